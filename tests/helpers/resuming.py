"""A small pool that is interrupted and resumes, on forked ranks."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from adloco_dist.checkpoint.resume import fresh_domains, restore_pool, resumed
from adloco_dist.checkpoint.writer import Checkpoints, CheckpointWriter
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.replay import Trajectory
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.run.journal import Journal, MetricsFile, RunFile
from adloco_dist.setup.building import build_module
from adloco_dist.setup.journal import restore_records
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.train import train
from helpers.records import KeptRecords
from helpers.support import corpus_and_model, small_settings


class StopAfterLooks(StopRequest):
    """Is heard when it has been looked at so often: at an update that a test chooses, on all ranks."""

    def __init__(self, looks: int | None) -> None:
        self.left = looks
        super().__init__()

    @property
    def is_heard(self) -> bool:
        if self.left is None or threading.current_thread().name == "heartbeat":
            return False
        self.left -= 1
        return self.left < 0

    @is_heard.setter
    def is_heard(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value:
            self.left = 0


class SwiftCheckpoints(Checkpoints):
    """As on disks that are never late: a checkpoint which is still being written postpones none."""

    @property
    def is_writing(self) -> bool:
        self._writer.wait()
        return False


def train_kept(
    runtime: Runtime,
    directory: str,
    looks: int | None,
    *overrides: str,
    own_directories: bool = False,
    prepare: Callable[[LocalPool], None] = lambda pool: None,
    module: nn.Module | None = None,
) -> dict[str, Any]:
    """Train from the newest checkpoint, if there is one, until the budget is spent or a rank is asked to stop.

    Args:
        looks: how often a rank looks for a request to stop before it sees one, once before every update and every
            average; None: there is none.
        own_directories: every node has a directory of its own.
        prepare: changes the pool before the first round.
        module: what is trained; None: what the settings name.

    Returns:
        This rank's anchors (by trainer), cursors, what ended the run, what was reported, and on rank 0 the records.
    """
    path = Path(directory) / (f"node{runtime.nodes[runtime.rank]}" if own_directories else "shared")
    settings = small_settings(f"run.directory={path}", "run.unfinished=resume", *overrides)
    detail: list[str] = []
    sink = KeptRecords([])
    with ExitStack() as stack:
        source = stack.enter_context(resumed(runtime, settings, detail.append))
        state = source.state if source else None
        layout = state.plan.layout if state else experiment_layout(settings, runtime.nodes)
        splits, objective, named = corpus_and_model(settings)
        if settings.pool.ranks_per_worker > 1:
            named = build_module(objective, settings, runtime)
        pool = set_up_pool(settings, runtime, splits, objective, module or named, layout, source)
        inputs = find_plan_inputs(pool, layout, Trajectory())
        if source:
            restore_pool(pool, source)
        prepare(pool)
        domains = source.reader.domains if source else stack.enter_context(fresh_domains(runtime, path, settings))
        journal = Journal()
        if runtime.rank == 0:
            earlier = dict(source.state.journal) if source else {}
            if source:
                restore_records(path, source)
            facts = {"started": "then"}
            metrics = MetricsFile(path, earlier.get("metrics_bytes", 0))
            journal = Journal([RunFile(path, facts, earlier or None), metrics, sink])
        writer = CheckpointWriter(domains, runtime.store, runtime.world_size, settings.checkpoint, detail.append)
        stop = runtime.heartbeat.stop = StopAfterLooks(looks)
        outcome = train(pool, inputs, journal, stop, SwiftCheckpoints(writer, journal, path, settings), state)
        writer.wait()
        runtime.control.exchange({})
        if runtime.rank == 0:
            journal.close(outcome.result and {"stop": outcome.stop, **outcome.result})
    trainers = outcome.pool.trainers.values()
    return {
        "anchors": {trainer.id: trainer.anchor.numpy(force=True).copy() for trainer in trainers},
        "momentum": {trainer.id: list(trainer.state().values())[-1].numpy(force=True).copy() for trainer in trainers},
        "cursors": {trainer.id: trainer.cursor.position for trainer in trainers},
        "stop": outcome.stop,
        "round": outcome.plan.round,
        "records": sink.records,
        "reported": detail,
        "updates_done": [worker.updates_done for worker in outcome.pool.workers],
        "newest": writer.newest,
    }
