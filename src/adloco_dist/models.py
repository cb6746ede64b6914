"""Models from settings: transformers does the building, this room says what is wrong.

Shape suffixes: B sequences, L tokens of a sequence that are predicted, V vocabulary.
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from adloco_dist.config import ModelSettings, SettingsError


def model_config(model: ModelSettings, vocab_size: int, sequence_length: int) -> PretrainedConfig:
    """The transformers config of the model: the architecture's defaults, the overrides, the corpus' vocabulary.

    Raises:
        SettingsError: unknown architecture or field, a warm start that does not fit, or ids beyond the vocabulary.
    """
    if model.warm_start is not None:
        config = _warm_start_config(model)
        if config.vocab_size < vocab_size:
            raise SettingsError(
                f"model.warm_start={model.warm_start}: its vocabulary has {config.vocab_size} ids, the corpus needs "
                f"{vocab_size}; use the corpus that it was trained on"
            )
    else:
        config = _fresh_config(model, vocab_size, sequence_length)
        if config.vocab_size < vocab_size:
            raise SettingsError(
                f"model.overrides.vocab_size={config.vocab_size}: the corpus holds ids up to {vocab_size - 1}; "
                f"set at least {vocab_size}, or leave it out"
            )
    context = getattr(config, "max_position_embeddings", sequence_length)
    if sequence_length > context:
        raise SettingsError(
            f"data.sequence_length={sequence_length}: the model's context is {context} tokens "
            "(max_position_embeddings); use shorter sequences"
        )
    return config


def build_model(model: ModelSettings, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """The module in fp32 on the CPU, with weights from `model.warm_start` or drawn from `seed`: equal on all ranks.

    Raises:
        SettingsError: the weights cannot be read, or there is no model of such settings.
    """
    if model.warm_start is not None:
        source = _model_directory(model.warm_start)
        try:  # safetensors only: reading weights never runs code
            return AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True,
                trust_remote_code=False,
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError) as error:
            raise SettingsError(
                f"model.warm_start={model.warm_start}: its model.safetensors cannot be read; save it with "
                "save_pretrained"
            ) from error
    torch.manual_seed(seed)
    told = f"model.architecture={model.architecture}, model.overrides={model.overrides}"
    try:
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        token_losses(module, torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    except Exception as error:  # of any kind: what does not fit together shows when it is built, or computed
        reason = next(iter(str(error).splitlines()), "")
        raise SettingsError(f"{told}: no such model can be computed ({reason}); change the overrides") from error
    module.zero_grad(set_to_none=True)
    return module


def token_losses(module: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of every predicted token, shape (B, L), in at least fp32.

    Args:
        module: a causal model of transformers, or a function that is called like one.
        tokens: (B, L + 1) ids; position t predicts t + 1. The one place where labels are shifted.
    """
    logits = module(input_ids=tokens[:, :-1], use_cache=False).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(tokens.shape[0], -1)


def _fresh_config(model: ModelSettings, vocab_size: int, sequence_length: int) -> PretrainedConfig:
    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if model.architecture is None or model.architecture not in known:
        near = difflib.get_close_matches(str(model.architecture), known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "for example llama or gpt2"
        raise SettingsError(f"model.architecture={model.architecture}: no causal model of transformers; {hint}")
    defaults = AutoConfig.for_model(model.architecture)
    _check_fields(model, defaults)
    fitted = {"vocab_size": vocab_size, "max_position_embeddings": max(sequence_length, 1024)}
    # Special token ids of the published tokenizer mean nothing in another vocabulary.
    fitted |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    try:
        return AutoConfig.for_model(model.architecture, **{**fitted, **model.overrides})
    except Exception as error:  # transformers validates with several exception types of its own
        raise SettingsError(f"model.overrides={model.overrides}: {' '.join(str(error).split())}") from error


def _warm_start_config(model: ModelSettings) -> PretrainedConfig:
    source = _model_directory(str(model.warm_start))
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingsError(f"model.warm_start={model.warm_start}: its config.json cannot be read") from error
    _check_fields(model, config)
    wanted = {"model_type": model.architecture, **model.overrides}
    for field, value in wanted.items():
        if value is not None and getattr(config, field) != value:
            raise SettingsError(
                f"model.warm_start={model.warm_start}: has {field}={getattr(config, field)}, but the settings ask for "
                f"{value}; use model=pretrained to take the model's own shape"
            )
    return config


def _model_directory(name: str) -> Path:
    """A transformers directory: `name` itself, or model/ of the run directory `name`."""
    for candidate in (Path(name), Path(name) / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    raise SettingsError(f"model.warm_start={name}: no config.json there; name a transformers directory or a run")


def _check_fields(model: ModelSettings, config: PretrainedConfig) -> None:
    known = set(config.to_dict())
    for field in model.overrides:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "see its transformers documentation"
            raise SettingsError(f"model.overrides.{field}: {config.model_type} has no such field; {hint}")
