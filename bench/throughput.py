"""Training throughput on a GPU: tokens per second and model FLOPs utilisation (MFU) of the inner phase in bf16.

Random ids; batches of 1, 2, 4, ... sequences per update and instance, up to the b_max that the package finds by trying
(or --most). 1, 2 and 4 instances of one trainer share the device: in turn on one lane, or at once on lanes (streams) of
their own. All ways of one batch size alternate within a run, with model.compile true and false on the same weights,
moments and gradients; "-" where memory does not allow it. Every size is compiled afresh for its own shape, as the first
batch of a run is (what torch compiles for a second size is for any size). A repetition is an inner phase of a few
updates: data from the store to the device, passes, clipping, fused AdamW. Starting it and waiting for its end are
counted, compiling and warming up are not.

MFU = tokens per second x FLOPs per token / bf16 matrix rate
FLOPs per token = 6 x weights of all matrices that are multiplied (output layer included; input embeddings only look up)
                + 12 x layers x hidden size x sequence length / 2
The second line is attention, forward and backward like the first; 1/2 is for causality: on average, a token attends to
half of the sequence. The matrix rate is torch.matmul's of square bf16 matrices, measured before and after all else.

Without a GPU nothing is measured. --device cpu tries the code out on a CPU: figures without a meaning.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common import interleave, median_ratio, parse, report, spread
from torch import nn

from adloco_dist.cluster.environment import survey
from adloco_dist.cluster.runtime import Place, Runtime, join_store, started
from adloco_dist.cluster.signals import StopRequest
from adloco_dist.config import ClusterSettings, Concurrency, Device, Settings, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import Splits
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import TokenStore
from adloco_dist.decisions.layout import experiment_layout
from adloco_dist.decisions.plan import PoolReport, Premises
from adloco_dist.decisions.planning import plan_round
from adloco_dist.hosting import Rank, host
from adloco_dist.models import build_model, model_config
from adloco_dist.pool.capacity import free_device_memory, is_out_of_memory
from adloco_dist.pool.lane import Lane
from adloco_dist.round.concurrency import find_lanes
from adloco_dist.round.inner import InnerPhase
from adloco_dist.round.phases import wait_for
from adloco_dist.round.probe import probe_capacity

VOCABULARY = 32_000
LEAST_UPDATES = 2
"""Of every instance in a repetition, however large the batch."""
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
MATRIX_REPETITIONS = 30
MATRIX_WARMUP_SECONDS = 1.0


class Way(NamedTuple):
    """How instances share the device."""

    instances: int
    at_once: bool = False

    @property
    def key(self) -> str:
        return "1" if self.instances == 1 else f"{self.instances}_{'at_once' if self.at_once else 'in_turn'}"


WAYS = {1: [Way(1)], 2: [Way(2), Way(2, True)], 4: [Way(4), Way(4, True)]}


class Case(NamedTuple):
    """What is measured."""

    way: Way
    batch: int
    """Sequences per update of each instance."""
    is_compiled: bool


Speeds = dict[Case, list[float]]
"""Tokens per second of all instances together, of every repetition; none where memory does not allow it."""


@dataclass(frozen=True)
class Pool:
    """A rank that hosts the instances of one trainer."""

    settings: Settings
    rank: Rank
    lanes: dict[Way, list[Lane]]
    """Compiled ones; without a way that the device does not allow."""
    b_max: dict[Way, int]
    """Sequences of each instance that fit in one pass; 0 or less: not even one."""


class Side:
    """One case, a repetition a call; does nothing any more once it has run out of memory."""

    def __init__(self, pool: Pool, case: Case, sequences: int) -> None:
        way, batch = case.way, case.batch
        self.is_too_large = batch > pool.b_max.get(way, 0)
        if self.is_too_large:
            return
        settings = replace(pool.settings, batching=replace(pool.settings.batching, local_batch=batch))
        premises = Premises(experiment_layout(settings, [0]), is_concurrent=way.at_once)
        updates = max(LEAST_UPDATES, sequences // (batch * way.instances))
        plan = replace(plan_round(settings, premises, None, PoolReport()), updates=updates)
        assert plan.batches[0].local_batch == batch
        self.tokens = updates * batch * way.instances * settings.data.sequence_length
        self.rank, lanes = pool.rank, pool.lanes[way]
        self.lanes = lanes if case.is_compiled else [replace(lane, module=lane.flat_model.module) for lane in lanes]
        self.phase = InnerPhase(plan, settings, pool.rank.splits.train)

    def __call__(self) -> None:
        if self.is_too_large:
            return
        for lane in self.lanes:
            lane.flat_model.capacity = None  # one pass, whatever another side ran out of
        try:
            results = self.phase.run(list(self.rank.trainers.values()), self.lanes, self.rank.residence)
            self.is_too_large = any(result.notes for result in results.values())  # it went on in smaller passes
        except RuntimeError as error:
            self.is_too_large = is_out_of_memory(error)
            if not self.is_too_large:
                raise
        if self.is_too_large:
            free_device_memory()


def new_pool(
    settings: Settings, runtime: Runtime, splits: Splits, module: nn.Module, instances: int, most: int
) -> Pool:
    """Fresh instances, and what fits beside them.

    Raises:
        SettingsError: they do not fit on the device.
    """
    pool = replace(settings.pool, workers_per_trainer=instances)
    settings = replace(settings, pool=pool, batching=replace(settings.batching, largest_batch=most * instances))
    layout = experiment_layout(settings, runtime.nodes)
    rank = host(settings, runtime, splits, copy.deepcopy(module), layout)
    trainers, b_max, lanes = list(rank.trainers.values()), {}, {Way(instances): rank.lanes}
    if instances > 1:
        concurrency = Concurrency.streams if runtime.device.type == "cuda" else Concurrency.threads
        at_once = replace(settings, instances=replace(settings.instances, concurrency=concurrency))
        first, resident, store = rank.lanes[0], rank.residence, splits.train
        try:
            lanes[Way(instances, True)], _ = find_lanes(first, resident, trainers, layout, store, at_once, runtime)
        except SettingsError as error:
            print(error)
    for way, of_way in lanes.items():  # the probe of turns, too, leaves room for the gradients of all lanes
        capacity = probe_capacity(of_way, trainers, settings, most, sharers=1)
        b_max[way] = most if capacity is None else capacity
    return Pool(settings, rank, lanes, b_max)


def measure(pool: Pool, ways: Sequence[Way], sizes: Sequence[int], is_quick: bool) -> Speeds:
    """All ways of each size in turn, eager and compiled."""
    speeds: Speeds = {}
    for batch in sizes:
        torch.compiler.reset()
        cases = [Case(way, batch, is_compiled) for way in ways for is_compiled in (False, True)]
        sides = [Side(pool, case, sequences=16 if is_quick else 64) for case in cases]
        seconds = interleave(sides, rounds=5 if is_quick else 10)
        for case, side, taken in zip(cases, sides, seconds, strict=True):
            speeds[case] = [] if side.is_too_large else [side.tokens / one for one in taken]
    return speeds


def measure_all(
    settings: Settings, runtime: Runtime, splits: Splits, module: nn.Module, most: int, is_quick: bool
) -> tuple[Speeds, dict[Way, int]]:
    """Of 1, 2 and 4 instances, one pool after the other; b_max of every way."""
    speeds, b_max = Speeds(), dict[Way, int]()
    sizes = [1, 8] if is_quick else [1 << power for power in range(most.bit_length())]
    for instances, ways in WAYS.items():
        try:
            pool = new_pool(settings, runtime, splits, module, instances, most)
        except SettingsError as error:
            print(error)
            speeds |= {Case(way, batch, compiled): [] for way in ways for batch in sizes for compiled in (False, True)}
        else:
            b_max |= pool.b_max
            sizes = [size for size in sizes if size <= b_max[Way(1)]]
            speeds |= measure(pool, ways, sizes, is_quick)
            del pool
        torch.compiler.reset()  # lets go of the modules
        free_device_memory()
    return speeds, b_max


def matrix_rates(device: torch.device) -> list[float]:
    """FLOP/s of single multiplications of two square bf16 matrices, once the device is warm."""
    size = MATRIX_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    until = time.perf_counter() + MATRIX_WARMUP_SECONDS
    while time.perf_counter() < until:
        torch.matmul(left, right)
        wait_for(device)
    rates = []
    for _ in range(MATRIX_REPETITIONS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.matmul(left, right)
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            begin = time.perf_counter()
            torch.matmul(left, right)
            seconds = time.perf_counter() - begin
        rates.append(2 * size**3 / seconds)
    return rates


def multiplied_weights(module: nn.Module) -> int:
    """Elements of all matrices but those of embeddings; an output layer counts though it is tied to one."""
    layers = [layer for layer in module.modules() if not isinstance(layer, nn.Embedding)]
    return sum(weight.numel() for layer in layers for weight in layer.parameters(recurse=False) if weight.ndim > 1)


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
        if case.is_compiled and (eager := speeds[case._replace(is_compiled=False)]):
            gain = figures[f"compiled_over_eager_{case.way.key}"] = median_ratio(taken, eager)
            row[-1] = f"{gain:.3f}"
        rows.append(row)
    return rows, figures


def main() -> None:
    parser = parse("Tokens per second and model FLOPs utilisation of the inner phase in bf16, on a GPU.")
    parser.add_argument("--model", default="microllama", help="a model group of conf/ (%(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence (%(default)s)")
    parser.add_argument("--most", type=int, default=128, help="largest batch that is tried (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only try the code out")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return
    length, most = options.length, options.most
    settings = compose(
        [f"model={options.model}", "model.compile=true", "precision=bf16", f"data.sequence_length={length}",
         "pool.trainers=1", "merge=none", "batching.request=none", "inner.schedule=constant"]
    )  # fmt: skip
    num_tokens = max(WAYS) * most * length + 1
    store = TokenStore([np.random.default_rng(0).integers(0, VOCABULARY, num_tokens, dtype=np.uint16)], length)
    splits = Splits(store, store, Vocabulary(VOCABULARY), "random ids", digest="")
    config = model_config(settings.model, splits.vocabulary, length)
    module = build_model(settings.model, config, settings.seed)
    with tempfile.TemporaryDirectory() as directory:
        place = Place(0, 1, 0, 1, 0, init_method=f"file://{Path(directory) / 'rendezvous'}")
        cluster = ClusterSettings(device=Device[options.device])
        with started(cluster, place, join_store(place), StopRequest()) as runtime:
            (here,) = survey(runtime, Path())
            rates = matrix_rates(runtime.device)
            speeds, b_max = measure_all(settings, runtime, splits, module, most, options.quick)
            rates += matrix_rates(runtime.device)
    weights, layers, hidden = multiplied_weights(module), config.num_hidden_layers, config.hidden_size
    flops_per_token = 6 * weights + 12 * layers * hidden * length // 2
    limits = {f"b_max_{way.key}": float(count) for way, count in b_max.items()}
    rows, figures = tabulate(speeds, flops_per_token, statistics.median(rates))
    slowest, rate, fastest = spread(rates, unit=1e12)
    build = f"driver {here.driver}, CUDA {torch.version.cuda}"
    print(f"{here.device}, {'no figure means anything' if options.device == 'cpu' else build}")
    size = MATRIX_SIZE[options.device]
    print(f"bf16 matrix rate: {rate} TFLOP/s ({slowest} to {fastest}), torch.matmul of {size} x {size}")
    print(
        f"FLOPs per token: 6 x {weights:,} multiplied weights + 12 x {layers} layers x {hidden} x {length} / 2 "
        f"(causal attention) = {flops_per_token:,}; MFU = tokens per second x FLOPs per token / matrix rate"
    )
    report(
        f"inner phase of {options.model}, bf16, sequences of {length}, instances together: tokens per second",
        ["instances", "batch of each", "min", "median", "max", "MFU, %", "over eager"],
        rows,
        {**limits, "flops_per_token": flops_per_token, "matrix_tflops": statistics.median(rates) / 1e12, **figures},
        options.json,
    )


if __name__ == "__main__":
    main()
