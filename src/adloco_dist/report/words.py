"""What happened in a run, in sentences: each stands on the records, and says nothing that they do not show."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from adloco_dist.policy.evaluation import in_words
from adloco_dist.report.columns import REQUEST, Values
from adloco_dist.report.history import History
from adloco_dist.report.pool import loss_in_words, place_in_words
from adloco_dist.report.source import Source
from adloco_dist.run.reading import Candidate, saved_candidate
from adloco_dist.text import counted, duration, in_bytes

BOUNDS = {
    "min_batch": "the minimum (batching.min_batch)",
    "max_batch": "the maximum (batching.max_batch)",
    "shard": "one epoch of its shard",
    "growth_limit": "the largest growth after one measurement (batching.growth_limit)",
    "shrink_limit": "the largest decrease after one measurement (batching.shrink_limit)",
    "measurable": "the smallest batch whose noise can be measured",
}
"""What bounded a batch, in words."""
MAX_TRAINERS = 8
"""Trainers left at the end whose batches are described."""
RECENT = 0.25
"""The last share of rounds, which says how a run ended up."""


def sentences(source: Source) -> list[str]:
    """The story of a run: what it learned, who merged, why batches were what they were, what the link cost."""
    history = source.history
    if not history.num_rounds:
        return ["No round has been trained yet."]
    return [*_learned(source), *_merged(source), *_batches(source), *_link(source), *_incidents(source)]


def _learned(source: Source) -> Iterator[str]:
    history = source.history
    seconds, tokens = history.axes["seconds"][-1], history.axes["tokens"][-1]
    workers = np.nan_to_num(history.values("workers"))[history.row_rounds == history.num_rounds]
    when = _tense(source, "at the end", "now")
    pool = f"{counted(len(workers), 'trainer')} with {counted(int(workers.sum()), 'worker')} {when}"
    clock = " of a simulated clock" if source.is_simulated else ""
    yield (
        f"{counted(history.num_rounds, 'round')} in {duration(seconds)}{clock}: {tokens:,.0f} tokens, "
        f"{history.axes['updates'][-1]:,.0f} updates of each worker; {pool}."
    )
    _, losses = history.best_validation
    if len(losses):
        first, last, best = losses[0], losses[-1], losses.min()
        later = "" if best == last else f", at its lowest {best:.4f}"
        sequences = source.settings.get("evaluation.sequences")
        where = f", on up to {sequences:,} validation sequences" if isinstance(sequences, int) else ""
        went = _tense(source, "went", "has gone")
        line = f"The validation loss of the best trainer {went} from {first:.4f} to {last:.4f} while training{later}"
        yield f"{line}{where}."
    if source.result and (saved := saved_candidate(source.result)):
        targets, most = source.result.get("validation_targets"), source.settings.get("evaluation.final_sequences")
        sequences = f"on up to {most:,} validation sequences" if isinstance(most, int) else "on the validation split"
        where = f", {sequences} ({targets:,} targets)" if targets else ""
        yield f"Saved: {saved['name']}; {' and '.join(_figures(saved))}{where}."


def _figures(saved: Candidate) -> list[str]:
    """The validation loss of a candidate, and what people compare beside it."""
    loss = f"validation loss {loss_in_words(saved['validation_loss'])}"
    return list(dict.fromkeys([loss, in_words(saved)]))


def _merged(source: Source) -> Iterator[str]:
    history = source.history
    if not history.merges:
        if len(history.trainers) == 1:
            yield f"There {_tense(source, 'was', 'is')} one trainer, so nothing to merge."
        else:
            yield f"No trainers {_tense(source, 'merged', 'have merged so far')}."
    for row, merge in history.merges:
        shares = ", ".join(f"{member} ({share:.2f})" for member, share in merge.shares.items())
        line = f"Before round {row.round:,} trainers {shares} became trainer {merge.survivor}"
        if merge.loss is not None:
            losses = ", ".join(loss_in_words(merge.member_losses.get(member)) for member in merge.shares)
            line += f": validation losses {losses}, of the average {loss_in_words(merge.loss)}"
        yield f"{line}; {counted(row.workers or 0, 'worker')} on {place_in_words(row.ranks, source.cluster['nodes'])}."


def _batches(source: Source) -> Iterator[str]:
    history = source.history
    left = history.row_trainers[history.row_rounds == history.num_rounds].tolist()
    for trainer in left[:MAX_TRAINERS]:
        rows = history.rows_of(trainer)
        known, workers = (_known(history.values(name)[rows]) for name in ("total_batch", "workers"))
        if not len(known):
            continue
        name = "Batches" if len(history.trainers) == 1 else f"Batches of trainer {trainer}"
        first, last, largest = known[0], known[-1], known.max()
        is_constant = known.min() == largest
        stayed, went = _tense(source, "stayed", "have stayed"), _tense(source, "went", "have gone")
        change = f"{stayed} at {first:,.0f}" if is_constant else f"{went} from {first:,.0f} to {last:,.0f} sequences"
        if largest > max(first, last):
            change += f", {largest:,.0f} at most"
        if len(workers) and workers[0] != workers[-1]:
            change += f" ({counted(int(workers[0]), 'worker')} at first, {int(workers[-1])} at last)"
        yield f"{name} {change}{_why(source, trainer)}."


def _why(source: Source, trainer: int) -> str:
    """What asked for a trainer's batches, and what bounded the request in most of the rounds."""
    history, rule, rows = source.history, source.settings.get("batching.request", ""), source.history.rows_of(trainer)
    counts = Counter({bound: len(bounded) for bound, bounded in history.bounds(trainer).items()})
    asked, noise, passes = (_known(history.values(name)[rows]) for name in ("request", "noise_scale", "passes"))
    if rule == "none":
        return "; nothing asked for others (batching.request=none)"
    if not len(asked) or not counts.total():
        return ""
    went = _tense(source, "went", "has gone")
    measured = f"the gradient noise scale {went} from {noise[0]:,.3g} to {noise[-1]:,.3g}, " if len(noise) else ""
    wished, end = _tense(source, "asked", "has asked"), _tense(source, "at last", "now")
    wish = f"{measured}{rule or 'the request'} {wished} for {asked[0]:,.3g} at first and {asked[-1]:,.3g} {end}"
    most = passes.max(initial=1)
    split = f", computed in up to {most:,.0f} micro-batches" if most > 1 else ""
    ((bound, count),) = counts.most_common(1)
    taken, decides = _tense(source, "which was taken", "which is taken"), _tense(source, "decided", "decides")
    decided = taken if bound == REQUEST else f"and {BOUNDS.get(bound, bound)} {decides}"
    return f": {wish}, {decided} in {count:,} of {counts.total():,} rounds{split}"


def _tense(source: Source, ended: str, goes_on: str) -> str:
    """What is said of a run that has ended, or of one that may go on."""
    return ended if source.result else goes_on


def _known(values: Values) -> Values:
    return values[np.isfinite(values)]


def _link(source: Source) -> Iterator[str]:
    history = source.history
    sent = float(history.axes["bytes"][-1])
    where = " (all ranks on one node)" if len(set(source.cluster["nodes"])) == 1 else ""
    hidden, exposed, total = _communication(history)
    if not sent or not total:
        return
    yield (
        f"All ranks {_tense(source, 'sent', 'have sent')} {in_bytes(sent)}{where}. Of the ranks' time "
        f"{exposed / total:.1%} {_tense(source, 'went', 'has gone')} into exposed averages and waiting for others; "
        f"averages that travelled beside updates would have been another {hidden / total:.1%}."
    )
    known = _known(history.values("worth")[history.row_rounds > (1 - RECENT) * history.num_rounds])
    if len(known):
        lowest, middle, highest = np.quantile(known, [0, 0.5, 1]).tolist()
        workers = counted(int(np.nanmax(history.values("workers"))), "worker")
        made = _tense(source, "made", "makes" if workers == "1 worker" else "make")
        said = "Estimate" if middle > 1 else f"It {_tense(source, 'did', 'does')} not pay"
        yield (
            f"{said}: {workers} of a trainer {made} up to {middle:.2f} times the progress per second of one alone "
            f"(an upper bound, the median of the last quarter of the rounds: {lowest:.2f} to {highest:.2f})."
        )


def _communication(history: History) -> tuple[float, float, float]:
    """Seconds of all ranks: hidden averages, exposed averages and waiting, and all steps."""
    spent = Counter[str]()
    for steps in history.rank_seconds.values():
        spent.update(steps)
    exposed = spent["outer"] + spent["wait"] + spent["control"]
    return spent["transfer"], exposed, spent.total() - spent["transfer"]


def _incidents(source: Source) -> Iterator[str]:
    starts = source.facts.get("resumed", [])
    if resumed := [start for start in starts if not start.get("why")]:
        lost = dict.fromkeys(host for start in resumed for host in start.get("lost_hosts", []))
        without = f", without {', '.join(lost)}, which had been lost" if lost else ""
        yield f"The run was resumed {counted(len(resumed), 'time')}{without}."
    if changes := [start for start in starts if start.get("why")]:
        paused = sum(start.get("paused_seconds") or 0.0 for start in changes)
        times, spent = counted(len(changes), "time"), duration(paused)
        yield f"Nodes came or went {times}; those who stayed paused for {spent} in all, which no axis counts."
    if left_out := sum(bool(row.nonfinite_workers) for row in source.history.told):
        rounds = counted(left_out, "round")
        yield f"Workers that were not finite were left out of averages in {rounds} of a trainer."


def tiles(source: Source) -> list[tuple[str, str]]:
    """The figures that one looks for first: what they are, and what they say."""
    history, shown = source.history, []
    if not history.num_rounds:
        return shown
    _, losses = history.best_validation
    if saved := saved_candidate(source.result):
        shown += [(figure.rpartition(" ")[0], figure.rpartition(" ")[2]) for figure in _figures(saved)]
    elif len(losses):
        shown.append(("best validation loss", f"{losses.min():.4f}"))
    shown += [("rounds", f"{history.num_rounds:,}"), ("tokens", f"{history.axes['tokens'][-1]:,.0f}")]
    seconds = float(history.axes["seconds"][-1])
    shown += [("time", duration(seconds)), ("sent", in_bytes(history.axes["bytes"][-1]))]
    if seconds:
        shown.append(("tokens per second", f"{history.axes['tokens'][-1] / seconds:,.0f}"))
    if count := source.facts.get("parameters"):
        shown.append(("parameters", f"{count:,}"))
    if total := _communication(history)[2]:
        inner = sum(steps.get("inner", 0.0) for steps in history.rank_seconds.values())
        shown.append(("time in updates", f"{inner / total:.1%}"))
    return [*shown, *([("merges", str(len(history.merges)))] if history.merges else [])]
