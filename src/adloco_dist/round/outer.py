"""The outer step: pseudo-gradients averaged over a trainer's workers, one step of the outer optimizer.

Delta = mean over the trainer's workers of (x - w_m), then SGD on the anchor x with Delta as its gradient
(DiLoCo, 2311.08105, Algorithm 1, lines 12 to 14), for one fragment of the model at a time (Streaming DiLoCo,
2501.18512, Algorithm 2); a model of one fragment without delay is plain DiLoCo. Buffers that training changes are no
parameters: the anchor's become the mean of the workers'.

`start` takes the differences and lets them travel, `complete` takes the step on the anchor with what has arrived, and
`mix` brings it to the workers. Between the first and the last there may be updates.
"""

from collections.abc import Sequence

import torch

from adloco_dist.averaging.background import Background
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.outer import chunks, clip_scale, outer_step, pseudo_gradient
from adloco_dist.averaging.outer import mix as mix_weights
from adloco_dist.policy.report import OuterReport
from adloco_dist.pool.timing import wait_for
from adloco_dist.pool.trainer import Trainer, UnderWay
from adloco_dist.pool.worker import NOTHING, Worker


def outer(trainer: Trainer, group: Group | None, fragment: int = 0, keep_local: float = 0.0) -> OuterReport:
    """One outer step of a fragment, for which the workers wait; every rank takes the same step, and nobody broadcasts.

    A worker whose weights or losses are not finite contributes nothing and restarts from the new anchor with fresh
    moments; the number of the others travels in the payload. If none is left, the anchor stays.
    """
    started = start(trainer, group, fragment)
    completed = complete(trainer, keep_local)
    wait_for(trainer.flat_model.device)  # the CPU may read what was copied into its memory
    return started + completed


def start(trainer: Trainer, group: Group | None, fragment: int, is_delayed: bool = False) -> OuterReport:
    """Take the workers' differences from the anchor, and let them travel; workers then await the fragment's step.

    Args:
        is_delayed: whether updates may be computed while they travel, which is still to be begun; else they arrive.
    """
    # Loss and gradients that are not finite leave weights that are not, and so do differences.
    finite = [
        bool(torch.isfinite(worker.weights.sum()) and torch.isfinite(worker.loss_sum)) for worker in trainer.workers
    ]
    for worker, is_finite in zip(trainer.workers, finite, strict=True):
        worker.awaits = fragment
        if not is_finite:
            worker.weights.copy_(trainer.anchor)
            worker.reset_optimizer()
    payload = trainer.payload(fragment)
    contributors = [worker for worker, is_finite in zip(trainer.workers, finite, strict=True) if is_finite]
    _sum_differences(trainer, fragment, contributors, payload)
    payload[-1] = sum(worker.weight for worker in contributors)
    num_exact = len(payload) - trainer.fragments[fragment].num_elements
    nonfinite = [worker.id for worker, is_finite in zip(trainer.workers, finite, strict=True) if not is_finite]
    if group is None:
        trainer.under_way = UnderWay(fragment, payload)
        return OuterReport(nonfinite=nonfinite, bytes_sent={"outer": 0})
    averager, residual = trainer.averager, trainer.residual_of(fragment)
    if is_delayed:
        average = Background(
            lambda: averager.all_reduce(payload, num_exact, group, residual), trainer.flat_model.device
        )
        trainer.under_way = UnderWay(fragment, average)
    else:
        trainer.under_way = UnderWay(fragment, averager.all_reduce(payload, num_exact, group, residual))
    num_bytes = averager.bytes_per_rank(len(payload), num_exact, len(group.ranks))
    return OuterReport(nonfinite=nonfinite, bytes_sent={"outer": num_bytes})


def complete(trainer: Trainer, keep_local: float | None = None) -> OuterReport:
    """Wait for the average under way, if there is one, and take the fragment's step on the anchor.

    Args:
        keep_local: as in `mix`, which is then done chunk by chunk, while the anchor is in the cache; None: it is not.
    """
    under_way, trainer.under_way = trainer.under_way, None
    if under_way is None:
        return OuterReport()
    average = under_way.average
    total = average.wait() if isinstance(average, Background) else average
    seconds = (average.seconds, average.waited_seconds) if isinstance(average, Background) else (0.0, 0.0)
    fragment, num_finite = trainer.fragments[under_way.fragment], float(total[-1])
    state = [trainer.anchor] if trainer.momentum is None else [trainer.anchor, trainer.momentum]
    weights = [] if keep_local is None else [worker.weights for worker in trainer.workers]
    for *slices, mean in fragment.parts(*state, *weights, packed=total):
        for chunk in chunks(len(mean), total.device):
            anchor, *rest = (one[chunk] for one in slices)
            momentum = None if trainer.momentum is None else rest.pop(0)
            stepped = outer_step(trainer.outer, anchor, momentum, mean[chunk], num_finite)
            mix_weights(rest, stepped, keep_local or 0.0)
    boundary = trainer.flat_model.buffer_boundary
    if num_finite and under_way.fragment == 0:
        trainer.anchor[boundary:].copy_(total[fragment.num_elements : -1].mul_(1 / num_finite))
    if keep_local is not None:
        _end_mix(trainer, under_way.fragment, keep_local)
    norm = float(torch.linalg.vector_norm(total[: fragment.num_elements])) if num_finite else 0.0
    return OuterReport(num_finite, [], norm, transfer_seconds=seconds[0], wait_seconds=seconds[1])


def mix(trainer: Trainer, fragment: int, keep_local: float) -> OuterReport:
    """Bring the outer step of a fragment to the workers that await it.

    Args:
        keep_local: share of a worker's own weights, in [0, 1); the rest are the anchor's.
    """
    completed = complete(trainer)
    workers = [worker for worker in trainer.workers if worker.awaits == fragment]
    for one in trainer.fragments[fragment].slices:
        for chunk in chunks(one.stop - one.start, trainer.flat_model.device):
            anchor = trainer.anchor[one][chunk]
            mix_weights([worker.weights[one][chunk] for worker in workers], anchor, keep_local)
    _end_mix(trainer, fragment, keep_local)
    return completed


def _end_mix(trainer: Trainer, fragment: int, keep_local: float) -> None:
    boundary = trainer.flat_model.buffer_boundary
    workers = [worker for worker in trainer.workers if worker.awaits == fragment]
    if fragment == 0:
        mix_weights([worker.weights[boundary:] for worker in workers], trainer.anchor[boundary:], keep_local)
    for worker in workers:
        worker.awaits = NOTHING


def _sum_differences(trainer: Trainer, fragment: int, contributors: Sequence[Worker], payload: torch.Tensor) -> None:
    """Fill the payload with the weighted sum of x - w_m over this rank's finite workers; of buffers, of w_m."""
    device, boundary = payload.device, trainer.flat_model.buffer_boundary
    vectors = [worker.weights for worker in contributors]
    scales = [worker.weight for worker in contributors]
    if trainer.outer.clip_norm is not None:
        clipped = _clip_scales(trainer, fragment, vectors, payload)
        scales = [scale * weight for scale, weight in zip(clipped, scales, strict=True)]
    if all(scale == 1.0 for scale in scales):
        scales = []
    for anchor, *weights, total in trainer.fragments[fragment].parts(trainer.anchor, *vectors, packed=payload):
        for part in chunks(len(total), device):
            pseudo_gradient(anchor[part], [one[part] for one in weights], total[part], scales)
    if fragment == 0:
        buffers = payload[trainer.fragments[0].num_elements : -1].zero_()
        for worker in contributors:
            buffers.add_(worker.weights[boundary:].to(device), alpha=worker.weight)


def _clip_scales(
    trainer: Trainer, fragment: int, contributors: Sequence[torch.Tensor], payload: torch.Tensor
) -> list[float]:
    """What each worker's pseudo-gradient is multiplied by; the payload is scratch."""
    scales = []
    for worker in contributors:
        norms = []
        for anchor, weights, scratch in trainer.fragments[fragment].parts(trainer.anchor, worker, packed=payload):
            for part in chunks(len(scratch), payload.device):
                pseudo_gradient(anchor[part], [weights[part]], scratch[part])
                norms.append(torch.linalg.vector_norm(scratch[part]))
        scales.append(clip_scale(trainer.outer.clip_norm, float(torch.linalg.vector_norm(torch.stack(norms)))))
    return scales
