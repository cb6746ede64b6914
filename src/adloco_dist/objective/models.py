"""Models from settings: transformers builds them, this module says what is wrong."""

import difflib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from adloco_dist.config import ModelSettings, SettingsError
from adloco_dist.data.batch import TokenBatch
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.hub import fetching
from adloco_dist.objective.attention import attend_without_mask
from adloco_dist.objective.losses import losses
from adloco_dist.objective.protocol import ParameterCount
from adloco_dist.objective.shapes import auto_class, count_parameters, load_weights, stored_shapes
from adloco_dist.text import first_line

CPU = torch.device("cpu")
MAX_NEW = 2
"""Maximum ratio of parameters to the numbers that a warm start stores: an output layer that it lacks is no larger than
its embedding."""
FETCH_REMEDY = "name a transformers directory or a run, or take a shape of your own, as model=tiny does"


def model_config(
    model: ModelSettings, vocabulary: Vocabulary, sequence_length: int, num_labels: int | None = None
) -> PretrainedConfig:
    """The transformers config of the model: the architecture's defaults or a warm start's, fitted to the corpus.

    Args:
        num_labels: classes of a labelled corpus; None: the model is causal.

    Raises:
        SettingsError: unknown architecture or field, a warm start that does not fit, or ids beyond the vocabulary.
    """
    if model.warm_start is not None:
        config = _warm_start_config(model, model.warm_start)
        if config.vocab_size < vocabulary.size:
            raise SettingsError(
                f"model.warm_start={model.warm_start}: its vocabulary has {config.vocab_size} ids, the corpus needs "
                f"{vocabulary.size}; use the corpus that it was trained on, or its tokenizer (data.tokenizer)"
            )
    else:
        config = _fresh_config(model, vocabulary, sequence_length, is_classifier=num_labels is not None)
        if config.vocab_size < vocabulary.size:
            raise SettingsError(
                f"model.overrides.vocab_size={config.vocab_size}: the corpus holds ids up to {vocabulary.size - 1}; "
                f"set at least {vocabulary.size}, or leave it out"
            )
    if num_labels is not None:
        config.num_labels = num_labels
        if config.pad_token_id is None:  # where causal architectures look for the last token of a sequence
            config.pad_token_id = vocabulary.pad
    context = getattr(config, "max_position_embeddings", None) or sequence_length
    if sequence_length > context:
        raise SettingsError(
            f"data.sequence_length={sequence_length}: the model's context is {context} tokens "
            "(max_position_embeddings); use shorter sequences"
        )
    return config


def build_model(
    model: ModelSettings, config: PretrainedConfig, seed: int, is_classifier: bool = False, device: torch.device = CPU,
    in_bf16: bool = False,
) -> Any:  # fmt: skip
    """The module in fp32, with weights from `model.warm_start` or drawn from `seed`: equal on all ranks.

    Args:
        device: where it will be computed, and is tried out: attention may be made for GPUs alone.
        in_bf16: whether it will be under bf16 autocast.

    Raises:
        SettingsError: the weights cannot be read or do not fit, or there is no model of such settings.
    """
    torch.manual_seed(seed)  # also of a warm start, for the layers that it does not have
    if model.warm_start is not None and not model.from_scratch:
        module = _warm(model, model.warm_start, config, is_classifier)
    else:
        module = fresh(model, config, is_classifier)
    if model.reset_output:
        _reset_output(module)
    if model.gradient_checkpointing:
        _checkpoint_activations(module)
    try_out(model, module, is_classifier, device, in_bf16)
    return module


def num_parameters(model: ModelSettings, config: PretrainedConfig, is_classifier: bool = False) -> ParameterCount:
    """Count the parameters of the module that `build_model` builds, without building it.

    Raises:
        SettingsError: there is no model of such settings.
    """
    try:
        return count_parameters(config, lambda config: from_config(model, config, is_classifier))
    except Exception as error:  # of any kind, as when it is built
        raise not_computable(model, error) from error


def in_words(model: ModelSettings) -> str:
    """The settings that name the shape, as an error begins."""
    shape = f"model.warm_start={model.warm_start}" if model.warm_start else f"model.architecture={model.architecture}"
    detail = f"{shape}, model.overrides={model.overrides}"
    return detail if model.attention is None else f"{detail}, model.attention={model.attention}"


def from_config(model: ModelSettings, config: PretrainedConfig, is_classifier: bool = False) -> PreTrainedModel:
    """A module of the config, on the current device; raises whatever transformers raise."""
    return auto_class(is_classifier).from_config(config, **_options(model))


def fresh(model: ModelSettings, config: PretrainedConfig, is_classifier: bool) -> PreTrainedModel:
    """Return a module of the config, like `from_config`, or say what is wrong.

    Raises:
        SettingsError: there is no model of such settings.
    """
    try:
        return from_config(model, config, is_classifier)
    except Exception as error:  # of any kind: what does not fit together shows when it is built, or computed
        raise not_computable(model, error) from error


def try_out(
    model: ModelSettings, module: PreTrainedModel, is_classifier: bool, device: torch.device = CPU,
    in_bf16: bool = False,
) -> None:  # fmt: skip
    """Choose the attention, move the module to `device`, and take a few tokens forth and back there.

    Raises:
        SettingsError: it cannot be computed.
    """
    try:
        if model.attention is None and not is_classifier:
            attend_without_mask(module)
        torch.nn.Module.to(module, device)
        with torch.autocast(device.type, torch.bfloat16) if in_bf16 else nullcontext():
            trial_losses(module.eval(), is_classifier).sum().backward()  # in which no buffer changes
    except Exception as error:  # of any kind, as above
        raise not_computable(model, error) from error
    module.zero_grad(set_to_none=True)
    module.train()


def trial_losses(module: PreTrainedModel, is_classifier: bool) -> torch.Tensor:
    """The losses of three tokens, to see whether there are any; raises whatever transformers raise."""
    tokens = torch.zeros(1, 3, dtype=torch.int64, device=module.device)
    label = torch.zeros(1, dtype=torch.int64, device=module.device)
    return losses(module, TokenBatch(tokens, (1,), label + 3, label) if is_classifier else TokenBatch.packed(tokens))


def not_computable(model: ModelSettings, error: Exception) -> SettingsError:
    """The mistake, where a model could not be built or computed."""
    return SettingsError(
        f"{in_words(model)}: no such model can be computed ({first_line(error)}); change the overrides"
    )


def local_model(name: str) -> str:
    """The directory of a model: `name` itself, or model/ of the run directory `name`; else `name`, of the hub."""
    for candidate in (Path(name), Path(name) / "model"):
        if (candidate / "config.json").is_file():
            return str(candidate)
    if Path(name).exists() or name.count("/") > 1 or name.startswith((".", "/", "~")):
        rule = "no config.json there; name a transformers directory, a run, or a model of the hub"
        raise SettingsError(f"model.warm_start={name}: {rule}")
    return name


def _options(model: ModelSettings) -> dict[str, Any]:
    options = {"dtype": torch.float32, "trust_remote_code": model.trust_remote_code}
    return options if model.attention is None else {**options, "attn_implementation": model.attention}


def _warm(model: ModelSettings, name: str, config: PretrainedConfig, is_classifier: bool) -> PreTrainedModel:
    """The model with the weights of a warm start, all of them where it is of the same class."""
    source, named = local_model(name), config.architectures or ()
    remedy = "restore both, or take another shape on purpose: model.from_scratch=true, model.reset_output=true"
    wrong = f"model.warm_start={name}: its weights do not fit its config"
    with fetching("model.warm_start", f"{name}, its weights as safetensors", FETCH_REMEDY):
        stored = sum(shape.numel() for shape in stored_shapes(Path(source)).values())
    needed = num_parameters(model, config, is_classifier).total
    if 0 < MAX_NEW * stored < needed:  # refused before as many are built
        raise SettingsError(f"{wrong}: {stored:,} numbers for {needed:,} parameters; {remedy}")
    with fetching("model.warm_start", f"{name}, its weights as safetensors", FETCH_REMEDY):
        module, fit = load_weights(is_classifier, source, config, revision=model.revision, **_options(model))
    if model.reset_output:
        fit = fit.but_for_heads()
    elif type(module).__name__ not in named:
        fit = replace(fit.but_for_heads(), of_other_shape=fit.of_other_shape)
    problem = fit.in_words()
    if problem or module is None:
        raise SettingsError(f"{wrong}: {problem}; {remedy}")
    return module


def _reset_output(module: PreTrainedModel) -> None:
    """Initialise the layers behind the base model again: the head of a causal model or a classifier."""
    base = module.base_model
    kept = {parameter.data_ptr() for parameter in base.parameters()}
    heads = [child for child in module.children() if child is not base]
    if any(parameter.data_ptr() in kept for head in heads for parameter in head.parameters()):
        rule = "the output layer is the input embedding (tied); add +model.overrides.tie_word_embeddings=false"
        raise SettingsError(f"model.reset_output=true: {rule}, or leave it out")
    for head in heads:
        for parameter in head.parameters():
            parameter._is_hf_initialized = False  # pyright: ignore[reportAttributeAccessIssue]  (else it is passed over)
        for layer in head.modules():
            module._init_weights(layer)  # as the model draws them


def _checkpoint_activations(module: PreTrainedModel) -> None:
    if not module.supports_gradient_checkpointing:
        rule = f"{module.config.model_type} cannot do that in transformers; leave it out"
        raise SettingsError(f"model.gradient_checkpointing=true: {rule}")
    module.gradient_checkpointing_enable({"use_reentrant": False})


def _fresh_config(
    model: ModelSettings, vocabulary: Vocabulary, sequence_length: int, is_classifier: bool
) -> PretrainedConfig:
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if is_classifier else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model.architecture is None or model.architecture not in known:
        kind = "classifier" if is_classifier else "causal model"
        near = difflib.get_close_matches(str(model.architecture), sorted(known), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "for example llama or gpt2"
        raise SettingsError(f"model.architecture={model.architecture}: no {kind} of transformers; {hint}")
    defaults = AutoConfig.for_model(model.architecture)
    _check_fields(model, defaults)
    fitted = {"vocab_size": vocabulary.size, "max_position_embeddings": max(sequence_length, 1024)}
    # Special token ids of the published tokenizer mean nothing in another vocabulary.
    fitted |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    try:
        return AutoConfig.for_model(model.architecture, **{**fitted, **model.overrides})
    except Exception as error:  # transformers validates with several exception types of its own
        raise SettingsError(f"model.overrides={model.overrides}: {' '.join(str(error).split())}") from error


def _warm_start_config(model: ModelSettings, name: str) -> PretrainedConfig:
    with fetching("model.warm_start", name, FETCH_REMEDY):
        config = AutoConfig.from_pretrained(
            local_model(name), trust_remote_code=model.trust_remote_code, revision=model.revision
        )
    _check_fields(model, config)
    if model.from_scratch:  # the shape alone is taken
        for field, value in model.overrides.items():
            setattr(config, field, value)
    wanted = {"model_type": model.architecture, **model.overrides}
    for field, value in wanted.items():
        if value is not None and getattr(config, field) != value:
            raise SettingsError(
                f"model.warm_start={name}: has {field}={getattr(config, field)}, but the settings ask for "
                f"{value}; use model=pretrained to take the model's own shape"
            )
    return config


def _check_fields(model: ModelSettings, config: PretrainedConfig) -> None:
    known = set(config.to_dict())
    for field in model.overrides:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "see its transformers documentation"
            raise SettingsError(f"model.overrides.{field}: {config.model_type} has no such field; {hint}")
