"""Models of transformers without or with their weights: how large they are, and whether weights fit them."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

MAX_LAYERS = 1024
"""Building so many layers on the meta device takes a second."""
OF_BODY = re.compile(r"(^|\.)(\d+|w[tp]e)\.|embed")
"""Matches names of parameters in layers and embeddings."""


def misfit(loading_info: Mapping[str, Any], is_other_head: bool = False, is_new_head: bool = False) -> str | None:
    """The first parameter that does not fit when weights are loaded into a model; None: all of them fit.

    Args:
        loading_info: what transformers report (`output_loading_info`).
        is_other_head: the weights may lack or bring parameters that are neither in a layer nor an embedding.
        is_new_head: such parameters may have another shape.
    """
    mismatched = loading_info["mismatched_keys"]
    of_other_shape = [f"{name} {list(has)} instead of {list(needs)}" for name, has, needs in mismatched]
    for pattern, names, is_head_free in (
        ("has no {}", loading_info["missing_keys"], is_other_head),
        ("holds {} too", loading_info["unexpected_keys"], is_other_head),
        ("has {}", of_other_shape, is_new_head),
    ):
        wrong = sorted(name for name in names if OF_BODY.search(name) or not is_head_free)
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            return pattern.format(wrong[0] + more)
    return None


def silence_transformers() -> None:
    """Turn off the library's progress bars and warnings: the program has its own, and `misfit`."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load_weights(
    is_classifier: bool, source: str, config: PretrainedConfig, **options: Any
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """A model with the weights of a directory or of the hub, and what `misfit` needs; safetensors alone, so no code is
    run. Raises whatever transformers raise where they do not say what does not fit."""
    silence_transformers()
    options |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    return auto_class(is_classifier).from_pretrained(source, config=config, **options)


def auto_class(is_classifier: bool) -> Any:
    """The class of transformers that builds causal models or classifiers."""
    return AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM


def on_meta(config: PretrainedConfig, build: Callable[[PretrainedConfig], nn.Module]) -> Any:
    """The module that `build` makes of a config, on the meta device, which takes no memory; raises whatever `build`
    raises, and a ValueError where there are so many layers that building them would take minutes."""
    for name, value in vars(config.get_text_config()).items():
        if "layer" in name and isinstance(value, int) and value > MAX_LAYERS:
            raise ValueError(f"{name}={value}: must be <= {MAX_LAYERS} layers")
    with torch.device("meta"):
        return build(config)


def num_stored(folder: Path) -> int:
    """The number of elements in a folder's safetensors files, from their headers; 0 where there is no such file;
    raises whatever safetensors raises for a damaged file."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count
