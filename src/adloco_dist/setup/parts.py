"""What a run trains and on what data: named by its settings, or a user's own functions.

Nothing here imports torch before it is needed: mistakes in settings are reported before.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adloco_dist.command import importing
from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import compose, parse

if TYPE_CHECKING:
    from adloco_dist.data.protocols import Splits
    from adloco_dist.objective.protocol import Objective

MEANINGFUL = ("data.shards", "data.sequence_length")
"""Settings of `data` that apply to a user's own data, too."""
ONE_TOKEN = "data.sequence_length=1"
"""Budgets in tokens count a user's sequences, unless the user says how many tokens each of them has."""


class NamedParts:
    """A corpus and a transformers model that the settings name."""

    command: tuple[str, ...] = ("-m", "adloco_dist.launch")
    """The arguments of the interpreter that start another process of the same run, settings excluded."""

    def compose(self, overrides: Sequence[str]) -> Settings:
        """The settings of a run; raises a SettingsError for a mistake in them, or one that has no effect."""
        return compose(overrides)

    def data_name(self, settings: Settings) -> str:
        """What names the data: an error message about it begins with this."""
        return f"data.corpus={settings.data.corpus.name}"

    def splits(self, settings: Settings) -> "Splits":
        """The data for training and validation; raises a SettingsError where it cannot be read."""
        with importing():
            from adloco_dist.data.corpora import load_corpus

        return load_corpus(settings.data, settings.seed)

    def objective(self, settings: Settings, splits: Any, reads_weights: bool = True) -> "Objective":
        """What is computed.

        Args:
            splits: what `splits` returned.
            reads_weights: whether this process looks at the weights of a warm start; one of each node does.

        Raises:
            SettingsError: there is no such model.
        """
        with importing():
            from adloco_dist.checkpoint.model import check_model
            from adloco_dist.objective.architecture import local_model
            from adloco_dist.objective.language import LanguageObjective

        if settings.model.warm_start is not None and reads_weights:
            check_model("model.warm_start", Path(local_model(settings.model.warm_start)[0]))
        return LanguageObjective.fitted(settings, splits.vocabulary, splits.labels)


@dataclass(frozen=True)
class OwnParts:
    """The functions of a user's script, as `launch` takes them; methods are those of `NamedParts`."""

    model: Callable[[], Any]
    data: Callable[[], Any]
    loss: Callable[[Any, Any], tuple[Any, int] | tuple[Any, int, int]]
    collate: Callable[[list[Any]], Any] | None = None
    blocks: Callable[[Any], Sequence[Any]] | None = None
    script: Path = field(default_factory=lambda: Path(sys.argv[0]).resolve())

    @property
    def command(self) -> tuple[str, ...]:
        spec = sys.modules["__main__"].__spec__
        if spec is not None:  # python -m package.module
            return ("-m", spec.name.removesuffix(".__main__"))
        return (str(self.script),)

    def compose(self, overrides: Sequence[str]) -> Settings:
        for name in ("model", "data", "loss", "collate", "blocks"):
            part = getattr(self, name)
            if not callable(part) and not (name in ("collate", "blocks") and part is None):
                raise SettingsError(f"launch({name}={part!r}): must be a function; see docs/guide/own-model.md")
        for override in parse(overrides):
            key = override.key_or_group.partition(".")[0]
            if key in ("model", "data") and override.key_or_group not in MEANINGFUL:
                rule = f"has no effect, because {self.script.name} brings its own {key}; leave it out"
                raise SettingsError(f"{override.input_line}: {rule}")
        return compose([ONE_TOKEN, *overrides])

    def data_name(self, settings: Settings) -> str:
        return f"data={getattr(self.data, '__name__', type(self.data).__name__)}"

    def splits(self, settings: Settings) -> "Splits":
        from torch.utils.data import default_collate

        from adloco_dist.data.own import own_splits

        return own_splits(self.data, self.collate or default_collate)

    def objective(self, settings: Settings, splits: Any, reads_weights: bool = True) -> "Objective":
        from adloco_dist.objective.own import OwnObjective

        return OwnObjective(self.model, self.loss, splits.first_batch, settings.seed, self.blocks)


Parts = NamedParts | OwnParts
"""Where a run's model, loss and data come from."""


@dataclass(frozen=True)
class Task:
    """What is computed, and on which data, as this process has read it."""

    splits: "Splits"
    objective: "Objective"

    @classmethod
    def of(cls, parts: Parts, settings: Settings, reads_weights: bool) -> "Task":
        """What the parts make, which takes seconds; as of `NamedParts`."""
        splits = parts.splits(settings)
        return cls(splits, parts.objective(settings, splits, reads_weights))
