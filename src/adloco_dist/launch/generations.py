"""A run whose nodes come and go: its ranks live on, and train with whoever is there."""

import gc
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
from torch.distributed.distributed_c10d import Store

from adloco_dist.averaging.checks import is_of_another
from adloco_dist.checkpoint.salvage import Left, salvage
from adloco_dist.cluster.failures import LostContactError, PeerFailedError, failed
from adloco_dist.cluster.meeting import Meeting, Terms
from adloco_dist.cluster.nodes import Node
from adloco_dist.cluster.runtime import Place, Runtime, forget_groups
from adloco_dist.cluster.signals import STOP_SIGNALS, Ask, StopRequest, stop_on_signals
from adloco_dist.config import EXIT_STOPPED, Settings, SettingsError
from adloco_dist.launch.job import Job, World
from adloco_dist.launch.launchers import max_restarts, speaks_for_node
from adloco_dist.launch.run import Manner, Run, report_line
from adloco_dist.setup.agreement import facts_of_node
from adloco_dist.setup.journal import Change
from adloco_dist.setup.parts import Task
from adloco_dist.terminal import report_error, reported_wait

log = logging.getLogger(__name__)
HERE = platform.node()
LEAVING = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
"""What tells a rank that its node leaves: the driver (launch/agent.py), or whoever ends single processes."""


class Generation(World):
    """The ranks that are there now.

    Attributes:
        left: what this rank is left with of the generation before, until all have it; None: nothing.
    """

    def __init__(
        self, node: Node, settings: Settings, left: Left | None, is_fitted: bool, change: Change | None
    ) -> None:
        place, store = node.next()
        if node.change and place.local_rank == 0:
            report_error(node.change)
        super().__init__(place, store, node.contact)
        self._node, self._settings, self.left, self._number = node, settings, left, node.generation
        self.manner = Manner(is_fitted, goes_on=True, change=change)

    def is_asked(self) -> bool:
        """Whether SIGTERM is more than the agent's answer to the failure of another rank of this node."""
        ranks = psutil.Process(os.getppid()).children()
        return sum(rank.status() != psutil.STATUS_ZOMBIE for rank in ranks) >= self.place.local_world_size

    def begin(self, runtime: Runtime) -> None:
        runtime.heartbeat.enter("seeing what is left")
        salvage(runtime, self._settings, self.left, report_line(runtime), self.manner.is_fitted)
        self.left = None  # before another pool takes its place

    def hold(self, run: Run) -> None:
        super().hold(run)
        has_begun = run.resume_point is not None and run.resume_point.state.has_begun
        seats = {seat for ranks in run.inputs.layout.rank_sets for seat in ranks}
        self._node.has_idle = self.manner.is_fitted and has_begun and len(seats) < run.pool.runtime.num_seats

    def rest(self) -> None:
        self._node.rest()

    def end(self) -> Left | None:
        """What this rank is left with, now that the generation is over."""
        run, number = self.run, self._number
        if self.left or run is None or run.pool.standing is None:
            return self.left
        return Left(run.pool, run.journal, run.directory, number, self.place.rank == 0)


def train_with_who_is_there(job: Job, meeting: Meeting, place: Place, local: Store) -> bool:
    """Train, generation after generation; whether it was interrupted.

    Args:
        place: this process', as torchrun says, among those of its node.
        local: the store that these share.

    Raises:
        SettingsError: on the ranks of a node that has no place among the others, or on all ranks.
        RuntimeError: this rank has failed by itself.
    """
    if job.error:
        raise job.error
    settings, stop = job.settings, StopRequest(leaves_at=LEAVING)
    task = Task.of(job.parts, settings, reads_weights=place.local_rank == 0)  # before others have to wait for it
    job = replace(job, task=task)
    facts = {"--rdzv-id": meeting.run, **facts_of_node(settings, task.splits)}
    terms = Terms(meeting.least, meeting.most, meeting.run, max_restarts(), job.overrides)
    node = Node(meeting, place, local, facts, terms, settings.cluster.silence_seconds)
    stop.has_newcomers, stop.is_lost = node.has_newcomers, lambda: node.contact.lost is not None
    left = change = None
    is_free = settings.pool.workers_per_trainer is None and not settings.algorithm.is_data_parallel
    is_fitted = is_free and task.splits.train.num_sequences is not None
    try:
        # While it trains, a rank takes signals for requests. One that waits for others has nothing to write.
        with stop_on_signals(stop, STOP_SIGNALS, is_meant=lambda: False):
            while True:
                with reported_wait(node.in_words, speaks_for_node()), _in_time(stop, settings.cluster.silence_seconds):
                    world = Generation(node, settings, left, is_fitted, change)
                stop.renew()
                is_interrupted = _work(job, world, stop, node.has_new)
                if is_interrupted is not None and not world.stays:
                    return is_interrupted
                # Of a round that is over all is in the checkpoint, from which a number of workers begins the next one.
                is_within = is_interrupted is None or (is_fitted and not stop.ends_with_round)
                left = world.end() if is_within else None
                change = Change(_why(node, stop if is_interrupted else None), time.monotonic())
                world.logs.close()
                del world
                forget_groups()
                gc.collect()  # what was on the device
    finally:
        node.leave()


@contextmanager
def _in_time(stop: StopRequest, seconds: float) -> Iterator[None]:
    """End this process after so long in the block if it was asked to stop: it waits for others, who may never come."""
    end = threading.Timer(seconds, os._exit, [EXIT_STOPPED])
    end.daemon = True
    if stop.own > Ask.nothing:
        end.start()
    try:
        yield
    finally:
        end.cancel()


def _why(node: Node, stop: StopRequest | None) -> str:
    """Why a generation is over, which was asked to `stop`; None: it was not."""
    if stop:
        return "newcomers" if stop.ends_with_round else "a node left"
    return node.contact.lost or "newcomers could not take part"


def _work(job: Job, world: Generation, stop: StopRequest, has_new: bool) -> bool | None:
    """Train with those who are there; whether it was interrupted, None where some of them are lost."""
    try:
        return job.work(world, stop)
    except SettingsError as error:
        if not has_new:
            raise
        if world.place.local_rank == 0:
            report_error(f"note: newcomers cannot take part, and training goes on without them: {error}")
        return None
    except Exception as error:
        failure = failed(error, f"rank {world.place.rank} on {HERE}", world.store)
        is_theirs = isinstance(failure, PeerFailedError | LostContactError) or isinstance(error, PeerFailedError)
        if not (is_theirs or (isinstance(error, RuntimeError) and is_of_another(error))):
            raise
        log.info("%s", failure, exc_info=error)
        world.contact.lose(str(failure), "an error")
        return None
