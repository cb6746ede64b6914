"""Buffers that training changes and frozen parameters (docs/state.md), in one process."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adloco_dist.buffers import changing_buffers
from adloco_dist.config import Settings
from adloco_dist.data.indexed import permutation
from adloco_dist.data.tokens import TokenBatch
from adloco_dist.objective.losses import losses
from adloco_dist.pool.capacity import micro_batch_bytes
from adloco_dist.pool.gradient import mean_gradient
from adloco_dist.pool.slot import ComputeSlot, further_slot
from adloco_dist.pool.trainer import Trainer
from adloco_dist.pool.worker import Worker
from adloco_dist.round.inner import _update_gradient
from helpers.lone import lone_trainer
from helpers.modules import CHANGING, WIDTH, Normed
from helpers.support import FOUR_TRAINERS, small_objective, small_settings, small_store


def batches(count: int) -> list[TokenBatch]:
    return [small_store().batch(permutation(100)[3 * number : 3 * number + 3]) for number in range(count)]


def new_trainer(num_workers: int, *overrides: str) -> tuple[Trainer, ComputeSlot]:
    settings, table = small_settings(*FOUR_TRAINERS, *overrides), small_store()
    objective = small_objective(settings)
    return lone_trainer(settings, objective, Normed(), table, range(num_workers), changing=CHANGING)


def update(worker: Worker, slot: ComputeSlot, batch: TokenBatch) -> None:
    worker.attach(slot.flat_model)
    mean_gradient(slot.flat_model, slot.objective, batch, None)
    worker.step()
    slot.flat_model.store_buffers()


def held(trainer: Trainer, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a flat vector, as a saved model would have them."""
    with trainer.flat_model.borrowed(vector) as module:
        return {name: value.clone() for name, value in module.state_dict().items()}


def trained_alone(settings: Settings, taken: list[TokenBatch]) -> dict[str, torch.Tensor]:
    module = Normed().double()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    rate, decay = settings.inner.lr, settings.inner.weight_decay
    assert rate
    groups = [{"params": [p for p in trained if (p.ndim < 2) is is_vector], "weight_decay": 0.0 if is_vector else decay}
              for is_vector in (False, True)]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    for batch in taken:
        optimizer.zero_grad()
        losses(module, batch).mean().backward()
        optimizer.step()
    return module.state_dict()


def test_workers_in_turn_on_one_module_are_workers_on_modules_of_their_own() -> None:
    trainer, slot = new_trainer(2)
    taken = batches(8)
    for number, batch in enumerate(taken):
        update(trainer.workers[number % 2], slot, batch)
    for number, worker in enumerate(trainer.workers):
        alone = trained_alone(small_settings(*FOUR_TRAINERS), taken[number::2])
        found = held(trainer, worker.weights)
        assert found["norm.num_batches_tracked"] == 4
        assert found["center"].abs().sum() > 0
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-11)
        torch.testing.assert_close(found["embedding.weight"], Normed().embedding.weight.detach().double())


def test_the_outer_step_averages_buffers_of_finite_workers() -> None:
    trainer, slot = new_trainer(3)
    for number, batch in enumerate(batches(6)):
        update(trainer.workers[number % 3], slot, batch)
    boundary = trainer.flat_model.buffer_boundary
    expected = [held(trainer, trainer.workers[number].weights) for number in (0, 2)]
    trainer.workers[1].weights[boundary + 3] = float("nan")
    step = trainer.step(0, None)
    assert (step.num_finite, step.nonfinite) == (2, [1])
    found = held(trainer, trainer.anchor)
    for name in CHANGING:
        mean = (expected[0][name].double() + expected[1][name].double()) / 2
        torch.testing.assert_close(found[name].double(), mean, rtol=0, atol=1e-15)
    assert trainer.momentum is not None
    assert not trainer.momentum[boundary:].any()
    assert all(torch.equal(worker.weights, trainer.anchor) for worker in trainer.workers)


def test_an_average_of_whole_numbers_is_rounded() -> None:
    trainer, slot = new_trainer(1, "precision=fp32")
    count = slot.flat_model.module.get_buffer("norm.num_batches_tracked")
    count.fill_(1000)
    slot.flat_model.store_buffers()
    (place,) = (slot.flat_model.weights == 1000).nonzero()
    for average, whole in ((6.9999995, 7), (7.25, 7), (7.75, 8)):
        trainer.anchor[place] = average
        slot.flat_model.point_at(trainer.anchor)
        assert count == whole


def test_one_worker_keeps_its_buffers_to_the_bit() -> None:
    trainer, slot = new_trainer(1, "precision=fp32")
    for batch in batches(3):
        update(trainer.workers[0], slot, batch)
    before = held(trainer, trainer.workers[0].weights)
    trainer.step(0, None)
    after = held(trainer, trainer.anchor)
    assert all(torch.equal(before[name], after[name]) for name in CHANGING)


def test_passes_that_train_nobody_leave_no_trace() -> None:
    """Those that measure memory, and all others after which buffers are not stored."""
    trainer, slot = new_trainer(1)
    (worker,) = trainer.workers
    update(worker, slot, batches(1)[0])
    before = held(trainer, worker.weights)
    micro_batch_bytes(slot, 2)
    changed = {name: value.clone() for name, value in slot.flat_model.module.state_dict().items()}
    assert not torch.equal(changed["center"], before["center"])
    torch.testing.assert_close(held(trainer, worker.weights), before, rtol=0, atol=0)


def test_a_pass_that_ran_out_of_memory_does_not_count() -> None:
    class Large(Normed):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
            result = super().forward(input_ids)
            if len(input_ids) > 2:
                raise torch.OutOfMemoryError("of three sequences")
            return result

    settings, batch, notes = small_settings(*FOUR_TRAINERS), batches(1)[0], list[str]()
    trainer, slot = lone_trainer(settings, small_objective(settings), Large(), small_store(), changing=CHANGING)
    trainer.workers[0].attach(slot.flat_model)
    _update_gradient(slot, (0, 0), batch, (0,), None, notes)
    slot.flat_model.store_buffers()
    assert len(notes) == 1
    assert slot.flat_model.capacity == 1
    wanted = Normed().double()
    for sequence in batch.split(1):
        losses(wanted, sequence)
    found = held(trainer, trainer.workers[0].weights)
    for name in CHANGING:
        torch.testing.assert_close(found[name], wanted.state_dict()[name], rtol=0, atol=1e-12)


def find(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    tokens = batches(1)[0]
    return changing_buffers(module, dtype, lambda: losses(module, tokens))


def test_buffers_that_change_are_found_and_left_as_they_were() -> None:
    module = Normed().eval()
    tensors, values = dict(module.named_buffers()), copy.deepcopy(dict(module.named_buffers()))
    assert set(find(module)) == set(CHANGING)
    assert not module.training
    assert all(tensor is tensors[name] for name, tensor in module.named_buffers())
    assert all(torch.equal(tensor, values[name]) for name, tensor in module.named_buffers())


class Odd(Normed):
    """With one more buffer, of which a pass makes something else."""

    def __init__(self, before: torch.Tensor | None, after: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("odd", before)
        self.after = after

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        if self.training:
            self._buffers["odd"] = self.after
        return super().forward(input_ids)


@pytest.mark.parametrize(
    ("before", "after", "detail"),
    [
        (torch.zeros(2), torch.zeros(3), r"odd changes from \[2\] on cpu to \[3\] on cpu"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), "odd changes from torch.float32 to torch.bfloat16"),
        (torch.zeros(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64), "odd is sparse, quantized or"),
        (torch.zeros(2).to_sparse(), torch.ones(2).to_sparse(), "odd is sparse, quantized or complex"),
        (None, torch.zeros(2), "odd is there at some times and not at others"),
        (torch.tensor(0), torch.tensor(2**24 + 1), "odd holds whole numbers that torch.float32 cannot"),
    ],
)
def test_a_changing_buffer_that_cannot_be_averaged_is_named(
    before: torch.Tensor | None, after: torch.Tensor | None, detail: str
) -> None:
    with pytest.raises(ValueError, match=detail):
        find(Odd(before, after))


def test_a_complex_constant_stays_complex() -> None:
    module = Normed()
    module.register_buffer("turns", torch.ones(2, dtype=torch.complex64) * 1j)
    settings = small_settings(*FOUR_TRAINERS)
    _, slot = lone_trainer(settings, small_objective(settings), module, small_store(), changing=CHANGING)
    assert torch.equal(slot.flat_model.module.get_buffer("turns"), torch.ones(2, dtype=torch.complex64) * 1j)


def test_a_constant_that_starts_to_change_stops_the_run() -> None:
    trainer, slot = new_trainer(1)
    update(trainer.workers[0], slot, batches(1)[0])
    slot.flat_model.module.get_buffer("passes").add_(1)  # a cache may
    update(trainer.workers[0], slot, batches(1)[0])
    slot.flat_model.module.get_buffer("mask").add_(1)
    with pytest.raises(RuntimeError, match="buffer mask was changed by an update"):
        update(trainer.workers[0], slot, batches(1)[0])


def test_frozen_parameters_are_in_no_vector_and_stay_as_they_are() -> None:
    settings = small_settings(*FOUR_TRAINERS, "inner.weight_decay=0.5")
    objective = small_objective(settings)
    trainer, slot = lone_trainer(settings, objective, Normed(), small_store(), range(2), changing=CHANGING)
    flat_model = slot.flat_model
    module = Normed()
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert "embedding.weight" not in sizes
    assert {name: view.numel() for name, view in flat_model.parameter_layout.views(trainer.anchor).items()} == sizes
    assert flat_model.num_parameters == sum(sizes.values()) + 23 * WIDTH
    other = further_slot(slot, settings)
    mine, its = (one.flat_model.module.get_parameter("embedding.weight") for one in (slot, other))
    assert mine is its
    for number, batch in enumerate(batches(4)):
        update(trainer.workers[number % 2], (slot, other)[number % 2], batch)
    trainer.step(0, None)
    assert torch.equal(mine, module.embedding.weight.double())
    assert mine.grad is None


def test_lanes_keep_their_buffers_apart() -> None:
    results = []
    for num_slots in (1, 2):
        trainer, slot = new_trainer(2)
        slots = [slot, further_slot(slot, small_settings())][:num_slots]
        for number, batch in enumerate(batches(4)):
            update(trainer.workers[number % 2], slots[number % num_slots], batch)
        results.append([worker.weights for worker in trainer.workers])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
