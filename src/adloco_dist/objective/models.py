"""Models from settings: transformers builds them; this file checks them, and chooses their attention."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from adloco_dist.config import ModelSettings, SettingsError, require
from adloco_dist.data.hub import fetching
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.objective.architecture import FETCH_REMEDY, local_model
from adloco_dist.objective.losses import losses
from adloco_dist.objective.protocol import ParameterCount
from adloco_dist.objective.weights import auto_class, load_weights, misfit, num_stored, on_meta
from adloco_dist.text import first_line

CPU = torch.device("cpu")
MAX_NEW = 2
"""Maximum ratio of parameters to the numbers that a warm start stores: an output layer that it lacks is no larger than
its embedding."""
MAX_COMPUTED = 1 << 27
"""Maximum number of parameters of a model that is computed only to find out whether it can be."""
NUM_TOKENS = 3
"""Tokens that models are tried with."""
MASKLESS = "maskless_sdpa"
"""The name of an attention implementation: transformers' sdpa. No mask function is registered under it, so transformers
make no mask."""
TRIAL_TOKENS = 16
"""Tokens whose logits must be the same with and without a mask."""

AttentionInterface.register(MASKLESS, sdpa_attention_forward)


def build_model(
    model: ModelSettings,
    config: PretrainedConfig,
    seed: int,
    is_classifier: bool = False,
    device: torch.device = CPU,
    in_bf16: bool = False,
) -> Any:
    """The module in fp32, with weights from `model.warm_start` or drawn from `seed`: equal on all ranks; raises a
    SettingsError where the weights cannot be read or do not fit, or there is no model of such settings. It is tried out
    on `device`, because some kinds of attention need a GPU, and under bf16 autocast with `in_bf16`."""
    torch.manual_seed(seed)  # also of a warm start, for the layers that it does not have
    if model.warm_start is not None and not model.from_scratch:
        module = _warm(model, model.warm_start, config, is_classifier)
    else:
        module = _fresh(model, config, is_classifier)
    if model.reset_output:
        _reset_output(module)
    if model.gradient_checkpointing:
        rule = f"{config.model_type} cannot do that in transformers; leave it out"
        require(module.supports_gradient_checkpointing, "model.gradient_checkpointing", "true", rule)
        module.gradient_checkpointing_enable({"use_reentrant": False})
    _try_out(model, module, is_classifier, device, in_bf16)
    return module


def num_parameters(model: ModelSettings, config: PretrainedConfig, is_classifier: bool = False) -> ParameterCount:
    """Count the parameters of the module that `build_model` builds, without building it; raises a SettingsError where
    there is no model of such settings."""
    return ParameterCount.of(_fresh(model, config, is_classifier, is_meta=True))


def in_words(model: ModelSettings) -> str:
    """The settings that name the shape, with which an error begins."""
    shape = f"model.warm_start={model.warm_start}" if model.warm_start else f"model.architecture={model.architecture}"
    attention = f", model.attention={model.attention}" if model.attention else ""
    return f"{shape}, model.overrides={model.overrides}{attention}"


def try_shape(model: ModelSettings, config: PretrainedConfig, is_classifier: bool) -> PreTrainedModel:
    """The model on the meta device, through which a few tokens were passed; raises a SettingsError where there is no
    model of such settings.

    A model whose layers look at values cannot be passed there. It is computed instead, unless it is large: then only
    sizes that do not go together are refused.
    """
    if "flash" in (model.attention or ""):  # it needs a GPU, and this machine may have none
        model = replace(model, attention=None)
    module = _fresh(model, config, is_classifier, is_meta=True)
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    mistakes = []
    # Without a mask, some architectures look for one in the values of their positions.
    for mask in (None, torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS, device="meta")):
        try:
            with torch.device("meta"):
                module(input_ids=tokens, attention_mask=mask).logits.sum().backward()
            return module
        except Exception as error:  # of any kind
            mistakes.append(error)
    if ParameterCount.of(module).total <= MAX_COMPUTED:
        _try_out(model, _fresh(model, config, is_classifier), is_classifier)
    elif re.search(r"\b(shape|size)s?\b", str(mistakes[-1])):
        with _computable(model):
            raise mistakes[-1]
    return module


@contextmanager
def _computable(model: ModelSettings) -> Iterator[None]:
    """Report by a SettingsError that no such model can be built or computed: transformers have many exceptions."""
    try:
        yield
    except Exception as error:
        detail = f"no such model can be computed ({first_line(error)})"
        raise SettingsError(f"{in_words(model)}: {detail}; change the overrides") from error


def _fresh(model: ModelSettings, config: PretrainedConfig, is_classifier: bool, is_meta: bool = False) -> Any:
    """A module of the config, on the current device or on the meta device."""
    build = partial(auto_class(is_classifier).from_config, **_options(model))
    with _computable(model):
        return on_meta(config, build) if is_meta else build(config)


def _try_out(
    model: ModelSettings,
    module: PreTrainedModel,
    is_classifier: bool,
    device: torch.device = CPU,
    in_bf16: bool = False,
) -> None:
    """Choose the attention, move the module to `device`, and pass a few tokens forward and backward there; raises a
    SettingsError where it cannot be computed."""
    with _computable(model):
        if model.attention is None and not is_classifier:
            _attend_without_mask(module)
        torch.nn.Module.to(module, device)
        with torch.autocast(device.type, torch.bfloat16) if in_bf16 else nullcontext():
            trial_losses(module.eval(), is_classifier).sum().backward()  # in which no buffer changes
    module.zero_grad(set_to_none=True)
    module.train()


def _attend_without_mask(module: PreTrainedModel) -> None:
    """Let a causal model that attends to everything before a token do so without a mask.

    Given no mask, transformers look at the values of the positions for sequences packed side by side: one
    synchronisation with the device in every forward pass. Where `torch.compile` traces the model they cannot look and
    always build the mask, with which torch takes neither its flash kernel nor grouped queries.

    The module is left as it is where it has an implementation of its own, attends within a window, or computes other
    logits without the mask.
    """
    config = module.config
    if config._attn_implementation != "sdpa" or _has_windows(config.get_text_config()):
        return
    expected = _trial_logits(module)
    module.set_attn_implementation(MASKLESS)
    if config._attn_implementation != MASKLESS or not torch.allclose(_trial_logits(module), expected, atol=1e-5):
        module.set_attn_implementation("sdpa")


def _has_windows(config: PretrainedConfig) -> bool:
    names = ("sliding_window", "attention_chunk_size", "window_size")
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds - {"full_attention"}) or any(getattr(config, name, None) for name in names)


def _trial_logits(module: PreTrainedModel) -> torch.Tensor:
    """The logits of a few tokens; leaves the module in eval mode."""
    config = module.config.get_text_config()
    count = min(TRIAL_TOKENS, getattr(config, "max_position_embeddings", None) or TRIAL_TOKENS)
    tokens = torch.arange(count, device=module.device)[None] % config.vocab_size
    with torch.no_grad():
        return module.eval()(input_ids=tokens, use_cache=False).logits


def trial_losses(module: PreTrainedModel, is_classifier: bool) -> torch.Tensor:
    """The losses of a few tokens, to see whether the module can be computed; raises whatever transformers raise."""
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device=module.device)
    label = torch.zeros(1, dtype=torch.int64, device=module.device)
    labelled = TokenBatch(tokens, (1,), label + NUM_TOKENS, label)
    return losses(module, labelled if is_classifier else TokenBatch.packed(tokens))


def _options(model: ModelSettings) -> dict[str, Any]:
    attention = {} if model.attention is None else {"attn_implementation": model.attention}
    return {"dtype": torch.float32, "trust_remote_code": model.trust_remote_code, **attention}


def _warm(model: ModelSettings, name: str, config: PretrainedConfig, is_classifier: bool) -> PreTrainedModel:
    """The model with the weights of a warm start, all of them where it is of the same class."""
    source, revision = local_model(name)
    remedy = "restore both, or take another shape on purpose: model.from_scratch=true, model.reset_output=true"
    wrong = f"model.warm_start={name}: its weights do not fit its config"
    needed = num_parameters(model, config, is_classifier).total
    with fetching("model.warm_start", f"{name}, its weights as safetensors", FETCH_REMEDY):
        stored = num_stored(Path(source))
        if 0 < MAX_NEW * stored < needed:  # refused before as many are built
            raise SettingsError(f"{wrong}: {stored:,} numbers for {needed:,} parameters; {remedy}")
        module, loading_info = load_weights(is_classifier, source, config, revision=revision, **_options(model))
    is_other_class = type(module).__name__ not in (config.architectures or ())
    if problem := misfit(loading_info, is_other_class or model.reset_output, model.reset_output):
        raise SettingsError(f"{wrong}: {problem}; {remedy}")
    return module


def _reset_output(module: PreTrainedModel) -> None:
    """Initialise the layers behind the base model again: the head of a causal model or a classifier."""
    base = module.base_model
    kept = {parameter.data_ptr() for parameter in base.parameters()}
    heads = [child for child in module.children() if child is not base]
    is_tied = any(parameter.data_ptr() in kept for head in heads for parameter in head.parameters())
    rule = "the output layer is the input embedding (tied); add +model.overrides.tie_word_embeddings=false"
    require(not is_tied, "model.reset_output", "true", f"{rule}, or leave it out")
    for head in heads:
        for parameter in head.parameters():
            parameter._is_hf_initialized = False  # pyright: ignore[reportAttributeAccessIssue]  (else it is passed over)
        for layer in head.modules():
            module._init_weights(layer)  # as the model draws them
