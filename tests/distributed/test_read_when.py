"""What the annotations of settings say against what runs do: a setting that is not read changes no bit of a run."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config.without_effect import without_effect
from helpers.processes import run_ranks
from helpers.support import FOUR_TRAINERS, small_settings, train_small_pool

CLOCK = ("simulation.update_seconds=0.1", "simulation.sequence_seconds=0.01", "simulation.bytes_per_second=1e5")
"""Of a run whose batches and rounds follow seconds, so that it can be repeated to the bit."""
QUICK = ("inner.lr=5e-3", "budget=4rounds", "evaluation.every=null", "batching.capacity=64")
MEASURED = ("batching.request=norm_test", "batching.eta=0.7", "batching.capacity=3")
TWO_OF_TWO = ("pool.trainers=2", "pool.workers_per_trainer=2")
ONE_OF_TWO = ("pool.trainers=1", "pool.workers_per_trainer=2")
MERGES = ("merge=worst_with_worst", "merge.every_rounds=1", "merge.width=2", "inner.lr=1e-2")
DDP = ("algorithm=ddp", *ONE_OF_TWO, "wire=fp32")
"""Pseudo-gradients grow."""
LINK = ("algorithm.round=link", *ONE_OF_TWO, "outer=average", *CLOCK, "budget=5rounds")


REAL_CLOCK = (*ONE_OF_TWO, "outer=average")


class Case(NamedTuple):
    values: str
    """A setting with two values."""
    unread: tuple[str, ...]
    read: tuple[str, ...]

    @property
    def travels(self) -> bool:
        """Whether what travels between two ranks has to do with it."""
        return any(word.startswith(("wire", "algorithm", "outer")) for word in (self.values, *self.unread, *self.read))


CASES = (
    Case("final=best,average", ONE_OF_TWO, ()),
    Case("batching.local_batch=2,4", ("batching.request=staged", "batching.stages=[[0,4]]"), ()),
    Case("batching.eta=0.4,1.5", ("batching.request=progress", *CLOCK), MEASURED),
    Case("batching.theta=0.01,9", MEASURED, (*MEASURED, "batching.request=inner_product_test", "batching.min_batch=1",
                                            "batching.local_batch=16")),
    Case("batching.nu=0.2,50", (*MEASURED, "batching.request=inner_product_test"),
         (*MEASURED, "batching.request=augmented_inner_product_test", "batching.theta=50", "batching.local_batch=16")),
    Case("batching.gradient_norm=unbiased,plugin", ("batching.request=progress", *CLOCK), MEASURED),
    Case("batching.every_updates=1,6", ("batching.request=ramp",), MEASURED),
    Case("batching.span=0,1", ("batching.request=none",), MEASURED),
    Case("batching.growth_limit=1.5,4", ("batching.request=ramp",), MEASURED),
    Case("batching.shrink_limit=1,8", ("batching.request=none",),
         (*MEASURED, "batching.eta=5", "batching.local_batch=16", "batching.min_batch=1", "batching.capacity=16")),
    Case("batching.unmeasured=keep,grow", ("batching.request=none", "batching.local_batch=1"),
         (*MEASURED, "batching.local_batch=1")),
    Case("batching.ramp_factor=1.1,2", ("batching.request=none",), ("batching.request=ramp",)),
    Case("batching.switch_n=1.5,3", ("batching.request=ramp", "batching.capacity=3"), MEASURED),
    Case("merge.policy=worst_with_worst,best_with_worst", (*ONE_OF_TWO, *MERGES),
         (*MERGES, *MEASURED, "budget=6rounds", "merge.every_rounds=2")),
    Case("merge.every_rounds=1,2", (*ONE_OF_TWO, *MERGES), MERGES),
    Case("merge.width=2,3", (*ONE_OF_TWO, *MERGES), MERGES),
    Case("merge.width=2,3", (*MERGES, "merge=none"), MERGES),
    Case("merge.min_trainers=1,3", ("merge=none",), MERGES),
    Case("inner.beta1=0.5,0.9", ("inner=sgd",), ()),
    Case("inner.beta2=0.5,0.9", ("inner=sgd",), ()),
    Case("inner.eps=1e-3,1e-8", ("inner=sgd",), ("inner=muon",)),
    Case("inner.momentum=0.5,0.9", ("inner=adamw",), ("inner=sgd",)),
    Case("inner.momentum=0.5,0.9", ("inner=adamw",), ("inner=muon",)),
    Case("inner.final_lr_fraction=0,1", ("inner.schedule=constant",), ("inner.schedule=cosine",)),
    Case("inner.decay_fraction=0.1,1", ("inner.schedule=cosine",), ("inner.schedule=wsd",)),
    Case("inner.reset_each_round=true,false", ("inner=sgd", "inner.momentum=0"), ("inner=sgd", "inner.momentum=0.9")),
    Case("outer.lr=0.5,0.7", DDP, ()),
    Case("outer.momentum=0.5,0.9", DDP, ()),
    Case("wire.fraction=0.01,0.5", ("wire=int4", *TWO_OF_TWO), ("wire=sparse", *TWO_OF_TWO, "outer=average")),
    Case("simulation.sequence_seconds=0,10", REAL_CLOCK, LINK),
    Case("simulation.bytes_per_second=1e2,1e7", REAL_CLOCK, LINK),
    Case("simulation.latency_seconds=0,3", REAL_CLOCK, (*LINK, "simulation.bytes_per_second=null")),
    Case("simulation.average_seconds=0,3", REAL_CLOCK, (*LINK, "simulation.bytes_per_second=null")),
)  # fmt: skip


def trained(runtime: Runtime, runs: list[tuple[str, ...]]) -> list[dict[str, Any]]:
    return [train_small_pool(runtime, *FOUR_TRAINERS, *overrides) for overrides in runs]


def weights(ranks: list[dict[str, Any]]) -> list[np.ndarray[Any, Any]]:
    """All that is left of a run: every rank's anchors, and the model."""
    anchors = [rank["anchors"][trainer] for rank in ranks for trainer in sorted(rank["anchors"])]
    return [*anchors, ranks[0]["chosen"]]


def is_equal(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Whether two runs left the same bits, and planned the same rounds."""
    plans = [
        [(row.get("trainer"), row.get("total_batch"), row.get("updates"), row.get("mode")) for row in run[0]["records"]]
        for run in (mine, theirs)
    ]
    pairs = list(zip(weights(mine), weights(theirs), strict=False))
    return plans[0] == plans[1] and all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.values}-{' '.join(case.unread)}")
def test_a_setting_changes_a_run_exactly_where_it_is_read(case: Case) -> None:
    key, _, values = case.values.partition("=")
    given = [f"{key}={value}" for value in values.split(",")]
    for one in given:
        assert list(without_effect(small_settings(*FOUR_TRAINERS, *QUICK, *case.unread, one), [one])) == [one]
        assert not without_effect(small_settings(*FOUR_TRAINERS, *QUICK, *case.read, one), [one])
    runs = [(*QUICK, *others, one) for others in (case.unread, case.read) for one in given]
    nodes = [0, 1] if case.travels else [0]
    ranks = run_ranks(trained, nodes, runs, timeout_seconds=300)
    first, second, third, fourth = ([rank[number] for rank in ranks] for number in range(4))
    assert is_equal(first, second)
    assert not is_equal(third, fourth)
