"""Whether a model can be computed at all, found out without memory for it."""

import re
from dataclasses import replace

import torch
from transformers import PretrainedConfig, PreTrainedModel

from adloco_dist.config import ModelSettings
from adloco_dist.objective.models import fresh, not_computable, num_parameters, try_out
from adloco_dist.objective.shapes import shallow

MAX_COMPUTED = 1 << 27
"""Parameters of a model that is computed for nothing but to find out whether it can be."""
SIZES_DIFFER = re.compile(r"\b(shape|size)s?\b")
NUM_TOKENS = 3


def try_shape(model: ModelSettings, config: PretrainedConfig, is_classifier: bool) -> PreTrainedModel:
    """Pass a few tokens through the model, cut down to two layers: on the meta device, which knows shapes alone.

    What it cannot know, for a layer looks at values, is computed, unless the two layers are large themselves: then only
    sizes that do not go together are refused.

    Returns:
        The model that was tried, on the meta device.

    Raises:
        SettingsError: there is no model of such settings.
    """
    config = shallow(config, 2)
    if "flash" in (model.attention or ""):  # which is made for GPUs, and this machine may have none
        model = replace(model, attention=None)
    with torch.device("meta"):
        module = fresh(model, config, is_classifier)
        # Without a mask, some architectures look for one in the values of their positions.
        masks = (None, torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS))
        errors = [error for mask in masks if (error := _error(module, mask))]
    if len(errors) < len(masks):
        return module
    if num_parameters(model, config, is_classifier).total <= MAX_COMPUTED:
        try_out(model, fresh(model, config, is_classifier), is_classifier)
    elif SIZES_DIFFER.search(str(errors[-1])):
        raise not_computable(model, errors[-1]) from errors[-1]
    return module


def _error(module: PreTrainedModel, mask: torch.Tensor | None) -> Exception | None:
    """What goes wrong in a forward and backward pass on the meta device."""
    try:
        module(input_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.int64), attention_mask=mask).logits.sum().backward()
    except Exception as error:  # of any kind, as above
        return error
    return None
