"""`NoiseScale` on ranks that average their gradients: the statistics of the exact gradients of every chunk.

Exact equality, sketch for sketch, with gradients that are computed in this process; that such statistics are unbiased
is held by test_noise_scale.py and tests/unit/noise/test_statistics.py.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from adloco_dist import NoiseScale
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.noise.sketch import Sketch
from helpers.processes import run_ranks
from helpers.regression import flat, mean_gradient, new_model, sketched_statistics, sum_of_losses

Passes = list[list[int]]
UPDATES: dict[str, list[Passes]] = {
    "one pass": [[[0, 1, 2]], [[3, 4, 5]]],
    "several passes": [[[0, 1], [2, 3, 4], [5]], [[6, 7], [8], [9, 10, 11]]],
    "unequal ranks": [[[0, 1, 2], [3]], [[4, 5]]],
    "a rank without a pass": [[[0, 1, 2], [3]], []],
}
"""The sequences of every pass of every rank."""
CPU = torch.device("cpu")


def chunk_gradients(chunks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    return [flat(mean_gradient(ids)) for ids in chunks]


def num_sequences(ranks: list[Passes]) -> int:
    return sum(len(ids) for passes in ranks for ids in passes)


def under_ddp(runtime: Runtime, ranks: list[Passes], communicates: str, bucket_view: bool) -> list[Any]:
    """Two measured updates of the same passes.

    Args:
        communicates: `last`, `every` or `no` pass (then the averaging is left out, as it plays no part).
    """
    passes, total = ranks[runtime.rank], num_sequences(ranks)
    model = new_model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view) if communicates != "no" else None
    wrapped = ddp or model
    noise = NoiseScale(wrapped, every_updates=1)
    found = []
    for _ in range(2):
        for ids in passes:
            is_silent = communicates == "last" and ids is not passes[-1]
            with ddp.no_sync() if ddp and is_silent else nullcontext():
                # Weighted so that the ranks' mean is the mean over all sequences.
                (sum_of_losses(wrapped, ids) * runtime.world_size / total).backward()
            noise.observe(len(ids))
        estimate = noise.update()
        assert estimate is not None
        found.append(asdict(estimate))
        wrapped.zero_grad(set_to_none=not bucket_view)
    return found


@pytest.mark.parametrize(
    ("update", "communicates", "bucket_view"),
    [
        ("one pass", "every", False),
        ("one pass", "every", True),
        ("several passes", "every", False),
        ("several passes", "last", False),
        ("several passes", "last", True),
        ("unequal ranks", "no", False),
        ("a rank without a pass", "no", False),
    ],
)
def test_ddp_ranks_measure_their_own_passes(update: str, communicates: str, bucket_view: bool) -> None:
    ranks = UPDATES[update]
    first, second = run_ranks(under_ddp, [0, 0], ranks, communicates, bucket_view)
    chunks = [ids for passes in ranks for ids in passes]
    gradients = chunk_gradients(chunks)
    sketch = Sketch(len(gradients[0]), torch.float64, CPU)
    sketch.renew(0)
    expected = sketched_statistics(torch.stack([sketch(gradient) for gradient in gradients]), chunks)
    assert first == second, "all ranks have the same estimates"
    assert first[0]["statistics"] == pytest.approx(asdict(expected), rel=1e-9)
    assert (first[0]["num_chunks"], first[0]["num_sequences"]) == (len(chunks), num_sequences(ranks))
    # The second is smoothed with the first, and has signs of its own: 2.2 % apart in each norm.
    assert first[1]["statistics"]["trace"] == pytest.approx(expected.trace, rel=0.1)


def sharded(*mesh_shape: int) -> nn.Module:
    model = new_model()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replica", "shard")[-len(mesh_shape) :])
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


def under_fully_shard(runtime: Runtime, ranks: list[Passes], mesh_shape: tuple[int, ...], silent: int) -> Any:
    """One update; the first `silent` passes do not communicate."""
    passes, total = ranks[runtime.rank], num_sequences(ranks)
    model = sharded(*mesh_shape)
    assert isinstance(model, FSDPModule)
    noise = NoiseScale(model)
    pending = 0
    for number, ids in enumerate(passes):
        model.set_requires_gradient_sync(number >= silent)
        (sum_of_losses(model, ids) * runtime.world_size / total).backward()
        pending += len(ids)
        if number >= silent:
            noise.observe(pending)
            pending = 0
    estimate = noise.update()
    assert estimate is not None
    dist.barrier()
    return asdict(estimate)


@pytest.mark.parametrize(("mesh_shape", "silent"), [((2,), 0), ((2,), 1), ((2, 2), 0)])
def test_under_fully_shard_a_pass_of_all_ranks_is_a_chunk(mesh_shape: tuple[int, ...], silent: int) -> None:
    num_ranks, num_shards = 2 * len(mesh_shape), mesh_shape[-1]
    ranks: list[Passes] = [[[10 * rank, 1], [2, 3, 4], [5 + rank]] for rank in range(num_ranks)]
    found = run_ranks(under_fully_shard, [0] * num_ranks, ranks, mesh_shape, silent)
    by_pass = [[ids for passes in ranks for ids in passes[number]] for number in range(3)]
    chunks = [[ids for silently in by_pass[: silent + 1] for ids in silently], *by_pass[silent + 1 :]]
    sketches = []
    for ids in chunks:
        # The ranks of the first replica sketch their shards, each with signs of its own.
        parts = []
        for shard in range(num_shards):
            mine = flat([gradient.chunk(num_shards)[shard] for gradient in mean_gradient(ids)])
            sketch = Sketch(len(mine), torch.float64, CPU)
            sketch.renew(0, shard)
            parts.append(sketch(mine))
        sketches.append(torch.stack(parts).sum(0))
    expected = sketched_statistics(torch.stack(sketches), chunks)
    assert all(rank == found[0] for rank in found)
    assert found[0]["statistics"] == pytest.approx(asdict(expected), rel=1e-9)
    assert (found[0]["num_chunks"], found[0]["num_sequences"]) == (len(chunks), num_sequences(ranks))


def with_a_group_of_its_own(runtime: Runtime) -> Any:
    """Ranks 0 and 1 average their gradients; rank 2 has nothing to do with them."""
    group = dist.new_group([0, 1])
    model = new_model()
    if runtime.rank == 2:
        with pytest.raises(ValueError, match="this rank is not in it; pass the group that averages its gradients"):
            NoiseScale(model, group)  # pyright: ignore[reportArgumentType]
        return None
    assert isinstance(group, dist.ProcessGroup)
    noise = NoiseScale(model, group)
    (sum_of_losses(model, [runtime.rank]) / 1).backward()
    noise.observe(1)
    estimate = noise.update()
    assert estimate is not None
    return estimate.num_chunks


def test_only_the_groups_ranks_are_compared() -> None:
    assert run_ranks(with_a_group_of_its_own, [0, 0, 0]) == [2, 2, None]


def messages(call: Callable[[], object]) -> list[str]:
    """What is raised or logged."""
    records: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Kept()
    logging.getLogger("adloco_dist.noise_scale").addHandler(handler)
    try:
        call()
    except ValueError as error:
        records.append(str(error))
    logging.getLogger("adloco_dist.noise_scale").removeHandler(handler)
    return records


def misused(runtime: Runtime) -> dict[str, list[str]]:
    model = sharded(2)
    noise = NoiseScale(model)

    def one_pass() -> None:
        sum_of_losses(model, [runtime.rank]).backward()
        noise.observe(1)
        assert noise.update() is None

    def silent_pass() -> None:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        silent = NoiseScale(model)
        sum_of_losses(model, [runtime.rank]).backward()
        silent.observe(1)

    def before_wrapping() -> None:
        plain = new_model()
        early = NoiseScale(plain)
        fully_shard(plain, mesh=init_device_mesh("cpu", (2,)))
        sum_of_losses(plain, [runtime.rank]).backward()
        early.observe(1)

    def partly() -> None:
        partial = new_model()
        fully_shard(partial[0], mesh=init_device_mesh("cpu", (2,)))
        NoiseScale(partial)

    def by_hand() -> None:
        layer = nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (2,))
        for name, parameter in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))
        NoiseScale(layer)

    calls = {call.__name__: messages(call) for call in (one_pass, silent_pass, before_wrapping, partly, by_hand)}
    dist.barrier()
    return calls


def test_what_sharded_models_do_not_allow_is_said_in_one_line() -> None:
    found, other = run_ranks(misused, [0, 0])
    assert found == other
    assert all(len(lines) == 1 for lines in found.values())
    expected = {
        "one_pass": "1 chunk(s) to compare; it takes two backward passes",
        "silent_pass": "no gradient reached the model's parameters",
        "before_wrapping": "no gradient reached the model's parameters",
        "partly": "model=Sequential: 0.weight is sharded and 2.weight is not; shard all parameters with fully_shard",
        "by_hand": "model=Linear: weight is a DTensor; of these only fully_shard's are supported",
    }
    for name, message in expected.items():
        assert message in found[name][0]
