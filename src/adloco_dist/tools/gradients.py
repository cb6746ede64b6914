"""The full gradient of a run's model, and how far the gradients of single batches are from it.

G is the mean gradient over N sequences, in which every target weighs the same. Batch j of B sequences has the mean
gradient g_j over its own targets; s_j is the number of them over the targets per sequence (B without padding). Ranks
share the sequences, then the batches. A rank keeps G beside the model's weights and gradient, and of a batch numbers.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.data.corpora import TextSplits
from adloco_dist.data.tokens import TextTable
from adloco_dist.noise.statistics import ratio
from adloco_dist.pool.arithmetic import set_up_arithmetic
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.run.rows import Record
from adloco_dist.text import first_difference
from adloco_dist.tools.deviation import BatchFigures, FullGradient, Subject, Vector, batch_figures, full_gradient
from adloco_dist.tools.finished import open_finished
from adloco_dist.tools.gradient_plot import check_place, histogram, quartiles, show

MAX_SEQUENCES = 1024
"""Maximum number of sequences that are looked at unless the user says otherwise."""
NUM_VECTORS = 3
"""Flat vectors that a rank holds: weights, gradient and G."""
BATCH_SIZES = (1, 4, 16, 64)
MIN_BATCHES = 8
"""Minimum number of batches for a standard error: few that hold all sequences deviate nearly alike (two, exactly)."""


@dataclass(frozen=True)
class AnalysisOptions:
    """What is asked; None: the default."""

    run: Path
    sequences: int | None = None
    """N: number of sequences, spread evenly over the split."""
    batches: tuple[int, ...] | None = None
    """Sizes B of the batches."""
    split: str | None = None
    """Name of the split: train or validation."""
    output: Path | None = None
    micro_batch_size: int | None = None


def analyze_run(runtime: Runtime, options: AnalysisOptions) -> None:
    """Analyse a run's model; rank 0 prints a table, and writes gradients.json and gradients.png. Collective.

    Dropout is off, so that the gradients are those of one function: masks are noise that depends on no sequence.

    Raises:
        SettingsError: on all ranks, and nothing is written: no such run, no model, another corpus than the run's,
            numbers that do not fit it, no place for the files, or a gradient with which nothing can be compared.
    """
    output = options.output or options.run / "gradients"
    subject: Subject | None = None
    error: SettingsError | None = None
    try:
        subject = _load(options, runtime.device, runtime.nodes.count(runtime.nodes[runtime.rank]))
        if runtime.rank == 0:
            check_place(output)
    except SettingsError as mistake:
        error = mistake
    runtime.control.agree(error)
    assert subject is not None
    subject.flat_model.module.eval()
    # Integers, whose sum does not depend on its order; alignment makes the weights whole 64-bit words.
    bits = int(subject.flat_model.initial_weights().view(torch.int64).sum())
    asked = {"--sequences": options.sequences, "--batches": options.batches, "--split": options.split}
    if difference := first_difference(runtime.control.exchange({**asked, "the model": bits})):
        raise SettingsError(f"{difference}; start every node with the same command and run")
    result = _analyze(runtime, subject, options)
    if runtime.rank == 0:
        show(result, output)


def _analyze(runtime: Runtime, subject: Subject, options: AnalysisOptions) -> Record:
    """All that is found out, as gradients.json has it."""
    settings, num_sequences = subject.settings, len(subject.ids)
    group = Groups(runtime.backend, settings.cluster.outer_seconds).of(tuple(range(runtime.world_size)))
    full = full_gradient(subject, runtime.control, group)
    if not (math.isfinite(full.squared_norm) and full.squared_norm > 0):
        detail = f"the squared norm of its model's gradient over the {subject.split} split is {full.squared_norm}"
        raise SettingsError(f"RUN={options.run}: {detail}, with which nothing can be compared")
    summaries = []
    for size in options.batches or [size for size in BATCH_SIZES if size <= num_sequences]:
        figures = batch_figures(subject, full, size, runtime.control)
        summaries.append(summary(figures, full, num_sequences, settings.batching.eta))
    return {
        "run": str(options.run),
        "split": subject.split,
        "split_sequences": subject.table.num_sequences,
        "sequences": num_sequences,
        "targets": full.targets,
        "num_parameters": subject.flat_model.num_parameters,
        "precision": settings.precision.name,
        "eta": settings.batching.eta,
        "loss": full.loss,
        "norm": math.sqrt(full.squared_norm),
        "batches": summaries,
    }


def traces_of(figures: BatchFigures, num_sequences: int) -> Vector:
    """tr(Sigma) per sequence as every batch estimates it, (J,); their mean is the estimate.

    Sigma is the covariance of the N sequences' own gradients (divisor N). Batches are drawn from them without
    replacement, so their means spread less than those of independent draws:

        E |g_B - G|^2 = tr(Sigma) / B * (N - B) / (N - 1)

    (Cochran, Sampling Techniques, 3rd edition, theorem 2.2), which is solved for tr(Sigma). At B = 1 every sequence is
    its own batch, and the mean is exact; of others it errs by their sampling. At B = N nothing can be estimated: NaN.

    With padding s_j (g_j - G) is the sum over the batch of s_i (g_i - G), whose own sum over all sequences is 0: what
    is measured is tr(Sigma) = 1/N sum s_i^2 |g_i - G|^2, by s_j^2 |g_j - G|^2 / B, and the formula holds as it stands.
    """
    if figures.size == num_sequences:
        return np.full(len(figures.norms), math.nan)
    correction = (num_sequences - 1) / (num_sequences - figures.size)
    return figures.relative_sizes**2 * figures.squared_deviations / figures.size * correction


def summary(figures: BatchFigures, full: FullGradient, num_sequences: int, eta: float) -> Record:
    """What the batches of one size come to.

    trace: tr(Sigma); trace_error: its standard error (0 at B = 1, NaN of few batches). noise_scale: tr(Sigma) / |G|^2,
    in sequences. request: the batch that the norm test asks for, tr(Sigma) / (eta^2 |G|^2) (docs/theory.md).
    """
    traces = traces_of(figures, num_sequences)
    trace, num_batches = float(traces.mean()), len(traces)
    error = float(traces.std(ddof=1)) / math.sqrt(num_batches) if num_batches >= MIN_BATCHES else math.nan
    deviations = np.sqrt(figures.squared_deviations / full.squared_norm)
    values = {"norm": figures.norms, "relative_deviation": deviations, "cosine": figures.cosines}
    return {
        "batch": figures.size,
        "num_batches": num_batches,
        "trace": trace,
        "trace_error": 0.0 if figures.size == 1 < num_sequences else error,
        "noise_scale": ratio(trace, full.squared_norm),
        "request": ratio(trace, eta**2 * full.squared_norm),
        **{name: quartiles(of_batches) for name, of_batches in values.items()},
        "histogram": histogram(deviations),
        "values": {name: of_batches.tolist() for name, of_batches in values.items()},
    }


def _load(options: AnalysisOptions, device: torch.device, sharers: int) -> Subject:
    """Load what is analysed, and refuse whatever this rank alone can refuse.

    Args:
        sharers: ranks of this node.
    """
    for name, value in (("--sequences", options.sequences), ("--pass", options.micro_batch_size)):
        if value is not None and not value >= 1:
            raise SettingsError.of(name, value, "must be >= 1")
    run = open_finished(options.run, NUM_VECTORS, sharers)
    settings = run.settings
    split, table = choose_split(run.splits, options.split)
    count = options.sequences or min(table.num_sequences, MAX_SEQUENCES)
    ids = np.arange(count) * table.num_sequences // count  # spread evenly
    if count > table.num_sequences:
        raise SettingsError.of("--sequences", count, f"the {split} split has {table.num_sequences}")
    largest = max(options.batches or (1,))
    if largest > count:
        raise SettingsError.of("--batches", largest, f"{count} sequences are looked at; take more (--sequences)")
    set_up_arithmetic(settings, device)
    flat_model = FlatModel(run.module, device, settings.precision)
    micro_batch_size = options.micro_batch_size or settings.evaluation.batch
    return Subject(settings, flat_model, run.objective, split, table, ids, micro_batch_size)


def choose_split(splits: TextSplits, asked: str | None) -> tuple[str, TextTable]:
    """The split that is looked at, by name and in sequences: the one to train on, unless that is a stream.

    Raises:
        SettingsError: it is a stream, and asked for.
    """
    if splits.table is not None and asked != "validation":
        return "train", splits.table
    rule = f"{splits.source} cannot be read in any order; leave it out for the validation split"
    if asked == "train":
        raise SettingsError.of("--split", asked, rule)
    return "validation", splits.validation
