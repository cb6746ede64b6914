"""What a checkpoint costs: how long training is blocked by the copy, and how much the background write slows it."""

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from adloco_dist.checkpoint.resume import fresh_domains
from adloco_dist.checkpoint.writer import Checkpoints, CheckpointWriter, parts
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import load_corpus
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import CheckpointId, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.replay import Trajectory
from adloco_dist.policy.report import RankReport
from adloco_dist.round.steps import begin_round
from adloco_dist.run.journal import Journal, MetricsFile, RunFile
from adloco_dist.run.manifest import digest_of
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.train import run_round
from helpers.processes import run_ranks

ROUNDS_PER_CHECKPOINT = 5
PAIRS_PER_START = 6
SETTINGS = (
    "model=tiny", "algorithm=diloco", "algorithm.updates_per_round=20", "pool.trainers=2",
    "pool.workers_per_trainer=1", "merge=none", "batching.local_batch=4", "batching.request=none",
    "batching.capacity=1024", "data.sequence_length=128", "budget=1000rounds",
    "inner.schedule=constant", "cluster.device=cpu",
)  # fmt: skip


def measure_on_rank(runtime: Runtime, folder: str, pairs: int) -> dict[str, list[float]]:
    """Seconds of five rounds with a checkpoint before them and without, in turn; of the copy; bytes of both."""
    settings = compose(SETTINGS)
    splits = load_corpus(settings.data)
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    module = objective.build(torch.device("cpu"), in_bf16=False)
    layout = experiment_layout(settings, runtime.nodes)
    pool = set_up_pool(settings, runtime, splits, objective, module, layout)
    plan = plan_round(settings, find_plan_inputs(pool, layout, Trajectory()), None, PoolReport())
    directory = Path(folder)
    taken: dict[str, list[float]] = {"with": [], "without": [], "blocked": [], "bytes": []}
    with fresh_domains(runtime, directory, settings) as domains:
        journal = Journal([RunFile(directory, {"started": ""}), MetricsFile(directory)] if runtime.rank == 0 else [])
        writer = CheckpointWriter(domains, runtime.store, runtime.world_size, settings.checkpoint, print)
        checkpoints = Checkpoints(writer, journal, directory, settings)
        numbers = iter(range(1, 10**6))

        def rounds(mark: CheckpointId | None) -> float:
            runtime.control.exchange({})
            start = time.perf_counter()
            if mark:
                checkpoints.save(pool, mark, plan, PoolReport(), 0.0)
                taken["blocked"].append(time.perf_counter() - start)
            for _ in range(ROUNDS_PER_CHECKPOINT):
                planned, report = replace(plan, round=next(numbers)), RankReport(runtime.rank)
                begin_round(pool, None, planned, report)
                run_round(pool, planned, report, StopRequest())
            runtime.control.exchange({})
            seconds = time.perf_counter() - start
            assert not writer.is_busy, "the writing took longer than five rounds"
            return seconds

        mark = CheckpointId()
        for number in range(pairs + 1):
            mark = CheckpointId(number + 1, number)
            sides = (("with", mark), ("without", None))
            for name, one in sides if number % 2 else reversed(sides):
                taken[name].append(rounds(one))
        written = [path for path in (domains.folder / mark.name).iterdir()]
        taken["bytes"].append(sum(digest_of(path).num_bytes for path in written))
    state = parts(pool, plan.layout, pool.settings.wire.is_streaming)
    taken["state"] = [float(sum(tensor.nbytes for tensors in state.values() for tensor in tensors.values()))]
    return {name: values if name in ("bytes", "state") else values[1:] for name, values in taken.items()}


def measure_cost(starts: int) -> tuple[dict[str, float], list[list[str]]]:
    """The figures, and rows for a table."""
    taken: dict[str, list[float]] = {"with": [], "without": [], "blocked": []}
    size_ratio = 0.0
    for _ in range(starts):
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(measure_on_rank, [0, 0], folder, PAIRS_PER_START)
        for name, values in taken.items():
            values += ranks[0][name]
        size_ratio = ranks[0]["bytes"][0] / sum(rank["state"][0] for rank in ranks)
    round_seconds = statistics.median(taken["without"]) / ROUNDS_PER_CHECKPOINT
    blocked = statistics.median(taken["blocked"])
    ratios = sorted(a / b for a, b in zip(taken["with"], taken["without"], strict=True))
    quartiles = statistics.quantiles(ratios, n=4)
    rows = [
        ["a round, ms", f"{round_seconds * 1e3:.1f}"],
        ["copy, ms", f"{blocked * 1e3:.2f}"],
        ["one checkpoint in five rounds: slower by, % (quartiles)",
         f"{(quartiles[1] - 1) * 100:.2f} ({(quartiles[0] - 1) * 100:.2f} to {(quartiles[2] - 1) * 100:.2f})"],
        ["bytes written over the state's", f"{size_ratio:.4f}"],
    ]  # fmt: skip
    figures = {
        "checkpoint_blocked": blocked / round_seconds,
        "checkpoint_overhead": statistics.median(ratios) - 1,
        "checkpoint_size_ratio": size_ratio,
    }
    return figures, rows
