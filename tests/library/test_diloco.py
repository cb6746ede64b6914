"""`DiLoCo` around a loop of one's own: the published algorithm, number for number, whatever is in the loop."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from adloco_dist import DiLoCo, OuterSGD
from adloco_dist.averaging.checks import MARK_ELEMENTS
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import (
    Normed,
    Tied,
    adafactor,
    adamw,
    batch,
    loss,
    muon_beside_adamw,
    on_ranks,
    published,
    sgd,
    update,
)

OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "adafactor": adafactor, "muon beside adamw": muon_beside_adamw}
ROUNDS, UPDATES = 4, 3


def values(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def train_around(runtime: Runtime, optimizer: str) -> list[torch.Tensor]:
    module = Tied().double()
    optimizers = OPTIMIZERS[optimizer](module)
    with DiLoCo(module, optimizers, updates_per_round=UPDATES) as diloco:
        for number in range(ROUNDS * UPDATES):
            assert (diloco.round, diloco.updates) == divmod(number, UPDATES)
            update(module, optimizers, batch(runtime.rank, number))
            assert diloco.is_round_end is (number % UPDATES == UPDATES - 1)
    return values(module)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_diloco_as_published(optimizer: str, num_ranks: int) -> None:
    reference = published(Tied().double(), OPTIMIZERS[optimizer], num_ranks, ROUNDS, UPDATES)
    for rank in on_ranks(train_around, num_ranks, optimizer):
        torch.testing.assert_close(rank, reference, rtol=0, atol=1e-12)


def with_schedule_and_accumulation(runtime: Runtime, wrapping: str) -> tuple[list[torch.Tensor], int]:
    """Four micro-batches an update, clipping and a schedule, all of them the user's."""
    module = Tied().double()
    inner: Any = module
    if wrapping == "compiled":
        inner = torch.compile(module, backend="eager")
    elif wrapping == "ddp":
        alone = [dist.new_group([rank]) for rank in range(runtime.world_size)]
        inner = nn.parallel.DistributedDataParallel(module, process_group=alone[runtime.rank])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    step: Callable[[], Any] = optimizer.step
    if wrapping == "compiled":
        step = torch.compile(lambda: optimizer.step(), backend="eager")
    with DiLoCo(inner, optimizer, updates_per_round=2) as diloco:
        for number in range(6):
            for micro_batch in range(4):
                (loss(inner, batch(runtime.rank, 4 * number + micro_batch)) / 4).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            step()
            schedule.step()
            optimizer.zero_grad()
    assert set(diloco.state_dict()["anchor"]) == {
        "first.weight",
        "first.bias",
        "second.bias",
        "head.weight",
        "head.bias",
    }
    return values(module), diloco.round


@pytest.mark.parametrize("wrapping", ["compiled", "ddp"])
def test_the_loop_stays_the_users(wrapping: str) -> None:
    plain = on_ranks(with_schedule_and_accumulation, 2, "")
    wrapped = on_ranks(with_schedule_and_accumulation, 2, wrapping)
    for rank, rounds in [*plain, *wrapped]:
        assert rounds == 3
        torch.testing.assert_close(rank, plain[0][0], rtol=0, atol=1e-12)
    assert not torch.equal(plain[0][0][1], values(Tied().double())[1])


def train_scaled(runtime: Runtime, is_fused: bool) -> tuple[list[torch.Tensor], int]:
    """The second gradient of rank 1 overflows, so that it needs one more batch for as many updates."""
    module = Tied().double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-2, fused=is_fused)
    scaler = torch.amp.GradScaler("cpu")
    number = 0
    with DiLoCo(module, optimizer, updates_per_round=UPDATES) as diloco:
        while diloco.round < ROUNDS:
            before, overflows = diloco.updates, runtime.rank == 1 and number == 1
            scaled = scaler.scale(loss(module, batch(runtime.rank, number)))
            (scaled * (float("inf") if overflows else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert (diloco.updates == before) is overflows
            number += 1
    return values(module), number


def update_on_next_batch(module: nn.Module, optimizers: Sequence[Optimizer], worker: int, number: int) -> None:
    """Worker 1 has lost its second batch."""
    update(module, optimizers, batch(worker, number + (worker == 1 and number >= 1)))


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_that_grad_scaler_skips_is_no_update(is_fused: bool) -> None:
    reference = published(Tied().double(), adamw, 2, ROUNDS, UPDATES, update_on_next_batch)
    for rank, (trained, num_batches) in enumerate(on_ranks(train_scaled, 2, is_fused)):
        assert num_batches == ROUNDS * UPDATES + rank
        torch.testing.assert_close(trained, reference, rtol=0, atol=1e-12)


def train_in_a_group(runtime: Runtime) -> tuple[list[torch.Tensor], float | None] | None:
    """Ranks 1 and 2 of three are the workers; they start from different weights."""
    group = dist.new_group([1, 2])
    if runtime.rank == 0:
        return None
    assert isinstance(group, dist.ProcessGroup)
    module = Tied().double()
    if runtime.rank == 2:
        module.head.weight.data.add_(5)
    optimizers = adamw(module)
    with DiLoCo(module, optimizers, updates_per_round=UPDATES, group=group) as diloco:
        for number in range(ROUNDS * UPDATES):
            update(module, optimizers, batch(runtime.rank - 1, number))
    assert diloco.last_step
    return values(module), diloco.last_step.num_finite


def test_the_ranks_of_a_group_are_the_workers() -> None:
    reference = published(Tied().double(), adamw, 2, ROUNDS, UPDATES)
    outsider, *workers = on_ranks(train_in_a_group, 3)
    assert outsider is None
    for trained, num_finite in workers:
        torch.testing.assert_close(trained, reference, rtol=0, atol=1e-12)
        assert num_finite == 2


def train_normed(runtime: Runtime) -> dict[str, Any]:
    module = Normed()
    if runtime.rank == 1:
        with torch.no_grad():
            module.norm.running_mean.add_(5)  # pyright: ignore[reportOptionalMemberAccess]
            module.head.weight.add_(5)
    optimizers = adamw(module)
    before: dict[str, torch.Tensor] = {}
    with DiLoCo(module, optimizers, updates_per_round=100) as diloco:
        start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        for number in range(3):
            update(module, optimizers, batch(runtime.rank, number))
        before = {name: tensor.clone() for name, tensor in module.named_buffers()}
        step = diloco.outer_step()
    after = {name: tensor.clone() for name, tensor in module.named_buffers()}
    return {"start": start, "before": before, "after": after, "bytes": step.bytes_sent, "values": values(module)}


def test_buffers_that_training_changes_are_averaged_and_constants_stay() -> None:
    one, other = on_ranks(train_normed, 2)
    for name, tensor in Normed().state_dict().items():
        torch.testing.assert_close(one["start"][name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(other["start"][name], tensor, rtol=0, atol=0)
    for name in ("norm.running_mean", "norm.running_var"):
        assert not torch.equal(one["before"][name], other["before"][name])
        mean = (one["before"][name].double() + other["before"][name].double()) / 2
        for rank in (one, other):
            assert torch.equal(rank["after"][name], mean.float())
    for rank in (one, other):
        assert rank["after"]["norm.num_batches_tracked"] == 3
        assert torch.equal(rank["after"]["mask"], torch.full((3,), float("-inf")))
        # In a ring of two, as many bytes as the payloads have: aligned parameters, a mark of the anchor and a count
        # of workers; changing buffers.
        assert rank["bytes"] == 4 * (64 + 96 + 5 * 32 + 1 + MARK_ELEMENTS) + 8 * (2 * 8 + 1)
    torch.testing.assert_close(one["values"], other["values"], rtol=0, atol=0)


def train_with_one_norm(runtime: Runtime) -> dict[str, Any]:
    """The running statistics of rank 1 stay as they are."""
    module = Normed()
    if runtime.rank == 1:
        module.norm.eval()
    optimizers = adamw(module)
    with DiLoCo(module, optimizers) as diloco:
        update(module, optimizers, batch(runtime.rank, 0))
        before = {name: tensor.clone() for name, tensor in module.named_buffers()}
        diloco.outer_step()
    return {"before": before, "after": dict(module.named_buffers()), "known": diloco.state_dict()["changing_buffers"]}


def test_a_buffer_that_changes_on_one_rank_alone_is_averaged() -> None:
    one, other = on_ranks(train_with_one_norm, 2)
    start = dict(Normed().named_buffers())
    assert one["known"] == other["known"] == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    for name in one["known"]:
        assert torch.equal(other["before"][name], start[name])
        assert not torch.equal(one["before"][name], start[name])
        mean = (one["before"][name].double() + start[name].double()) / 2
        expected = mean.to(start[name].dtype) if start[name].is_floating_point() else mean.round().long()
        assert torch.equal(one["after"][name], expected)
        assert torch.equal(other["after"][name], expected)
    assert torch.equal(one["after"]["mask"], start["mask"])


def train_in_bf16(runtime: Runtime) -> dict[str, Any]:
    module = Tied().bfloat16()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with DiLoCo(module, optimizer, updates_per_round=1, outer=OuterSGD(lr=0.01, momentum=0)) as diloco:
        anchors = [diloco.state_dict()["anchor"]["head.bias"].clone()]
        for _ in range(3):
            with torch.no_grad():
                module.head.bias.sub_(0.125)  # far more than a step of 0.01 times it can show in bf16
            optimizer.step()
            anchors.append(diloco.state_dict()["anchor"]["head.bias"].clone())
    return {"anchors": anchors, "bias": module.head.bias.detach().clone()}


def test_the_anchor_of_bf16_parameters_keeps_what_rounding_takes_from_them() -> None:
    for rank in on_ranks(train_in_bf16, 2):
        first, *_, last = rank["anchors"]
        assert last.dtype == torch.float32
        assert torch.equal(rank["bias"], last.bfloat16())
        torch.testing.assert_close(first - last, torch.full_like(last, 3 * 0.125 * 0.01), rtol=0.2, atol=0)


def train_with_nan(runtime: Runtime, worker: int | None) -> dict[str, Any]:
    """In the second round the weights of `worker` (None: of both) become NaN."""
    module = Normed().double()
    optimizers = adamw(module)
    history, norms, finite = [], [], []
    with DiLoCo(module, optimizers, updates_per_round=UPDATES) as diloco:
        for number in range(3 * UPDATES):
            update(module, optimizers, batch(runtime.rank, number))
            if number == UPDATES and worker in (runtime.rank, None):
                module.head.bias.data.fill_(float("nan"))
            if diloco.is_round_end:
                assert diloco.last_step
                norms.append(diloco.last_step.pseudo_gradient_norm)
                finite.append(diloco.last_step.num_finite)
                history.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
                steps = [int(state["step"]) for state in optimizers[0].state.values()]
                history[-1]["steps"] = torch.tensor(steps)
    return {"history": history, "norms": norms, "finite": finite}


def test_a_worker_that_is_not_finite_contributes_nothing_and_restarts() -> None:
    one, other = on_ranks(train_with_nan, 2, 1)
    assert one["finite"] == other["finite"] == [2, 1, 2]
    for mine, theirs in zip(one["history"], other["history"], strict=True):
        for name in mine.keys() - {"steps"}:
            assert torch.equal(mine[name], theirs[name])
            assert name == "mask" or mine[name].isfinite().all()
    assert set(one["history"][1]["steps"].tolist()) == {2 * UPDATES}
    assert other["history"][1]["steps"].numel() == 0
    assert set(other["history"][2]["steps"].tolist()) == {UPDATES}


def test_without_any_finite_worker_the_anchor_stays() -> None:
    for rank in on_ranks(train_with_nan, 2, None):
        assert rank["finite"] == [2, 0, 2]
        assert rank["norms"][1] == 0.0
        for name, tensor in rank["history"][0].items():
            assert name == "steps" or torch.equal(rank["history"][1][name], tensor)
