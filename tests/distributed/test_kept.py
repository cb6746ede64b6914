"""Every entry of the schema survives: saved and resumed where it was, on other ranks, and in other parts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from adloco_dist.checkpoint.writer import schema_of
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.policy.plan import INTERRUPTED
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.schema import NOTHING, Kind
from helpers.processes import run_ranks
from helpers.resuming import train_kept
from helpers.sharded import ROWS
from helpers.support import FOUR_TRAINERS

POOL = (
    ROWS, "pool.trainers=1", "pool.workers_per_trainer=2", "merge=none", "batching.request=norm_test",
    "algorithm.updates_per_round=4", "precision=fp64",
)  # fmt: skip
CASES = {
    "what travels late": (
        ("wire.fragments=2", "wire.delay_updates=1", "outer.momentum=0.9", "outer.average_span=0.3", "wire=fp32"), 9
    ),
    "what was not sent": (
        ("wire=sparse", "wire.fraction=0.1", "outer=average", "inner=sgd", "inner.momentum=0.9"), 7
    ),
}  # fmt: skip
"""Settings, and how often ranks look before they stop: their worker is in a round then, and awaits a fragment."""
OF_THREE = {"of three": (*CASES["what was not sent"][0], "pool.workers_per_trainer=3")}
"""The second of them with as many workers as makes some ranks owners of sums."""
Kept = dict[str, dict[str, npt.NDArray[Any]]]


def kept(pool: LocalPool) -> Kept:
    """What this rank would save, by its owner and by the name of the entry."""
    owners: dict[str, dict[str, Any]] = {}
    for trainer in pool.trainers.values():
        owners[f"trainer {trainer.id}"] = trainer.state()
        owners[f"trainer {trainer.id} on rank {pool.runtime.rank}"] = trainer.own_state()
        for worker in trainer.workers:
            assert pool.estimator
            state = worker.state(True) | pool.estimator.state((trainer.id, worker.id))
            if "departed" in state:  # what lies behind the fragment's elements is of a fragment before
                awaited = 0 if worker.awaits == NOTHING else trainer.fragments[worker.awaits].num_elements
                state["departed"] = state["departed"][:awaited]
            owners[f"worker {worker.id} of trainer {trainer.id}"] = state
    return {
        owner: {name: value.numpy(force=True).copy() for name, value in state.items()}
        for owner, state in owners.items()
    }


def trained(runtime: Runtime, folder: str, overrides: Sequence[str], looks: int) -> tuple[Kept, Kept, dict[str, Kind]]:
    """What a rank holds when it begins and when it was stopped, and the kinds of the entries."""
    pools: list[LocalPool] = []
    begun: list[Kept] = []

    def look(pool: LocalPool) -> None:
        pools.append(pool)
        begun.append(kept(pool))

    result = train_kept(runtime, folder, looks, *FOUR_TRAINERS, *overrides, prepare=look)
    assert result["stop"] == INTERRUPTED
    schema = schema_of(pools[0], is_away=True)
    return begun[0], kept(pools[0]), {entry.name: entry.kind for entry in (*schema.trainer, *schema.worker)}


def run(nodes: list[int], folder: Path, case: str, looks: int, size: int = 1) -> tuple[Kept, Kept, dict[str, Kind]]:
    """As `trained`, of all ranks; what several ranks keep of a trainer for themselves is added up."""
    chosen = OF_THREE[case] if case in OF_THREE else CASES[case][0]
    overrides = (*POOL, *chosen, f"pool.ranks_per_worker={size}")
    ranks = run_ranks(trained, nodes, str(folder), overrides, looks, ranks_per_worker=size)
    begun, ended = ({} for _ in range(2))
    for of_rank in ranks:
        for together, owners in ((begun, of_rank[0]), (ended, of_rank[1])):
            for owner, state in owners.items():
                if " on rank " in owner:
                    total = together.setdefault(owner.partition(" on rank ")[0] + ", added up", {})
                    total |= {name: total.get(name, 0) + value for name, value in state.items()}
                else:
                    together[owner] = state
    return begun, ended, ranks[0][2]


def assert_same(begun: Kept, saved: Kept) -> None:
    assert begun.keys() == saved.keys()
    for owner, state in saved.items():
        assert begun[owner].keys() == state.keys()
        for name, value in state.items():
            np.testing.assert_array_equal(begun[owner][name], value, err_msg=f"{name} of {owner}", strict=True)


@pytest.mark.parametrize("case", CASES)
def test_every_entry_survives(tmp_path: Path, case: str) -> None:
    _, saved, kinds = run([0, 0], tmp_path, case, looks=CASES[case][1])
    assert {name for state in saved.values() for name in state} == kinds.keys()
    for name, kind in kinds.items():
        if kind in (Kind.vector, Kind.packed, Kind.part, Kind.fragment, Kind.summed):
            assert any(np.any(state[name]) for state in saved.values() if name in state), f"{name} is nothing but zeros"
    assert_same(run([0, 0], tmp_path, case, looks=0)[0], saved)
    for nodes in ([0], [0, 0, 0, 0]):
        assert_same(run(nodes, tmp_path, case, looks=0)[0], saved)
    run([0, 0, 0, 0], tmp_path, case, looks=0, size=2)
    run([0, 0, 0, 0], tmp_path, case, looks=0, size=4)
    assert_same(run([0, 0], tmp_path, case, looks=0)[0], saved)


def test_what_owners_of_sums_did_not_send_survives_on_fewer_ranks(tmp_path: Path) -> None:
    """Of three ranks each owns the sum of a slice, and keeps what was not sent of it; of two none does."""
    _, saved, _ = run([0, 0, 0], tmp_path, "of three", looks=7)
    for nodes in ([0, 0, 0], [0, 0], [0]):
        begun = run(nodes, tmp_path, "of three", looks=0)[0]
        assert begun.keys() == saved.keys()
        for owner, state in saved.items():
            for name, value in state.items():
                np.testing.assert_allclose(begun[owner][name], value, rtol=0, atol=1e-15, err_msg=f"{name} of {owner}")


def test_the_cases_have_all_kinds(tmp_path: Path) -> None:
    kinds = [set(run([0], tmp_path / str(number), case, looks=3)[2].values()) for number, case in enumerate(CASES)]
    assert set.union(*kinds) == set(Kind)
