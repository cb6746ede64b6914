"""A loop of one's own with `DiLoCo` trains what the launcher trains."""

import numpy as np

from adloco_dist import DiLoCo
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.testing.processes import run_ranks
from helpers.launched import ClippedUpdates, batches, new_adamw, parameters, train_and_unflatten
from helpers.support import small_module, small_settings

ROUNDS, UPDATES, LOCAL_BATCH = 5, 3, 2


def train_by_loop(runtime: Runtime) -> list[np.ndarray]:
    module = small_module(small_settings()).double()
    optimizers = new_adamw(module)
    take_update = ClippedUpdates(batches(ROUNDS * UPDATES, runtime.world_size * LOCAL_BATCH), LOCAL_BATCH)
    with DiLoCo(module, optimizers, updates_per_round=UPDATES):
        for number in range(ROUNDS * UPDATES):
            take_update(module, optimizers, runtime.rank, number)
    return [parameter.numpy() for parameter in parameters(module)]


def test_a_loop_of_ones_own_is_the_launchers_run() -> None:
    overrides = ("pool.workers_per_trainer=2", "inner.lr=5e-3", f"budget.rounds={ROUNDS}")
    launched = run_ranks(train_and_unflatten, [0, 0], *overrides)
    for mine, theirs in zip(run_ranks(train_by_loop, [0, 0]), launched, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
