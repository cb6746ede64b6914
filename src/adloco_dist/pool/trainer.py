"""A trainer's share on this rank, with all its state."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from adloco_dist.averaging.anchors import average_in, weight_of
from adloco_dist.averaging.averager import Averager
from adloco_dist.averaging.background import Background
from adloco_dist.averaging.checks import checksum
from adloco_dist.averaging.fragments import largest, packed_part
from adloco_dist.averaging.outer import OuterSGD
from adloco_dist.config import OuterState, Settings
from adloco_dist.data.protocols import Cursor
from adloco_dist.pool.flat_model import FlatModel, new_outer_vector
from adloco_dist.pool.worker import Worker


@dataclass(frozen=True)
class UnderWay:
    """The average of a fragment, on its way."""

    fragment: int
    average: Background | torch.Tensor
    """What brings the sum of all ranks' payloads, or that sum."""


class Trainer:
    """Trainer `id`: its anchor, outer momentum and cursor (equal on all its ranks), and the workers placed here.

    Attributes:
        anchor: (num_elements,), on the rank's device, or in CPU memory (pool.outer_state=cpu).
        momentum: the outer SGD's (DiLoCo, 2311.08105, Algorithm 1, line 14), as large as the anchor and in the same
            place, zeros at first; None: there is none.
        mean_anchor: the average of the anchors so far (outer.average_span), like these; None: there is none.
        averager: how its pseudo-gradients travel between ranks.
        fragments: the parts of the model that are averaged at different times.
        residual: what this rank has not sent of its pseudo-gradients, as large as the anchor, fragment after fragment;
            None: there is no error feedback.
        under_way: the fragment whose average has been started, and whose outer step has not been taken yet.
    """

    def __init__(
        self, trainer_id: int, workers: list[Worker], initial_weights: torch.Tensor, flat_model: FlatModel,
        cursor: Cursor, settings: Settings, averager: Averager,
    ) -> None:  # fmt: skip
        self.id = trainer_id
        self.workers = workers
        self.cursor = cursor
        self.flat_model = flat_model
        outer = settings.outer
        self.outer = OuterSGD(
            outer.lr, outer.momentum, outer.nesterov, outer.clip_norm, outer.radial, outer.outlier_deviations,
            outer.outlier_rounds,
        )  # fmt: skip
        self.averager = averager
        self.fragments = flat_model.fragments(settings.wire.fragments)
        self.residual = torch.zeros_like(initial_weights) if self.averager.keeps_residual else None
        self.under_way: UnderWay | None = None
        delayed = largest(self.fragments) if settings.wire.is_delayed else 0
        num_exact = len(flat_model.room) - flat_model.buffer_boundary
        self._room = initial_weights.new_empty(delayed + num_exact) if delayed else flat_model.room
        on_cpu = settings.pool.outer_state is OuterState.cpu
        self.anchor = new_outer_vector(initial_weights, on_cpu)
        self.momentum = new_outer_vector(torch.zeros_like(initial_weights), on_cpu) if self.outer.momentum else None
        self._average_span = outer.average_span
        self.mean_anchor = new_outer_vector(initial_weights, on_cpu) if outer.average_span else None

    @property
    def outer_vectors(self) -> list[torch.Tensor]:
        """What a merge averages: the anchor, and its momentum."""
        return [self.anchor] if self.momentum is None else [self.anchor, self.momentum]

    def begin_average(self) -> None:
        """Let the average of anchors begin at this one."""
        if self.mean_anchor is not None:
            self.mean_anchor.copy_(self.anchor)

    @property
    def result(self) -> torch.Tensor:
        """What is evaluated and saved: the anchor, or the average of the anchors."""
        return self.anchor if self.mean_anchor is None else self.mean_anchor

    def average_anchors(self, tokens_before: int, tokens: int) -> None:
        """Let the anchor of this round count in the average.

        Args:
            tokens_before, tokens: of the whole pool before the round, and in it.
        """
        if self.mean_anchor is not None and self._average_span:
            average_in(self.mean_anchor, self.anchor, weight_of(tokens_before, tokens, self._average_span))

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of the outer state, by name: these very tensors."""
        vectors = {"anchor": self.anchor, "momentum": self.momentum, "mean_anchor": self.mean_anchor}
        return {name: vector for name, vector in vectors.items() if vector is not None}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Become what `state` was taken of.

        Raises:
            KeyError: a part of it is missing.
        """
        for name, vector in self.state().items():
            vector.copy_(state[name])

    def payload(self, fragment: int) -> torch.Tensor:
        """Where what travels of a fragment is put: its elements, what must arrive exactly, and at last a count.

        What must arrive exactly are the buffers that training changes, with the first fragment, and the lengths of
        tensors whose means are radial. Where updates are computed meanwhile it has memory of its own, else that of the
        flat model's gradient.
        """
        num_buffers = self.flat_model.num_elements - self.flat_model.buffer_boundary if fragment == 0 else 0
        num_exact = num_buffers + len(self.radial(fragment)) + 1
        return self._room[: self.fragments[fragment].num_elements + num_exact]

    def radial(self, fragment: int) -> list[int]:
        """The tensors of a fragment whose means are radial, by their places in it."""
        tensors = self.fragments[fragment].tensors if self.outer.radial else ()
        return [place for place, index in enumerate(tensors) if index not in self.flat_model.embeddings]

    def residual_of(self, fragment: int) -> torch.Tensor | None:
        """What this rank has not sent of a fragment."""
        return None if self.residual is None else packed_part(self.residual, self.fragments, fragment)

    @property
    def is_finite(self) -> bool:
        """Whether the anchor is finite; the momentum then is too, for every step adds it to the anchor."""
        return bool(torch.isfinite(self.anchor.sum()))

    def checksum(self) -> list[int]:
        """Two checksums over the bits of the anchor; equal on all ranks of the trainer (docs/guarantees.md)."""
        return checksum(self.anchor)
