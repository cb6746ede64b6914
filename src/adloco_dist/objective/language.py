"""The built-in objective: models of transformers that predict next tokens, or labels."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from adloco_dist.config import ModelSettings, Settings
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import TokenBatch, padded
from adloco_dist.objective.architecture import model_config
from adloco_dist.objective.losses import Losses, fused_losses, losses, losses_of, predict
from adloco_dist.objective.models import build_model, in_words, num_parameters, try_shape
from adloco_dist.objective.protocol import Objective, ParameterCount
from adloco_dist.objective.weights import silence_transformers
from adloco_dist.policy.evaluation import ACCURACY, PERPLEXITY, Evaluation
from adloco_dist.text import first_line

PROMPT_TOKENS, SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 48, 160, 0.8
"""Of a sample: what it begins with, what is written after that, and how likely what is not the likeliest is."""


class LanguageObjective(Objective):
    """Cross-entropy in nats of a causal model, or of a classifier where the corpus has labels."""

    def __init__(self, settings: Settings, config: PretrainedConfig, vocabulary: Vocabulary) -> None:
        """`config` is the shape of the model (`model_config`)."""
        silence_transformers()
        self.config, self._settings, self._vocabulary = config, settings, vocabulary
        self._losses: Losses = losses
        self._losses_in_words = "loss not fused"

    @classmethod
    def fitted(
        cls, settings: Settings, vocabulary: Vocabulary, labels: Sequence[str] | None = None
    ) -> "LanguageObjective":
        """The objective for the model that the settings name, fitted to a corpus; raises a SettingsError where there is
        no such model, or it does not fit. The saved model answers with the names `labels`; None: it is causal."""
        num_labels = len(labels) if labels else None
        config = model_config(settings.model, vocabulary, settings.data.sequence_length, num_labels)
        if labels:
            config.id2label = dict(enumerate(labels))
            config.label2id = {name: number for number, name in enumerate(labels)}
        return cls(settings, config, vocabulary)

    def describe(self) -> str:
        return in_words(self._settings.model)

    def num_parameters(self) -> ParameterCount:
        return num_parameters(self._settings.model, self.config, self._settings.data.is_labelled)

    def check_shape(self) -> nn.Module:
        return try_shape(self._settings.model, self.config, self._settings.data.is_labelled)

    def build(self, device: torch.device, in_bf16: bool) -> PreTrainedModel:
        """Build the model from a seed or a warm start, and choose how its loss is computed."""
        settings = self._settings
        self._losses, self._losses_in_words = _choose_losses(settings.model, device)
        return build_model(settings.model, self.config, settings.seed, settings.data.is_labelled, device, in_bf16)

    def loss(self, module: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, int]:
        return self._losses(module, batch).sum(), batch.total_targets

    def trial_batch(self, num_sequences: int, device: torch.device) -> TokenBatch:
        """Sequences of full length, as large in memory as any of training."""
        length = self._settings.data.sequence_length
        if self._settings.data.is_labelled:
            labels = np.zeros(num_sequences, dtype=np.int64)
            return padded([np.zeros(length, dtype=np.uint16)] * num_sequences, 0, labels).to(device)
        return TokenBatch.packed(torch.zeros(num_sequences, length + 1, dtype=torch.int64, device=device))

    def evaluate(self, module: nn.Module, batch: TokenBatch) -> Evaluation:
        logits = predict(module, batch)
        loss_sum = float(losses_of(logits, batch).sum(dtype=torch.float64))
        if batch.labels is None:
            return Evaluation(loss_sum, batch.total_targets, figure=PERPLEXITY)
        num_correct = int((logits.argmax(-1) == batch.labels).sum())
        return Evaluation(loss_sum, batch.total_targets, num_correct, figure=ACCURACY)

    def sample(self, module: nn.Module, batch: TokenBatch) -> tuple[str, str] | None:
        tokenizer, length = self._vocabulary.tokenizer, self._settings.data.sequence_length
        causal: Any = module  # transformers' types refuse to bind generate() to a model
        if tokenizer is None or batch.labels is not None or not causal.can_generate():
            return None
        begin = batch.tokens[:1, : min(PROMPT_TOKENS, length // 2, batch.num_targets[0])]
        torch.manual_seed(self._settings.seed)
        written = causal.generate(
            begin,
            attention_mask=torch.ones_like(begin),
            max_new_tokens=min(SAMPLE_TOKENS, length - begin.shape[1]),
            do_sample=True,
            temperature=SAMPLE_TEMPERATURE,
            pad_token_id=tokenizer.eos_token_id,
        )
        whole = written[0].tolist()
        return str(tokenizer.decode(whole[: begin.shape[1]])), str(tokenizer.decode(whole[begin.shape[1] :]))

    def save(self, module: nn.Module, directory: Path) -> None:
        """Write what transformers load: weights as safetensors, the config, and the tokenizer where it is known."""
        assert isinstance(module, PreTrainedModel)
        self._fit_to_tokenizer(module)
        # save_pretrained takes tensors with one storage for tied ones; views of one flat vector would look tied.
        state = {name: tensor.clone() for name, tensor in self.saved_tensors(module).items()}
        module.save_pretrained(directory, state_dict=state)
        self._save_tokenizer(module, directory)

    def saved_tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """The module's tensors; of tied ones only the source."""
        assert isinstance(module, PreTrainedModel)
        tied = module.all_tied_weights_keys
        return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}

    def save_beside_weights(self, module: nn.Module, directory: Path) -> None:
        assert isinstance(module, PreTrainedModel)
        self._fit_to_tokenizer(module)
        module.config.architectures = [type(module).__name__.removeprefix("FSDP")]  # the class that fully_shard makes
        module.config.dtype = module.dtype
        module.config.save_pretrained(directory)
        if module.can_generate() and module.generation_config is not None:
            module.generation_config.save_pretrained(directory)
        self._save_tokenizer(module, directory)

    def _fit_to_tokenizer(self, module: PreTrainedModel) -> None:
        """Set the special tokens that the model was trained on in its configs, where generation looks for them."""
        vocabulary, chosen = self._vocabulary, self._settings.model.overrides
        tokenizer = vocabulary.tokenizer
        if tokenizer is None:
            return
        wanted = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": vocabulary.end}
        generation = module.generation_config if module.can_generate() else None
        for config in filter(None, (module.config, generation)):
            for name, id_ in wanted.items():
                named = getattr(config, name, None)  # an id, or several
                is_named = id_ in named if isinstance(named, list) else named == id_
                if id_ is not None and name not in chosen and not is_named:
                    setattr(config, name, id_)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else vocabulary.end
        if generation is not None and generation.pad_token_id is None:
            generation.pad_token_id = pad
        # The embedding of a config's padding token is not trained, so it is never the end token.
        if module.config.pad_token_id is None and pad != vocabulary.end:
            module.config.pad_token_id = pad

    def _save_tokenizer(self, module: PreTrainedModel, directory: Path) -> None:
        """Write a copy that has a padding token, and the model's context as its maximum length."""
        if self._vocabulary.tokenizer is None:
            return
        tokenizer = copy.deepcopy(self._vocabulary.tokenizer)
        if tokenizer.pad_token is None and self._vocabulary.end is not None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(self._vocabulary.end)
        context = getattr(module.config, "max_position_embeddings", None)
        if isinstance(context, int):
            tokenizer.model_max_length = min(tokenizer.model_max_length, context)
        tokenizer.save_pretrained(directory)

    def implementation(self, module: nn.Module) -> str:
        attention = getattr(getattr(module, "config", None), "_attn_implementation", "its own")
        return f"attention {attention}, {self._losses_in_words}"


def _choose_losses(model: ModelSettings, device: torch.device) -> tuple[Losses, str]:
    if model.compile:
        # One graph with the model, so that logits are never in memory in fp32, compiled at the first call. Modules of
        # one shape share it, and so do batches of every size except 1, which has its own.
        return torch.compile(losses), "loss compiled with the model"
    if device.type != "cuda":
        return losses, "loss not fused"
    try:
        return fused_losses(device), "loss fused"
    except Exception as error:  # of any kind: without a compiler or Triton training continues, only slower
        return losses, f"loss not fused, for torch cannot compile here ({first_line(error)})"
