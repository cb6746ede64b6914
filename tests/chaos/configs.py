"""Whether every command line either trains to its end or is refused in one line: random ones, right and wrong.

Each is composed, prepared and trained on one to three gloo ranks, as launch/train.py does it, with a model of a few
thousand parameters and three small files. All ranks must end alike: after a round or more, with records that are
finite; or with one and the same line of a SettingsError. A traceback, a rank that died or waits in vain, a line that is
several, and numbers that are not finite are failures.
"""

import math
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis.configuration import set_hypothesis_home_dir

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.run.journal import Journal, MetricsFile
from adloco_dist.setup.agreement import compare_settings, prepare
from adloco_dist.setup.parts import NamedParts
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.train import train
from chaos.random_commands import Start, starts
from chaos.values import RECORDED, SHAPES
from helpers.processes import run_ranks
from helpers.records import KeptRecords

# --- on ranks


@dataclass(frozen=True)
class Ending:
    """How a rank ended: refused, or trained."""

    refusal: str | None = None
    rounds: int = 0
    """In the records, which rank 0 has."""
    not_finite: tuple[str, ...] = ()
    """Places in records and result with numbers that should be finite."""


def train_on_rank(runtime: Runtime, overrides: Sequence[str], directory: Path, run: str) -> Ending:
    """What a rank of a run does between its start and its end.

    Args:
        directory: where files are relative to.
        run: a folder there, for metrics.jsonl.
    """
    warnings.simplefilter("ignore")  # torch's, of what it deprecates
    with chdir(directory):
        try:
            settings = compose(overrides)
            threads = settings.cluster.threads_per_rank or 2
            torch.set_num_threads(threads)
            runtime = replace(runtime, threads=threads)
            compare_settings(runtime.control, settings)
            layout, splits, objective, trajectory = prepare(settings, runtime, NamedParts())
            pool = set_up_pool(
                settings, runtime, splits, objective, objective.build(torch.device("cpu"), in_bf16=False), layout
            )
            inputs = find_plan_inputs(pool, layout, trajectory)
            kept = KeptRecords([])
            journal = Journal([kept, MetricsFile(Path(run))] if runtime.rank == 0 else [])
            outcome = train(pool, inputs, journal, StopRequest())
            journal.close()
            assert outcome.result is not None, outcome.stop
        except SettingsError as error:
            return Ending(refusal=str(error))
    rounds = max((record["round"] for record in kept.records), default=0)
    return Ending(None, rounds, tuple(not_finite({"records": kept.records, "result": outcome.result})))


MAY_BE_INFINITE = {"request", "noise_scale"}
"""What a test asks for where all it measured was noise."""


def not_finite(value: Any, name: str = "") -> Iterator[str]:
    """The places of numbers that should be finite and are not."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from not_finite(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, float) and not math.isfinite(value):
        is_noise = value == math.inf and name.rsplit(".", 1)[-1] in MAY_BE_INFINITE
        yield from () if is_noise else (f"{name}={value}",)


# --- whether they survive


TRAINED, REFUSED, OVER, FAILED = "trained", "refused", "over", "failed"
"""OVER: a budget in seconds that was spent before the first round."""


def attempt(start: Start, directory: Path, run: str = "run") -> tuple[str, str]:
    """How a start ended, and what is reported about it: the refusal, or what is wrong."""
    try:
        compose(start.overrides)
        endings = run_ranks(train_on_rank, list(start.nodes), start.overrides, directory, run)
    except SettingsError as error:
        endings = [Ending(refusal=str(error))]
    except AssertionError as error:
        return FAILED, str(error)
    except Exception:  # whatever it is, it should have been a line
        return FAILED, traceback.format_exc()
    refusals, first = {ending.refusal for ending in endings}, endings[0]
    if len(refusals) > 1:
        return FAILED, f"ranks end differently: {endings}"
    if first.refusal is not None:
        return REFUSED if len(first.refusal.splitlines()) == 1 else FAILED, first.refusal
    if first.not_finite:
        return FAILED, f"not finite: {', '.join(first.not_finite)}"
    if first.rounds:
        return TRAINED, f"{first.rounds} round(s)"
    return OVER if any(
        override.endswith("seconds") for override in start.overrides if override.startswith("budget=")
    ) else FAILED, "ended without a round"


def write_files(directory: Path) -> None:
    """The files that command lines name, and two runs whose batches can be repeated."""
    words = " ".join(str(number * number) for number in range(900))
    texts = {"words": words, "others": words[::-1], "other": words[:1_500], "empty": "", "short": "a"}
    for name, text in texts.items():
        (directory / f"{name}.txt").write_text(text, encoding="utf-8")
    tokens = np.frombuffer(words.encode(), dtype=np.uint8)
    square = tokens[:64].reshape(8, 8)
    arrays = {"tokens": tokens, "signed": tokens.astype(np.int64), "square": square, "empty": tokens[:0]}
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)
    (directory / "broken").mkdir()
    (directory / "broken" / "config.json").write_text("{}", encoding="utf-8")
    (directory / "run").mkdir()
    shape = [f"+model.overrides.{name}={value}" for name, value in SHAPES["llama"].items()]
    for trainers, (run, rounds) in RECORDED.items():
        (directory / run).mkdir()
        overrides = ["model=causal", "model.architecture=llama", *shape, "data=text", "data.train=[words.txt]",
                     "data.sequence_length=16", "algorithm=diloco", "batching.request=norm_test",
                     "algorithm.updates_per_round=1",
                     f"pool.trainers={trainers}", "pool.workers_per_trainer=1", "merge.every_rounds=1",
                     f"budget={rounds}rounds"]  # fmt: skip
        ending, detail = attempt(Start((0,), tuple(overrides)), directory, run)
        assert ending == TRAINED, detail


DRAWN_AT_ONCE = 9
"""After ten, hypothesis varies what it has drawn: command lines that differ in one word, each tried like a new one."""


def measure_configs(count: int, seed: int) -> dict[str, float]:
    """Try `count` random command lines, and print in full every one that does not survive.

    Args:
        seed: of what is drawn; the same gives the same command lines.
    """
    endings: dict[Start, str] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        set_hypothesis_home_dir(directory / "hypothesis")
        write_files(directory)

        def try_one(start: Start) -> None:
            hypothesis.assume(start not in endings)
            endings[start], detail = attempt(start, directory)
            if endings[start] == FAILED:
                print(f"failure after {len(endings)}, {start}\n{detail}\n", flush=True)

        while len(endings) < count:
            options = hypothesis.settings(
                max_examples=min(DRAWN_AT_ONCE, count - len(endings)), deadline=None, database=None,
                phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow],
            )  # fmt: skip
            hypothesis.seed(f"{seed} {len(endings)}")(options(given(starts())(try_one)))()
    tally = Counter(endings.values())
    return {"configs_tried": len(endings), "configs_failed": tally[FAILED], "configs_trained": tally[TRAINED]}
