"""What a run will do, before it does: layout, memory, bytes and tokens (`--dry-run`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller

import torch
from rich.table import Table

from adloco_dist.cluster.environment import Link
from adloco_dist.config import InnerOptimizer, InnerSettings, RoundLength, Settings, WireFormat
from adloco_dist.objective.protocol import ParameterCount
from adloco_dist.policy.layout import Layout, experiment_layout, ranks_of_seat, seat_nodes
from adloco_dist.policy.simulation import rounds_until
from adloco_dist.pool.capacity import state_vectors
from adloco_dist.pool.flat_model import vector_dtype
from adloco_dist.pool.worker import peak_lr
from adloco_dist.setup.agreement import examine_plans, examine_replay, with_known_budget
from adloco_dist.setup.answers import COPY, answers, vectors_of
from adloco_dist.setup.building import divided_blocks, require_matrices
from adloco_dist.setup.forecast import UPDATE_SECONDS, forecast, in_words, seconds_on_links
from adloco_dist.setup.parts import Parts
from adloco_dist.setup.scale import GOOD_UTILISATION, LARGE, Traffic, print_scale
from adloco_dist.terminal import new_console, new_table, report_line
from adloco_dist.text import set_of_ranks

MEGA, GIGA = 1e6, 1e9
TABLE_WIDTH = 144
MAX_LISTED = 8
"""Workers whose ranks are listed one by one."""
Cells = tuple[str, ...]


def print_dry_run(
    settings: Settings, nodes: Sequence[int], parts: Parts, links: Sequence[Link] = (), unread: Sequence[str] = ()
) -> None:
    """Print what every rank would compute, hold and send; `nodes` has the node of every rank.

    A model that the settings name is not built, so it may be of any size. `links` are those that were measured,
    `unread` has a line for each override without effect.

    Raises:
        SettingsError: training would refuse this for another reason than memory.
    """
    layout = experiment_layout(settings, nodes)
    splits = parts.splits(settings)
    splits.train.check_size(len(layout.trainers), layout.num_workers(0), settings.data.shards)
    objective = parts.objective(settings, splits)
    examine_replay(settings, layout)
    examine_plans(with_known_budget(settings, splits), splits, layout, nodes)
    module = objective.check_shape() or objective.build(torch.device("cpu"), in_bf16=False)
    parameters = ParameterCount.of(module)
    if settings.inner.optimizer is InnerOptimizer.muon:
        require_matrices(settings.inner, objective, parameters.hidden)
    element_bytes = vector_dtype(settings.precision).itemsize
    size = settings.pool.ranks_per_worker
    if size > 1:
        divided_blocks(objective, module, settings)
    seats, part_bytes = seat_nodes(nodes, size), -(-parameters.trained // size) * element_bytes
    for line in unread:
        report_line(f"note: {line}")
    console = new_console(min_width=TABLE_WIDTH)
    console.soft_wrap = True
    sequences = "not counted" if splits.train.num_sequences is None else f"{splits.train.num_sequences:,}"
    together = f" on each of {size} ranks that hold it together" if size > 1 else ""
    console.print(f"model: {parameters.trained:,} parameters; one flat vector is {_in_words(part_bytes)}{together}")
    if parameters.frozen:
        held = _in_words(-(-parameters.frozen // size) * element_bytes)
        console.print(f"frozen: {parameters.frozen:,} more parameters, {held} on every rank, which are never sent")
    console.print(_optimizer_in_words(settings.inner, parameters))
    console.print(
        f"data: {splits.source}: {sequences} training and {splits.validation.num_sequences:,} "
        f"validation sequences of {settings.data.sequence_length} tokens"
    )
    for line in answers(settings, nodes, layout, parameters, links):
        console.print(line)
    traffic = Traffic(settings, parameters.trained, nodes)
    console.print(_trainer_table(settings, layout, seats, traffic))
    console.print(_rank_table(settings, layout, seats, part_bytes, parameters.matrix_share))
    on_links = {
        trainer: seconds_on_links(settings, traffic, layout.ranks(trainer), seats, links) for trainer in layout.trainers
    }
    if any(on_links.values()):
        console.print(_forecast_table(settings, layout, on_links))
    elif len(set(nodes)) > 1 and not links:
        console.print("links: not measured; on the nodes, under torchrun, they are, and utilisation is predicted")
    if parameters.total >= LARGE and not settings.algorithm.is_data_parallel:
        print_scale(console, settings, parameters, list(nodes).count(nodes[0]))
    budget, workers = with_known_budget(settings, splits).budget_amount, list(map(layout.num_workers, layout.trainers))
    if budget.unit == "tokens" and max(workers) > 1:
        console.print(_averages(settings, layout, budget.number))
    tokens = settings.data.sequence_length * settings.batching.local_batch * settings.algorithm.updates_per_round
    console.print(
        f"tokens of the first round: {tokens:,} per worker, {tokens * sum(workers):,} in the pool; nothing was trained"
    )


def _optimizer_in_words(inner: InnerSettings, parameters: ParameterCount) -> str:
    """What updates the parameters, at which rate."""
    optimizer = inner.optimizer.name
    if inner.optimizer is InnerOptimizer.muon:
        optimizer += f" for {parameters.matrix_share:.0%} of the elements, adamw for the rest"
    return f"inner optimizer: {optimizer}; the peak rate of one worker is {peak_lr(inner, parameters.hidden):.3g}"


def _averages(settings: Settings, layout: Layout, budget: float) -> str:
    """How often a trainer averages until the budget, in tokens, is spent."""
    updates = settings.algorithm.updates_per_round
    sequences = budget / settings.data.sequence_length / len(layout.trainers)
    batch = layout.num_workers(layout.trainers[0]) * settings.batching.local_batch
    counts = [f"{rounds_until(sequences, updates, batch, exponent):,.0f}" for exponent in (0.0, 0.5, 1.0)]
    length = f"H = {updates}" + (", which the link will change" if settings.algorithm.round is RoundLength.link else "")
    return (
        f"rounds until the budget is spent, with {length}: {counts[0]} if batches stay at {batch} sequences, "
        f"{counts[1]} if they grow with the root of the sequences seen, {counts[2]} if in proportion to them "
        "(docs/theory.md)"
    )


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / GIGA:,.1f} GB" if num_bytes >= GIGA else f"{num_bytes / MEGA:,.1f} MB"


def _ranks_of(seats: Sequence[int], settings: Settings) -> str:
    """The ranks of some seats, as in "0-7,16-23"."""
    ranks = [rank for seat in seats for rank in ranks_of_seat(seat, settings.pool.ranks_per_worker)]
    return set_of_ranks(ranks)[1:-1]


def _alike(rows: Iterable[tuple[int, Cells]]) -> dict[Cells, list[int]]:
    """The seats that have the same cells, by these."""
    alike: dict[Cells, list[int]] = {}
    for seat, cells in rows:
        alike.setdefault(cells, []).append(seat)
    return alike


def _workers_of(layout: Layout, trainer: int, settings: Settings) -> str:
    """The ranks of each of a trainer's workers; of many, of all together."""
    workers = layout.workers[trainer]
    if len(workers) > MAX_LISTED:
        return f"{len(workers)} on {_ranks_of(layout.ranks(trainer), settings)}"
    return " ".join("+".join(_ranks_of([seat], settings) for seat in worker) for worker in workers)


def _groups_of(seats: Sequence[int], settings: Settings) -> str:
    """The ranks that average with each other: of all of them, or of the first and the last part."""
    size = settings.pool.ranks_per_worker
    first, last = (set_of_ranks([size * seat + shard for seat in seats]) for shard in (0, size - 1))
    return first if size == 1 else f"{first} to {last}"


def _trainer_table(settings: Settings, layout: Layout, seats: Sequence[int], traffic: Traffic) -> Table:
    columns = ("trainer", "ranks of its workers", "nodes", "group", "first total batch", "MB a rank sends in a round",
               "MB of averages inside a node, at most", "MB a node sends to others")  # fmt: skip
    table = new_table(columns, "trainers", has_lines=True)
    formats = [traffic]  # with wire.format=adaptive by what the link allows
    if settings.wire.format is WireFormat.adaptive:
        formats.append(replace(traffic, in_four_bits=True))
    for trainer in layout.trainers:
        of_trainer = layout.ranks(trainer)
        counts = [methodcaller(name, of_trainer) for name in ("of_rank", "inside", "over_link")]
        table.add_row(
            str(trainer),
            _workers_of(layout, trainer, settings),
            str(layout.num_nodes(trainer, seats)),
            _groups_of(of_trainer, settings),
            str(layout.num_workers(trainer) * settings.batching.local_batch),
            *(" or ".join(f"{sent(format) / MEGA:,.2f}" for format in formats) for sent in counts),
        )
    return table


def _forecast_table(settings: Settings, layout: Layout, on_links: Mapping[int, float]) -> Table:
    """Rounds of the seats whose trainers average over links; these take `on_links` seconds a round, by trainer."""
    is_fixed = settings.algorithm.round is not RoundLength.link
    columns = ["ranks", "seconds on their links", *(f"{seconds:g} s" for seconds in UPDATE_SECONDS)]
    columns += [f"{GOOD_UTILISATION:.0%} from"] if is_fixed else []
    title = "by the measured links and the time of an update: share of a round in updates, H where it follows, "
    title += "and the progress of a trainer's workers over one's, at most"
    table = new_table(columns, title, has_lines=True)
    rows: list[tuple[int, Cells]] = []
    for seat in sorted({seat for trainer in layout.trainers for seat in layout.ranks(trainer)}):
        placed = layout.placed_on(seat)
        seconds, on_seat = sum(on_links[trainer] for trainer in placed), sum(map(len, placed.values()))
        if not seconds:
            continue
        num_workers = max(map(layout.num_workers, placed))
        cells = [in_words(settings, on_seat, num_workers, seconds, update) for update in UPDATE_SECONDS]
        if is_fixed:
            cells.append(f"{forecast(settings, on_seat, seconds, 0.0).update_seconds(GOOD_UTILISATION):.3g} s")
        rows.append((seat, (f"{seconds:.3g}", *cells)))
    for cells, members in _alike(rows).items():
        table.add_row(_ranks_of(members, settings), *cells)
    return table


def _rank_table(settings: Settings, layout: Layout, seats: Sequence[int], part_bytes: int, share: float) -> Table:
    unit, name = (GIGA, "GB") if part_bytes >= GIGA else (MEGA, "MB")
    kinds = [kind for kind in state_vectors(settings, 0, 0, share) if kind != COPY]
    columns = ("ranks", "nodes", "workers of each", *kinds, "all of these", "copy for a checkpoint, on the CPU")
    table = new_table(columns, f"memory of each rank in {name}, activations not counted", has_lines=True)
    rows: list[tuple[int, Cells]] = []
    for seat in range(len(seats)):
        vectors = vectors_of(settings, layout, seat, share)
        held = [vectors[kind] for kind in kinds]
        counts = [f"{count * part_bytes / unit:,.1f}" for count in (*held, sum(held), vectors[COPY])]
        rows.append((seat, (str(vectors["weights"]), *counts)))
    for cells, members in _alike(rows).items():
        nodes = set_of_ranks(sorted({seats[seat] for seat in members}))[1:-1]
        table.add_row(_ranks_of(members, settings), nodes, *cells)
    return table
