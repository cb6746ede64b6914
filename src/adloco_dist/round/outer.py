"""The outer step: pseudo-gradients averaged over a trainer's workers, one step of the outer optimizer.

Delta = mean over the trainer's workers of (x - w_m), then SGD on the anchor x with Delta as its gradient
(DiLoCo, 2311.08105, Algorithm 1, lines 12 to 14), for one fragment of the model at a time (Streaming DiLoCo,
2501.18512, Algorithm 2); a model of one fragment without delay is plain DiLoCo. Buffers that training changes are no
parameters: the anchor's become the mean of the workers'.

`start` takes the differences and lets them travel, `complete` takes the step on the anchor with what has arrived, and
`mix` brings it to the workers. Between the first and the last there may be updates.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import hypot

import torch
from msgspec.structs import replace

from adloco_dist.averaging.background import Background
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.outer import (
    OuterSGD,
    chunks,
    clip_scale,
    outer_step,
    pseudo_gradient,
    rejoin,
    restart,
)
from adloco_dist.averaging.radial import restore_lengths
from adloco_dist.policy.report import OuterReport
from adloco_dist.pool.timing import wait_for
from adloco_dist.pool.trainer import Trainer, UnderWay
from adloco_dist.pool.worker import NOTHING, Worker


def outer(trainer: Trainer, group: Group | None, fragment: int = 0) -> OuterReport:
    """One outer step of a fragment, for which the workers wait; every rank takes the same step, and nobody broadcasts.

    A worker whose weights or losses are not finite contributes nothing and restarts from the new anchor with fresh
    moments; the number of the others travels in the payload. If none is left, the anchor stays.
    """
    started = start(trainer, group, fragment)
    completed = complete(trainer, restarts_workers=True)
    wait_for(trainer.flat_model.device)  # the CPU may read what was copied into its memory
    return started + completed


def start(trainer: Trainer, group: Group | None, fragment: int, is_delayed: bool = False) -> OuterReport:
    """Take the workers' differences from the anchor, and let them travel; workers then await the fragment's step.

    Args:
        is_delayed: whether updates may be computed while they travel, which is still to be begun; else they arrive.
    """
    payload = trainer.payload(fragment)
    shards = trainer.flat_model.shards
    nonfinite = [worker for worker in trainer.workers if not shards.all_agree(worker.is_finite)]
    finite = [worker for worker in trainer.workers if worker not in nonfinite]
    norms = {worker: _norms(trainer, fragment, worker, payload) for worker in finite if trainer.outer.reads_norms}
    outliers = [worker for worker in norms if _is_outlier(trainer.outer, fragment, worker, norms[worker])]
    contributors = [worker for worker in finite if worker not in outliers]
    for worker in trainer.workers:
        worker.awaits = fragment
    for worker in nonfinite:
        worker.restart(trainer.anchor)
    for worker in outliers:
        worker.weights.copy_(trainer.anchor)
    for worker in trainer.workers if is_delayed else ():
        for _, weights, departed in _departed_parts(trainer, fragment, worker):
            departed.copy_(weights)
    _sum_differences(trainer, fragment, contributors, norms, payload)
    payload[-1] = sum(worker.weight for worker in contributors)
    num_exact = len(payload) - trainer.fragments[fragment].num_elements
    left_out = OuterReport(nonfinite=[worker.id for worker in nonfinite], outliers=[worker.id for worker in outliers])
    if group is None:
        trainer.under_way = UnderWay(fragment, payload)
        return replace(left_out, bytes_sent={"outer": 0})
    averager, residual = trainer.averager, trainer.residual_of(fragment)
    if is_delayed:
        average = Background(
            lambda: averager.all_reduce(payload, num_exact, group, residual), trainer.flat_model.device
        )
        trainer.under_way = UnderWay(fragment, average)
    else:
        trainer.under_way = UnderWay(fragment, averager.all_reduce(payload, num_exact, group, residual))
    num_bytes = averager.bytes_per_rank(len(payload), num_exact, group.ranks)
    return replace(left_out, bytes_sent={"outer": num_bytes})


def complete(trainer: Trainer, restarts_workers: bool = False) -> OuterReport:
    """Wait for the average under way, if there is one, and take the fragment's step on the anchor.

    Args:
        restarts_workers: whether these get the anchor's weights, chunk by chunk, while it is in the cache.
    """
    under_way, trainer.under_way = trainer.under_way, None
    if under_way is None:
        return OuterReport()
    average = under_way.average
    total = average.wait() if isinstance(average, Background) else average
    seconds = (average.seconds, average.waited_seconds) if isinstance(average, Background) else (0.0, 0.0)
    fragment, num_finite = trainer.fragments[under_way.fragment], float(total[-1])
    radial = trainer.radial(under_way.fragment)
    if radial:
        lengths = total[-1 - len(radial) : -1].tolist()
        sums = [mean for (mean,) in fragment.parts(packed=total, by_tensor=True)]
        restore_lengths([sums[place] for place in radial], lengths)
    state = [trainer.anchor] if trainer.momentum is None else [trainer.anchor, trainer.momentum]
    weights = [worker.weights for worker in trainer.workers] if restarts_workers else []
    for *slices, mean in fragment.parts(*state, *weights, packed=total):
        for chunk in chunks(len(mean), total.device):
            anchor, *rest = (one[chunk] for one in slices)
            momentum = None if trainer.momentum is None else rest.pop(0)
            stepped = outer_step(trainer.outer, anchor, momentum, mean[chunk], num_finite)
            restart(rest, stepped)
    boundary = trainer.flat_model.buffer_boundary
    if num_finite and under_way.fragment == 0:
        buffers = total[fragment.num_elements : len(total) - len(radial) - 1]
        trainer.anchor[boundary:].copy_(buffers.mul_(1 / num_finite))
    if restarts_workers:
        _end_mix(trainer, under_way.fragment)
    norm = float(torch.linalg.vector_norm(total[: fragment.num_elements])) if num_finite else 0.0
    return OuterReport(num_finite, pseudo_gradient_norm=norm, transfer_seconds=seconds[0], wait_seconds=seconds[1])


def mix(trainer: Trainer, fragment: int) -> OuterReport:
    """Bring the outer step of a fragment to the workers that await it; they keep what they have learned meanwhile."""
    completed = complete(trainer)
    workers = [worker for worker in trainer.workers if worker.awaits == fragment]
    for worker in workers:
        for anchor, weights, departed in _departed_parts(trainer, fragment, worker):
            for chunk in chunks(len(departed), trainer.flat_model.device):
                rejoin(weights[chunk], departed[chunk], anchor[chunk])
    _end_mix(trainer, fragment)
    return completed


def mix_awaited(trainer: Trainer) -> OuterReport:
    """Bring whatever workers await to them, before its time."""
    completed = complete(trainer)
    for fragment in sorted({worker.awaits for worker in trainer.workers} - {NOTHING}):
        completed = completed + mix(trainer, fragment)
    return completed


def leave(trainer: Trainer, worker: Worker) -> None:
    """Make a worker's weights what they differ by from the anchor, before it becomes another."""
    worker.weights.sub_(trainer.anchor.to(worker.weights.device))
    if worker.awaits != NOTHING:
        for anchor, _, departed in _departed_parts(trainer, worker.awaits, worker):
            departed.sub_(anchor.to(departed.device))


def join(trainer: Trainer, worker: Worker) -> None:
    """Make of those differences weights again."""
    worker.weights.add_(trainer.anchor.to(worker.weights.device))
    if worker.awaits != NOTHING:
        for anchor, _, departed in _departed_parts(trainer, worker.awaits, worker):
            departed.add_(anchor.to(departed.device))


def _departed_parts(
    trainer: Trainer, fragment: int, worker: Worker
) -> Iterator[tuple[torch.Tensor, ...]]:  # fmt: skip
    """The anchor, the worker's weights, and these as they were sent off; slice by slice."""
    if not len(worker.departed):  # nothing is computed while averages travel
        return iter(())
    return trainer.fragments[fragment].parts(trainer.anchor, worker.weights, packed=worker.departed)


def _end_mix(trainer: Trainer, fragment: int) -> None:
    boundary = trainer.flat_model.buffer_boundary
    workers = [worker for worker in trainer.workers if worker.awaits == fragment]
    if fragment == 0:
        restart([worker.weights[boundary:] for worker in workers], trainer.anchor[boundary:])
    for worker in workers:
        worker.awaits = NOTHING


def _sum_differences(
    trainer: Trainer, fragment: int, contributors: Sequence[Worker], norms: Mapping[Worker, Sequence[float]],
    payload: torch.Tensor,
) -> None:  # fmt: skip
    """Fill the payload with the weighted sum of x - w_m over this rank's contributors; of buffers, of w_m.

    Args:
        norms: of every tensor's difference, by contributor; nothing where they do not matter.
    """
    device, boundary, part = payload.device, trainer.flat_model.buffer_boundary, trainer.fragments[fragment]
    radial = trainer.radial(fragment)
    lengths = [0.0] * len(radial)
    scales: list[list[float]] = []
    for worker in contributors:
        scale = worker.weight * (clip_scale(trainer.outer.clip_norm, hypot(*norms[worker])) if norms else 1.0)
        scales.append([scale] * len(part.tensors))
        for number, place in enumerate(radial):
            length = norms[worker][place]
            lengths[number] += scale * length
            scales[-1][place] = worker.weight / length if length else 0.0
    vectors = [worker.weights for worker in contributors]
    parts = part.parts(trainer.anchor, *vectors, packed=payload, by_tensor=bool(radial))
    for place, (anchor, *weights, total) in enumerate(parts):
        by_worker = [each[place] for each in scales]
        by_worker = [] if all(scale == 1.0 for scale in by_worker) else by_worker
        for chunk in chunks(len(total), device):
            pseudo_gradient(anchor[chunk], [one[chunk] for one in weights], total[chunk], by_worker)
    if fragment == 0:
        buffers = payload[part.num_elements : len(payload) - len(radial) - 1].zero_()
        for worker in contributors:
            buffers.add_(worker.weights[boundary:].to(device), alpha=worker.weight)
    payload[len(payload) - len(radial) - 1 : -1] = torch.tensor(lengths)


def _norms(trainer: Trainer, fragment: int, worker: Worker, scratch: torch.Tensor) -> list[float]:
    """The norm of every tensor of a worker's difference from the anchor, in the order of the fragment's tensors.

    Collective over the ranks that hold the worker together.
    """
    norms = []
    parts = trainer.fragments[fragment].parts(trainer.anchor, worker.weights, packed=scratch, by_tensor=True)
    for anchor, weights, part in parts:
        by_chunk = []
        for chunk in chunks(len(part), scratch.device):
            pseudo_gradient(anchor[chunk], [weights[chunk]], part[chunk])
            by_chunk.append(torch.linalg.vector_norm(part[chunk]))
        norms.append(torch.linalg.vector_norm(torch.stack(by_chunk)))
    return trainer.flat_model.shards.whole_norms(torch.stack(norms).tolist(), trainer.fragments[fragment].tensors)


def _is_outlier(outer: OuterSGD, fragment: int, worker: Worker, norms: Sequence[float]) -> bool:
    if outer.outlier_deviations is None:
        return False
    return worker.norms.is_outlier(fragment, hypot(*norms), outer.outlier_deviations, outer.outlier_rounds)
