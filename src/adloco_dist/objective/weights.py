"""Models of transformers without or with their weights: how large they are, and whether weights fit them."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

MAX_LAYERS = 1024
"""A second on the meta device, as all of a model is built there."""
OF_BODY = re.compile(r"(^|\.)(\d+|w[tp]e)\.|embed")
"""What names of parameters in layers and embeddings have."""
Build = Callable[[PretrainedConfig], nn.Module]


@dataclass(frozen=True)
class Fit:
    """What there is to say when weights are loaded into a model; names of parameters, in ascending order."""

    missing: list[str]
    left_over: list[str]
    of_other_shape: list[str]
    """Each with the shape that it has and the shape that the model needs."""

    @classmethod
    def of(cls, loading_info: Mapping[str, Any]) -> "Fit":
        """Return what transformers report (`output_loading_info`), without what an architecture ignores."""
        mismatched = loading_info["mismatched_keys"]
        others = [f"{name} {list(has)} instead of {list(needs)}" for name, has, needs in mismatched]
        return cls(sorted(loading_info["missing_keys"]), sorted(loading_info["unexpected_keys"]), sorted(others))

    def but_for_heads(self) -> "Fit":
        """Leave out what a model of another class may lack or bring: what is neither in a layer nor an embedding."""
        return Fit(*([name for name in names if OF_BODY.search(name)] for names in vars(self).values()))

    def in_words(self) -> str | None:
        """The first thing that does not fit; None: all does."""
        names_by_pattern = {"has no {}": self.missing, "holds {} too": self.left_over, "has {}": self.of_other_shape}
        for pattern, names in names_by_pattern.items():
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                return pattern.format(names[0] + more)
        return None


def silence_transformers() -> None:
    """Turn off the library's progress bars, because the program has its own, and its warnings, which `Fit` replaces."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load_weights(
    is_classifier: bool, source: str, config: PretrainedConfig, **options: Any
) -> tuple[PreTrainedModel, Fit]:
    """A model with the weights of a directory or of the hub, and how they fit; safetensors alone: no code is run.

    Raises:
        Exception: of whatever kind transformers raise, where they do not say what does not fit.
    """
    silence_transformers()
    options |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    module, loading_info = auto_class(is_classifier).from_pretrained(source, config=config, **options)
    return module, Fit.of(loading_info)


def auto_class(is_classifier: bool) -> Any:
    """What builds models of a kind."""
    return AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM


def on_meta(config: PretrainedConfig, build: Build) -> Any:
    """The module that `build` makes of a config, on the meta device: all shapes, and memory for none of them.

    Raises:
        Exception: of whatever kind `build` raises.
        ValueError: it has so many layers that to build it alone would take minutes.
    """
    for name, value in vars(config.get_text_config()).items():
        if "layer" in name and isinstance(value, int) and value > MAX_LAYERS:
            raise ValueError(f"{name}={value}: must be <= {MAX_LAYERS} layers")
    with torch.device("meta"):
        return build(config)


def num_stored(folder: Path) -> int:
    """Numbers in a folder's safetensors files, from their headers; 0 where there is no such file.

    Raises:
        Exception: of whatever kind safetensors raises, for a file that is damaged.
    """
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count
