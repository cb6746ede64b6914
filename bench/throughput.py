"""Training throughput on a GPU: tokens per second and model FLOPs utilisation (MFU) of the inner phase in bf16.

Random ids; batches per update and instance as --sizes names them, and with --b-max the largest that fits into one pass,
which the package finds by trying. 1, 2 or 4 instances of one trainer share the device (--ways): in turn on one lane, or
at once on lanes (streams) of their own. All ways of one batch size alternate within a run, with model.compile true and
false (--compiling) on the same weights, moments and gradients; "-" where memory does not allow it. Every size is
compiled afresh for its own shape, as the first batch of a run is (what torch compiles for a second size is for any
size); that takes most of the time, so results are printed, and written to --json, after every size. A repetition is an
inner phase of a few updates: data from the store to the device, passes, clipping, fused AdamW. Starting it and waiting
for its end are counted, compiling and warming up are not.

MFU = tokens per second x FLOPs per token / bf16 matrix rate
FLOPs per token = 6 x weights of all matrices that are multiplied (output layer included; input embeddings only look up)
                + 12 x layers x hidden size x sequence length / 2
The second line is attention, forward and backward like the first; 1/2 is for causality: on average, a token attends to
half of the sequence. The matrix rate is torch.matmul's of square bf16 matrices, measured before and after all else.

Without a GPU nothing is measured. --device cpu tries the code out on a CPU: figures without a meaning.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from adloco_dist.cluster.environment import survey
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Concurrency, Device, Settings, SettingsError
from adloco_dist.data.corpora import TextSplits
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.objective.protocol import Objective
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.pool.capacity import free_device_memory, is_out_of_memory, probe_capacity
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.pool.slot import ComputeSlot
from adloco_dist.round.inner import InnerPhase
from adloco_dist.setup.concurrency import find_slots
from adloco_dist.setup.placement import set_up_pool
from common import interleave, median_ratio, parse, report, save, spread
from flops import MATRIX_SIZE, Work, matrix_rates
from helpers.lone import lone_rank

LEAST_UPDATES = 2
"""Of every instance in a repetition, however large the batch."""


class Way(NamedTuple):
    """How instances share the device."""

    instances: int
    concurrent: bool = False

    @property
    def key(self) -> str:
        return "1" if self.instances == 1 else f"{self.instances}_{'at_once' if self.concurrent else 'in_turn'}"


WAYS = {way.key: way for way in (Way(1), Way(2), Way(2, True), Way(4), Way(4, True))}


class Case(NamedTuple):
    """What is measured."""

    way: Way
    batch: int
    """Sequences per update of each instance."""
    is_compiled: bool


Speeds = dict[Case, list[float]]
"""Tokens per second of all instances together, of every repetition; none where memory does not allow it."""


@dataclass(frozen=True)
class Instances:
    """A rank that hosts the instances of one trainer."""

    settings: Settings
    pool: LocalPool
    slots: dict[Way, list[ComputeSlot]]
    """With compiled losses; without a way that the device does not allow."""
    eager: Objective
    """The same objective, with nothing compiled."""
    b_max: dict[Way, int]
    """Sequences of each instance that fit in one pass; 0 or less: not even one."""


class Side:
    """One case, a repetition a call; does nothing any more once it has run out of memory."""

    def __init__(self, instances: Instances, case: Case, sequences: int) -> None:
        way, batch = case.way, case.batch
        self.is_too_large = batch > instances.b_max.get(way, 0)
        if self.is_too_large:
            return
        settings = replace(instances.settings, batching=replace(instances.settings.batching, local_batch=batch))
        inputs = PlanInputs(experiment_layout(settings, [0]), is_concurrent=way.concurrent)
        updates = max(LEAST_UPDATES, sequences // (batch * way.instances))
        plan = replace(plan_round(settings, inputs, None, PoolReport()), updates=updates)
        assert plan.batches[0].local_batch == batch
        self.tokens = updates * batch * way.instances * settings.data.sequence_length
        self.pool, slots = instances.pool, instances.slots[way]
        self.slots = slots if case.is_compiled else [replace(slot, objective=instances.eager) for slot in slots]
        self.phase = InnerPhase(plan, settings)

    def __call__(self) -> None:
        if self.is_too_large:
            return
        for slot in self.slots:
            slot.flat_model.capacity = None  # one pass, whatever another side ran out of
        try:
            results = self.phase.run(list(self.pool.trainers.values()), self.slots, self.pool.offload)
            self.is_too_large = any(result.notes for result in results.values())  # it went on in smaller passes
        except RuntimeError as error:
            self.is_too_large = is_out_of_memory(error)
            if not self.is_too_large:
                raise
        if self.is_too_large:
            free_device_memory()


def new_instances(
    settings: Settings,
    runtime: Runtime,
    splits: TextSplits,
    objective: Objective,
    module: nn.Module,
    count: int,
    maximum: int,
) -> Instances:
    """Fresh instances, and what fits beside them.

    Raises:
        SettingsError: they do not fit on the device.
    """
    pool_settings = replace(settings.pool, workers_per_trainer=count)
    settings = replace(settings, pool=pool_settings, batching=replace(settings.batching, max_batch=maximum * count))
    layout = experiment_layout(settings, runtime.nodes)
    pool = set_up_pool(settings, runtime, splits, objective, copy.deepcopy(module), layout)
    trainers, b_max, slots = list(pool.trainers.values()), {}, {Way(count): pool.slots}
    if count > 1:
        concurrency = Concurrency.streams if runtime.device.type == "cuda" else Concurrency.threads
        concurrent = replace(settings, instances=replace(settings.instances, concurrency=concurrency))
        try:
            slots[Way(count, True)], _ = find_slots(replace(pool, settings=concurrent), layout)
        except SettingsError as error:
            print(error)
    for way, of_way in slots.items():  # the probe of turns, too, leaves room for the gradients of all lanes
        capacity = probe_capacity(of_way, trainers, settings, maximum, sharers=1)
        b_max[way] = maximum if capacity is None else capacity
    eager = LanguageObjective.fitted(settings, splits.vocabulary)
    return Instances(settings, pool, slots, eager, b_max)


def measure(instances: Instances, ways: Sequence[Way], batch: int, compiling: Sequence[bool], is_quick: bool) -> Speeds:
    """All ways of one size in turn, eager or compiled or both."""
    torch.compiler.reset()
    cases = [Case(way, batch, is_compiled) for way in ways for is_compiled in compiling]
    sides = [Side(instances, case, sequences=16 if is_quick else 64) for case in cases]
    seconds = interleave(sides, rounds=5 if is_quick else 10)
    return {
        case: [] if side.is_too_large else [side.tokens / one for one in taken]
        for case, side, taken in zip(cases, sides, seconds, strict=True)
    }


def measure_all(
    work: Work, runtime: Runtime, ways: Sequence[Way], sizes: Sequence[int], with_b_max: bool,
    compiling: Sequence[bool], is_quick: bool, report_line: Callable[[Speeds, dict[Way, int]], None],
) -> None:  # fmt: skip
    """One pool after the other, one for each number of instances.

    Args:
        with_b_max: also the largest batch that fits, of each number of instances in turn.
        report_line: takes the speeds of every size as soon as they are there, and the b_max of every way so far.
    """
    b_max = dict[Way, int]()
    for count in dict.fromkeys(way.instances for way in ways):
        of_pool = [way for way in ways if way.instances == count]
        try:
            instances = new_instances(
                work.settings, runtime, work.splits, work.objective, work.module, count, work.maximum
            )
        except SettingsError as error:
            print(error)
            cases = [Case(way, batch, is_compiled) for way in of_pool for batch in sizes for is_compiled in compiling]
            report_line({case: [] for case in cases}, b_max)
        else:
            b_max |= {way: maximum for way, maximum in instances.b_max.items() if way in of_pool}
            for batch in sorted({*sizes, instances.b_max[Way(count)]} if with_b_max else sizes):
                report_line(measure(instances, of_pool, batch, compiling, is_quick), b_max)
            del instances
        torch.compiler.reset()  # lets go of the modules
        free_device_memory()


def tabulate(speeds: Speeds, flops_per_token: int, matrix_rate: float) -> tuple[list[list[str]], dict[str, float]]:
    """The table's rows; of every way its best MFU, and what compiling gains at the largest size."""
    rows, figures = [], dict[str, float]()
    for case, taken in speeds.items():
        compiling = "compiled" if case.is_compiled else "eager"
        row = [f"{case.way.key.replace('_', ' ')}, {compiling}", str(case.batch)]
        if not taken:
            rows.append([*row, *"-----"])
            continue
        mfu, best = statistics.median(taken) * flops_per_token / matrix_rate, f"mfu_{case.way.key}_{compiling}"
        figures[best] = max(mfu, figures.get(best, 0.0))
        row += [*spread(taken), f"{100 * mfu:.1f}", ""]
        if case.is_compiled and (eager := speeds.get(case._replace(is_compiled=False))):
            gain = figures[f"compiled_over_eager_{case.way.key}"] = median_ratio(taken, eager)
            row[-1] = f"{gain:.3f}"
        rows.append(row)
    return rows, figures


def main() -> None:
    parser = parse("Tokens per second and model FLOPs utilisation of the inner phase in bf16, on a GPU.")
    parser.add_argument("--model", default="microllama", help="a model group of conf/ (%(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence (%(default)s)")
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 16, 64], help="batches per update (4 16 64)")
    parser.add_argument("--b-max", action="store_true", help="also the largest batch that fits into one pass")
    parser.add_argument("--most", type=int, default=128, help="largest b_max that is looked for (%(default)s)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["1"], help="instances on the device (1)")
    parser.add_argument("--compiling", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only try the code out")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return
    work = Work.of(options.model, options.length, options.most)
    speeds, figures = Speeds(), dict[str, float]()
    title = (
        f"inner phase of {options.model}, bf16, sequences of {options.length}, instances together: tokens per second"
    )
    columns = ["instances", "batch of each", "min", "median", "max", "MFU, %", "over eager"]
    with lone_rank(Device[options.device]) as runtime:
        (here,) = survey(runtime, Path())
        rates = matrix_rates(runtime.device)

        def report_line(of_size: Speeds, b_max: dict[Way, int]) -> None:
            speeds.update(of_size)
            rows, found = tabulate(of_size, work.flops_per_token, statistics.median(rates))
            best = {name: max(value, figures.get(name, value)) for name, value in found.items()}
            figures.update(best, **{f"b_max_{way.key}": float(count) for way, count in b_max.items()})
            for row in rows:
                print(", ".join(f"{name} {value}" for name, value in zip(columns, row, strict=True)), flush=True)
            if options.json:
                save(figures, options.json)

        ways = [WAYS[key] for key in options.ways]
        compiling = [name == "compiled" for name in options.compiling]
        measure_all(work, runtime, ways, options.sizes, options.b_max, compiling, options.quick, report_line)
        rates += matrix_rates(runtime.device)
    rows, found = tabulate(speeds, work.flops_per_token, statistics.median(rates))
    slowest, rate, fastest = spread(rates, unit=1e12)
    build = f"driver {here.driver}, CUDA {torch.version.cuda}"
    print(f"{here.device}, {'no figure means anything' if options.device == 'cpu' else build}")
    size = MATRIX_SIZE[options.device]
    print(f"bf16 matrix rate: {rate} TFLOP/s ({slowest} to {fastest}), torch.matmul of {size} x {size}")
    print(
        f"FLOPs per token: {work.flops_in_words} = {work.flops_per_token:,}; "
        "MFU = tokens per second x FLOPs per token / matrix rate"
    )
    whole = {"flops_per_token": work.flops_per_token, "matrix_tflops": statistics.median(rates) / 1e12}
    report(title, columns, rows, {**figures, **whole, **found}, options.json)


if __name__ == "__main__":
    main()
