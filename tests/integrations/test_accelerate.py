"""DiLoCo in a loop of accelerate's, without code of ours between the two."""

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from adloco_dist import DiLoCo
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import Tied, batch, loss, on_ranks, published

pytest.importorskip("accelerate", reason="accelerate is not installed")

ROUNDS, UPDATES, MICRO_BATCHES, WORKERS = 3, 2, 2, 2


def sgd(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.5)]


def update(module: nn.Module, optimizers: Any, worker: int, number: int) -> None:
    for micro_batch in range(MICRO_BATCHES):
        (loss(module, batch(worker, MICRO_BATCHES * number + micro_batch)) / MICRO_BATCHES).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizers[0].step()
    optimizers[0].zero_grad()


def new_accelerator(runtime: Runtime) -> Any:
    """One that sees the other ranks, as under torchrun."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    numbers = (runtime.rank, runtime.rank, runtime.world_size, runtime.world_size)
    os.environ |= {name: str(number) for name, number in zip(names, numbers, strict=True)} | {"OMP_NUM_THREADS": "1"}
    from accelerate import Accelerator

    return Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)


def accumulate(runtime: Runtime) -> dict[str, Any]:
    accelerator = new_accelerator(runtime)
    module = Tied().double()
    model = accelerator.prepare_model(module, evaluation_mode=True)
    # accelerate deals the batches to the ranks in turn.
    num_batches = ROUNDS * UPDATES * MICRO_BATCHES
    rows = torch.cat([batch(worker, number) for number in range(num_batches) for worker in range(WORKERS)])
    loader = DataLoader(rows, batch_size=len(batch(0, 0)))  # pyright: ignore[reportArgumentType]
    optimizer, loader = accelerator.prepare(sgd(module)[0], loader)
    steps = []
    with DiLoCo(accelerator.unwrap_model(model), optimizer.optimizer, updates_per_round=UPDATES) as diloco:
        for micro_batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, micro_batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            steps.append((diloco.round, diloco.updates))
    return {
        "values": [parameter.detach() for parameter in module.parameters()],
        "steps": steps,
        "is wrapped": model is not module,
        "num_processes": accelerator.num_processes,
        "hooks of the wrapper": hasattr(optimizer, "_optimizer_step_post_hooks"),
    }


def overflow(runtime: Runtime) -> list[tuple[int, int, bool]]:
    """GradScaler skips rank 1's second update."""
    new_accelerator(runtime)
    from accelerate.optimizer import AcceleratedOptimizer

    module = Tied()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(sgd(module)[0], scaler=scaler)
    seen = []
    with DiLoCo(module, optimizer.optimizer, updates_per_round=10) as diloco:
        for number in range(3):
            scaler.scale(loss(module, batch(runtime.rank, number))).backward()
            if (runtime.rank, number) == (1, 1):
                module.head.bias.grad = torch.full_like(module.head.bias, float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            seen.append((diloco.round, diloco.updates, optimizer.step_was_skipped))
        diloco.outer_step()
    return seen


def both(runtime: Runtime) -> dict[str, Any]:
    return {"accumulate": accumulate(runtime), "overflow": overflow(runtime)}


@pytest.fixture(scope="module")
def done() -> list[dict[str, Any]]:
    return on_ranks(both, WORKERS)


def test_it_takes_the_steps_that_are_published(done: list[dict[str, Any]]) -> None:
    reference = published(Tied().double(), sgd, WORKERS, ROUNDS, UPDATES, update)
    for rank in (rank["accumulate"] for rank in done):
        torch.testing.assert_close(rank["values"], reference, rtol=0, atol=1e-12)
        assert rank["num_processes"] == WORKERS
        assert not rank["is wrapped"]


def test_micro_batches_are_no_updates(done: list[dict[str, Any]]) -> None:
    expected = [divmod(number // MICRO_BATCHES, UPDATES) for number in range(1, 1 + ROUNDS * UPDATES * MICRO_BATCHES)]
    for rank in (rank["accumulate"] for rank in done):
        assert rank["steps"] == expected


def test_steps_that_a_scaler_skips_are_no_updates(done: list[dict[str, Any]]) -> None:
    assert done[0]["overflow"] == [(0, 1, False), (0, 2, False), (0, 3, False)]
    assert done[1]["overflow"] == [(0, 1, False), (0, 1, True), (0, 2, False)]


def test_the_wrapping_optimizer_has_no_hooks_to_use(done: list[dict[str, Any]]) -> None:
    """If it gets some one day, `optimizer.optimizer` in the guide can become `optimizer`."""
    assert not any(rank["accumulate"]["hooks of the wrapper"] for rank in done)
