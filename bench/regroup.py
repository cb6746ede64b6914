"""One merge with everything around it, on 8 gloo ranks: report, plan, new groups, averaged anchors.

Four trainers of two workers, each on two ranks of its own; two of them merge onto four ranks that never formed a group
before. Without the payload (a model of a few thousand parameters) it is all latency; with 20 MB of it, the averaging
of anchors and outer momentum is compared with a bare all-reduce of the same bytes over the same ranks.
"""

import itertools
import random
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import indexed_splits
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import TokenTable
from adloco_dist.messages import decode, encode
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.replay import Trajectory
from adloco_dist.policy.report import RankReport
from adloco_dist.policy.summary import pool_report
from adloco_dist.pool.local_pool import LocalPool
from adloco_dist.round.combine import Transfer
from adloco_dist.round.regroup import average_members, regroup
from adloco_dist.round.steps import opening_report
from adloco_dist.setup.placement import find_plan_inputs, set_up_pool
from common import interleave, median_ratio, parse, report, spread
from helpers.processes import run_ranks

NUM_RANKS, VOCAB_SIZE, LENGTH = 8, 256, 16
COMMON = (
    "algorithm=diloco", "batching.request=norm_test",
    "pool.trainers=4", "pool.workers_per_trainer=2", "merge=worst_with_worst",
    "merge.every_rounds=1", "batching.capacity=64", f"data.sequence_length={LENGTH}", "evaluation.every=null",
    "budget=100rounds",
)  # fmt: skip
WITHOUT_PAYLOAD = (
    "model.overrides={hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1, "
    "num_key_value_heads: 1}"
)
WITH_PAYLOAD = (
    "model.overrides={hidden_size: 256, intermediate_size: 688, num_hidden_layers: 6, num_attention_heads: 4, "
    "num_key_value_heads: 4, tie_word_embeddings: true}"
)  # 4.8M parameters


def new_pool(settings: Settings, runtime: Runtime, layout: Layout) -> LocalPool:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 20_000).astype(np.uint16)
    table = TokenTable([tokens], LENGTH)
    splits = indexed_splits(table, table, Vocabulary(VOCAB_SIZE), "noise")
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    module = objective.build(torch.device("cpu"), in_bf16=False)
    return set_up_pool(settings, runtime, splits, objective, module, layout)


def layouts(count: int) -> list[Layout]:
    """Pairs of ranks such that trainers 0 and 1 together stand on other four ranks every time."""
    quartets = list(itertools.combinations(range(NUM_RANKS), 4))
    random.Random(0).shuffle(quartets)
    made = []
    for quartet in quartets[:count]:
        rest = [rank for rank in range(NUM_RANKS) if rank not in quartet]
        made.append(
            Layout.one_rank_per_worker({0: quartet[:2], 1: quartet[2:], 2: tuple(rest[:2]), 3: tuple(rest[2:])})
        )
    return made


def latency(runtime: Runtime, repetitions: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank in each repetition: for report and plan, and for all."""
    settings = compose([*COMMON, WITHOUT_PAYLOAD])
    taken: dict[str, list[float]] = {"report and plan": [], "whole": []}
    for layout in layouts(repetitions):
        pool = new_pool(settings, runtime, layout)
        inputs = find_plan_inputs(pool, layout, Trajectory())
        first = plan_round(settings, inputs, None, PoolReport())
        own = opening_report(pool, layout)
        dist.barrier()
        start = time.perf_counter()
        reports = [decode(RankReport, message) for message in runtime.mail.gather(encode(own))]
        decided = plan_round(settings, inputs, first, pool_report(reports, None, 0.0)) if reports else None
        plan = decode(RoundPlan, runtime.mail.broadcast(decided and encode(decided)))
        planned = time.perf_counter()
        regroup(pool, layout, plan)
        end = time.perf_counter()
        assert plan.merge
        assert plan.layout.num_workers(plan.merge.survivor) == 4
        slowest = runtime.control.exchange({"report and plan": planned - start, "whole": end - start})
        for name, values in taken.items():
            values.append(max(message[name] for message in slowest))
        pool.groups.keep([])
    return taken


def payload(runtime: Runtime, rounds: int) -> dict[str, Any]:
    """Seconds of averaging anchors and momentum, and of one bare all-reduce of as many bytes, on rank 0."""
    settings = compose([*COMMON, WITH_PAYLOAD])
    layout = layouts(1)[0]
    pool = new_pool(settings, runtime, layout)
    inputs = find_plan_inputs(pool, layout, Trajectory())
    first = plan_round(settings, inputs, None, PoolReport())
    plan = plan_round(settings, inputs, first, PoolReport())
    merge = plan.merge
    assert merge
    transfer = Transfer.of(merge.shares, layout, plan.layout.ranks(merge.survivor))
    members = {member: pool.trainers[member] for member in merge.shares if member in pool.trainers}
    regroup(pool, layout, plan)
    union = transfer.ranks
    buffer = torch.zeros(2 * pool.flat_model.num_elements)
    group = pool.groups.of(union)

    def ours() -> None:
        dist.barrier()
        if members:
            average_members(pool, merge, transfer, members)

    def bare() -> None:
        dist.barrier()
        if group is not None:
            dist.all_reduce(buffer, group=group.process_group)

    seconds = interleave([ours, bare], rounds, warmup=2)
    return {"ranks": union, "seconds": seconds, "bytes": buffer.nbytes}


def main() -> None:
    options = parse(__doc__ or "").parse_args()
    latencies = run_ranks(latency, [0] * NUM_RANKS, 10 if options.quick else 30)[0]
    results = run_ranks(payload, [0] * NUM_RANKS, 10 if options.quick else 30)
    ours, bare = results[results[0]["ranks"][0]]["seconds"]
    megabytes = results[0]["bytes"] / 1e6
    rows = [[f"without payload: {name}", *spread(seconds, 1e-3)] for name, seconds in latencies.items()]
    rows.append([f"{megabytes:.0f} MB on four ranks: merge", *spread(ours, 1e-3)])
    rows.append([f"{megabytes:.0f} MB on four ranks: bare all-reduce", *spread(bare, 1e-3)])
    figures = {
        "regroup_ms": 1e3 * statistics.median(latencies["whole"]),
        "merge_over_bare_allreduce": median_ratio(ours, bare),
    }
    report("a merge on 8 gloo ranks: milliseconds", ["", "min", "median", "max"], rows, figures, options.json)


if __name__ == "__main__":
    main()
