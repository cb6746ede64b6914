"""Files of a run, as whoever reads them finds them: whole, damaged, or something else altogether."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import from_plain
from adloco_dist.messages import decode, decode_json
from adloco_dist.text import reason

RUN_FILE = "run.json"


class Candidate(TypedDict):
    """What the evaluation of one candidate came to; null: not finite."""

    name: str
    validation_loss: float | None
    validation_perplexity: NotRequired[float | None]
    validation_accuracy: NotRequired[float | None]
    """It stands in for the perplexity where targets are labels. A user's own loss has neither."""


class Result(TypedDict):
    """What a run came to."""

    stop: str
    saved: str | None
    """The candidate whose weights are the model; null: stopped early."""
    candidates: list[Candidate]
    validation_targets: NotRequired[int]
    rounds: NotRequired[int]
    tokens: NotRequired[int]
    bytes_sent: NotRequired[int]
    seconds: NotRequired[float]


class CorpusFacts(TypedDict):
    """What a run was trained on."""

    source: str
    digest: str


class RunFacts(TypedDict):
    """run.json, as far as anybody reads it."""

    settings: dict[str, Any]
    corpus: CorpusFacts
    result: Result | None
    """null: it has not ended."""


def read_run(directory: Path) -> RunFacts:
    """The contents of run.json.

    Raises:
        SettingsError: `directory` is no run directory, or its run.json is damaged.
    """
    try:
        facts = decode_json((directory / RUN_FILE).read_bytes())
        decode(RunFacts, facts)
        result = facts["result"]
        candidates = result["candidates"] if result else []
        names = [candidate["name"] for candidate in candidates]
        if names and result["saved"] not in names:
            raise ValueError("result.saved is none of the candidates")
    except OSError as error:
        rule = f"has no readable {RUN_FILE} ({error.strerror}); name a run directory"
        raise SettingsError.of("RUN", directory, rule) from error
    except ValueError as error:
        rule = f"{RUN_FILE} is not what a run writes ({error}); restore it, or name another run"
        raise SettingsError.of("RUN", directory, rule) from error
    return facts


def saved_candidate(result: Mapping[str, Any] | None) -> Candidate | None:
    """The candidate whose weights are the model; None: the run has not ended, or was stopped early."""
    if result is None:
        return None
    return next((candidate for candidate in result["candidates"] if candidate["name"] == result["saved"]), None)


def settings_of(directory: Path, facts: RunFacts) -> Settings:
    """The settings that a run was trained with.

    Raises:
        SettingsError: they are not those of this version.
    """
    try:
        return from_plain(facts["settings"])
    except Exception as error:  # settings of any shape can raise anything
        rule = f"the settings in its {RUN_FILE} cannot be read ({reason(error)}); use the version that trained it"
        raise SettingsError.of("RUN", directory, rule) from error
