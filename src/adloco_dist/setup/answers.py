"""What a dry run answers before its tables: whether the run fits, whether the link is enough, and what is gained."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import psutil
import torch

from adloco_dist.cluster.environment import Link
from adloco_dist.config import OuterState, RoundLength, Settings, SettingsError
from adloco_dist.objective.protocol import ParameterCount
from adloco_dist.policy.layout import Layout, experiment_layout, seat_nodes
from adloco_dist.pool.capacity import state_vectors
from adloco_dist.pool.flat_model import vector_dtype
from adloco_dist.setup.forecast import (
    SHORTEST_SECONDS,
    UPDATE_SECONDS,
    forecast,
    progress,
    seconds_on_links,
    shortest_update,
)
from adloco_dist.setup.scale import GOOD_UTILISATION, LARGE, LINKS, Traffic, predictions, update_seconds
from adloco_dist.text import in_bytes

H100_BYTES = 80e9
STATE_SHARE = 0.8
"""Of a device's memory that a run's state may take: more leaves little room for activations."""
SLOW_LINK = {"10 Mbit/s": 1.25e6}
"""Bytes per second of a link that is enough for small models alone."""
COPY = "checkpoint"
"""The one kind of vectors that is on the CPU wherever the others are."""


def answers(
    settings: Settings, nodes: Sequence[int], layout: Layout, parameters: ParameterCount, links: Sequence[Link]
) -> list[str]:
    """One line for each question; without several nodes there is no link to ask about.

    Args:
        nodes: the node of every rank.
        links: those that were measured.
    """
    memory, remedy = _memory(settings, nodes, layout, parameters)
    lines, note = [memory], ""
    if remedy:  # what else is asked is asked of what can run
        note = f", with pool.ranks_per_worker={remedy.pool.ranks_per_worker}"
        settings, layout = remedy, experiment_layout(remedy, nodes)
    sent = Traffic(settings, parameters.trained, nodes).over_fullest_link(layout)
    if sent:
        lines.append(f"link{note}: {_link(settings, nodes, layout, parameters, links, sent)}")
        if gain := _gain(settings, nodes, layout, parameters, links):
            lines.append(f"gain{note}: {gain}")
    return [*lines, *(["tables: of the settings as they are given"] if remedy else [])]


def vectors_of(settings: Settings, layout: Layout, seat: int, matrix_share: float) -> Mapping[str, float]:
    """Number of flat vectors that a rank, or each of a seat, holds, by kind."""
    placed = layout.placed_on(seat).values()
    return state_vectors(settings, len(placed), sum(map(len, placed)), matrix_share)


def on_device(settings: Settings, vectors: Mapping[str, float]) -> float:
    """How many of these vectors are where the rank computes; the others are on the CPU."""
    elsewhere = {COPY, *(["outer state"] if settings.pool.outer_state is OuterState.cpu else [])}
    return sum(count for kind, count in vectors.items() if kind not in elsewhere)


def _held(settings: Settings, layout: Layout, parameters: ParameterCount, has_gpu: bool) -> tuple[float, float]:
    """Bytes that the rank with the most holds where it computes, and beside that on the CPU, if that is another."""
    size = settings.pool.ranks_per_worker
    unit = vector_dtype(settings.precision).itemsize / size
    held = []
    for seat in {seat for trainer in layout.trainers for seat in layout.ranks(trainer)}:
        vectors = vectors_of(settings, layout, seat, parameters.matrix_share)
        device = on_device(settings, vectors)
        copies = 0.0 if settings.checkpoint.every is None else vectors[COPY]
        others = sum(vectors.values()) - device - vectors[COPY] + copies
        held.append((unit * (device * parameters.trained + parameters.frozen), unit * others * parameters.trained))
    on_its_device, on_cpu = max(held)
    return (on_its_device, on_cpu) if has_gpu else (on_its_device + on_cpu, 0.0)


def _memory(
    settings: Settings, nodes: Sequence[int], layout: Layout, parameters: ParameterCount
) -> tuple[str, Settings | None]:
    """Whether every rank's state fits on its device, and the settings with which it would if it does not."""
    ranks_on_node = max(Counter(nodes).values())
    has_gpu = torch.cuda.is_available() or parameters.total >= LARGE
    if torch.cuda.is_available():
        sharers = -(-ranks_on_node // torch.cuda.device_count())
        limit, name = torch.cuda.get_device_properties(0).total_memory / sharers, "its part of this machine's GPUs is"
    elif has_gpu:
        limit, name = H100_BYTES, "no GPU is here to ask, an H100 has"
    else:
        limit, name = psutil.virtual_memory().total / ranks_on_node, "its part of this machine is"
    device, host = _held(settings, layout, parameters, has_gpu)
    holds = f"each rank holds {in_bytes(device)}, activations not counted ({name} {in_bytes(limit)})"
    if device <= STATE_SHARE * limit:
        on_cpu, is_room = _on_cpu(host * ranks_on_node)
        verdict = "it fits" if is_room else "it fits on devices, but not on a node's CPU"
        advice = "" if is_room else "; checkpoint.every=null spares copies; else it needs nodes with more memory"
        return f"memory: {verdict}: {holds}{on_cpu}{advice}", None
    verdict = "it is tight" if device <= limit else "it does not fit"
    for size in range(settings.pool.ranks_per_worker + 1, ranks_on_node + 1):
        remedy = replace(settings, pool=replace(settings.pool, ranks_per_worker=size))
        try:
            device, host = _held(remedy, experiment_layout(remedy, nodes), parameters, has_gpu)
        except SettingsError:  # ranks are no multiple of it
            continue
        if device <= STATE_SHARE * limit:
            on_cpu, _ = _on_cpu(host * ranks_on_node)
            advice = f"set pool.ranks_per_worker={size}, with which it is {in_bytes(device)}{on_cpu}"
            return f"memory: {verdict}: {holds}; {advice}", remedy
    return f"memory: {verdict}: {holds}; it needs nodes with more or larger devices, or a smaller model", None


def _on_cpu(num_bytes: float) -> tuple[str, bool]:
    """What a node holds beside its GPUs, and whether it has the memory, as far as that is known: of nodes like this."""
    if not num_bytes:
        return "", True
    held, memory = f"; on the CPU, a node holds {in_bytes(num_bytes)} more", psutil.virtual_memory().total
    if not torch.cuda.is_available():
        return f"{held}, which must be free there", True
    return f"{held} (this machine has {in_bytes(memory)})", num_bytes <= STATE_SHARE * memory


def _link(
    settings: Settings,
    nodes: Sequence[int],
    layout: Layout,
    parameters: ParameterCount,
    links: Sequence[Link],
    sent: int,
) -> str:
    """Which links are enough for the model on these nodes; of a small one, or where every update waits, which updates
    are long enough for them."""
    traffic = Traffic(settings, parameters.trained, nodes)
    line = f"each node sends {in_bytes(sent)} to the others in a round"
    if inside := max(traffic.inside(layout.ranks(trainer)) for trainer in layout.trainers):
        line += f", and up to {in_bytes(inside)} of averages between its own ranks"
    good = f"enough for {GOOD_UTILISATION:.0%} of the time in updates"
    (of_nodes,) = predictions(settings, parameters, list(nodes).count(nodes[0]), [len(set(nodes))]) or (None,)
    if parameters.total < LARGE or of_nodes is None or settings.algorithm.is_data_parallel:
        seats = seat_nodes(nodes, settings.pool.ranks_per_worker)
        _, ranks, on_seat = _largest_trainer(layout)
        found = []
        for name, known in _known_or_assumed({seats[seat] for seat in ranks}, links).items():
            seconds = seconds_on_links(settings, traffic, ranks, seats, known)
            shortest = shortest_update(settings, on_seat, seconds) if seconds else None
            if shortest is not None:
                found.append(f"{name} if they take {shortest:.2g} s or more")
            if shortest == SHORTEST_SECONDS:  # faster ones are enough, too
                break
        return f"{line}; {good}: {', '.join(found)}" if found else line
    algorithm = settings.algorithm
    longest = algorithm.updates_range[1] if algorithm.round is RoundLength.link else algorithm.updates_per_round
    needed = {name: length for name, (_, length) in of_nodes.rounds.items()}
    enough = [f"{name} (from H = {length:,} on)" for name, length in needed.items() if length <= longest]
    line = f"{line}; {good}: {', '.join(enough) or 'none'}"
    slow = [f"{name} ({length:,})" for name, length in needed.items() if length > longest]
    return f"{line}; too slow with H up to {longest:,}: {', '.join(slow)}" if slow else line


def _largest_trainer(layout: Layout) -> tuple[int, tuple[int, ...], int]:
    """The trainer with the most workers, its seats, and the most of its workers that one of them has."""
    trainer = max(layout.trainers, key=layout.num_workers)
    ranks = layout.ranks(trainer)
    return trainer, ranks, max(len(layout.workers_on(seat, trainer)) for seat in ranks)


def _known_or_assumed(between: Collection[int], links: Sequence[Link]) -> Mapping[str, Sequence[Link]]:
    """The links that were measured, or, where none were, usual ones between the nodes, by name."""
    if links:
        return {"the measured links": links}
    ends = (min(between), max(between))
    return {name: [Link(ends, 0.0, rate)] for name, rate in {**SLOW_LINK, **LINKS}.items()}


def _gain(
    settings: Settings, nodes: Sequence[int], layout: Layout, parameters: ParameterCount, links: Sequence[Link]
) -> str:
    """What a trainer's workers reach together, over those of one node, for which its own links cost nothing."""
    size = settings.pool.ranks_per_worker
    seats, traffic = seat_nodes(nodes, size), Traffic(settings, parameters.trained, nodes)
    trainer, ranks, on_seat = _largest_trainer(layout)
    num_workers = layout.num_workers(trainer)
    between = {seats[seat] for seat in ranks}
    if len(between) == 1 or settings.algorithm.is_data_parallel:
        return ""
    cases: dict[str, tuple[Sequence[Link], float]] = {}
    if parameters.total >= LARGE:
        update = update_seconds(settings, parameters)
        cases = {f"on {name}": (known, update) for name, known in _known_or_assumed(between, links).items()}
    elif links:
        cases = {f"with updates of {update:g} s": (links, update) for update in UPDATE_SECONDS}
    on_node = max(Counter(seats[seat] for seat in ranks for _ in layout.workers_on(seat, trainer)).values())
    found = []
    for case, (known, update) in cases.items():
        seconds = seconds_on_links(settings, traffic, ranks, seats, known)
        expected = forecast(settings, on_seat, seconds, update)
        found.append(f"{progress(expected, on_seat, num_workers, update) / on_node:.2g} {case}")
    if not found:
        return ""
    rule = "so much where the noise of gradients dominates; below 1, one node alone is faster"
    of_node = "one" if on_node == 1 else f"{on_node} on one node"
    return f"the progress of {num_workers} workers over that of {of_node} is at most {', '.join(found)} ({rule})"
