"""A run as a rank sees it: opened where it begins or resumes, trained, and closed with what it leaves."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import adloco_dist
from adloco_dist.checkpoint.model import save_model
from adloco_dist.checkpoint.resume import ResumePoint, fresh_domains, restore_pool, resumed
from adloco_dist.checkpoint.writer import Checkpoints, CheckpointWriter
from adloco_dist.cluster.environment import Link
from adloco_dist.cluster.runtime import Place, Runtime
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import Settings
from adloco_dist.launch.launchers import max_restarts
from adloco_dist.policy.evaluation import in_order, in_words
from adloco_dist.policy.plan import INTERRUPTED, NONFINITE, PlanInputs, RoundPlan
from adloco_dist.pool.arithmetic import set_up_arithmetic
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.report.processes import listen, shown_live, write_report
from adloco_dist.run.directory import PROFILE_DIRECTORY, STOP_FILE, STOP_VARIABLE
from adloco_dist.run.log import logged
from adloco_dist.run.profiler import RoundProfiler
from adloco_dist.run.reading import saved_candidate
from adloco_dist.setup.agreement import (
    agree_on_directory,
    examine_plans,
    prepare,
    survey_cluster,
    with_known_budget,
)
from adloco_dist.setup.building import build_module
from adloco_dist.setup.journal import Change, open_journal, print_note
from adloco_dist.setup.parts import Parts, Task
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from adloco_dist.terminal import reported_wait, show, to_type
from adloco_dist.train import Outcome, train

log = logging.getLogger(__name__)
QUICK_PARAMETERS = 50_000_000
"""Largest model that writes a sample on a CPU: in a second or two."""
RECORDS_BYTES = 1 << 20
"""Room that a run directory must have beside the model."""


class NonfiniteError(RuntimeError):
    """Training comes to nothing: workers were not finite in too many rounds, or no trainer's loss is in the end."""


@dataclass(frozen=True)
class Manner:
    """How a run goes on where ranks come and go."""

    is_fitted: bool = False
    """Whether there are as many workers as ranks, also where there were others before."""
    goes_on: bool = False
    """Whether ranks that have lost others go on with what is left."""
    change: Change | None = None
    """After which it goes on; None: it begins, or resumes in new processes."""


class Run:
    """A run as this rank has it open: its share of the pool, and where its records and checkpoints go."""

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime,
        parts: Parts,
        stack: ExitStack,
        logs: ExitStack,
        notes: Sequence[str],
        task: Task | None = None,
        manner: Manner = Manner(),
    ) -> None:
        """Find where the run resumes or begins, set up the pool, and make or take the run directory. Collective.

        Args:
            stack: closes what stays open during training.
            logs: closes the log, which an error is to be written to.
            notes: lines about the settings for the user.
            task: what is computed on which data; None: it is read now.

        Raises:
            SettingsError: on all ranks, when one of them finds a mistake; nothing was written then.
        """
        control = runtime.control
        with reported_wait(runtime.heartbeat.in_words, speaks=runtime.rank == 0):
            runtime.heartbeat.enter("looking at nodes and links")
            environments, links = survey_cluster(runtime, settings)
            runtime.heartbeat.enter("looking for a checkpoint")
            self.resume_point = stack.enter_context(
                resumed(runtime, settings, report_line(runtime), manner.is_fitted, manner.goes_on)
            )
            self.pool, self.inputs = _set_up_pool(runtime, settings, parts, self.resume_point, links, task)
        listener, is_resumed = None, self.resume_point is not None
        with control.agreed():
            if runtime.rank == 0 and settings.run.watch_address is not None:
                listener = listen(f"run.watch={settings.run.watch}", *settings.run.watch_address)
        needed_bytes = 4 * self.pool.flat_model.num_parameters + RECORDS_BYTES
        self.directory, taken = agree_on_directory(control, settings.run, needed_bytes, is_resumed)
        if self.resume_point:
            domains = self.resume_point.reader.domains
        else:
            domains = stack.enter_context(fresh_domains(runtime, self.directory, settings))
        self.terminal = logs.enter_context(logged(self.directory, runtime.rank))
        """This rank's terminal: its standard output goes to its log."""
        log.info("%s", environments[runtime.rank])
        for line in notes if runtime.rank == 0 else ():
            print_note(line)
        (self.directory / STOP_FILE).unlink(missing_ok=True)  # what stopped the run before it resumes now
        self.journal = open_journal(
            self.pool, self.inputs, taken, environments, links, self.resume_point, manner.change
        )
        stack.callback(self.journal.close)  # where nothing else has closed it
        report = self.journal.report_line
        if address := stack.enter_context(shown_live(self.directory, listener)):
            report(f"the run is shown on {address}")
        node = runtime.nodes[runtime.rank]
        slowest = min((link.bytes_per_second for link in links if node in link.nodes), default=None)
        self.writer = CheckpointWriter(domains, runtime.store, runtime.world_size, settings.checkpoint, report, slowest)

    def train(self, stop: StopRequest) -> Outcome:
        """Train until the budget is spent or a rank was asked to stop, by the stop file as well.

        Raises:
            NonfiniteError: training comes to nothing; the page of the run has been written.
        """
        pool, state = self.pool, self.resume_point and self.resume_point.state
        stop.watch(Path(os.environ.get(STOP_VARIABLE) or self.directory / STOP_FILE))
        try:
            checkpoints = Checkpoints(self.writer, self.journal, self.directory, pool.settings)
            chosen, folder = pool.settings.profile.chosen, self.directory / PROFILE_DIRECTORY
            profiler = RoundProfiler(chosen, folder, pool.runtime, self.journal.report_line)
            outcome = train(pool, self.inputs, self.journal, stop, checkpoints, state, profiler)
            self.writer.wait()
            if outcome.stop == NONFINITE:
                raise NonfiniteError(outcome.plan.nonfinite_in_words())
            if outcome.result is not None and outcome.result["saved"] is None:
                rule = "the validation loss of no trainer is finite, so no model is saved; lower inner.lr"
                raise NonfiniteError(rule)
        except Exception as error:
            self.journal.close()
            if isinstance(error, NonfiniteError):
                self._write_report()
            raise
        return outcome

    def hand_over(self, left: Outcome | None, place: Place) -> None:
        """Leave the run directory to the next generation of ranks, which goes on at once; `left` is where this rank's
        node leaves it, None: it does not."""
        self.journal.close()
        if left:
            line = f"left in round {left.plan.round + 1}: the others go on, and the same command takes part again"
            log.info("%s", line)
            if place.local_rank == 0:
                show(line, self.terminal)

    def close(self, outcome: Outcome, place: Place) -> None:
        """Write what a run that has come to an end leaves, and report it; collective where a model is saved."""
        lines = self._end(outcome)
        log.info("%s", "; ".join(lines))
        if place.rank == 0:
            show("\n".join(lines))
        elif place.local_rank == 0:  # every node's terminal shows how it went; files are on rank 0's node
            where = f"run directory on {self.pool.runtime.hosts[0]}: {self.directory}"
            show(f"{lines[0]}; {where}", self.terminal)
        if outcome.stop != INTERRUPTED or max_restarts() == 0:  # else it resumes at once
            self._write_report()

    def _end(self, outcome: Outcome) -> list[str]:
        """Close the journal with the result, save the model, and return the lines to report."""
        where = f"run directory: {self.directory}"
        result = outcome.result
        if result is None:
            self.journal.close({"stop": outcome.stop, "saved": None, "candidates": []})
            resumes = "the same command with run.directory and run.unfinished=resume resumes it"
            newest = self.writer.newest
            kept = f"checkpoint: {newest}; {resumes}" if newest else "no checkpoint, for nothing new was trained"
            return [f"stopped: {outcome.stop} in round {outcome.plan.round + 1}", where, kept]
        shown = saved_candidate(result) or result["candidates"][0]
        lines = [f"ended: {outcome.stop}; {in_words(shown)}", where]
        if outcome.weights is not None:
            flat_model, objective = outcome.pool.flat_model, outcome.pool.objective
            model = save_model(self.directory, flat_model, outcome.weights, objective)
            lines += [f"model: {model}", *_next_commands(self.directory, model)]
        self.journal.close({"stop": outcome.stop, **result, **self._sample(outcome)})
        return lines

    def _sample(self, outcome: Outcome) -> dict[str, Any]:
        """What the saved model writes, where it writes quickly: for the result."""
        flat_model = outcome.pool.flat_model
        is_quick = flat_model.device.type == "cuda" or flat_model.num_parameters <= QUICK_PARAMETERS
        if outcome.weights is None or flat_model.shards.ranks or not (is_quick and self.pool.settings.run.report):
            return {}
        first = self.pool.splits.validation.batch(np.array(in_order(self.pool.splits.validation.num_sequences)[:1]))
        with flat_model.borrowed(outcome.weights) as module:
            written = outcome.pool.objective.sample(module, first.to(flat_model.device))
        return {"sample": written} if written else {}

    def _write_report(self) -> None:
        """On rank 0, write the page of the run that has ended, and say where it is."""
        runtime = self.pool.runtime
        if runtime.rank == 0 and self.pool.settings.run.report:
            runtime.heartbeat.enter("writing the report")
            line = write_report(self.directory)
            log.info("%s", line)
            show(line)


def _set_up_pool(
    runtime: Runtime,
    settings: Settings,
    parts: Parts,
    resume_point: ResumePoint | None,
    links: Sequence[Link],
    task: Task | None,
) -> tuple[LocalPool, PlanInputs]:
    """This rank's share of the pool, as it begins or as the checkpoint has it."""
    runtime.heartbeat.enter("reading the corpus")
    state = resume_point and resume_point.state
    layout, splits, objective, trajectory = prepare(settings, runtime, parts, state, task)
    if settings.budget_amount.unit == "epochs":
        epochs, settings = settings.budget, with_known_budget(settings, splits)
        if runtime.rank == 0:
            print_note(f"budget={epochs} of {splits.source}: {settings.budget_amount.number:,} tokens")
    runtime.heartbeat.enter("setting up the pool")
    plans: Sequence[RoundPlan] = ()
    with runtime.control.agreed():
        set_up_arithmetic(settings, runtime.device)
        if runtime.rank == 0:
            plans = examine_plans(settings, splits, layout, runtime.nodes, state.plan.round if state else 0)
    module = build_module(objective, settings, runtime)
    pool = set_up_pool(settings, runtime, splits, objective, module, layout, resume_point)
    inputs = find_plan_inputs(pool, layout, trajectory, links, plans)
    if resume_point:
        restore_pool(pool, resume_point)
    return pool, inputs


def _next_commands(directory: Path, model: Path) -> list[str]:
    """What to do with a model of transformers that a run has left, where the tools are, as in a checkout; own models
    have tools of their own."""
    python, tools = to_type(Path(sys.executable)), Path(adloco_dist.__file__).parents[2] / "launch"
    writes = (model / "tokenizer_config.json").is_file()
    wanted = {"evaluate.py": "", **({"generate.py": ' "how a text begins"'} if writes else {})}
    if not (model / "config.json").is_file() or not all((tools / name).is_file() for name in wanted):
        return []
    return [f"next: {python} {to_type(tools / name)} {directory}{rest}" for name, rest in wanted.items()]


def report_line(runtime: Runtime) -> Callable[[str], None]:
    """What shows the user a line before there is a display, on rank 0; the others log it."""
    return print_note if runtime.rank == 0 else log.info
