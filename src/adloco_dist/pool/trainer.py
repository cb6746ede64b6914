"""A trainer's share on this rank, with all its state."""

from collections.abc import Mapping, Sequence

import torch

from adloco_dist.averaging.averager import Averager, FullPrecision
from adloco_dist.averaging.checks import checksum
from adloco_dist.averaging.codecs import BFloat16, Signs, WholeNumbers
from adloco_dist.averaging.fragments import Fragment, largest
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.inside_first import InsideFirst
from adloco_dist.averaging.outer_sgd import OuterSGD, chunks
from adloco_dist.averaging.outer_step import Division, OuterStep, outer_entries
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.config import OuterSettings, OuterState, Settings, WireFormat, WireSettings
from adloco_dist.data.protocols import Cursor
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.worker import Worker
from adloco_dist.schema import NOTHING, Entry, Kind, assign, gather


def trainer_entries(outer: OuterSettings, wire: WireSettings) -> list[Entry]:
    """What is kept of a trainer: attributes of it."""
    mean_anchor = Entry("mean_anchor", Kind.vector, is_shared=True)
    entries = outer_entries(OuterSGD(outer.lr, outer.momentum), wire.keeps_residual)
    return [*entries, *([mean_anchor] if outer.average_span else [])]


class Trainer(OuterStep[Worker]):
    """Trainer `id` on this rank: the outer step of its workers here, and its cursor. Anchor, momentum and cursor are
    equal on all its ranks.

    Attributes:
        averagers: how sums travel, and with wire.format=adaptive how they do where all elements travel; else the same.
        mean_anchor: the average of the anchors so far, on the anchor's device; None without outer.average_span.
    """

    def __init__(
        self,
        trainer_id: int,
        workers: list[Worker],
        initial_weights: torch.Tensor,
        flat_model: FlatModel,
        cursor: Cursor,
        settings: Settings,
        nodes: Sequence[int],
    ) -> None:
        """`nodes` are those of all ranks of the run, by rank."""
        self.id, self.cursor, self.flat_model = trainer_id, cursor, flat_model
        outer, wire = settings.outer, settings.wire
        fragments, boundary = flat_model.fragments(wire.fragments), flat_model.buffer_boundary
        device = torch.device("cpu") if settings.pool.outer_state is OuterState.cpu else initial_weights.device
        is_pinned = device != initial_weights.device
        self.averagers: Sequence[Averager] = [
            new_averager(wire, initial_weights.dtype, nodes, in_four_bits) for in_four_bits in (False, True)
        ]
        anchor = torch.empty_like(initial_weights, device=device, pin_memory=is_pinned).copy_(initial_weights)
        super().__init__(
            workers,
            anchor,
            Division(fragments, flat_model.shards, flat_model.device),
            OuterSGD(outer.lr, outer.momentum, outer.follows_workers),
            self.averagers[False],
            FlatBuffers(anchor, boundary),
            # The flat model's gradient is free while nobody computes.
            initial_weights.new_empty(largest(fragments) + len(flat_model.payload) - boundary)
            if wire.is_delayed
            else flat_model.payload,
        )
        self.entries = trainer_entries(outer, wire)
        self._average_span, self._is_delayed = outer.average_span, wire.is_delayed
        self.mean_anchor = None
        if outer.average_span:
            self.mean_anchor = torch.empty_like(anchor, pin_memory=is_pinned).copy_(anchor)

    def average(self, fragment: int, group: Group | None, in_four_bits: bool) -> OuterStepReport:
        """Average the workers' pseudo-gradients in a fragment, or prepare to. Collective over the trainer's ranks.

        Args:
            in_four_bits: with wire.format=adaptive, whether 4 bits of each element travel, or its sign alone.
        """
        self.averager = self.averagers[in_four_bits]
        if self._is_delayed:
            before = self.mix_awaited()  # in a last round that is too short for what is under way to be mixed in
            return before + self.start(fragment, group, is_delayed=True)
        return self.step(fragment, group)

    def restart_buffers(self) -> None:
        """Give workers that await no average the anchor's buffers."""
        self._buffers.restart([worker for worker in self.workers if worker.awaits == NOTHING])

    @property
    def outer_vectors(self) -> list[torch.Tensor]:
        """What a merge averages: the anchor, and its momentum."""
        return [self.anchor] if self.momentum is None else [self.anchor, self.momentum]

    @property
    def result(self) -> torch.Tensor:
        """What is evaluated and saved: the average of the anchors, or the anchor if there is none."""
        return self.anchor if self.mean_anchor is None else self.mean_anchor

    def average_anchors(self, tokens_before: int, tokens: int) -> None:
        """Add the anchor of this round to the average, by the whole pool's tokens before the round and in it."""
        if self.mean_anchor is not None and self._average_span:
            average_in(self.mean_anchor, self.anchor, weight_of(tokens_before, tokens, self._average_span))

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of the trainer that all its ranks share: the tensors themselves, by name."""
        return gather(self, [entry for entry in self.entries if entry.is_shared])

    def own_state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of the trainer that only this rank has."""
        return gather(self, [entry for entry in self.entries if not entry.is_shared])

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what the ranks share; KeyError: a part is missing."""
        assign(self, [entry for entry in self.entries if entry.is_shared], state)

    def awaited_by(self, worker: Worker) -> Fragment | None:
        """The fragment whose outer step a worker has not received yet; None: there is none."""
        return None if worker.awaits == NOTHING else self.fragments[worker.awaits]

    def checksum(self) -> list[int]:
        """Two checksums over the bits of the anchor; equal on all ranks of the trainer (docs/guarantees.md)."""
        return checksum(self.anchor)

    @property
    def is_finite(self) -> bool:
        """Whether the anchor is finite; the momentum then is too, for every step adds it to the anchor."""
        return bool(torch.isfinite(self.anchor.sum()))


class FlatBuffers:
    """The buffers behind a boundary of flat vectors: of the anchor and of every worker's weights."""

    def __init__(self, anchor: torch.Tensor, boundary: int) -> None:
        self._anchor, self._boundary = anchor, boundary
        self.dtype = anchor.dtype

    @property
    def num_elements(self) -> int:
        return len(self._anchor) - self._boundary

    def find_changing(self, group: Group | None) -> None:
        """Nothing to find: they were known when vectors were laid out."""

    def sum_of(self, replicas: Sequence[Worker], total: torch.Tensor) -> None:
        total.zero_()
        for replica in replicas:
            total.add_(replica.weights[self._boundary :].to(total.device), alpha=replica.weight)

    def step(self, total: torch.Tensor, num_workers: float) -> None:
        if num_workers:
            self._anchor[self._boundary :].copy_(total.mul_(1 / num_workers))

    def restart(self, replicas: Sequence[Worker]) -> None:
        for replica in replicas:
            replica.weights[self._boundary :].copy_(self._anchor[self._boundary :], non_blocking=True)


def weight_of(tokens_before: int, tokens: int, span: float) -> float:
    """The anchor's weight in the average after a round of `tokens` > 0; the rest is the weight of the average before.

    Polynomial-decay averaging (Shamir and Zhang 2013, 1212.1824, section 4): the average spans a share of the run so
    far, so it forgets the start.

    Args:
        span: share of the tokens so far over which an anchor's weight falls by a factor of about e; in (0, 1].
    """
    return 1.0 - (tokens_before / (tokens_before + tokens)) ** (1.0 / span)


def average_in(mean: torch.Tensor, anchor: torch.Tensor, weight: float) -> None:
    """Move the average towards the anchor in place, (n,) both, in operations that round alike on every device."""
    for chunk in chunks(len(mean), mean.device):
        mean[chunk].mul_(1.0 - weight).add_(anchor[chunk] * weight)


def averagers() -> dict[str, Averager]:
    """Every format with its own settings as they stand, by name; adaptive is one of two of them."""
    formats = [format for format in WireFormat if format is not WireFormat.adaptive]
    return {format.name: _by_format(WireSettings(format), torch.float32, False) for format in formats}


def new_averager(wire: WireSettings, dtype: torch.dtype, nodes: Sequence[int], in_four_bits: bool = False) -> Averager:
    """How pseudo-gradients of this type travel between ranks on these nodes; as they are inside of a node, before they
    travel to others in few bits.

    Args:
        in_four_bits: with wire.format=adaptive, whether 4 bits of each element travel, or its sign alone.
    """
    averager = _by_format(wire, dtype, in_four_bits)
    if isinstance(averager, FullPrecision) or len(set(nodes)) == len(nodes):
        return averager
    return InsideFirst(averager, tuple(nodes))


def _by_format(wire: WireSettings, dtype: torch.dtype, in_four_bits: bool) -> FullPrecision | Quantized | Sparse:
    match wire.format:
        case WireFormat.fp32:
            return FullPrecision(dtype)
        case WireFormat.bf16:
            return Quantized(BFloat16())
        case WireFormat.int8:
            return Quantized(WholeNumbers(8))
        case WireFormat.int4:
            return Quantized(WholeNumbers(4))
        case WireFormat.signs:
            return Quantized(Signs(), keeps_residual=True)
        case WireFormat.sparse:
            return Sparse(wire.fraction)
        case WireFormat.adaptive:
            return Quantized(WholeNumbers(4) if in_four_bits else Signs(), keeps_residual=True)
