"""Model instances on flat vectors, passes, the outer step and its checksum, in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adloco_dist.averaging.outer_sgd import OuterSGD
from adloco_dist.config import Precision
from adloco_dist.data.indexed import permutation
from adloco_dist.objective.losses import losses
from adloco_dist.pool.estimator import shared_squared_norm
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.gradient import mean_gradient
from helpers.support import (
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    new_trainer,
    small_module,
    small_objective,
    small_settings,
    small_store,
)

CPU = torch.device("cpu")


def test_instances_share_one_module_and_one_gradient() -> None:
    settings = small_settings()
    module = small_module(settings)
    before = {name: value.double() for name, value in module.state_dict().items()}
    flat_model = FlatModel(module, CPU, settings.precision)
    first = flat_model.initial_weights()
    second = first * 2
    for name, value in flat_model.module.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    flat_model.point_at(second)
    for name, value in flat_model.module.state_dict().items():
        torch.testing.assert_close(value, 2 * before[name])
    batch = small_store().batch(permutation(4))
    mean_gradient(flat_model, small_objective(settings), batch, None)
    assert flat_model.gradient.abs().sum() > 0
    assert all(p.grad is not None and p.grad.untyped_storage().data_ptr() == flat_model.payload.data_ptr()
               for p in flat_model.module.parameters())  # fmt: skip
    torch.testing.assert_close(second, first * 2, rtol=0, atol=0)


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 6, 7, 100])
def test_any_number_of_passes_is_one_batch(capacity: int) -> None:
    settings = small_settings()
    flat_model = FlatModel(small_module(settings), CPU, Precision.fp64)
    weights = flat_model.initial_weights()
    batch = small_store().batch(permutation(7))
    whole_loss = mean_gradient(flat_model, small_objective(settings), batch, None).mean
    whole = flat_model.gradient.clone()
    loss = mean_gradient(flat_model, small_objective(settings), batch, capacity).mean
    torch.testing.assert_close(flat_model.gradient, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(loss, whole_loss, rtol=0, atol=1e-12)
    # And the gradient is that of autograd on a module of its own.
    module = small_module(settings).double()
    losses(module, batch).mean().backward()
    flat_model.point_at(weights)
    for mine, theirs in zip(flat_model.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


def test_weight_decay_spares_vectors() -> None:
    settings = small_settings("inner=sgd", "inner.momentum=0", "inner.weight_decay=0.5", "inner.lr=1.0")
    trainer = new_trainer(settings, 1)
    (worker,) = trainer.workers
    worker.attach(trainer.flat_model)
    trainer.flat_model.gradient.zero_()
    before = worker.weights.clone()
    worker.set_learning_rate(1.0)
    worker.step()
    boundary = trainer.flat_model.decay_boundary
    torch.testing.assert_close(worker.weights[:boundary], before[:boundary] * 0.5)
    torch.testing.assert_close(worker.weights[boundary:], before[boundary:], rtol=0, atol=0)
    assert before[boundary:].abs().sum() > 0


def test_a_worker_that_is_not_finite_is_left_out_and_starts_afresh() -> None:
    trainer = new_trainer(small_settings("outer=average"), 3)
    good, bad, other = trainer.workers
    for worker in trainer.workers:
        worker.attach(trainer.flat_model)
        trainer.flat_model.gradient.fill_(0.1)
        worker.step()
    good.weights.add_(1.0)
    other.weights.add_(3.0)
    expected = (good.weights + other.weights) / 2
    bad.weights[5] = float("nan")
    step = trainer.step(0, None)
    assert step.num_finite == 2
    torch.testing.assert_close(trainer.anchor, expected)
    for worker in trainer.workers:
        torch.testing.assert_close(worker.weights, trainer.anchor, rtol=0, atol=0)
    assert all(moment.all() for moment in good.vectors()[1:])
    assert not any(moment.any() for moment in bad.vectors()[1:])


@pytest.mark.parametrize("settings", [OuterSGD(0.7, 0.9), OuterSGD(0.7, 0.0)])
def test_the_outer_step_is_torchs(settings: OuterSGD) -> None:
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(1000, dtype=torch.float64, generator=generator)
    theirs = anchor.clone()
    optimizer = torch.optim.SGD([theirs], lr=settings.lr, momentum=settings.momentum, nesterov=settings.momentum > 0)
    momentum = torch.zeros_like(anchor) if settings.momentum else None
    for _ in range(5):
        theirs.grad = torch.randn(1000, dtype=torch.float64, generator=generator)
        settings.step(anchor, momentum, theirs.grad.clone())
        optimizer.step()
        torch.testing.assert_close(anchor, theirs, rtol=0, atol=1e-14)
        if momentum is not None:
            torch.testing.assert_close(momentum, optimizer.state[theirs]["momentum_buffer"], rtol=0, atol=1e-14)


class ArithmeticSeen(TorchDispatchMode):
    """Keeps the names of the operations inside of it, and fails at one that multiplies and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0].removesuffix("_")
        assert (kwargs or {}).get("alpha", 1) == 1, func
        self.names.add(name)
        return func(*args, **(kwargs or {}))


def test_the_outer_step_is_made_of_operations_that_round_alike_on_every_device() -> None:
    """The sums, norms and tests for finiteness beside them decide nothing that ranks must agree on to the bit."""
    trainer = new_trainer(small_settings("algorithm=diloco", "outer=nesterov"), 3)
    for number, worker in enumerate(trainer.workers):
        worker.weights.mul_(1.01 + 0.01 * number)
    with ArithmeticSeen() as seen:
        assert trainer.step(0, None).num_finite == 3
    assert {"mul", "add", "sub"} <= seen.names
    moving = {"slice", "select", "copy", "fill", "zero", "detach", "lift_fresh", "_local_scalar_dense"}
    moving |= {"new_zeros", "stack"}
    judging = {"sum", "isfinite", "all", "abs", "eq", "ne", "mul", "bitwise_and", "linalg_vector_norm"}
    assert seen.names <= {"mul", "add", "sub"} | moving | judging


def test_without_any_finite_worker_the_anchor_stays() -> None:
    trainer = new_trainer(small_settings(), 2)
    before = trainer.anchor.clone()
    for worker in trainer.workers:
        worker.weights.fill_(float("inf"))
    assert trainer.step(0, None).num_finite == 0
    torch.testing.assert_close(trainer.anchor, before, rtol=0, atol=0)
    torch.testing.assert_close(trainer.workers[1].weights, before, rtol=0, atol=0)


@pytest.mark.parametrize(("place", "chunk"), [("cpu", None), ("device", 1000)])
def test_the_outer_step_depends_neither_on_chunks_nor_on_the_place_of_its_state(
    place: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped(place: str) -> list[torch.Tensor]:
        trainer = new_trainer(small_settings(f"pool.outer_state={place}"), 2)
        for _ in range(3):
            for number, worker in enumerate(trainer.workers):
                worker.weights.mul_(1.01 + 0.01 * number)
            trainer.step(0, None)
        return [*trainer.state().values(), *(worker.weights for worker in trainer.workers)]

    wanted = stepped("device")
    if chunk is not None:
        monkeypatch.setattr("adloco_dist.averaging.outer_sgd.CPU_CHUNK_ELEMENTS", chunk)
    found = stepped(place)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_checksum_sees_every_change(precision: str) -> None:
    trainer = new_trainer(small_settings(f"precision={precision}"), 1)
    before = trainer.checksum()
    assert new_trainer(small_settings(f"precision={precision}"), 1).checksum() == before
    for index in (0, 1, 7, len(trainer.anchor) // 2, len(trainer.anchor) - 1):
        kept = trainer.anchor[index].clone()
        trainer.anchor[index] += 1e-3
        assert trainer.checksum() != before
        trainer.anchor[index] = kept
    assert trainer.checksum() == before
    for first, second in ((0, 2), (0, 4000), (3000, 4100)):
        swapped = trainer.anchor.clone()
        assert swapped[first] != swapped[second]
        trainer.anchor[[first, second]] = trainer.anchor[[second, first]]
        assert trainer.checksum() != before, "exchanged elements"
        trainer.anchor.copy_(swapped)


def test_bf16_autocast_keeps_fp32_weights() -> None:
    settings = small_settings("precision=bf16")
    flat_model = FlatModel(small_module(settings), CPU, settings.precision)
    weights = flat_model.initial_weights()
    batch = small_store().batch(permutation(4))
    loss = mean_gradient(flat_model, small_objective(settings), batch, None).mean
    exact = FlatModel(small_module(settings), CPU, Precision.fp32)
    exact.initial_weights()
    full = mean_gradient(exact, small_objective(settings), batch, None).mean
    assert weights.dtype == flat_model.gradient.dtype == torch.float32
    assert loss != full, "bf16 rounds"
    torch.testing.assert_close(loss, full, rtol=2e-2, atol=0)
    torch.testing.assert_close(flat_model.gradient, exact.gradient, rtol=0, atol=0.05)


def test_an_untrained_model_is_as_good_as_chance() -> None:
    module = small_module(small_settings())
    for parameter in module.parameters():
        parameter.data.zero_()
    found = losses(module, small_store().batch(permutation(4)))
    assert found.shape == (4, SEQUENCE_LENGTH)
    torch.testing.assert_close(found, torch.full_like(found, float(torch.tensor(VOCAB_SIZE).log())))


def test_what_workers_have_in_common_is_the_product_of_different_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(50, dtype=torch.float64, generator=generator)
    means = common + 0.5 * torch.randn(3, 50, dtype=torch.float64, generator=generator)
    pairs = [float(means[i] @ means[j]) for i in range(3) for j in range(3) if i != j]
    assert shared_squared_norm(means) == pytest.approx(sum(pairs) / 6)
    assert shared_squared_norm(common.expand(2, -1)) == pytest.approx(float(common @ common))
    assert shared_squared_norm(means[:1]) is None, "one alone shares nothing"
