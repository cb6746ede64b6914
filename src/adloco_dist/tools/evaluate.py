"""Validation loss of a finished run's model: `launch/evaluate.py RUN`."""

import argparse
from pathlib import Path

import torch

from adloco_dist.config import SettingsError, as_tool
from adloco_dist.policy.evaluation import in_order, in_words
from adloco_dist.pool.arithmetic import set_up_arithmetic
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.round.evaluate import Part, evaluate
from adloco_dist.terminal import report_line, reported_wait
from adloco_dist.tools.finished import open_finished


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/evaluate.py."""
    parser = argparse.ArgumentParser(description="Evaluate a run's model on the validation split of its corpus.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--sequences", type=int, help="validation sequences (default: the whole split)")
    options = parser.parse_args(arguments)
    with as_tool():
        with reported_wait(lambda: f"evaluating {options.run}: still at it"):
            line = evaluate_run(options.run, options.sequences)
        report_line(line)


def evaluate_run(directory: Path, max_sequences: int | None) -> str:
    """One line: loss in nats per token, perplexity, tokens.

    Raises:
        SettingsError: no such run, no model, or another corpus than the run's on this machine.
    """
    if max_sequences is not None and max_sequences < 1:
        raise SettingsError.of("--sequences", max_sequences, "must be >= 1")
    run = open_finished(directory)
    settings = run.settings
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_up_arithmetic(settings, device)
    flat_model = FlatModel(run.module, device, settings.precision)
    evaluation = evaluate(
        flat_model,
        run.objective,
        flat_model.initial_weights(),
        run.splits.validation,
        in_order(run.splits.validation.num_sequences)[:max_sequences],
        settings.evaluation.batch,
        Part(0, 1),
    )
    figures, targets = evaluation.figures(), evaluation.targets
    kind = "labels" if settings.data.is_labelled else "tokens"
    return f"validation loss {evaluation.loss:.4f}, {in_words(figures)}, on {targets:,} {kind}"
