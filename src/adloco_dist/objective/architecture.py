"""The transformers config of a model: an architecture's own or that of a warm start, fitted to the corpus."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from adloco_dist.config import ModelSettings, SettingsError, require
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.hub import fetching, split_revision

FETCH_REMEDY = "name a transformers directory or a run, or take a shape of your own, as model=tiny does"


def model_config(
    model: ModelSettings, vocabulary: Vocabulary, sequence_length: int, num_labels: int | None = None
) -> PretrainedConfig:
    """The transformers config of the model, the architecture's defaults or a warm start's, fitted to the corpus (with
    labels for a classifier); raises a SettingsError where there is no such architecture or field, a warm start does not
    fit, or ids are beyond the vocabulary."""
    if model.warm_start is not None:
        config = _warm_start_config(model, model.warm_start)
        has = f"its vocabulary has {config.vocab_size} ids, the corpus needs {vocabulary.size}"
        rule = f"{has}; use the corpus that it was trained on, or its tokenizer (data.tokenizer)"
        require(config.vocab_size >= vocabulary.size, "model.warm_start", model.warm_start, rule)
    else:
        config = _fresh_config(model, vocabulary, sequence_length, is_classifier=num_labels is not None)
        rule = f"the corpus holds ids up to {vocabulary.size - 1}; set at least {vocabulary.size}, or leave it out"
        require(config.vocab_size >= vocabulary.size, "model.overrides.vocab_size", config.vocab_size, rule)
    if num_labels is not None:
        config.num_labels = num_labels
        if config.pad_token_id is None:  # where causal architectures look for the last token of a sequence
            config.pad_token_id = vocabulary.pad
    context = getattr(config, "max_position_embeddings", None) or sequence_length
    rule = f"the model's context is {context} tokens (max_position_embeddings); use shorter sequences"
    require(sequence_length <= context, "data.sequence_length", sequence_length, rule)
    return config


def local_model(name: str) -> tuple[str, str | None]:
    """The directory of a model: `name` itself, or model/ of the run directory `name`; else a model of the hub, with its
    revision where `name` has one; raises a SettingsError where it can be neither."""
    for candidate in (Path(name), Path(name) / "model"):
        if (candidate / "config.json").is_file():
            return str(candidate), None
    model, revision = split_revision(name)
    is_of_hub = not Path(name).exists() and model.count("/") <= 1 and not name.startswith((".", "/", "~"))
    rule = "no config.json there; name a transformers directory, a run, or a model of the hub"
    require(is_of_hub, "model.warm_start", name, rule)
    return model, revision


def _fresh_config(
    model: ModelSettings, vocabulary: Vocabulary, sequence_length: int, is_classifier: bool
) -> PretrainedConfig:
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if is_classifier else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model.architecture is None or model.architecture not in known:
        kind = "classifier" if is_classifier else "causal model"
        hint = _near(str(model.architecture), known) or "for example llama or gpt2"
        raise SettingsError.of("model.architecture", model.architecture, f"no {kind} of transformers; {hint}")
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
        source, revision = local_model(name)
        config = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code, revision=revision)
    _check_fields(model, config)
    if model.from_scratch:  # the shape alone is taken
        for field, value in model.overrides.items():
            setattr(config, field, value)
    wanted = {"model_type": model.architecture, **model.overrides}
    for field, value in wanted.items():
        has = getattr(config, field)
        rule = f"has {field}={has}, but the settings ask for {value}; model=pretrained takes the model's own shape"
        require(value is None or has == value, "model.warm_start", name, rule)
    return config


def _check_fields(model: ModelSettings, config: PretrainedConfig) -> None:
    known = set(config.to_dict())
    for field in (field for field in model.overrides if field not in known):
        hint = _near(field, known) or "see its transformers documentation"
        raise SettingsError(f"model.overrides.{field}: {config.model_type} has no such field; {hint}")


def _near(name: str, known: Iterable[str]) -> str:
    """What somebody may have meant; empty: nothing is near."""
    near = difflib.get_close_matches(name, sorted(known), n=3)
    return f"did you mean {' or '.join(near)}?" if near else ""
