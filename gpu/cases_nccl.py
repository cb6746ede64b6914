"""NCCL between ranks that share one GPU: it takes them for hosts, and their traffic goes through sockets.

Without a GPU the same cases run over gloo.
"""

import os
import signal
import time
from itertools import combinations
from typing import Any

import numpy as np
import torch

from adloco_dist.cluster.groups import Groups
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Backend
from cases_averages import sharded_beside_updates, sharded_pool_as_on_cpus
from cases_library import diloco_as_published, noise_scale_as_on_cpus
from harness import Case, Here
from helpers.commands import errors, facts, metrics, run
from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, train_small_pool
from ranks import MANY, cluster, collectives, largest_difference
from small_runs import ENDLESS, finish, hurt_rank, small_run

SHARED = {
    "ADLOCO_TEST_SHARED_NCCL": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
}
"""For ranks of a case: the network that two hosts would use, on this one."""
END_SECONDS = 15.0
"""Within this all other ranks have ended when one is dead or silent."""
TURNS, MOST = 100, 2


def backend(here: Here) -> Backend:
    """What the case is about, or what stands in for it."""
    return Backend.nccl if here.is_cuda else Backend.gloo


def nccl_run(here: Here, directory: str, *more: str, num_ranks: int) -> list[str]:
    """The command of a small run."""
    return small_run(here, directory, f"cluster.backend={backend(here).name}", *more, num_ranks=num_ranks)


def collectives_as_gloo(here: Here) -> dict[str, float]:
    """Every collective of the package on two and on three ranks: nothing but the order of sums may differ."""
    worst = 0.0
    for num_ranks in (2, 3):
        results = run_ranks(collectives, [0] * num_ranks, cluster=cluster(here, backend(here)))
        expected = run_ranks(collectives, [0] * num_ranks)
        for rank, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
            for name, array in theirs.items():
                difference = float(np.abs(mine[name] - array).max())
                allowed = 1e-5 if "all_reduce" in name and "32" in name else 1e-12 if "all_reduce" in name else 0.0
                assert difference <= allowed, f"{num_ranks} ranks, rank {rank}, {name}: off by {difference:.3g}"
                worst = max(worst, difference)
    return {"largest_difference": worst}


def many_groups(here: Here) -> dict[str, float]:
    """Groups of twelve rank sets take turns, of which a rank is in two at a time: no hang; what one costs."""
    (first, *_) = run_ranks(_take_turns, [0] * 4, cluster=cluster(here, backend(here)))
    return first


def _take_turns(runtime: Runtime) -> dict[str, float]:
    sets = [ranks for size in (2, 3, 4) for ranks in combinations(range(runtime.world_size), size)]
    sets = [*sets, (0, 1, 2, 3)][:12]
    groups = Groups(runtime.backend, timeout_seconds=60, maximum=MOST)
    random = torch.Generator().manual_seed(0)  # the same turns on all ranks
    forming, taken, device = list[float](), list[float](), runtime.device
    tensor = torch.ones(1_000_000, device=device)
    for turn in range(TURNS):
        ranks = sets[int(torch.randint(len(sets), (1,), generator=random))]
        is_new, free = ranks not in groups.formed, _free_bytes(device)
        start = time.perf_counter()
        group = groups.of(ranks)
        if group is not None:
            tensor.fill_(runtime.rank + 1)
            group.all_reduce(tensor)
            assert float(tensor[-1]) == sum(rank + 1 for rank in ranks), f"turn {turn}: wrong sum"
            if is_new:
                forming.append(time.perf_counter() - start)
                taken.append(free - _free_bytes(device))
        mine = [one for one in groups.formed if runtime.rank in one]
        assert len(mine) <= MOST, f"turn {turn}: in {mine} at one time"
    groups.keep([])
    # Other ranks form theirs on the same device meanwhile: the megabytes are of all of them.
    return {"form_seconds": sum(forming) / len(forming), "form_mb_all_ranks": max(taken) / 1e6, "turns": float(TURNS)}


def _free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    return float(torch.cuda.mem_get_info(device)[0])


def whole_pool(here: Here) -> dict[str, float]:
    """A pool in fp64 with merges over three ranks: the anchors of gloo on the CPU."""
    results: list[dict[str, Any]] = run_ranks(
        train_small_pool, [0] * 3, *FOUR_TRAINERS, *MANY, cluster=cluster(here, backend(here))
    )
    difference = largest_difference(results, run_ranks(train_small_pool, [0] * 3, *FOUR_TRAINERS, *MANY))
    assert difference < 1e-9, f"anchors differ by {difference:.3g}"
    return {"anchor_difference": difference}


def diloco_over_nccl(here: Here) -> dict[str, float]:
    """The library around a loop: the algorithm as published."""
    return diloco_as_published(here, backend(here))


def noise_scale_over_nccl(here: Here) -> dict[str, float]:
    """The library under DistributedDataParallel: the estimates of CPUs."""
    return noise_scale_as_on_cpus(here, backend(here))


def sharded_pool(here: Here) -> dict[str, float]:
    """Workers of two ranks each, whose averages travel over gloo while NCCL gathers layers: as on CPUs."""
    return sharded_pool_as_on_cpus(here, cluster(here, backend(here)))


def diloco_around_sharded_workers(here: Here) -> dict[str, float]:
    """The library around such workers, with a delay: as on CPUs."""
    return sharded_beside_updates(here, cluster(here, backend(here)))


def whole_run(here: Here) -> dict[str, float]:
    """A run with merges, after which ranks are in other groups."""
    more = ("pool.trainers=3", "pool.workers_per_trainer=2", "merge.every_rounds=1", "budget=4rounds")
    finish(nccl_run(here, "run", *more, num_ranks=3), here)
    found, rows = facts(here.folder / "run"), metrics(here.folder / "run")
    assert found["cluster"]["backend"] == backend(here).name
    assert len(found["merges"]) == 2
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    outer = [row["seconds"]["outer"] for row in rows if row.get("seconds", {}).get("outer")]
    return {"last_loss": rows[-1]["validation_loss"], "outer_seconds": max(outer)}


def killed_in_an_all_reduce(here: Here) -> dict[str, float]:
    """kill -9 while ranks hardly do anything but average: the run ends in time, with the name of the rank."""
    hurt = hurt_rank(_averaging(here), here, 1, signal.SIGKILL, minimum="round 1 ")
    assert hurt.code == 1, f"code {hurt.code}"
    (line,) = errors(hurt.output)
    assert "rank 1 on " in line and "ended by SIGKILL" in line, line
    assert hurt.seconds < END_SECONDS, f"the others took {hurt.seconds:.1f} s to end"
    return {"end_seconds": hurt.seconds}


def stuck_in_an_all_reduce(here: Here) -> dict[str, float]:
    """A rank that stands still is named by the others, after the time that a rank may be silent."""
    hurt = hurt_rank(_averaging(here), here, 1, signal.SIGSTOP, minimum="round 1 ")
    assert hurt.code == 1, f"code {hurt.code}"
    log = (here.folder / "run" / "logs" / "rank0.log").read_text(encoding="utf-8")
    assert "rank 1 on " in log and "silent for " in log, log
    assert hurt.seconds < END_SECONDS, f"the others took {hurt.seconds:.1f} s to end"
    return {"end_seconds": hurt.seconds}


def _averaging(here: Here) -> list[str]:
    """A run that averages a million parameters after every update."""
    more = ("model=tiny", "merge=none", "pool.trainers=1", "pool.workers_per_trainer=3", "evaluation.every=null")
    return nccl_run(here, "run", *more, "algorithm.updates_per_round=1", *ENDLESS, num_ranks=3)


def elastic_restart(here: Here) -> dict[str, float]:
    """After kill -9 the run is started again, with groups of its own, and resumes."""
    more = ("run.unfinished=resume", "checkpoint.every=1rounds", "--max-restarts", "1", "pool.workers_per_trainer=2")
    command = nccl_run(here, "run", "merge=none", "pool.trainers=1", *ENDLESS, *more, num_ranks=2)
    hurt = hurt_rank(command, here, 1, signal.SIGKILL, until="note: resumes from", minimum="round 4 ")
    assert hurt.code == 75, f"code {hurt.code}"
    return {"restart_seconds": hurt.seconds}


def wrong_interface(here: Here) -> dict[str, float]:
    """NCCL is given a network that this machine does not have: the run ends in time, and says why."""
    os.environ["NCCL_SOCKET_IFNAME"] = "=nowhere0"
    more = ("merge=none", "pool.trainers=1", "pool.workers_per_trainer=2", "cluster.timeout_seconds=20")
    start = time.monotonic()
    done = run(nccl_run(here, "run", *more, num_ranks=2), here.folder, timeout_seconds=80)
    seconds = time.monotonic() - start
    print(done.output)
    if here.is_cuda:
        assert done.code in (1, 2), f"code {done.code}"
        (line,) = errors(done.output)
        assert "nccl" in line.lower(), line
    return {"end_seconds": seconds}


CASES = [
    Case("collectives as gloo's", collectives_as_gloo, 120, SHARED),
    Case("twelve rank sets, two at a time", many_groups, 120, SHARED, alone=True),
    Case("a pool with merges, in fp64", whole_pool, 90, SHARED),
    Case("DiLoCo around a loop, over NCCL", diloco_over_nccl, 90, SHARED),
    Case("noise scale of a loop, over NCCL", noise_scale_over_nccl, 90, SHARED),
    Case("a sharded pool, beside updates, over NCCL", sharded_pool, 120, SHARED),
    Case("DiLoCo around sharded workers, over NCCL", diloco_around_sharded_workers, 120, SHARED),
    Case("a whole run with merges and eviction", whole_run, 90, SHARED),
    Case("a rank killed in an all-reduce", killed_in_an_all_reduce, 60, SHARED),
    Case("a rank stuck in an all-reduce", stuck_in_an_all_reduce, 90, SHARED),
    Case("elastic restart over NCCL", elastic_restart, 90, SHARED),
    Case("a wrong interface", wrong_interface, 90, SHARED),
]
