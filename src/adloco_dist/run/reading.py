"""Files of a run, as whoever reads them finds them: whole, damaged, or something else altogether."""

import json
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from omegaconf.errors import OmegaConfBaseException

from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import from_plain
from adloco_dist.messages import decode
from adloco_dist.text import reason

RUN_FILE = "run.json"


UNREADABLE_SETTINGS = (
    OmegaConfBaseException, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""What settings of any shape can raise."""


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
        detail = f"has no readable {RUN_FILE} ({error.strerror}); name a run directory"
        raise SettingsError(f"RUN={directory}: {detail}") from error
    except ValueError as error:
        detail = f"{RUN_FILE} is not what a run writes ({error}); restore it, or name another run"
        raise SettingsError(f"RUN={directory}: {detail}") from error
    return facts


def settings_of(directory: Path, facts: RunFacts) -> Settings:
    """The settings that a run was trained with.

    Raises:
        SettingsError: they are not those of this version.
    """
    try:
        return from_plain(facts["settings"])
    except UNREADABLE_SETTINGS as error:
        rule = f"the settings in its {RUN_FILE} cannot be read ({reason(error)}); use the version that trained it"
        raise SettingsError(f"RUN={directory}: {rule}") from error


def decode_json(content: bytes) -> Any:
    """JSON that anybody may have written; numbers that it does not know, which Python writes all the same, are null.

    Raises:
        ValueError: it is none, in one line.
    """
    try:
        value = json.loads(content.decode(), parse_constant=lambda _: None)
        if rb"\ud" in content.lower():  # half a character, which could not be shown
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ValueError("no UTF-8") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from error
    return value
