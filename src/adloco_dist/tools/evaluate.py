"""Validation loss of a finished run's model: `launch/evaluate.py RUN`."""

import argparse
from pathlib import Path

import torch
from rich.progress import track

from adloco_dist.command import as_tool
from adloco_dist.config import require
from adloco_dist.policy.evaluation import Evaluation, in_order, in_words, subsets, total
from adloco_dist.round.evaluate import BATCH, evaluate
from adloco_dist.run.reading import read_run
from adloco_dist.terminal import new_console, report_line, reported_wait
from adloco_dist.tools.finished import open_finished

STEP = 4 * BATCH
"""Sequences after which the bar moves on."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of launch/evaluate.py."""
    parser = argparse.ArgumentParser(description="Evaluate a run's model on the validation split of its corpus.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--sequences", type=int, help="at most so many (default: those of the result in its run.json)")
    options = parser.parse_args(arguments)
    with as_tool():
        report_line(evaluate_run(options.run, options.sequences))


def evaluate_run(directory: Path, max_sequences: int | None) -> str:
    """One line: loss in nats per token, perplexity, tokens; raises a SettingsError as `open_finished` does.

    Args:
        max_sequences: None: those that the run's own result is of.
    """
    require(max_sequences is None or max_sequences >= 1, "--sequences", max_sequences, "must be >= 1")
    threads = read_run(directory).get("cluster", {}).get("threads_per_rank")
    if isinstance(threads, int) and threads >= 1:  # more would spin beside whatever else this machine computes
        torch.set_num_threads(threads)
    with reported_wait(lambda: "opening the run: still at it"):
        run = open_finished(directory, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    weights, table = run.flat_model.initial_weights(), run.splits.validation
    chosen = subsets(table.num_sequences, run.settings.evaluation).final
    if max_sequences is not None:
        chosen = in_order(table.num_sequences)[:max_sequences]
    console = new_console(stderr=True)
    parts = [chosen[start : start + STEP] for start in range(0, len(chosen), STEP)]
    shown = track(parts, f"evaluating {len(chosen):,} sequences", console=console, disable=not console.is_terminal)
    done: list[Evaluation] = []
    count = f"{len(chosen):,} sequences are done"
    with reported_wait(lambda: f"evaluating: {STEP * len(done):,} of {count}", speaks=not console.is_terminal):
        for part in shown:
            done.append(evaluate(run.flat_model, run.objective, weights, table, part, BATCH))
    evaluation = total(done)
    assert evaluation
    kind = "labels" if run.settings.data.is_labelled else "tokens"
    loss, figure = evaluation.loss, in_words(evaluation.figures())
    return f"validation loss {loss:.4f}, {figure}, on {evaluation.targets:,} {kind}"
