"""A rank's one worker and its anchor: fragments of their difference averaged, steps taken, and brought back."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from math import hypot
from operator import add

import torch
import torch.distributed as dist

from adloco_dist.averaging.averager import Averager
from adloco_dist.averaging.background import Background
from adloco_dist.averaging.buffers import AveragedBuffers
from adloco_dist.averaging.checks import compare_anchors
from adloco_dist.averaging.fragments import Fragment, largest, packed_part
from adloco_dist.averaging.group import ring_bytes_sent
from adloco_dist.averaging.outer import OuterSGD, chunks, clip_scale, outer_step
from adloco_dist.averaging.outliers import NormHistory
from adloco_dist.averaging.own_group import Connection
from adloco_dist.averaging.parameters import TrainedParameters
from adloco_dist.averaging.radial import restore_lengths
from adloco_dist.averaging.shards import Shards

log = logging.getLogger("adloco_dist.diloco")


@dataclass(frozen=True)
class OuterStepReport:
    """What an outer step did."""

    num_finite: int
    """Workers whose weights were finite and contributed; 0: the anchor stayed."""
    pseudo_gradient_norm: float
    """Norm of the mean pseudo-gradient, of this rank's part of a sharded model; 0 if the anchor stayed."""
    bytes_sent: int
    """Bytes that this rank sent for it."""
    transfer_seconds: float = 0.0
    """How long the average took, where updates were taken meanwhile; else 0."""
    wait_seconds: float = 0.0
    """Time of that in which this rank waited."""

    def __add__(self, other: "OuterStepReport") -> "OuterStepReport":
        return OuterStepReport(
            min(self.num_finite, other.num_finite),
            (self.pseudo_gradient_norm**2 + other.pseudo_gradient_norm**2) ** 0.5,
            self.bytes_sent + other.bytes_sent,
            self.transfer_seconds + other.transfer_seconds,
            self.wait_seconds + other.wait_seconds,
        )


@dataclass(frozen=True)
class _UnderWay:
    fragment: Fragment
    average: Background | torch.Tensor
    buffers: torch.Tensor
    """Values of the buffers that training changes; summed when the average has arrived."""
    bytes_sent: int


class AnchoredWorker:
    """Takes the outer steps of the rank's worker.

    Attributes:
        anchor: (num_elements,), equal on all ranks of the group.
        momentum: as long, zeros at first; None where the outer optimizer has none.
        norms: of the worker's pseudo-gradients, where they decide whether it is left out.
        departed: the worker's weights in the fragment that it awaits, as they were sent off; empty without delay.
        residual: what this rank has not sent, fragment after fragment; None: there is no error feedback.
        steps: outer steps that were taken, of any fragment.
        is_under_way: whether an average is.
    """

    def __init__(
        self, parameters: TrainedParameters, buffers: AveragedBuffers, fragments: list[Fragment], outer: OuterSGD,
        averager: Averager, connection: Connection, shards: Shards, is_delayed: bool = False,
    ) -> None:  # fmt: skip
        self._parameters, self._buffers, self._outer, self._averager = parameters, buffers, outer, averager
        self._fragments, self._connection, self._shards = fragments, connection, shards
        self.anchor = parameters.vector()
        self.momentum = torch.zeros_like(self.anchor) if outer.momentum else None
        self.residual = torch.zeros_like(self.anchor) if averager.keeps_residual else None
        self.norms = NormHistory(len(fragments))
        self.departed = self.anchor.new_zeros(largest(fragments) if is_delayed else 0)
        self.steps = 0
        # The memory that an outer step takes, which should be lacking now rather than after a round.
        self.anchor.new_empty(largest(fragments))
        self._under_way: _UnderWay | None = None

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    def tensors(self, worker: str) -> dict[str, dict[str, torch.Tensor]]:
        """What is to be saved, by part and name: these very tensors.

        What differs between ranks has a name of its own on each, so that it is not taken for one thing.

        Args:
            worker: names this rank's worker.
        """
        place = f", {self._shards.place}" if self._shards.ranks else ""

        def views(vector: torch.Tensor) -> dict[str, torch.Tensor]:
            return {name + place: view for name, view in self._parameters.layout.views(vector).items()}

        own = worker + place
        return {
            "anchor": views(self.anchor),
            "momentum": {} if self.momentum is None else views(self.momentum),
            "residual": {} if self.residual is None else {own: self.residual},
            "norms": {own: self.norms.values} if self._outer.outlier_deviations is not None else {},
            "departed": {own: self.departed} if len(self.departed) else {},
            "buffers": {name + place: value for name, value in self._buffers.values.items()},
        }

    def start(self, index: int, is_delayed: bool) -> None:
        """Let a fragment's pseudo-gradient travel; buffers travel with the first fragment. Collective.

        Args:
            is_delayed: returns while it travels; else it has arrived.
        """
        fragment, group = self._fragments[index], self._connection.group
        if index == 0:
            self._buffers.find_changing(group)
        payload, buffers = self._payloads(index)
        if is_delayed:
            self._parameters.copy_to(self.departed, fragment.tensors)
        if group is None:
            self._under_way = _UnderWay(fragment, payload, buffers, 0)
            return

        def average() -> torch.Tensor:
            if is_delayed:  # else it is compared when the step has been taken
                compare_anchors(group, self.steps, self.anchor)
            if len(buffers):
                group.all_reduce(buffers)
            residual = None if self.residual is None else packed_part(self.residual, self._fragments, index)
            return self._averager.all_reduce(payload, num_exact, group, residual)

        num_ranks, num_exact = len(group.ranks), len(payload) - fragment.num_elements
        bytes_sent = ring_bytes_sent(buffers.nbytes, num_ranks)
        bytes_sent += self._averager.bytes_per_rank(len(payload), num_exact, group.ranks)
        under_way = Background(average, payload.device).begin() if is_delayed else average()
        self._under_way = _UnderWay(fragment, under_way, buffers, bytes_sent)

    def complete(self, restarts: bool = False) -> OuterStepReport:
        """Wait for what is under way, and take its outer step.

        Args:
            restarts: whether the worker gets the anchor's weights; else it goes on with its own.
        """
        assert self._under_way is not None
        under_way, self._under_way = self._under_way, None
        average = under_way.average
        total = average.wait() if isinstance(average, Background) else average
        num_finite = int(total[-1])
        if self._shards.has_copies:
            parts = self._parts_of(under_way.fragment, total)
            self._shards.unify(list(zip(under_way.fragment.tensors, parts, strict=True)))
        self._restore_lengths(under_way.fragment, total)
        norm = self._step(under_way.fragment, total, num_finite, restarts)
        if num_finite and under_way.fragment is self._fragments[0]:
            self._buffers.step(under_way.buffers, num_finite)
        if restarts and under_way.fragment is self._fragments[0]:
            self._buffers.restart()
        self.steps += 1
        times = (average.seconds, average.waited_seconds) if isinstance(average, Background) else (0.0, 0.0)
        return OuterStepReport(num_finite, norm, under_way.bytes_sent, *times)

    def abandon(self) -> bool:
        """Do without what is under way; whether anything was."""
        under_way, self._under_way = self._under_way, None
        return under_way is not None

    def step(self, indices: Iterable[int] | None = None) -> OuterStepReport:
        """Take the outer steps of fragments, or of all, and wait for each of them. Collective."""
        reports = []
        for index in range(len(self._fragments)) if indices is None else indices:
            self.start(index, is_delayed=False)
            reports.append(self.complete(restarts=True))
        if group := self._connection.group:
            compare_anchors(group, self.steps, self.anchor)
        return reduce(add, reports)

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Have the anchor's weights in the model while the block runs; not those of an average under way."""
        own = self._parameters.vector()
        self._parameters.put(self.anchor)
        try:
            with self._buffers.outer_values():
                yield
        finally:
            self._parameters.put(own)

    def mix(self, index: int) -> None:
        """Bring the outer step of a fragment, which was taken, to the worker; it keeps what it has learned since."""
        self._parameters.rejoin(self.anchor, self.departed, self._fragments[index].tensors)
        if index == 0:
            self._buffers.restart()

    def _step(self, fragment: Fragment, total: torch.Tensor, num_finite: int, restarts: bool) -> float:
        """Take the step part by part, and bring each to the worker; the norm of the mean pseudo-gradient."""
        norms, start = [total.new_zeros(())], 0
        for where, which in self._parameters.parts(fragment.tensors):
            anchor, mean = self.anchor[where], total[start : start + where.stop - where.start]
            start += len(mean)
            momentum = None if self.momentum is None else self.momentum[where]
            for chunk in chunks(len(mean), mean.device) if num_finite else ():
                outer_step(
                    self._outer, anchor[chunk], None if momentum is None else momentum[chunk], mean[chunk], num_finite
                )
                norms.append(torch.linalg.vector_norm(mean[chunk]))
            if restarts:
                self._parameters.restart(self.anchor, which)
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def _parts_of(self, fragment: Fragment, packed: torch.Tensor) -> list[torch.Tensor]:
        """What a packed vector has of each tensor of the fragment."""
        return [part for (part,) in fragment.parts(packed=packed, by_tensor=True)]

    def _radial(self, fragment: Fragment) -> list[int]:
        """The tensors whose means are radial, by their places in the fragment."""
        tensors = fragment.tensors if self._outer.radial else ()
        return [place for place, tensor in enumerate(tensors) if tensor not in self._parameters.embeddings]

    def _payloads(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What travels: the pseudo-gradient, lengths of its tensors, and the number of workers in it; and the values of
        changing buffers."""
        fragment = self._fragments[index]
        radial = self._radial(fragment)
        payload = self.anchor.new_empty(fragment.num_elements + len(radial) + 1)
        total = self._parameters.subtract_from(self.anchor, payload, fragment.tensors)
        buffers = self._buffers.payload(payload.device) if index == 0 else self.anchor[:0]
        # Weights that are not finite make differences that are not.
        is_finite = self._shards.all_agree(bool(torch.isfinite(total) and torch.isfinite(buffers.sum())))
        if is_finite and self._contributes(fragment, index, radial, payload):
            payload[-1] = 1
        else:
            why = "the norm of its pseudo-gradient is far above those before" if is_finite else "weights are not finite"
            log.warning(
                "outer step %d: rank %d is left out, %s; it restarts from the anchor%s",
                self.steps + 1, dist.get_rank(), why, "" if is_finite else " with a fresh optimizer state",
            )  # fmt: skip
            payload.zero_()
            buffers.zero_()
            self._parameters.restart(self.anchor)
            if not is_finite:
                self._buffers.recover()
                self._parameters.reset_optimizers()
        return payload, buffers

    def _contributes(self, fragment: Fragment, index: int, radial: list[int], payload: torch.Tensor) -> bool:
        """Whether the worker's pseudo-gradient is averaged; it is clipped and made radial then, as settings want it."""
        outer = self._outer
        if not outer.reads_norms:
            return True
        parts = self._parts_of(fragment, payload)
        own = torch.stack([torch.linalg.vector_norm(part) for part in parts]).tolist()
        norms = self._shards.whole_norms(own, fragment.tensors)
        norm = hypot(*norms)
        deviations, rounds = outer.outlier_deviations, outer.outlier_rounds
        if deviations is not None and self.norms.is_outlier(index, norm, deviations, rounds):
            return False
        scale = clip_scale(outer.clip_norm, norm)
        for place, part in enumerate(parts):
            length = norms[place]
            part.mul_(scale if place not in radial else 1 / length if length else 0.0)
        payload[fragment.num_elements : -1] = torch.tensor([scale * norms[place] for place in radial])
        return True

    def _restore_lengths(self, fragment: Fragment, total: torch.Tensor) -> None:
        if radial := self._radial(fragment):
            sums = self._parts_of(fragment, total)
            restore_lengths([sums[place] for place in radial], total[fragment.num_elements : -1].tolist())
