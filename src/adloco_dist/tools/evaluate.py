"""Validation loss of a finished run's model: `launch/evaluate.py RUN`."""

import argparse
from pathlib import Path

import torch

from adloco_dist.command import as_tool
from adloco_dist.config import require
from adloco_dist.policy.evaluation import in_order, in_words
from adloco_dist.round.evaluate import BATCH, evaluate
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
    """One line: loss in nats per token, perplexity, tokens; raises a SettingsError as `open_finished` does."""
    require(max_sequences is None or max_sequences >= 1, "--sequences", max_sequences, "must be >= 1")
    run = open_finished(directory, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    weights, table = run.flat_model.initial_weights(), run.splits.validation
    chosen = in_order(table.num_sequences)[:max_sequences]
    evaluation = evaluate(run.flat_model, run.objective, weights, table, chosen, BATCH)
    kind = "labels" if run.settings.data.is_labelled else "tokens"
    loss, figure = evaluation.loss, in_words(evaluation.figures())
    return f"validation loss {loss:.4f}, {figure}, on {evaluation.targets:,} {kind}"
