"""Causal attention without a mask tensor: what the fast kernels ask for, and what transformers hide from them."""

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

MASKLESS = "maskless_sdpa"
"""The name of an attention implementation: transformers' sdpa, for which they make no mask, as none is registered."""
TRIAL_TOKENS = 16

AttentionInterface.register(MASKLESS, sdpa_attention_forward)


def attend_without_mask(module: PreTrainedModel) -> bool:
    """Let a causal model that attends to everything before a token do so without a mask; returns whether it does.

    Given no mask, transformers look at the values of the positions for sequences packed side by side: one
    synchronisation with the device in every forward pass. Where `torch.compile` traces the model they cannot look and
    always build the mask, with which torch takes neither its flash kernel nor grouped queries.

    The module is left as it is where it has an implementation of its own, attends within a window, or computes other
    logits without the mask.
    """
    config = module.config
    if config._attn_implementation != "sdpa" or _has_windows(config.get_text_config()):
        return False
    expected = _trial_logits(module)
    module.set_attn_implementation(MASKLESS)
    if config._attn_implementation == MASKLESS and torch.allclose(_trial_logits(module), expected, atol=1e-5):
        return True
    module.set_attn_implementation("sdpa")
    return False


def _has_windows(config: PretrainedConfig) -> bool:
    names = ("sliding_window", "attention_chunk_size", "window_size")
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds - {"full_attention"}) or any(getattr(config, name, None) for name in names)


def _trial_logits(module: PreTrainedModel) -> torch.Tensor:
    was_training = module.training
    config = module.config.get_text_config()
    count = min(TRIAL_TOKENS, getattr(config, "max_position_embeddings", None) or TRIAL_TOKENS)
    tokens = torch.arange(count, device=module.device)[None] % config.vocab_size
    with torch.no_grad():
        logits = module.eval()(input_ids=tokens, use_cache=False).logits
    module.train(was_training)
    return logits
