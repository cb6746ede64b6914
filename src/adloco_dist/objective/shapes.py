"""Shapes of models: how large they are, known before they are built, and whether weights fit them."""

import copy
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

from adloco_dist.objective.protocol import ParameterCount

DEEPEST = 256
"""Maximum number of layers that are built to be counted, a quarter of a second on the meta device; further layers are
counted in proportion."""
IN_LAYERS = re.compile(r"(^|\.)\d+\.")
EMBEDDINGS = re.compile(r"embed|(^|\.)w[tp]e\.")
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
        others = [
            f"{name} {list(has)} instead of {list(needs)}" for name, has, needs in loading_info["mismatched_keys"]
        ]
        return cls(sorted(loading_info["missing_keys"]), sorted(loading_info["unexpected_keys"]), sorted(others))

    def but_for_heads(self) -> "Fit":
        """Leave out what a model of another class may lack or bring: what is neither in a layer nor an embedding."""
        return Fit(*([name for name in names if _is_of_body(name)] for names in vars(self).values()))

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
) -> tuple[PreTrainedModel | None, Fit]:
    """A model with the weights of a directory or of the hub, and how they fit; safetensors alone: no code is run.

    Raises:
        Exception: of whatever kind transformers raise, where they do not say what does not fit.
    """
    silence_transformers()
    auto = auto_class(is_classifier)
    try:
        module, loading_info = auto.from_pretrained(
            source,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except Exception:
        # Of tied weights in another shape, transformers compare values before they are there.
        stored = stored_shapes(Path(source))
        with torch.device("meta"):
            needed = auto.from_config(config).state_dict()
        others = {name: (shape, needed[name].shape) for name, shape in stored.items() if name in needed}
        changed = [(name, has, needs) for name, (has, needs) in others.items() if has != needs]
        if not changed:
            raise
        return None, Fit.of({"mismatched_keys": changed, "missing_keys": (), "unexpected_keys": ()})
    return module, Fit.of(loading_info)


def auto_class(is_classifier: bool) -> Any:
    """What builds models of a kind."""
    return AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM


def count_parameters(config: PretrainedConfig, build: Build) -> ParameterCount:
    """Parameters of the model of this config, of any depth, without memory for one of them.

    Layers beyond the 256th count as the average of the second half of those.

    Args:
        build: makes the module of a config.

    Raises:
        Exception: of whatever kind `build` raises.
    """

    def count(depths: Mapping[str, int]) -> ParameterCount:
        with torch.device("meta"):
            parameters = list(build(at_depths(config, depths)).parameters())
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        return ParameterCount(trained, sum(parameter.numel() for parameter in parameters) - trained)

    deep = _depths(config)
    half = {name: DEEPEST // 2 for name in deep}
    if not deep:
        return count({})
    base = count(half)
    trained, frozen = base.trained, base.frozen
    for name, depth in deep.items():
        grown, steps = count({**half, name: DEEPEST}), depth - DEEPEST // 2
        trained += (grown.trained - base.trained) * steps // (DEEPEST // 2)
        frozen += (grown.frozen - base.frozen) * steps // (DEEPEST // 2)
    return ParameterCount(trained, frozen)


def stored_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of all tensors in a folder's safetensors files, by name, from their headers; empty if none.

    Raises:
        Exception: of whatever kind safetensors raises, for a file that is damaged.
    """
    shapes: dict[str, torch.Size] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def at_depths(config: PretrainedConfig, depths: Mapping[str, int]) -> PretrainedConfig:
    """The config with another number of layers: lists that have an entry for every layer are cut off."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    for name, depth in depths.items():
        before = getattr(text, name)
        for field, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == before:
                setattr(text, field, value[:depth])
        setattr(text, name, depth)
    return changed


def shallow(config: PretrainedConfig, depth: int) -> PretrainedConfig:
    """The config with at most `depth` layers."""
    return at_depths(config, {name: depth for name in _depths(config, depth)})


def _depths(config: PretrainedConfig, maximum: int = DEEPEST) -> dict[str, int]:
    """The numbers of layers (n_layer, num_hidden_layers, decoder_layers, ...) above `maximum`, by field."""
    fields = vars(config.get_text_config()).items()
    return {
        name: value
        for name, value in fields
        if "layer" in name and isinstance(value, int) and not isinstance(value, bool) and value > maximum
    }


def _is_of_body(name: str) -> bool:
    return bool(IN_LAYERS.search(name) or EMBEDDINGS.search(name))
