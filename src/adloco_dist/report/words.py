"""What happened in a run, in sentences: each stands on the records, and says nothing that they do not show."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from adloco_dist.policy.evaluation import in_words
from adloco_dist.report.history import REQUEST, History, Numbers, Values
from adloco_dist.report.pool import loss_in_words, merges_of, place_in_words
from adloco_dist.report.source import Source
from adloco_dist.text import duration, in_bytes

BOUNDS = {
    "min_batch": "the minimum (batching.min_batch)",
    "max_batch": "the maximum (batching.max_batch)",
    "shard": "one epoch of its shard",
    "growth_limit": "the largest growth after one measurement (batching.growth_limit)",
    "shrink_limit": "the largest decrease after one measurement (batching.shrink_limit)",
    "measurable": "the smallest batch whose noise can be measured",
    "may_shrink": "the last batch (batching.may_shrink=false)",
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
    pool = f"{counted(len(workers), 'trainer')} with {counted(int(workers.sum()), 'worker')} at the end"
    yield (
        f"{counted(history.num_rounds, 'round')} in {duration(seconds)}: {tokens:,.0f} tokens, "
        f"{history.axes['updates'][-1]:,.0f} updates of each worker; {pool}."
    )
    losses = history.values("validation_loss")
    known = np.flatnonzero(np.isfinite(losses))
    if len(known):
        first = float(losses[known[0]])
        last = float(losses[known][history.row_rounds[known] == history.row_rounds[known[-1]]].min())
        best = float(losses[known].min())
        later = "" if best == last else f", at its lowest {best:.4f}"
        yield f"The validation loss of the best trainer went from {first:.4f} to {last:.4f} while training{later}."
    result = source.result
    if result and result["candidates"]:
        saved = next((one for one in result["candidates"] if one["name"] == result["saved"]), None)
        if saved:
            targets = result.get("validation_targets")
            yield f"Saved: {result['saved']}, {in_words(saved)}{f' on {targets:,} targets' if targets else ''}."


def _merged(source: Source) -> Iterator[str]:
    history, merges = source.history, merges_of(source.history)
    if not merges:
        one = len(history.trainers) == 1
        yield "There was one trainer, so nothing to merge." if one else "No trainers merged."
        return
    for merge in merges:
        shares = ", ".join(f"{member} ({share:.2f})" for member, share in merge.shares.items())
        detail = f"Before round {merge.before_round:,} trainers {shares} became trainer {merge.survivor}"
        if merge.loss is not None:
            found = ", ".join(f"{loss_in_words(merge.losses.get(member))}" for member in merge.shares)
            detail += f": validation losses {found}, of the average {loss_in_words(merge.loss)}"
        where = place_in_words(merge.ranks, source.nodes)
        yield f"{detail}; {counted(merge.workers, 'worker')} on {where}."


def _batches(source: Source) -> Iterator[str]:
    history = source.history
    left = history.row_trainers[history.row_rounds == history.num_rounds].tolist()
    for trainer in left[:MAX_TRAINERS]:
        rows = history.rows_of(trainer)
        known, workers = (_known(history.values(name)[rows]) for name in ("total_batch", "workers"))
        if not len(known):
            continue
        name = "Batches" if len(history.trainers) == 1 else f"Batches of trainer {trainer}"
        change = f"stayed at {known[0]:,.0f}" if known.min() == known.max() else f"went from {known[0]:,.0f} to "
        change += "" if known.min() == known.max() else f"{known[-1]:,.0f} sequences"
        if known.max() > max(known[0], known[-1]):
            change += f", {known.max():,.0f} at most"
        if len(workers) and workers[0] != workers[-1]:
            change += f" ({counted(int(workers[0]), 'worker')} at first, {int(workers[-1])} at last)"
        yield f"{name} {change}{_why(source, rows)}."


def _why(source: Source, rows: Numbers) -> str:
    """What asked for the batches, and what bounded the request in most of the rounds."""
    history = source.history
    counts = Counter(word for word in history.bounds[rows].tolist() if word is not None)
    asked, noise, passes = (_known(history.values(name)[rows]) for name in ("request", "noise_scale", "passes"))
    rule = source.settings.get("batching.request", "")
    if rule == "none" or not len(asked) or not counts:
        return "; nothing asked for others (batching.request=none)" if rule == "none" else ""
    measured = f"the gradient noise scale went from {noise[0]:,.3g} to {noise[-1]:,.3g}, " if len(noise) else ""
    wish = f"{measured}{rule or 'the request'} asked for {asked[0]:,.3g} at first and {asked[-1]:,.3g} at last"
    most = passes.max(initial=1)
    split = f", computed in up to {most:,.0f} micro-batches" if most > 1 else ""
    ((bound, count),) = counts.most_common(1)
    decided = "which was taken" if bound == REQUEST else f"and {BOUNDS.get(bound, bound)} decided"
    return f": {wish}, {decided} in {count:,} of {counts.total():,} rounds{split}"


def _known(values: Values) -> Values:
    return values[np.isfinite(values)]


def _link(source: Source) -> Iterator[str]:
    history = source.history
    sent = float(history.axes["bytes"][-1])
    several = len(source.nodes) and len(set(source.nodes)) > 1
    where = "" if several else " (all ranks on one node)" if source.nodes else ""
    hidden, exposed, total = _communication(history)
    if not sent or not total:
        return
    yield (
        f"All ranks sent {in_bytes(sent)}{where}. Of the ranks' time {exposed / total:.1%} went into exposed averages "
        "and waiting for others; averages that travelled beside updates would have been another "
        f"{hidden / total:.1%}."
    )
    worth = history.values("worth")
    last = worth[history.row_rounds > (1 - RECENT) * history.num_rounds]
    known = last[np.isfinite(last)]
    if len(known):
        middle = float(np.median(known))
        verdict = "It paid" if middle > 1 else "It did not pay"
        yield (
            f"{verdict}: in the last quarter of the rounds, averaging made at most {middle:.2f} times the progress per "
            "second of one worker alone."
        )


def _communication(history: History) -> tuple[float, float, float]:
    """Seconds of all ranks: hidden averages, exposed averages and waiting, and all steps."""
    hidden = exposed = total = 0.0
    for rank in history.names("rank_seconds"):
        for step in history.names("rank_seconds", rank):
            seconds = float(np.nansum(history.values("rank_seconds", rank, step)))
            hidden += seconds if step == "transfer" else 0.0
            exposed += seconds if step in ("outer", "control") else 0.0
            total += seconds if step not in ("transfer", "wait") else 0.0
    return hidden, exposed, total


def _incidents(source: Source) -> Iterator[str]:
    resumed = source.facts.get("resumed", [])
    if resumed:
        lost = dict.fromkeys(host for start in resumed for host in start.get("lost_hosts", []))
        without = f", without {', '.join(lost)}, which had been lost" if lost else ""
        yield f"The run was resumed {counted(len(resumed), 'time')}{without}."
    left_out = source.history.records("nonfinite_workers")
    if left_out:
        rounds = counted(len(left_out), "round")
        yield f"Workers that were not finite were left out of averages in {rounds} of a trainer."


def tiles(source: Source) -> list[tuple[str, str]]:
    """The figures that one looks for first: what they are, and what they say."""
    history, found = source.history, []
    if not history.num_rounds:
        return found
    losses = history.values("validation_loss")
    known = losses[np.isfinite(losses)]
    result = source.result
    saved = [one for one in result["candidates"] if one["name"] == result["saved"]] if result else []
    if saved:
        found.append(("validation", in_words(saved[0]).removeprefix("validation ")))
    elif len(known):
        found.append(("best validation loss", f"{known.min():.4f}"))
    total = _communication(history)[2]
    inner = [np.nansum(history.values("rank_seconds", rank, "inner")) for rank in history.names("rank_seconds")]
    found += [("rounds", f"{history.num_rounds:,}"), ("tokens", f"{history.axes['tokens'][-1]:,.0f}")]
    found += [("time", duration(history.axes["seconds"][-1])), ("sent", in_bytes(history.axes["bytes"][-1]))]
    if total:
        found.append(("time in updates", f"{sum(inner) / total:.1%}"))
    merges = merges_of(history)
    found.append(("merges", str(len(merges))))
    return found


def counted(number: int, noun: str) -> str:
    """Return a number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
