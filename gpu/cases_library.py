"""The library around loops of one's own, on ranks that share a device: as on CPUs."""

from dataclasses import asdict
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from adloco_dist import DiLoCo, NoiseScale
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Backend
from harness import Case, Here
from helpers.plain import Tied, adamw, batch, loss, published, update
from helpers.processes import run_ranks
from ranks import cluster

ROUNDS, UPDATES = 4, 3


def diloco_as_published(here: Here, backend: Backend = Backend.gloo) -> dict[str, float]:
    """Two ranks in fp64 with fused AdamW, against the algorithm on one CPU, in plain modules."""
    reference = published(Tied().double(), adamw, 2, ROUNDS, UPDATES)
    ranks = run_ranks(_train_around, [0, 0], cluster=cluster(here, backend))
    differences = [
        float((torch.from_numpy(mine) - theirs).abs().max())
        for rank in ranks
        for mine, theirs in zip(rank, reference, strict=True)
    ]
    assert max(differences) < 1e-9, f"parameters differ by {max(differences):.3g}"
    return {"parameter_difference": max(differences)}


def _train_around(runtime: Runtime) -> list[Any]:
    module = Tied().double().to(runtime.device)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-2, fused=True)
    with DiLoCo(module, optimizer, updates_per_round=UPDATES):
        for number in range(ROUNDS * UPDATES):
            update(module, [optimizer], batch(runtime.rank, number).to(runtime.device))
    return [parameter.detach().cpu().numpy() for parameter in module.parameters()]


def noise_scale_as_on_cpus(here: Here, backend: Backend = Backend.gloo) -> dict[str, float]:
    """Under DistributedDataParallel in fp64, measured three times: the same estimates."""
    mine, theirs = (
        run_ranks(_measure, [0, 0], cluster=where) for where in (cluster(here, backend), cluster(Here.cpu(here.folder)))
    )
    worst = 0.0
    for one, other in zip(mine[0], theirs[0], strict=True):
        for name, value in other.items():
            difference = abs(one[name] - value) / max(abs(value), 1e-30)
            assert difference < 1e-6, f"{name}: {one[name]} instead of {value}"
            worst = max(worst, difference)
    return {"relative_difference": worst}


def _measure(runtime: Runtime) -> list[dict[str, float]]:
    module = DistributedDataParallel(Tied().double().to(runtime.device))
    noise, found = NoiseScale(module, every_updates=1), []
    for number in range(3):
        for micro_batch in range(2):
            rows = batch(runtime.rank, 2 * number + micro_batch).to(runtime.device)
            (loss(module, rows) / 2).backward()
            noise.observe(num_sequences=len(rows))
        estimate = noise.update()
        assert estimate is not None
        found.append({name: value for name, value in asdict(estimate).items() if isinstance(value, float)})
        module.zero_grad()
    return found


CASES = [
    Case("DiLoCo around a loop", diloco_as_published, 90),
    Case("noise scale of a loop", noise_scale_as_on_cpus, 90),
]
