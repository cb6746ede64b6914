"""What a rank does together with the others of a world: agree on what is asked, train, and leave in order."""

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from adloco_dist.cluster.contact import FIXED, Contact
from adloco_dist.cluster.runtime import Place, Runtime, started
from adloco_dist.cluster.signals import STOP_SIGNALS, Ask, StopRequest, stop_on_signals
from adloco_dist.config import Settings, SettingsError, Unfinished
from adloco_dist.config.without_effect import without_effect
from adloco_dist.launch.launchers import max_restarts
from adloco_dist.launch.rendezvous import check_restarts
from adloco_dist.launch.run import Manner, Run, report_line
from adloco_dist.policy.plan import INTERRUPTED
from adloco_dist.run.directory import is_finished
from adloco_dist.setup.agreement import compare_settings, survey_cluster
from adloco_dist.setup.dry_run import print_dry_run
from adloco_dist.setup.parts import Parts, Task


class World:
    """The ranks that this one works with, until the end.

    Attributes:
        place: this rank's among them.
        store: what they share.
        contact: does what is to be done when a rank is lost.
        logs: closes this rank's log.
        run: the run, once it is open.
        manner: how it goes on where ranks come and go.
        stays: whether this rank's node goes on with others after an interruption.
    """

    run: Run | None = None
    manner = Manner()
    stays = False

    def __init__(self, place: Place, store: Store, contact: Contact = FIXED) -> None:
        self.place, self.store, self.contact, self.logs = place, store, contact, ExitStack()

    def is_asked(self) -> bool:
        """Whether SIGTERM asks for a stop."""
        return True

    def begin(self, runtime: Runtime) -> None:
        """The ranks are connected, and begin to work. Collective."""

    def hold(self, run: Run) -> None:
        """The run is open."""
        self.run = run

    def rest(self) -> None:
        """All of them are done, and none has left yet."""


@dataclass(frozen=True)
class Job:
    """What was asked of this rank."""

    settings: Settings
    error: SettingsError | None
    """The mistake in the settings, which are the defaults then; None: there is none."""
    overrides: Sequence[str]
    dry_run: bool
    parts: Parts
    task: Task | None = None
    """What is computed on which data; None: it is read once the ranks have met."""

    def work(self, world: World, stop: StopRequest) -> bool:
        """Train with the ranks of a world, or show what would be trained; whether it was interrupted. Collective."""
        settings, directory, is_interrupted = self.settings, self.settings.run.directory, False
        with ExitStack() as stack:
            other_signals = [number for number in STOP_SIGNALS if number != signal.SIGTERM]
            stack.enter_context(stop_on_signals(stop, other_signals))
            size = settings.pool.ranks_per_worker
            of_world = (world.place, world.store, stop, size, world.contact)
            runtime = stack.enter_context(started(settings.cluster, *of_world))
            # Not before: an agent whose other ranks have failed ends with SIGTERM those that wait for them to start.
            stack.enter_context(stop_on_signals(stop, [signal.SIGTERM], world.is_asked))
            runtime.control.agree(self.error)
            compare_settings(runtime.control, settings)
            check_restarts(settings.run, max_restarts())
            notes = [f"{line}: {why}" for line, why in without_effect(settings, self.overrides).items()]
            # As who starts it again and again may not know.
            resumes = settings.run.unfinished is Unfinished.resume and directory is not None
            ended = resumes and directory is not None and is_finished(Path(directory))
            if self.dry_run:
                runtime.heartbeat.enter("measuring links")
                _, links = survey_cluster(runtime, settings)
                if runtime.rank == 0:
                    print_dry_run(settings, runtime.nodes, self.parts, links, notes)
            elif any(reply["ended"] for reply in runtime.control.exchange({"ended": ended})):
                line = f"run.directory={directory} holds a run that has ended: there is nothing to resume"
                report_line(runtime)(line)
            else:
                world.begin(runtime)
                run = Run(settings, runtime, self.parts, stack, world.logs, notes, self.task, world.manner)
                world.hold(run)
                outcome = run.train(stop)
                is_interrupted = outcome.stop == INTERRUPTED
                staying = _staying(runtime, stop) if is_interrupted and world.manner.goes_on else set[int]()
                world.stays = runtime.nodes[runtime.rank] in staying
                if staying:
                    run.hand_over(None if world.stays else outcome, world.place)
                else:
                    run.close(outcome, world.place)
            # Before any rank ends: torchrun ends the others as soon as one exits with another code than 0, and with
            # rank 0 goes the store, without which a heartbeat would take its own rank for failed.
            runtime.control.exchange({})
            runtime.heartbeat.close()
            world.rest()
            runtime.control.exchange({})
        return is_interrupted


def _staying(runtime: Runtime, stop: StopRequest) -> set[int]:
    """The nodes that go on after an interruption: all but those who leave, and none if somebody wants a stop.
    Collective."""
    asks = [Ask(reply["ask"]) for reply in runtime.control.exchange({"ask": stop.own})]
    leaving = {node for node, ask in zip(runtime.nodes, asks, strict=True) if ask is Ask.leave}
    return set() if Ask.stop in asks else set(runtime.nodes) - leaving
