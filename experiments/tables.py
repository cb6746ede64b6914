"""Tables of docs/evidence.md from what experiments/further.py has found; a row is left out until its runs are there."""

import math
import statistics
from collections.abc import Mapping
from itertools import product

import numpy as np
from further import (
    AT_OTHER_RATE,
    DELAYED_UPDATES,
    DELAYS,
    FORMATS,
    FURTHER_SEEDS,
    HALF,
    LENGTHS,
    LENGTHS_IN_UPDATES,
    LONGER,
    MANY_HOSTS,
    OTHER_RATE,
    OUTER_STEPS,
    PUBLISHED,
    ROUNDS,
    SECONDS,
    SIZES,
    TOKENS_IN_UPDATE,
)
from kept import Points, Records
from pools import MERGED_BY, MERGED_LENGTHS, MERGED_POLICIES
from ratios import is_extrapolated, share
from runs import Record
from shapes import TRIED

(SEED, *_) = FURTHER_SEEDS
PARAMETERS = 117_120
"""Of `nano`."""
MOST = 10
"""Largest factor that is shown: beyond, it is read off the first points of a curve."""
TEXTS = {"headers": "C++ headers", "wikitext2": "WikiText-2"}


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def published(records: Records) -> str:
    """By method, losses by rate, and the time of the default, at the best of its rates, to the best of these losses."""
    found = {
        name: {rate: run for rate in rates if (run := _run(records, "published", f"{name}_{rate}", SECONDS))}
        for name, (_, _, rates) in PUBLISHED.items()
    }
    best = {name: min(made.values(), key=lambda run: run["loss"]) for name, made in found.items() if made}
    return "\n".join(
        row(
            name.replace("_", " "),
            ", ".join(f"{rate}: {run['loss']:.3f}" for rate, run in found[name].items()),
            f"**{_share(best['default'], run)}**" if name != "default" else "1",
        )
        for name, run in best.items()
    )


def outer_steps(records: Records) -> str:
    """By hosts: losses with the outer steps that were tried."""
    rows = []
    for hosts, seconds in MANY_HOSTS.items():
        made = [_run(records, "outer_steps", f"{hosts}_{name}", seconds) for name in OUTER_STEPS]
        if all(made):
            rows.append(row(hosts, seconds, *(f"{run['loss']:.3f}" for run in made if run)))
    return "\n".join(rows)


def compressed(records: Records) -> str:
    """By link and hook, the loss of compressed averages of every gradient, and the default's share of the time."""
    rows = []
    sides = [run for name, run in sorted(records.by_name.items()) if name.startswith("compressed/")]
    for run in sorted(sides, key=lambda run: int(run["side"]["link"])):
        side = run["side"]
        amount = {"sparse": f", {side['amount']:g} of the elements", "powersgd": f", rank {side['amount']:g}"}
        hook = side["hook"] + amount.get(side["hook"], "") + ("" if side.get("hidden", 1) else ", nothing hides it")
        what = f"{side['optimizer']}, {side['lr']:g}, {side['local_batch']} sequences a host"
        ours = records.reached("lengths", f"two_{side['link']}", side["seed"])
        rows.append(row(side["link"], hook, what, f"{run['loss']:.3f}", f"{run['updates']:,}", _time(ours, run)))
    return "\n".join(rows)


def merged(records: Records) -> str:
    """By length and side, what pools that merge come to, and their seconds over those of one trainer to their loss."""
    rows = []
    for seconds in MERGED_LENGTHS:
        if one := _run(records, "merged", "one_trainer", seconds):
            rows.append(
                row(seconds, "one trainer", f"{one['loss']:.3f}", f"{one['bytes_sent'] / 1e6:.1f}", "", "1", "")
            )
        for name, policy in product(MERGED_BY, MERGED_POLICIES):
            if run := _run(records, "merged", f"{policy}_by_{name}", seconds):
                ours = records.reached("merged", "one_trainer", SEED)
                behind = 1 / share(ours, [(seconds, run["loss"])])
                side = f"by {name.replace('_', ' ')}, {policy}"
                least = (1 - run["merge_seconds"] / seconds) * behind
                cells = (f"{run['loss']:.3f}", f"{run['bytes_sent'] / 1e6:.1f}", f"{run['merge_seconds']:.1f}")
                rows.append(row(seconds, side, *cells, f"**{behind:.2f}**", f"{least:.2f}"))
    return "\n".join(rows)


def shapes(records: Records) -> str:
    """By tokens, width and depth: losses by rate, and the rate at which a parabola through the best three is least."""
    rows = []
    for tokens, by_shape in TRIED.items():
        for (width, depth), rates in by_shape.items():
            losses = {}
            for rate in rates:
                name = f"shapes/{width}x{depth}_{rate}/{tokens}t/seed"
                made = [run["loss"] for key, run in records.by_name.items() if key.startswith(name)]
                losses |= {rate: statistics.mean(made)} if made else {}
            if losses:
                found = best_rate({float(rate): loss for rate, loss in losses.items()})
                best = (f"{found:.2g}", f"{found * width:.2f}") if found else ("", "")
                listed = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in losses.items())
                rows.append(row(width, depth, f"{tokens:,}", listed, *best))
    return "\n".join(rows)


def best_rate(losses: Mapping[float, float]) -> float | None:
    """Where a parabola over log(rate) through the least loss and its neighbours is least; None: it has one alone."""
    rates = sorted(losses)
    place = rates.index(min(rates, key=lambda rate: losses[rate]))
    if not 0 < place < len(rates) - 1:
        return None
    near = rates[place - 1 : place + 2]
    square, linear, _ = np.polyfit(np.log(near), [losses[rate] for rate in near], 2)
    return float(np.exp(-linear / (2 * square)))


def texts(records: Records) -> str:
    """By text: losses of one alone, and shares of time."""
    rows = []
    for name, words in TEXTS.items():
        sides = ("alone_adamw", "alone_muon", "default_alone")
        alone = [_run(records, "texts", f"{side}_{name}", 150) for side in sides]
        two = _run(records, "texts", f"two_10_{name}", HALF * LENGTHS[1])
        if all(alone):
            adamw, constant, default = (run for run in alone if run)
            losses = [f"{run['loss']:.3f}" for run in (adamw, constant, default)]
            others = [_run(records, "texts", f"{side}_{OTHER_RATE}_{name}", 150) for side in AT_OTHER_RATE]
            losses += [f"{run['loss']:.3f}" if run else "not run" for run in others]
            rows.append(row(words, *losses, _share(default, adamw), _share(two, default)))
    return "\n".join(rows)


def lengths(records: Records) -> str:
    """By the seconds of one alone: what it has come to, and the shares of time of two hosts."""
    rows = []
    for seconds in LENGTHS:
        alone = _run(records, "lengths", "alone", seconds)
        if alone:
            shares = [_share(_long_enough(records, f"two_{link}", seconds, alone), alone) for link in ("10", "100")]
            tokens = f"{alone['tokens'] / PARAMETERS:.1f}"
            rows.append(row(seconds, tokens, alone["last_batch"], f"{alone['loss']:.3f}", *shares))
    return "\n".join(rows)


def _long_enough(records: Records, side: str, seconds: float, alone: Record) -> Record | None:
    """The shortest run of two hosts that comes to the loss of one alone, or the longest that was made."""
    made = [run for part in (HALF, LONGER) if (run := _run(records, "lengths", side, part * seconds))]
    come = [run for run in made if not is_extrapolated(run["curve"], alone["curve"])]
    return next(iter(come or made[-1:]), None)


def rounds(records: Records) -> str:
    """By updates and format: losses by H, and the updates to them over those of the shortest rounds in fp32."""
    rows = []
    for updates, wire in product(LENGTHS_IN_UPDATES, FORMATS):
        budget = f"{updates * TOKENS_IN_UPDATE}t"
        made = [records.by_name.get(f"rounds/{wire}_H{length}/{budget}/seed{SEED}") for length in ROUNDS]
        shortest = records.by_name.get(f"rounds/fp32_H{ROUNDS[0]}/{budget}/seed{SEED}")
        if shortest and all(made):
            cells = []
            for run in filter(None, made):
                factor = 1 / share(shortest["curve"], run["curve"])
                cells.append(f"{run['loss']:.3f}: {factor:.2f}" if factor < MOST else f"{run['loss']:.3f}")
            rows.append(row(f"{updates:,}", wire, *cells))
    return "\n".join(rows)


def delays(records: Records) -> str:
    """By format, H and delay: the loss, the updates to it over those of the shortest rounds in fp32, and the loss of
    rounds of H + 2 tau in fp32 without a delay, which is interpolated between those that were run."""
    budget = f"{DELAYED_UPDATES * TOKENS_IN_UPDATE}t/seed{SEED}"
    plain = {length: records.by_name.get(f"rounds/fp32_H{length}/{budget}") for length in ROUNDS}
    losses = {length: run["loss"] for length, run in plain.items() if run}
    shortest, rows = plain[ROUNDS[0]], []
    for wire, by_length in DELAYS.items():
        for length, tried in by_length.items():
            for delay in tried:
                run = records.by_name.get(f"delays/{wire}_H{length}_tau{delay}/{budget}")
                if run and shortest:
                    apart = length + 2 * delay
                    expected = np.interp(math.log(apart), [math.log(one) for one in losses], list(losses.values()))
                    factor = f"{1 / share(shortest['curve'], run['curve']):.2f}"
                    rows.append(row(wire, length, delay, f"{run['loss']:.3f}", factor, apart, f"{expected:.3f}"))
    return "\n".join(rows)


def sizes(records: Records) -> str:
    """By width and depth: what one alone has come to, and the shares of time of two hosts."""
    rows = []
    for width, depth, parameters, seconds in SIZES:
        shape = f"{width}x{depth}"
        alone = _run(records, "sizes", f"alone_{shape}", seconds)
        two = [_run(records, "sizes", f"two_{link}_{shape}", HALF * seconds) for link in ("10", "100")]
        if alone and any(two):
            shares = [_share(run, alone) for run in two]
            tokens = f"{alone['tokens'] / parameters:.2f}"
            of_model = (f"{parameters / 1e6:.1f}M", shape, seconds, tokens)
            rows.append(row(*of_model, alone["last_batch"], f"{alone['loss']:.3f}", *shares))
    return "\n".join(rows)


def _share(ours: Record | None, theirs: Record) -> str:
    """Our time to the loss that another run comes to, over that run's."""
    return _time(ours["curve"], theirs) if ours else "not run"


def _time(ours: Points, theirs: Record) -> str:
    """The time that these losses took to come to that of another run, over that run's."""
    further = " (extrapolated)" if is_extrapolated(ours, theirs["curve"]) else ""
    return f"{share(ours, theirs['curve']):.3f}{further}"


def _run(records: Records, question: str, side: str, seconds: float) -> Record | None:
    return records.by_name.get(f"{question}/{side}/{seconds:.10g}s/seed{SEED}")
