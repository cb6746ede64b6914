"""Files of a run, as whoever reads them finds them: whole, damaged, or something else altogether."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from adloco_dist.config import Settings, SettingsError, require
from adloco_dist.config.compose import from_plain
from adloco_dist.messages import decode, decode_json
from adloco_dist.policy.plan import RoundPlan
from adloco_dist.policy.replay import Trajectory
from adloco_dist.run.rows import METRICS_FILE, TrainerRow, parse_rows
from adloco_dist.terminal import report_error
from adloco_dist.text import reason

RUN_FILE, PLANS_FILE = "run.json", "plans.jsonl"


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
    sample: NotRequired[list[str]]
    """How a validation sequence begins, and what the saved model writes after that."""
    rounds: NotRequired[int]
    tokens: NotRequired[int]
    bytes_sent: NotRequired[int]
    seconds: NotRequired[float]


class CorpusFacts(TypedDict):
    """What a run was trained on."""

    source: str
    digest: str


class Start(TypedDict):
    """How a run went on: in new processes, or in its living ones with other nodes."""

    started: str
    checkpoint: str
    world_size: int
    hosts: NotRequired[list[str]]
    lost_hosts: NotRequired[list[str]]
    new_hosts: NotRequired[list[str]]
    round: NotRequired[int]
    why: NotRequired[str]
    """What became of the nodes; empty: processes are new."""
    paused_seconds: NotRequired[float | None]
    """How long nobody trained."""


class RunFacts(TypedDict):
    """run.json, as far as anybody reads it."""

    settings: dict[str, Any]
    cluster: NotRequired[dict[str, Any]]
    corpus: CorpusFacts
    resumed: NotRequired[list[Start]]
    result: Result | None
    """null: it has not ended."""


def read_run(directory: Path, setting: str = "RUN") -> RunFacts:
    """The contents of run.json; raises a SettingsError if there is none, or it is damaged."""
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
        raise SettingsError.of(setting, directory, rule) from error
    except ValueError as error:
        rule = f"{RUN_FILE} is not what a run writes ({error}); restore it, or name another run"
        raise SettingsError.of(setting, directory, rule) from error
    return facts


def saved_candidate(result: Mapping[str, Any] | None) -> Candidate | None:
    """The candidate whose weights are the model; None: the run has not ended, or was stopped early."""
    if result is None:
        return None
    return next((candidate for candidate in result["candidates"] if candidate["name"] == result["saved"]), None)


def settings_of(directory: Path, facts: RunFacts, setting: str = "RUN") -> Settings:
    """The settings that a run was trained with; raises a SettingsError if they are not those of this version."""
    try:
        return from_plain(facts["settings"])
    except Exception as error:  # settings of any shape can raise anything
        rule = f"the settings in its {RUN_FILE} cannot be read ({reason(error)}); use the version that trained it"
        raise SettingsError.of(setting, directory, rule) from error


def read_trajectory(setting: str, source: str) -> Trajectory:
    """The total batches of a run and its merges, by round, to be repeated; raises a SettingsError as `read_rows` does,
    and if rounds are missing."""
    rows = [row for row in read_rows(setting, source) if row.round]
    batches: dict[int, dict[int, int]] = {}
    for row in rows:
        batches.setdefault(row.round - 1, {})[row.trainer] = row.total_batch or 0
    merges = {row.round - 1: row.merge for row in rows if row.merge}
    if 0 not in batches:
        raise SettingsError(f"{setting}={source}: has no round 1; name the records of a whole run")
    trainers = set(batches[0])
    for round_ in range(max(batches) + 1):
        if round_ in merges:
            trainers -= set(merges[round_].ended)
        for trainer in sorted(trainers):
            if not batches.get(round_, {}).get(trainer):
                rule = f"trainer {trainer} has no total_batch in round {round_ + 1}; name the records of a whole run"
                raise SettingsError(f"{setting}={source}: {rule}")
        trainers = set(batches[round_])
    return Trajectory(batches, merges)


def read_plans(setting: str, directory: Path) -> list[RoundPlan]:
    """The plans of a run, from the first round on, to be repeated; raises a SettingsError if they cannot be read, or
    some are missing."""
    path, plans = directory / PLANS_FILE, list[RoundPlan]()
    content: dict[str, Any] = {}
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:
            content |= json.loads(line)
            plans.append(decode(RoundPlan, content))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        where = "" if isinstance(error, OSError) else f" in line {len(plans) + 1}"
        rule = f"{path} cannot be read{where} ({reason(error)}); name the directory of a whole run"
        raise SettingsError.of(setting, directory, rule) from error
    rule = "does not hold every plan from the first round on, as when it resumed with other settings or ranks"
    require(bool(plans) and [plan.round for plan in plans] == [*range(len(plans))], setting, directory, rule)
    return plans


def read_rows(setting: str, source: str) -> list[TrainerRow]:
    """The rows of a run directory, or of its metrics.jsonl, which a setting names; raises a SettingsError if it is
    missing or holds something else. Damaged lines, as a power cut or a full disk leaves them, are skipped and reported
    on standard error."""
    path = Path(source)
    try:
        path = path / METRICS_FILE if path.is_dir() else path
        rows, problems = parse_rows(path.read_bytes())
    except (OSError, ValueError) as error:
        remedy = f"name a run directory, or its {METRICS_FILE}"
        raise SettingsError(f"{setting}={source}: {path} cannot be read; {remedy}") from error
    if not rows:
        problem = problems[0] if problems else "it is empty"
        raise SettingsError(f"{setting}={source}: holds no record of a round ({problem}); name a run's {METRICS_FILE}")
    if problems:
        count = f"{len(problems)} of {len(rows) + len(problems)} lines are no records and are left out"
        report_error(f"note: {setting}={source}: {count}, the first of them {problems[0]}")
    return rows
