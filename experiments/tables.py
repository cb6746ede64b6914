"""Tables of docs/evidence.md from what experiments/further.py has found; a row is left out until its runs are there."""

from figures import Records
from further import CONSTANT_RATES, CONSTANTS, FURTHER_SEEDS, HALF, LENGTHS, PUBLISHED, ROUNDS, SECONDS
from ratios import share
from runs import Record

(SEED, *_) = FURTHER_SEEDS
PARAMETERS = 117_120
"""Of `nano`."""
TEXTS = {"headers": "C++ headers", "wikitext2": "WikiText-2"}


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def published(records: Records) -> str:
    """By method, the best of its rates, and the default's time to that loss."""
    rows, ours = [], _run(records, "published", "default", SECONDS)
    for name, (_, _, rates) in PUBLISHED.items():
        made = {rate: run for rate in rates if (run := _run(records, "published", f"{name}_{rate}", SECONDS))}
        if ours and made:
            best = min(made, key=lambda rate: made[rate]["loss"])
            losses = ", ".join(f"{rate}: {run['loss']:.3f}" for rate, run in made.items())
            rows.append(row(name.replace("_", " "), losses, f"**{share(ours, made[best]):.3f}**"))
    if ours:
        rows.append(row("the default", f"{ours['loss']:.3f}", "1"))
    return "\n".join(rows)


def compressed(records: Records) -> str:
    """By link and hook, the loss of compressed averages of every gradient, and the default's share of the time."""
    rows = []
    for name, run in sorted(records.by_name.items()):
        if name.startswith("compressed/"):
            side = run["side"]
            amount = {"sparse": f", {side['amount']:g} of the elements", "powersgd": f", rank {side['amount']:g}"}
            hook = side["hook"] + amount.get(side["hook"], "")
            what = f"{side['optimizer']}, {side['lr']:g}, {side['local_batch']} sequences a host"
            ours = _run(records, "lengths", f"two_{side['link']}", side["seconds"], side["seed"])
            beside = f"{share(ours, run):.3f}" if ours else ""
            rows.append(row(side["link"], hook, what, f"{run['loss']:.3f}", f"{run['updates']:,}", beside))
    return "\n".join(rows)


def texts(records: Records) -> str:
    """By text: losses of one alone, and shares of time."""
    rows = []
    for name, words in TEXTS.items():
        sides = ("alone_adamw", "alone_muon", "default_alone")
        alone = [_run(records, "texts", f"{side}_{name}", 150) for side in sides]
        two = _run(records, "texts", f"two_10_{name}", 105)
        if all(alone) and two:
            adamw, constant, default = (run for run in alone if run)
            losses = [f"{run['loss']:.3f}" for run in (adamw, constant, default)]
            rows.append(row(words, *losses, f"{share(default, adamw):.3f}", f"{share(two, default):.3f}"))
    return "\n".join(rows)


def lengths(records: Records) -> str:
    """By the seconds of one alone: what it has come to, and the shares of time of two hosts."""
    rows = []
    for seconds in LENGTHS:
        alone = _run(records, "lengths", "alone", seconds)
        two = [_run(records, "lengths", f"two_{link}", HALF * seconds) for link in ("10", "100")]
        if alone and all(two):
            shares = [f"{share(run, alone):.3f}" for run in two if run]
            tokens = f"{alone['tokens'] / PARAMETERS:.1f}"
            rows.append(row(seconds, tokens, alone["last_batch"], f"{alone['loss']:.3f}", *shares))
    return "\n".join(rows)


def constants(records: Records) -> str:
    """By constant batch and rate: losses of both seeds, and the default's shares of time."""
    rows = []
    for batch in CONSTANTS:
        for rate in CONSTANT_RATES:
            pairs = [
                (default, other)
                for seed in (10, 11)
                if (default := _run(records, "constants", "default", 150, seed))
                and (other := _run(records, "constants", f"constant_{batch}_{rate}", 150, seed))
            ]
            if pairs:
                losses = ", ".join(f"{other['loss']:.3f}" for _, other in pairs)
                rows.append(row(batch, rate, losses, ", ".join(f"{share(*pair):.3f}" for pair in pairs)))
    defaults = [run for seed in (10, 11) if (run := _run(records, "constants", "default", 150, seed))]
    if defaults:
        rows.append(row("the default", "3.5e-3", ", ".join(f"{run['loss']:.3f}" for run in defaults), "1"))
    return "\n".join(rows)


def apart(records: Records) -> str:
    """By H: the loss in a short and in a long run, and how much of the time it costs beside the shortest rounds."""
    rows = []
    for updates in ROUNDS:
        cells: list[object] = [updates]
        for seconds in (LENGTHS[0], LENGTHS[-1]):
            shortest = _run(records, "apart", f"H{ROUNDS[0]}", HALF * seconds)
            run = _run(records, "apart", f"H{updates}", HALF * seconds)
            if run and shortest:
                cells += [f"{run['updates']:,}", f"{run['loss']:.3f}", f"{share(shortest, run):.3f}"]
        if len(cells) > 1:
            rows.append(row(*cells))
    return "\n".join(rows)


def _run(records: Records, question: str, side: str, seconds: float, seed: int = SEED) -> Record | None:
    return records.by_name.get(f"{question}/{side}/{seconds:.10g}s/seed{seed}")
