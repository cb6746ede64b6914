"""Print what experiments have found, from the records that are kept beside this file: python experiments/figures.py.

With --folder the records are taken from runs first, and kept.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cases import LINKS, SEEDS, clock_of
from kept import RECORDS, Points, Records, seconds_to
from questions import ALONE_RATES, BATCHES, DIFFERENT, POOLS, QUESTIONS, ROUNDS, SCHEDULED
from ratios import extrapolated, interval, ratios, share
from runs import Record, read

MERGED_BATCH = 4
"""Sequences of a worker's update after the last merge, and in one trainer."""


def extrapolated_bound(loss: float, points: Points) -> float | None:
    """What was measured where `seconds_to` extrapolates below the shortest budget, at which the loss was lower already.

    Returns:
        That budget, which is an upper bound; None: the loss was reached between two budgets.
    """
    return points[0][0] if points[0][1] < loss else None


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f}, {len(values)} seeds)"


def second_machine(records: Records, question: str = "second_machine", suffix: str = "") -> dict[str, list[float]]:
    """With AdamW, the time to the loss that one host alone reaches, over its time; by figure, a number for each seed.

    Of a side with one budget: at most that, or infinite.
    """
    found: dict[str, list[float]] = {}
    for figure, seconds, target, points in _second_machines(records, question, suffix):
        found.setdefault(figure, []).append(seconds_to(target, points) / seconds)
    return found


def second_machine_bounds(records: Records, question: str, suffix: str) -> dict[str, list[float]]:
    """By figure, the upper bounds that were measured for those seeds of which `second_machine` extrapolates."""
    found: dict[str, list[float]] = {}
    for figure, seconds, target, points in _second_machines(records, question, suffix):
        if (bound := extrapolated_bound(target, points)) is not None:
            found.setdefault(figure, []).append(bound / seconds)
    return found


def _second_machines(records: Records, question: str, suffix: str) -> Iterator[tuple[str, float, float, Points]]:
    """Of every figure and seed: the seconds of one host alone, its loss, and the points of the others."""
    sides = {
        "second_machine_10mbit_adamw": "two_10",
        "second_machine_30mbit_adamw": "two_30",
        "second_machine_100mbit_adamw": "two_100",
        "four_machines_100mbit_adamw": "four_100",
    }
    for figure, side in sides.items():
        for seed in SEEDS:
            alone = records.points(question, f"alone{suffix}", seed)
            points = records.points(question, side + suffix, seed)
            if alone and points:
                ((seconds, target),) = alone
                yield figure, seconds, target, points


def over_others(
    records: Records, question: str, ours: str, others: Mapping[str, str], seconds: float, own: str | None = None
) -> dict[str, list[float]]:
    """Our time to the loss that each other side has reached in `seconds`, over that; by side, for each seed.

    Args:
        own: the question that has our side; None: the same.
    """
    found: dict[str, list[float]] = {}
    for name, side in others.items():
        for seed in SEEDS:
            loss = records.loss(question, side, seconds, seed)
            points = records.points(own or question, ours, seed)
            if loss is not None and len(points) > 1:
                found.setdefault(name, []).append(seconds_to(loss, points) / seconds)
    return found


def merging_at_equal_tokens(records: Records) -> dict[str, list[float]]:
    """Tokens of a pool over those with which one trainer has the pool's loss; by pool, for each seed."""
    found: dict[str, list[float]] = {}
    for side in POOLS:
        for seed in SEEDS:
            trainer = records.points("merging", "one_trainer", seed, "tokens")
            for tokens, loss in records.points("merging", side, seed, "tokens"):
                if trainer:
                    found.setdefault(side, []).append(tokens / seconds_to(loss, trainer))
    return found


def print_all(records: Records) -> None:
    _print_machines(records)
    _print_second_machine(records, "second_machine", "")
    others = {"free": "two_free", "30mbit": "two_30"}
    for name, values in over_others(records, "second_machine", "two_10", others, 75).items():
        print(f"second_machine_over_{name} = {spread(values)}")
    for corpus in ("headers", "wikitext2"):
        _print_second_machine(records, "other_corpora", f"_{corpus}")
    for link in DIFFERENT:
        fixed = {f"H {updates}": f"H{updates}_{link}" for updates in ROUNDS}
        _print_best("over_best_fixed_h", link, over_others(records, "rhythm", f"link_{link}", fixed, 60), 40 / 60)
    for link in LINKS:
        constant = {f"constant {batch}": f"constant_{batch}_{link}" for batch in BATCHES}
        others = constant | {"norm test": f"norm_test_{link}"}
        ratios = over_others(records, "batches", f"two_{link}", others, 90, "second_machine")
        shortest = min((seconds for seconds, _ in records.points("second_machine", f"two_{link}", SEEDS[0])), default=0)
        _print_best("over_best_constant", link, ratios, shortest / 90)
    _print_batches(records)
    _print_merging(records)
    _print_controls(records)
    _print_schedules(records)
    _print_sources(records)
    _print_compressed(records)


def _print_compressed(records: Records) -> None:
    """The best hook's time, hidden behind two thirds of its update or not at all, over the default's to its loss."""
    best: dict[str, Record] = {}
    for name, run in records.by_name.items():
        if name.startswith("compressed/"):
            figure = f"compressed_ddp_{run['side']['link']}mbit{'' if run['side'].get('hidden', 1) else '_waits'}"
            best[figure] = min(best.get(figure, run), run, key=lambda one: one["loss"])
    for figure, run in best.items():
        ours = records.reached("lengths", f"two_{run['side']['link']}", run["side"]["seed"])
        print(f"{figure} = {1 / share(ours, run['curve']):.2f}")


def _print_machines(records: Records) -> None:
    """What the default needs of the time of one alone, of the best constant batch, and of AdamW."""
    further = extrapolated(records)
    for name, values in ratios(records).items():
        print(f"{name} = {interval(values)}; {len(values)} seeds, {further[name]} of them extrapolated")


def _print_second_machine(records: Records, question: str, suffix: str) -> None:
    bounds = second_machine_bounds(records, question, suffix)
    for name, values in second_machine(records, question, suffix).items():
        kept = bounds.get(name, [])
        extrapolated = f"; {len(kept)} extrapolated, measured: at most {max(kept):.3f}" if kept else ""
        print(f"{name}{suffix} = {spread(values)}{extrapolated}")


def _print_batches(records: Records) -> None:
    """What batches by progress per second and by the norm test have come to after 90 s: sequences, and losses."""
    sides = [("second_machine", f"two_{link}") for link in LINKS] + [("batches", "norm_test_10")]
    sides += [("batches", f"constant_{batch}_10") for batch in BATCHES]
    for question, side in sides:
        made = {seed: records.by_name.get(f"{question}/{side}/90s/seed{seed}") for seed in SEEDS}
        ends = [f"seed {seed}: {run['last_batch']}, loss {run['loss']:.4f}" for seed, run in made.items() if run]
        if ends:
            print(f"last batch, {side}, 90 s: " + "; ".join(ends))


def _print_merging(records: Records) -> None:
    """Pools that merge over one trainer: time at equal losses, tokens at equal losses, and what the seconds were."""
    at_equal_tokens = merging_at_equal_tokens(records)
    for name, values in over_others(records, "merging", "one_trainer", {name: name for name in POOLS}, 45).items():
        print(f"merging_over_one_trainer, {name} = {spread([1 / value for value in values])}")
        print(f"merging_over_one_trainer_in_tokens, {name} = {spread(at_equal_tokens[name])}")
    for side in ("one_trainer", *POOLS):
        if run := records.by_name.get(f"merging/{side}/45s/seed{SEEDS[0]}"):
            fixed, of_sequence = clock_of("adamw")
            updates = run["updates"] * (fixed + MERGED_BATCH * of_sequence)
            detail = f"{run['updates']} updates of {MERGED_BATCH} sequences a worker would take {updates:.1f} of 45 s"
            print(f"merging, {side}: {run['rounds']} rounds, {run['bytes_sent'] / 1e6:.1f} MB; {detail}")


def _print_sources(records: Records) -> None:
    """The experiments of AdLoCo's paper, at equal tokens: losses, and what they took."""
    sides: dict[tuple[str, str], list[Record]] = {}
    for name, record in records.by_name.items():
        question, side, budget, _ = name.split("/")
        if question == "sources":
            sides.setdefault((budget, side), []).append(record)
    for (budget, side), made in sorted(sides.items()):
        means = {key: statistics.mean(record[key] for record in made) for key in ("rounds", "updates", "bytes_sent")}
        detail = f"{means['rounds']:,.0f} rounds, {means['updates']:,.0f} updates, {means['bytes_sent'] / 1e6:,.1f} MB"
        print(f"sources, {budget}, {side}: loss {spread([record['loss'] for record in made])}; {detail}")


def _print_best(figure: str, link: str, ratios: Mapping[str, list[float]], shortest: float) -> None:
    """The other side that is the hardest to beat.

    Args:
        shortest: our shortest budget over theirs; a ratio below it is extrapolated, and says no more than that.
    """
    if not ratios:
        return
    best = max(ratios, key=lambda name: statistics.mean(ratios[name]))
    print(f"{figure}, {link} Mbit/s = {spread(ratios[best])}; the best is {best}")
    for name, values in ratios.items():
        extrapolated = sum(value < shortest for value in values)
        detail = f"; {extrapolated} extrapolated, measured: below {shortest:.3f}" if extrapolated else ""
        print(f"    {name}: {spread(values)}{detail}")


def _print_controls(records: Records) -> None:
    """Losses of the controls at 10 Mbit/s, and how many times as long as ours they take to reach them."""
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    longest = 0.0
    for name, record in records.by_name.items():
        question, side, _, seeded = name.split("/")
        if question == "controls" and side != "ours":
            ours = _ours_at_10mbit(records, int(seeded.removeprefix("seed")))
            ratio = record["budget"] / seconds_to(record["loss"], ours)
            found.setdefault((side, record["budget"]), []).append((record["loss"], ratio))
            longest = ours[-1][0]
    for (side, budget), made in sorted(found.items()):
        losses, ratios = zip(*made, strict=True)
        bound = f"; beyond our {longest:g} s: below {budget / longest:.3f}" if min(ratios) < budget / longest else ""
        print(f"{side}: loss {spread(losses)} in {budget:g} s; {spread(ratios)} times as long as ours{bound}")


def _print_schedules(records: Records) -> None:
    """Losses by seconds of a cosine and of a constant rate with an average of anchors, seeds paired."""
    for seconds in SCHEDULED:
        sides: dict[str, list[float]] = {}
        for seed in SEEDS:
            cosine = records.loss("schedules", "cosine", seconds, seed)
            constant = dict(_ours_at_10mbit(records, seed)).get(seconds)
            if cosine is not None and constant is not None:
                sides.setdefault("cosine", []).append(cosine)
                sides.setdefault("constant", []).append(constant)
        if sides:
            print(
                f"schedules, {seconds:g} s: " + "; ".join(f"{name} {spread(losses)}" for name, losses in sides.items())
            )
    for rate in ALONE_RATES:
        losses = [records.loss("schedules", f"alone_constant_{rate}", 150, seed) for seed in SEEDS]
        made = [loss for loss in losses if loss is not None]
        if made:
            print(f"schedules, one alone, constant {rate}: {spread(made)}")


def _ours_at_10mbit(records: Records, seed: int) -> Points:
    """The default settings on two hosts, by rising seconds."""
    return sorted([*records.points("controls", "ours", seed), *records.points("second_machine", "two_10", seed)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="runs that experiments/run.py has made")
    parser.add_argument("--wikitext", type=Path, metavar="FILE", help="as with experiments/run.py")
    options = parser.parse_args()
    records = Records.kept()
    if options.folder:
        made = [read(question(options.wikitext), options.folder) for question in QUESTIONS.values()]
        made.append([json.loads(file.read_text()) for file in sorted((options.folder / "compressed").glob("*.json"))])
        records.by_name.update({record["name"]: record for question in made for record in question})
        RECORDS.write_text("".join(json.dumps(record) + "\n" for record in records.by_name.values()))
    print_all(records)


if __name__ == "__main__":
    main()
