"""What a run will do, before it does: layout, memory, bytes and tokens (`--dry-run`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from adloco_dist.setup.agreement import examine_data, examine_replay, with_known_budget
from adloco_dist.setup.building import divided_blocks, require_matrices
from adloco_dist.setup.forecast import UPDATE_SECONDS, forecast, in_words, seconds_on_links
from adloco_dist.setup.parts import Parts
from adloco_dist.setup.scale import GOOD_UTILISATION, LARGE, Traffic, print_scale
from adloco_dist.terminal import new_console, new_table, report_line

MEGA, GIGA = 1e6, 1e9
TABLE_WIDTH = 144


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
    splits = examine_data(settings, layout, parts)
    objective = parts.objective(settings, splits)
    examine_replay(settings, layout)
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
        f"averages of each trainer until the budget is spent, with {length}: {counts[0]} with batches of {batch}; "
        f"{counts[1]} and {counts[2]} if they grow as the root of what was seen, or in proportion (docs/theory.md)"
    )


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / GIGA:,.1f} GB" if num_bytes >= GIGA else f"{num_bytes / MEGA:,.1f} MB"


def _ranks_of(seat: int, settings: Settings) -> str:
    """A rank, or the first and the last of a seat."""
    ranks = ranks_of_seat(seat, settings.pool.ranks_per_worker)
    return str(seat) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _groups_of(seats: Sequence[int], settings: Settings) -> str:
    """The ranks that average with each other: of all of them, or of the first and the last part."""
    size = settings.pool.ranks_per_worker
    first, last = ("{" + ",".join(str(size * seat + shard) for seat in seats) + "}" for shard in (0, size - 1))
    return first if size == 1 else f"{first} to {last}"


def _trainer_table(settings: Settings, layout: Layout, seats: Sequence[int], traffic: Traffic) -> Table:
    columns = ("trainer", "ranks of its workers", "nodes", "group", "first total batch", "MB sent per rank and round")
    table = new_table(columns, "trainers", has_lines=True)
    for trainer in layout.trainers:
        of_trainer = layout.ranks(trainer)
        table.add_row(
            str(trainer),
            " ".join("+".join(_ranks_of(seat, settings) for seat in worker) for worker in layout.workers[trainer]),
            str(layout.num_nodes(trainer, seats)),
            _groups_of(of_trainer, settings),
            str(layout.num_workers(trainer) * settings.batching.local_batch),
            _sent_in_words(settings, traffic, of_trainer),
        )
    return table


def _sent_in_words(settings: Settings, traffic: Traffic, seats: Sequence[int]) -> str:
    """What a rank sends in a round, in MB; with wire.format=adaptive by what the link allows."""
    formats = (
        [traffic, replace(traffic, in_four_bits=True)] if settings.wire.format is WireFormat.adaptive else [traffic]
    )
    return " or ".join(f"{format.of_rank(seats) / MEGA:,.2f}" for format in formats)


def _forecast_table(settings: Settings, layout: Layout, on_links: Mapping[int, float]) -> Table:
    """Rounds of the seats whose trainers average over links; these take `on_links` seconds a round, by trainer."""
    is_fixed = settings.algorithm.round is not RoundLength.link
    columns = ["rank", "seconds on its links", *(f"{seconds:g} s" for seconds in UPDATE_SECONDS)]
    columns += [f"{GOOD_UTILISATION:.0%} from"] if is_fixed else []
    title = "by the measured links and the time of an update: share of a round in updates, H where it follows, "
    title += "and the progress of a trainer's workers over one's, at most"
    table = new_table(columns, title, has_lines=True)
    for seat in sorted({seat for trainer in layout.trainers for seat in layout.ranks(trainer)}):
        placed = layout.placed_on(seat)
        seconds, on_seat = sum(on_links[trainer] for trainer in placed), sum(map(len, placed.values()))
        if not seconds:
            continue
        num_workers = max(map(layout.num_workers, placed))
        cells = [in_words(settings, on_seat, num_workers, seconds, update) for update in UPDATE_SECONDS]
        if is_fixed:
            cells.append(f"{forecast(settings, on_seat, seconds, 0.0).update_seconds(GOOD_UTILISATION):.3g} s")
        table.add_row(_ranks_of(seat, settings), f"{seconds:.3g}", *cells)
    return table


def _rank_table(settings: Settings, layout: Layout, seats: Sequence[int], part_bytes: int, share: float) -> Table:
    unit, name = (GIGA, "GB") if part_bytes >= GIGA else (MEGA, "MB")
    columns = ("rank", "node", "workers", *state_vectors(settings, 0, 0, share), "sum")
    title = f"memory per rank in {name}, activations not counted; checkpoint: its copy, on the CPU"
    table = new_table(columns, title, has_lines=True)
    for seat, node in enumerate(seats):
        placed = layout.placed_on(seat).values()
        vectors = state_vectors(settings, len(placed), sum(map(len, placed)), share)
        counts = [*vectors.values(), sum(vectors.values())]
        row = [f"{count * part_bytes / unit:,.1f}" for count in counts]
        table.add_row(_ranks_of(seat, settings), str(node), str(vectors["weights"]), *row)
    return table
