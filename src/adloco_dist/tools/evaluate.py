"""Validation loss of a finished run's model: `launch/evaluate.py RUN`."""

import argparse
from pathlib import Path

import torch

from adloco_dist.config import as_tool, require
from adloco_dist.decisions.evaluation import in_words
from adloco_dist.pool.arithmetic import set_up_arithmetic
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.round.evaluate import Part, evaluate
from adloco_dist.run.finished import open_finished
from adloco_dist.terminal import tell, told_wait


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/evaluate.py."""
    parser = argparse.ArgumentParser(description="Evaluate a run's model on the validation split of its corpus.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--sequences", type=int, help="validation sequences (default: the whole split)")
    options = parser.parse_args(arguments)
    with as_tool():
        with told_wait(lambda: f"evaluating {options.run}: still at it"):
            line = evaluate_run(options.run, options.sequences)
        tell(line)


def evaluate_run(directory: Path, max_sequences: int | None) -> str:
    """One line: loss in nats per token, perplexity, tokens.

    Raises:
        SettingsError: no such run, no model, or another corpus than the run's on this machine.
    """
    require(max_sequences is None or max_sequences >= 1, "--sequences", max_sequences, "must be >= 1")
    settings, module, splits = open_finished(directory)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_up_arithmetic(settings, device)
    flat_model = FlatModel(module, device, settings.precision)
    evaluation = evaluate(
        flat_model,
        flat_model.initial_weights(),
        splits.validation,
        max_sequences,
        settings.evaluation.batch,
        Part(0, 1),
    )
    figures, targets = evaluation.figures(settings.data.is_labelled), evaluation.targets
    kind = "labels" if settings.data.is_labelled else "tokens"
    return f"validation loss {evaluation.loss:.4f}, {in_words(figures)}, on {targets:,} {kind}"
