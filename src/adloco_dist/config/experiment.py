"""What is trained on what: the pool, the model, the corpus."""

from dataclasses import dataclass, field
from typing import Any

from adloco_dist.config.choices import Corpus, OuterState, Placement, Shards
from adloco_dist.config.errors import require

MOST_WORKERS = 1 << 20
"""Of a pool: every rank and every plan lists all of them."""


@dataclass
class PoolSettings:
    """Trainers, their workers, and where both live."""

    trainers: int = 4
    """k: trainers that run side by side, each with an anchor and a shard of its own."""
    workers_per_trainer: int | None = 1
    """M: model instances of each trainer. null: as many as there are ranks for each trainer."""
    placement: Placement = Placement.pack
    """pack: a trainer's workers on as few nodes as balance allows. spread: on as many as it has workers."""
    outer_state: OuterState = OuterState.device
    """Where anchors and outer momentum live: on the device, or in (pinned) CPU memory."""

    def __post_init__(self) -> None:
        require(self.trainers >= 1, "pool.trainers", self.trainers, "must be >= 1")
        workers = self.workers_per_trainer
        require(workers is None or workers >= 1, "pool.workers_per_trainer", workers, "must be >= 1, or null")
        rule = f"times pool.workers_per_trainer={workers} must be <= {MOST_WORKERS}; lower one of them"
        require(self.trainers * (workers or 1) <= MOST_WORKERS, "pool.trainers", self.trainers, rule)


@dataclass
class ModelSettings:
    """What is trained."""

    architecture: str | None = "llama"
    """A causal model type of transformers (llama, gpt2, ...). null: take it from `warm_start`."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of that architecture's transformers config, for example hidden_size."""
    warm_start: str | None = None
    """Weights to start from: a local transformers directory, or a run directory (its model/ is taken)."""

    def __post_init__(self) -> None:
        require(
            self.architecture is not None or self.warm_start is not None,
            "model.architecture",
            self.architecture,
            "name a causal model type of transformers, or set model.warm_start to a local model",
        )


@dataclass
class DataSettings:
    """What it is trained on."""

    corpus: Corpus = Corpus.python_stdlib
    """python_stdlib: the sources of the running Python. text: files as bytes. tokens: .npy files of token ids."""
    train: list[str] = field(default_factory=list)
    """Files or globs (text), or .npy files (tokens) to train on."""
    validation: list[str] = field(default_factory=list)
    """The same for validation. Empty: `validation_fraction` of `train` is held out."""
    validation_fraction: float = 0.05
    """Share of the files (of the tail, where there is one file) that is held out, in (0, 1)."""
    vocab_size: int | None = None
    """Vocabulary of token files. null: largest id + 1. Text needs none: it is bytes."""
    sequence_length: int = 128
    """Tokens per sequence that are predicted; a stored sequence is one longer."""
    shards: Shards = Shards.disjoint
    """disjoint: every trainer reads a part of its own. shared: every trainer reads all, each in another order."""

    def __post_init__(self) -> None:
        require(self.sequence_length >= 1, "data.sequence_length", self.sequence_length, "must be >= 1 token")
        fraction = self.validation_fraction
        require(0 < fraction < 1, "data.validation_fraction", fraction, "must lie between 0 and 1, both excluded")
        needs_files = self.corpus is not Corpus.python_stdlib
        if needs_files:
            require(bool(self.train), "data.train", self.train, f"data.corpus={self.corpus.name} needs files or globs")
        else:
            for name in ("train", "validation"):
                files = getattr(self, name)
                require(not files, f"data.{name}", files, "has no effect with data.corpus=python_stdlib; use data=text")
        if self.vocab_size is not None:
            require(self.vocab_size >= 2, "data.vocab_size", self.vocab_size, "must be >= 2, or null")
            is_tokens = self.corpus is Corpus.tokens
            require(is_tokens, "data.vocab_size", self.vocab_size, "is for data.corpus=tokens; text is always bytes")
