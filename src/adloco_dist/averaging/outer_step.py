"""The outer step of DiLoCo (2311.08105, Algorithm 1, lines 12 to 14), in three actions.

1. `start`: encode the sum of x - w over this rank's workers, where x is the anchor and w a worker's weights, and
   exchange it with the other ranks, at once or while updates are taken
2. `complete`: commit the exchange; the mean becomes the gradient of a step on the anchor, which every rank takes alike
3. `mix`: workers that have taken updates meanwhile receive the step, and keep what they learned since

Nothing changes before the exchange has succeeded: after an error all state is what it was, and an average of the same
differences may be taken with other ranks. One fragment of the model travels at a time (Streaming DiLoCo, 2501.18512,
Algorithm 2); a model of one fragment is plain DiLoCo.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch

from adloco_dist.averaging.averager import Averager, Commit
from adloco_dist.averaging.background import Background
from adloco_dist.averaging.checks import MARK_ELEMENTS, compare_anchors, mark_of, word_sum
from adloco_dist.averaging.fragments import Fragment, largest
from adloco_dist.averaging.group import Group, ring_bytes_sent
from adloco_dist.averaging.outer_sgd import OuterSGD, chunks, step_anchor
from adloco_dist.averaging.replica import Buffers, R
from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.averaging.shards import Shards
from adloco_dist.schema import NOTHING, Entry, Kind


def outer_entries(optimizer: OuterSGD, keeps_residual: bool) -> list[Entry]:
    """What is kept of an `OuterStep`; checkpoints and `DiLoCo.state_dict` are both made from it."""
    return [
        Entry("anchor", Kind.vector, is_shared=True),
        *([Entry("momentum", Kind.vector, is_shared=True)] if optimizer.momentum else []),
        *([Entry("residual", Kind.packed)] if keeps_residual else []),
    ]


@dataclass(frozen=True)
class Division:
    """How a model is divided."""

    fragments: list[Fragment]
    """The parts that are averaged at different times."""
    shards: Shards
    """The ranks that hold one worker's model together."""
    device: torch.device
    """Where this rank computes outer steps, and payloads are."""


@dataclass(frozen=True)
class _UnderWay(Generic[R]):
    """The exchange of the fragment at `index`, which was started and has not been committed."""

    index: int
    exchange: Background[Commit] | Commit
    buffers: torch.Tensor
    """The sum of the values of buffers, if the fragment is the first."""
    nonfinite: list[R]
    """Replicas that were left out."""
    is_delayed: bool


class OuterStep(Generic[R]):
    """Takes the outer steps of this rank's replicas.

    Attributes:
        workers: this rank's.
        averager: how sums travel that are started from now on; every one keeps a residual, or none does.
        entries: what is kept of it.
        anchor: (num_elements,), equal on all ranks that average, on the device or in CPU memory.
        momentum: as long, in the same place, zeros at first; None where the outer optimizer has none.
        residual: what this rank has not sent, fragment after fragment, on the device; None: there is no error feedback.
        steps: outer steps that were taken, of any fragment.
        under_way: an exchange that was started; None: none was.
        unfinished: the fragment whose average was started last, until its step is taken; NOTHING: there is none.
        is_torn: whether an error has come between a commit and the end of its step, which no rank can undo.
        compares_anchors: whether ranks make sure, before every outer step, that they hold the same anchor.
    """

    def __init__(
        self,
        workers: list[R],
        anchor: torch.Tensor,
        division: Division,
        optimizer: OuterSGD,
        averager: Averager,
        buffers: Buffers[R],
        room: torch.Tensor | None = None,
    ) -> None:
        """`room` is memory for payloads that nobody uses from `start` to `complete`; None: they have their own."""
        self.workers, self.anchor, self.division, self.fragments = workers, anchor, division, division.fragments
        self.optimizer, self.averager = optimizer, averager
        self.entries = outer_entries(optimizer, averager.keeps_residual)
        self.momentum = torch.zeros_like(anchor, pin_memory=anchor.is_pinned()) if optimizer.momentum else None
        self.residual = torch.zeros_like(anchor, device=division.device) if averager.keeps_residual else None
        self.steps, self.unfinished = 0, NOTHING
        self.under_way: _UnderWay[R] | None = None
        self.is_torn = self.compares_anchors = False
        self._buffers, self._room = buffers, room
        if room is None:  # it should be lacking now rather than after a round
            torch.empty(largest(self.fragments), dtype=anchor.dtype, device=division.device)

    def step(self, index: int, group: Group | None) -> OuterStepReport:
        """Take one outer step of a fragment, for which the replicas wait. Collective over the group, if there is one.

        A replica whose weights or losses are not finite contributes nothing and restarts from the new anchor with a
        fresh optimizer state; the number of the others travels in the payload. If none is left, the anchor stays.
        """
        return self.start(index, group) + self.complete()

    def start(self, index: int, group: Group | None, is_delayed: bool = False) -> OuterStepReport:
        """Encode the replicas' differences from the anchor in a fragment, and exchange them. Collective.

        Buffers travel with the first fragment. If it is delayed, replicas take updates and await the step, and the
        exchange, which is still to be begun, goes on in a thread of its own; else it is over when this returns.
        """
        assert self.under_way is None
        self.unfinished = index
        for replica in self.workers:
            replica.begin()
        if index == 0:
            self._buffers.find_changing(group)
        payload, buffers, finite = self._encode(index)
        nonfinite = [replica for replica in self.workers if replica not in finite]
        exchange, bytes_sent = self._exchange(index, payload, buffers, group, is_delayed)
        if is_delayed:
            for replica in nonfinite:
                replica.recover(self.anchor)
            for replica in self.workers:
                replica.depart(self.fragments[index])
                replica.awaits = index
        self.under_way = _UnderWay(index, exchange, buffers, nonfinite, is_delayed)
        return OuterStepReport(nonfinite=[replica.id for replica in nonfinite], bytes_sent=bytes_sent)

    def begin(self, after: "Background[Commit] | None" = None) -> "Background[Commit] | None":
        """Let what was started with a delay travel once the exchange `after` is over; return which is the last now."""
        exchange = self.under_way.exchange if self.under_way else None
        return exchange.begin(after) if isinstance(exchange, Background) else after

    def complete(self) -> OuterStepReport:
        """Wait for what is under way, if anything is, and take the step on the anchor, which replicas that wait get."""
        under_way = self.under_way
        if under_way is None:
            return OuterStepReport()
        index, exchange = under_way.index, under_way.exchange
        try:
            total = self._committed(index, exchange.wait() if isinstance(exchange, Background) else exchange)
        except BaseException:
            self.abandon()
            raise
        self.under_way, self.is_torn = None, True
        num_finite = float(total[-1])
        waiting = [] if under_way.is_delayed else self.workers
        norm = self._step(self.fragments[index], total, num_finite, waiting)
        if index == 0:
            self._buffers.step(under_way.buffers, num_finite)
        for replica in () if under_way.is_delayed else under_way.nonfinite:
            replica.recover(self.anchor)
        if index == 0:
            self._buffers.restart(waiting)
        self.steps += 1
        self.unfinished, self.is_torn = NOTHING, False
        times = (exchange.seconds, exchange.waited_seconds) if isinstance(exchange, Background) else (0.0, 0.0)
        return OuterStepReport(num_finite, pseudo_gradient_norm=norm, transfer_seconds=times[0], wait_seconds=times[1])

    def mix(self, index: int) -> OuterStepReport:
        """Bring the outer step of a fragment to the replicas that await it; they keep what they have learned since."""
        completed = self.complete()
        awaiting = [replica for replica in self.workers if replica.awaits == index]
        for replica in awaiting:
            replica.rejoin(self.anchor, self.fragments[index])
            replica.awaits = NOTHING
        if index == 0:
            self._buffers.restart(awaiting)
        return completed

    def mix_awaited(self) -> OuterStepReport:
        """Bring whatever replicas await to them, before its time."""
        completed = self.complete()
        for index in sorted({replica.awaits for replica in self.workers} - {NOTHING}):
            self.mix(index)
        return completed

    def abandon(self) -> bool:
        """Do without what is under way, which no replica awaits any more; whether anything was."""
        under_way, self.under_way = self.under_way, None
        if under_way is None:
            return False
        for replica in self.workers:
            if replica.awaits == under_way.index:
                replica.give_up()
        return True

    def _encode(self, index: int) -> tuple[torch.Tensor, torch.Tensor, list[R]]:
        """What travels: the payload (the fragment's elements, buffers of their type, the anchor's mark if ranks compare
        anchors, the count of replicas), the buffers' values, and the replicas in both. Collective over the shards."""
        num_elements, dtype, device = self.fragments[index].num_elements, self.anchor.dtype, self.division.device
        num_buffers = self._buffers.num_elements if index == 0 else 0
        num_inside = num_buffers if self._buffers.dtype == dtype else 0
        size = num_elements + num_inside + (MARK_ELEMENTS if self.compares_anchors else 0) + 1
        payload = torch.empty(size, dtype=dtype, device=device) if self._room is None else self._room[:size]
        buffers = payload[num_elements : num_elements + num_inside]
        if num_buffers > num_inside:
            buffers = torch.empty(num_buffers, dtype=self._buffers.dtype, device=device)
        finite = self.workers
        if not self._fill(index, payload, buffers, finite):
            finite = [replica for replica in self.workers if self._fill(index, payload, buffers, [replica])]
            self._fill(index, payload, buffers, finite)
        return payload, buffers, finite

    def _fill(self, index: int, payload: torch.Tensor, buffers: torch.Tensor, replicas: Sequence[R]) -> bool:
        """Fill payload and buffers with the sums over some replicas; whether all of these are finite, as weights that
        are not make sums that are not. Collective over the shards' ranks."""
        if not replicas:  # the anchor's mark stays
            payload[: self.fragments[index].num_elements].zero_()
            buffers.zero_()
            payload[-1] = 0
            return True
        known, word_sums = [loss for replica in replicas for loss in replica.losses()], []
        for run in replicas[0].runs(self.fragments[index]):
            anchor, total = self.anchor[run.where].to(payload.device, non_blocking=True), payload[run.packed]
            for place, replica in enumerate(replicas):
                replica.add_difference(anchor, total, run, is_first=place == 0)
            known.append(total.sum())
            if self.compares_anchors:  # while it is in a cache
                word_sums.append(word_sum(anchor))
        if self.compares_anchors:
            marks = mark_of(torch.stack(word_sums).tolist() if word_sums else [], self.steps)
            payload[-1 - MARK_ELEMENTS : -1] = torch.tensor(marks, dtype=payload.dtype)
        if index == 0:
            self._buffers.sum_of(replicas, buffers)
            known.append(buffers.sum())
        payload[-1] = sum(replica.weight for replica in replicas)
        is_finite = torch.isfinite(torch.stack([scalar.to(payload.dtype) for scalar in known])).all()
        return self.division.shards.all_agree(bool(is_finite))

    def _exchange(
        self, index: int, payload: torch.Tensor, buffers: torch.Tensor, group: Group | None, is_delayed: bool
    ) -> tuple[Background[Commit] | Commit, int]:
        """Exchange payload and buffers, or have a thread for it; and the bytes that this rank sends."""
        if group is None:
            return (lambda: payload), 0
        num_exact, residual = len(payload) - self.fragments[index].num_elements, self._residual_of(index)
        is_apart, num_ranks, averager = buffers.dtype != payload.dtype, len(group.ranks), self.averager
        marks = payload[-1 - MARK_ELEMENTS : -1] if self.compares_anchors else payload[:0]
        expected = marks * num_ranks

        def exchange() -> Commit:
            if is_apart:
                group.all_reduce(buffers)
            commit = averager.exchange(payload, num_exact, group, residual)
            if not torch.equal(marks, expected):
                compare_anchors(group, self.steps, self.anchor)
            return commit

        bytes_sent = averager.bytes_per_rank(len(payload), num_exact, group.ranks)
        bytes_sent += ring_bytes_sent(buffers.nbytes, num_ranks) if is_apart else 0
        return Background(exchange, self.division.device) if is_delayed else exchange(), bytes_sent

    def _committed(self, index: int, commit: Commit) -> torch.Tensor:
        """The committed sum, in the same bits on ranks of one worker that have copies of a parameter."""
        shards, fragment, residual = self.division.shards, self.fragments[index], self._residual_of(index)
        if not shards.has_copies:
            return commit()
        before = None if residual is None else residual.clone()
        total = commit()
        try:
            averages = total[: fragment.num_elements].split(fragment.sizes)
            shards.unify(list(zip(fragment.tensors, averages, strict=True)))
        except BaseException:
            if residual is not None and before is not None:
                residual.copy_(before)
            raise
        return total

    def _residual_of(self, index: int) -> torch.Tensor | None:
        if self.residual is None:
            return None
        start = sum(fragment.num_elements for fragment in self.fragments[:index])
        return self.residual[start : start + self.fragments[index].num_elements]

    def _step(self, fragment: Fragment, total: torch.Tensor, num_finite: float, waiting: Sequence[R]) -> float:
        """Take the step run by run, and bring each to the replicas that wait; the norm of the mean pseudo-gradient."""
        norms = [total.new_zeros(())]
        for run in self.workers[0].runs(fragment):
            anchor, mean = self.anchor[run.where], total[run.packed]
            momentum = None if self.momentum is None else self.momentum[run.where]
            in_chunks = list(chunks(len(mean), mean.device)) if num_finite else []
            for chunk in in_chunks:
                of_chunk = None if momentum is None else momentum[chunk]
                stepped = step_anchor(self.optimizer, anchor[chunk], of_chunk, mean[chunk], num_finite)
                norms.append(torch.linalg.vector_norm(mean[chunk]))
                anchor = stepped if len(in_chunks) == 1 else anchor  # on the device, where the anchor may not be
            for replica in waiting:
                replica.restart(anchor, run)
        return float(torch.linalg.vector_norm(torch.stack(norms)))
