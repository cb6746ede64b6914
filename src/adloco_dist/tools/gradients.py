"""The full gradient of a run's model, and how far the gradients of single batches are from it.

G is the mean gradient over N sequences, in which every target weighs the same. Batch j of B sequences has the mean
gradient g_j over its own targets; s_j is the number of them over the targets per sequence (B without padding). Ranks
share the sequences, then the batches. A rank keeps G beside the model's weights and gradient, and of a batch numbers.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from adloco_dist.averaging.group import Group
from adloco_dist.cluster.control import ControlPlane
from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings, SettingsError, require
from adloco_dist.data.indexed import permutation
from adloco_dist.data.tokens import TextTable
from adloco_dist.messages import Json
from adloco_dist.noise.statistics import ratio
from adloco_dist.objective.protocol import Objective
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import accumulate_gradient, mean_gradient
from adloco_dist.round.evaluate import BATCH
from adloco_dist.run.directory import check_place
from adloco_dist.text import first_difference
from adloco_dist.tools.finished import open_finished
from adloco_dist.tools.gradient_plot import show

MAX_SEQUENCES = 1024
"""Maximum number of sequences that are looked at unless the user says otherwise."""
NUM_VECTORS = 3
"""Flat vectors that a rank holds: weights, gradient and G."""
BATCH_SIZES = (1, 4, 16, 64)
MIN_BATCHES = 8
"""Minimum number of batches for a standard error: a few that hold all sequences deviate almost equally, two exactly."""
PIECE_ELEMENTS = 1 << 20
"""Inner products are summed over pieces of so many elements: a long sum in fp32 would lose what is small in it."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AnalysisOptions:
    """What is asked; None: the default."""

    run: Path
    sequences: int | None = None
    """N: number of sequences, spread evenly over the split."""
    batches: tuple[int, ...] | None = None
    """Sizes B of the batches."""
    split: str | None = None
    """Name of the split, train or validation; None: the one to train on, unless that is a stream."""
    output: Path | None = None
    micro_batch_size: int | None = None


@dataclass(frozen=True)
class Subject:
    """What is analysed."""

    settings: Settings
    flat_model: FlatModel
    """The model at the weights, and in the mode (eval or train), that are analysed; its gradient is overwritten."""
    objective: Objective
    split: str
    table: TextTable
    """All sequences of the split."""
    ids: npt.NDArray[np.int64]
    """(N,) ids of the sequences that are looked at."""
    micro_batch_size: int


@dataclass(frozen=True)
class FullGradient:
    """The gradient of the mean loss over all sequences; the same on all ranks."""

    vector: torch.Tensor
    """(num_elements,) G."""
    squared_norm: float
    loss: float
    """Mean loss in nats per target."""
    targets: int


def analyze_run(runtime: Runtime, options: AnalysisOptions) -> None:
    """Analyse a run's model; rank 0 prints a table, and writes gradients.json and gradients.png. Collective.

    Dropout is off, so that the gradients are those of one function: masks are noise that depends on no sequence.

    Raises:
        SettingsError: on all ranks, and nothing is written: no such run, no model, another corpus than the run's,
            numbers that do not fit it, no place for the files, or a gradient with which nothing can be compared.
    """
    output = options.output or options.run / "gradients"
    with runtime.control.agreed():
        subject = _load(options, runtime.device, runtime.nodes.count(runtime.nodes[runtime.rank]))
        if runtime.rank == 0:
            check_place("--output", output)
    subject.flat_model.module.eval()
    # Integers, whose sum does not depend on its order; alignment makes the weights whole 64-bit words.
    bits = int(subject.flat_model.initial_weights().view(torch.int64).sum())
    asked = {"--sequences": options.sequences, "--batches": options.batches, "--split": options.split}
    if difference := first_difference(runtime.control.exchange({**asked, "the model": bits})):
        raise SettingsError(f"{difference}; start every node with the same command and run")
    settings = subject.settings
    group = Groups(runtime.backend, settings.cluster.timeout_seconds).of(tuple(range(runtime.world_size)))
    full = full_gradient(subject, runtime.control, group)
    if not (math.isfinite(full.squared_norm) and full.squared_norm > 0):
        what = f"the squared norm of its model's gradient over the {subject.split} split is {full.squared_norm}"
        raise SettingsError.of("RUN", options.run, f"{what}, with which nothing can be compared")
    sizes = options.batches or [size for size in BATCH_SIZES if size <= len(subject.ids)]
    batches = [summary(subject, full, size, runtime.control) for size in sizes]
    result = {
        "run": str(options.run),
        "split": subject.split,
        "split_sequences": subject.table.num_sequences,
        "sequences": len(subject.ids),
        "targets": full.targets,
        "num_parameters": subject.flat_model.num_parameters,
        "precision": settings.precision.name,
        "eta": settings.batching.eta,
        "loss": full.loss,
        "norm": math.sqrt(full.squared_norm),
        "batches": batches,
    }
    if runtime.rank == 0:
        show(result, output)


def _load(options: AnalysisOptions, device: torch.device, sharers: int) -> Subject:
    """Load what is analysed on one of `sharers` ranks of this node, and refuse whatever it alone can refuse."""
    for name, value in (("--sequences", options.sequences), ("--pass", options.micro_batch_size)):
        require(value is None or value >= 1, name, value, "must be >= 1")
    run = open_finished(options.run, device, NUM_VECTORS, sharers)
    settings, splits = run.settings, run.splits
    rule = f"{splits.source} cannot be read in any order; leave it out for the validation split"
    require(options.split != "train" or splits.table is not None, "--split", options.split, rule)
    split, table = "validation", splits.validation
    if splits.table is not None and options.split != "validation":
        split, table = "train", splits.table
    count = options.sequences or min(table.num_sequences, MAX_SEQUENCES)
    require(count <= table.num_sequences, "--sequences", count, f"the {split} split has {table.num_sequences}")
    largest = max(options.batches or (1,))
    require(largest <= count, "--batches", largest, f"{count} sequences are looked at; take more (--sequences)")
    ids = np.arange(count) * table.num_sequences // count  # spread evenly
    return Subject(settings, run.flat_model, run.objective, split, table, ids, options.micro_batch_size or BATCH)


def full_gradient(subject: Subject, control: ControlPlane, group: Group | None) -> FullGradient:
    """G, of whose sequences every rank takes each world_size-th; one all-reduce in the group of all. Collective."""
    flat_model = subject.flat_model
    vector = torch.zeros_like(flat_model.gradient)
    loss, targets = 0.0, 0
    rank_ids = subject.ids[control.rank :: control.world_size]
    for start in range(0, len(rank_ids), subject.micro_batch_size):
        batch = subject.table.batch(rank_ids[start : start + subject.micro_batch_size]).to(flat_model.device)
        done = accumulate_gradient(flat_model, subject.objective, batch, None)
        loss += float(done.loss_sum)
        vector.add_(flat_model.gradient, alpha=len(batch))  # the gradient of the loss sum over so many sequences
        targets += done.num_targets
    sums = control.exchange({"loss": loss, "targets": targets})
    loss, targets = sum(part["loss"] for part in sums), sum(part["targets"] for part in sums)
    if group is not None:
        group.all_reduce(vector)
    vector.div_(targets)
    return FullGradient(vector, float(inner_product(vector, vector)), loss / targets, targets)


def compare(subject: Subject, full: FullGradient, size: int, control: ControlPlane) -> Vector:
    """The gradients of J batches of `size` sequences against the full one: (4, J) numbers, equal on all ranks.

    A column has the batch's number of targets, |g_j|^2, <g_j, G> and |g_j - G|^2. Collective.

    The sequences are cut into consecutive batches of a random order, which the run's seed fixes; a rest that is smaller
    than a batch is left out. Every rank takes each world_size-th batch.
    """
    flat_model, num_sequences = subject.flat_model, len(subject.ids)
    gradient = flat_model.gradient
    order = subject.ids[permutation(num_sequences, subject.settings.seed)]
    num_batches = num_sequences // size
    rows = []
    for number in range(control.rank, num_batches, control.world_size):
        batch = subject.table.batch(order[number * size : (number + 1) * size]).to(flat_model.device)
        done = mean_gradient(flat_model, subject.objective, batch, subject.micro_batch_size)
        products = [inner_product(gradient, gradient), inner_product(gradient, full.vector)]
        gradient.sub_(full.vector)  # without a further vector
        products.append(inner_product(gradient, gradient))
        rows.append([done.num_targets, *torch.stack(products).tolist()])
    everything = np.empty((num_batches, 4))
    for rank, reply in enumerate(control.exchange({"rows": rows})):
        everything[rank :: control.world_size] = np.reshape(reply["rows"], (-1, 4))
    return everything.T


def inner_product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """<first, second> in fp64, a scalar on their device."""
    pairs = zip(first.split(PIECE_ELEMENTS), second.split(PIECE_ELEMENTS), strict=True)
    return torch.stack([piece @ its for piece, its in pairs]).double().sum()


def traces_of(size: int, relative_sizes: Vector, squared_deviations: Vector, num_sequences: int) -> Vector:
    """tr(Sigma) per sequence as every batch estimates it, (J,); their mean is the estimate.

    Args:
        size: B.
        relative_sizes: (J,) s_j.
        squared_deviations: (J,) |g_j - G|^2.
        num_sequences: N.

    Sigma is the covariance of the N sequences' own gradients (divisor N). Batches are drawn from them without
    replacement, so their means spread less than those of independent draws:

        E |g_B - G|^2 = tr(Sigma) / B * (N - B) / (N - 1)

    (Cochran, Sampling Techniques, 3rd edition, theorem 2.2), which is solved for tr(Sigma). At B = 1 every sequence is
    its own batch, and the mean is exact; of others it errs by their sampling. At B = N nothing can be estimated: NaN.

    With padding s_j (g_j - G) is the sum over the batch of s_i (g_i - G), whose own sum over all sequences is 0: what
    is measured is tr(Sigma) = 1/N sum s_i^2 |g_i - G|^2, by s_j^2 |g_j - G|^2 / B, and the formula holds as it stands.
    """
    if size == num_sequences:
        return np.full(len(squared_deviations), math.nan)
    return relative_sizes**2 * squared_deviations / size * ((num_sequences - 1) / (num_sequences - size))


def summary(subject: Subject, full: FullGradient, size: int, control: ControlPlane) -> Json:
    """What batches of `size` sequences come to, by the names of gradients.json; the same on all ranks. Collective.

    trace: tr(Sigma); trace_error: its standard error (0 at B = 1, NaN of few batches). noise_scale: tr(Sigma) / |G|^2,
    in sequences. request: the batch that the norm test asks for, tr(Sigma) / (eta^2 |G|^2) (docs/theory.md). A cosine
    with a gradient of 0 is 0.
    """
    targets, squared_norms, products, squared_deviations = compare(subject, full, size, control)
    norms, num_batches, num_sequences = np.sqrt(squared_norms), len(targets), len(subject.ids)
    traces = traces_of(size, targets * num_sequences / full.targets, squared_deviations, num_sequences)
    trace = float(traces.mean())
    error = float(traces.std(ddof=1)) / math.sqrt(num_batches) if num_batches >= MIN_BATCHES else math.nan
    values = {
        "norm": norms,
        "relative_deviation": np.sqrt(squared_deviations / full.squared_norm),
        "cosine": np.divide(products, norms * math.sqrt(full.squared_norm), out=np.zeros(num_batches), where=norms > 0),
    }
    return {
        "batch": size,
        "num_batches": num_batches,
        "trace": trace,
        "trace_error": 0.0 if size == 1 < num_sequences else error,
        "noise_scale": ratio(trace, full.squared_norm),
        "request": ratio(trace, subject.settings.batching.eta**2 * full.squared_norm),
        **{name: quartiles(of_batches) for name, of_batches in values.items()},
        "values": {name: of_batches.tolist() for name, of_batches in values.items()},
    }


def quartiles(values: Vector) -> dict[str, float]:
    """Mean, median, and the quartiles on both sides of it."""
    lower, median, upper = np.percentile(values, [25, 50, 75]).tolist()
    return {"mean": float(values.mean()), "lower_quartile": lower, "median": median, "upper_quartile": upper}
