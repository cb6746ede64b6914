"""Rank 0's work between two rounds of 1,024 ranks that host 4,096 workers of 256 trainers, in one process.

Every rank's report is made up, but encoded and decoded as the control plane does it. Rank 0 decodes all reports,
decides a round before which trainers merge (pool_report and plan_round), and encodes its plan. What rank 0 takes from
the wire and puts on it: a gather brings 8 bytes of length and a report from every other rank;
gloo broadcasts along a binomial tree, in which rank 0 itself sends ceil(log2(1024)) = 10 copies of the plan and of the
8 bytes of its length.
"""

import json
import math
import random
import statistics
from collections.abc import Callable
from functools import partial

import torch

from adloco_dist import messages
from adloco_dist.averaging.report import OuterStepReport
from adloco_dist.cluster.control import Message, decode, encode
from adloco_dist.config import Settings
from adloco_dist.config.compose import compose
from adloco_dist.noise.statistics import GradientStatistics
from adloco_dist.policy.layout import place
from adloco_dist.policy.plan import PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.policy.report import AnchorReport, InnerReport, MeasureReport, RankReport, TrainerReport
from adloco_dist.policy.summary import pool_report
from adloco_dist.run.recording import round_rows
from common import interleave, parse, report, spread

NUM_NODES, RANKS_PER_NODE, NUM_TRAINERS, WORKERS_PER_TRAINER = 128, 8, 256, 16
NUM_RANKS = NUM_NODES * RANKS_PER_NODE
SHARD_SEQUENCES, MODEL_BYTES, SKETCH_BYTES, LENGTH_BYTES = 50_000, 20_000_000, 65_536, 8
BATCH_LIMIT, MERGE_ROUND, SECONDS_PER_ROUND = 24, 5, 20.0
COMMON = (
    "algorithm=diloco", f"pool.trainers={NUM_TRAINERS}", f"pool.workers_per_trainer={WORKERS_PER_TRAINER}",
    "batching.request=norm_test", "merge=worst_with_worst", f"merge.every_rounds={MERGE_ROUND}",
    "evaluation.every=null", "budget=100rounds",
)  # fmt: skip
PLAIN = "two trainers merge"
VARIANTS = {PLAIN: ["merge.width=2"], "half of the trainers merge": [f"merge.width={NUM_TRAINERS // 2}"]}


def new_premises(settings: Settings) -> PlanInputs:
    nodes = [rank // RANKS_PER_NODE for rank in range(NUM_RANKS)]
    layout = place(NUM_TRAINERS, WORKERS_PER_TRAINER, nodes, settings.pool.placement)
    return PlanInputs(
        layout, dict.fromkeys(layout.trainers, SHARD_SEQUENCES), dict.fromkeys(layout.trainers, BATCH_LIMIT)
    )


def simulated_reports(plan: RoundPlan, rng: random.Random) -> list[RankReport]:
    """What all ranks tell after the round of `plan`: no two trainers and no two clocks agree."""
    digest = plan.digest()
    reports = [
        RankReport(
            rank, control_seconds=rng.uniform(0.05, 0.5), control_bytes_sent=rng.randrange(8_000, 10_000),
            plan_digest=digest, capacity=rng.randrange(BATCH_LIMIT, BATCH_LIMIT + 4),
        )
        for rank in range(NUM_RANKS)
    ]  # fmt: skip
    for trainer in plan.layout.trainers:
        checksum = [rng.getrandbits(64) - 2**63 for _ in range(2)]
        norm, ranks = rng.uniform(0.5, 2.0), plan.layout.ranks(trainer)
        ring_bytes = 2 * (len(ranks) - 1) * MODEL_BYTES // len(ranks)
        for rank in ranks:
            is_root = rank == ranks[0]
            num_workers = len(plan.layout.workers_on(rank, trainer))
            reports[rank].trainers[trainer] = TrainerReport(
                num_workers,
                InnerReport(
                    loss_sum=sum(rng.uniform(2.0, 4.0) for _ in range(num_workers)),
                    seconds=taken(rng, SECONDS_PER_ROUND / 4),
                ),
                MeasureReport(
                    statistics=simulated_statistics(plan.total_batch(trainer), rng) if is_root else None,
                    seconds=taken(rng, 0.02),
                    bytes_sent=0 if is_root else SKETCH_BYTES,
                ),
                OuterStepReport(
                    num_finite=plan.layout.num_workers(trainer),
                    pseudo_gradient_norm=norm,
                    seconds=taken(rng, 0.4),
                    bytes_sent=ring_bytes,
                ),
                AnchorReport(checksum, position=(plan.round + 1) * plan.updates * plan.total_batch(trainer)),
            )
    return reports


def taken(rng: random.Random, usual_seconds: float) -> float:
    return round(rng.uniform(0.5, 1.5) * usual_seconds, 6)


def simulated_statistics(batch: int, rng: random.Random) -> GradientStatistics:
    """As of a trainer whose noise scale is somewhere between 20 and 2,000 sequences."""
    trace = rng.lognormvariate(0.0, 0.5)
    squared_norm = trace / math.exp(rng.uniform(math.log(20), math.log(2_000)))
    ip_variance = trace * squared_norm * rng.uniform(0.1, 0.5)
    return GradientStatistics(
        trace=trace,
        squared_norm=squared_norm,
        sequences=batch,
        ip_variance=ip_variance,
        ip_error=trace * squared_norm / 4096,
        ip_corrected=True,
    )


def train_up_to_merge(settings: Settings, inputs: PlanInputs) -> tuple[RoundPlan, list[RankReport]]:
    """The plan of the last round before trainers merge, and what the ranks tell after it."""
    rng = random.Random(0)
    plan = plan_round(settings, inputs, None, PoolReport())
    reports = simulated_reports(plan, rng)
    for _ in range(MERGE_ROUND - 1):
        plan = plan_round(settings, inputs, plan, pool_report(reports, plan, SECONDS_PER_ROUND * (plan.round + 1)))
        reports = simulated_reports(plan, rng)
    return plan, reports


def check(plan: RoundPlan, width: int) -> None:
    """The round is the one that is meant, and its plan arrives as it was sent."""
    assert plan.stop is None
    assert plan.merge is not None
    assert len(plan.merge.shares) == width
    assert messages.decode(RoundPlan, decode(encode(messages.encode(plan)))) == plan


def call(side: Callable[[], object]) -> None:
    side()


def in_json(message: Message) -> int:
    """Bytes of a message that nobody compressed."""
    return len(json.dumps(message))


def main() -> None:
    options = parse(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    all_settings = {name: compose([*COMMON, *overrides]) for name, overrides in VARIANTS.items()}
    inputs = new_premises(all_settings[PLAIN])
    last, reports = train_up_to_merge(all_settings[PLAIN], inputs)

    def decide(settings: Settings) -> RoundPlan:
        return plan_round(settings, inputs, last, pool_report(reports, last, SECONDS_PER_ROUND * MERGE_ROUND))

    plans = {name: decide(settings) for name, settings in all_settings.items()}
    for name, plan in plans.items():
        check(plan, all_settings[name].merge.width)
    payloads = [encode(messages.encode(detail)) for detail in reports]
    plan_payloads = {name: encode(messages.encode(plan)) for name, plan in plans.items()}

    def decode_reports() -> list[RankReport]:
        return [messages.decode(RankReport, decode(payload)) for payload in payloads]

    def encode_plan(plan: RoundPlan) -> torch.Tensor:
        return encode(messages.encode(plan))

    assert decode_reports() == reports
    sides: dict[str, Callable[[], object]] = {
        "decode all reports": decode_reports,
        "records for the journal": partial(round_rows, all_settings[PLAIN], last, plans[PLAIN], reports, 0.0, 1e-3),
    }
    for name, settings in all_settings.items():
        sides[f"{name}: decide"] = partial(decide, settings)
        sides[f"{name}: encode the plan"] = partial(encode_plan, plans[name])
    calls = [partial(call, side) for side in sides.values()]
    seconds = dict(zip(sides, interleave(calls, 12 if options.quick else 60), strict=True))

    rows = [[f"{name}, ms", *spread(values, 1e-3)] for name, values in seconds.items()]
    report_bytes = {
        "in JSON": [in_json(messages.encode(detail)) for detail in reports],
        "as sent": [len(payload) for payload in payloads],
    }
    rows += [[f"a rank's report {form}, kB", *spread(sizes, 1e3)] for form, sizes in report_bytes.items()]
    for name, plan in plans.items():
        sizes = {"in JSON": in_json(messages.encode(plan)), "as sent": len(plan_payloads[name])}
        rows += [[f"{name}: plan {form}, kB", "", f"{size / 1e3:,.2f}", ""] for form, size in sizes.items()]
    decisions = zip(seconds[f"{PLAIN}: decide"], seconds[f"{PLAIN}: encode the plan"], strict=True)
    received = (NUM_RANKS - 1) * LENGTH_BYTES + sum(report_bytes["as sent"][1:])
    sent = math.ceil(math.log2(NUM_RANKS)) * (LENGTH_BYTES + len(plan_payloads[PLAIN]))
    rows += [[f"rank 0 {way}, kB", "", f"{size / 1e3:,.2f}", ""] for way, size in
             (("receives in the gather", received), ("sends in the broadcast", sent))]  # fmt: skip
    report(
        f"rank 0 between two rounds: {NUM_RANKS:,} ranks, {NUM_TRAINERS * WORKERS_PER_TRAINER:,} workers",
        ["", "min", "median", "max"],
        rows,
        {"decision_ms": 1e3 * statistics.median(map(sum, decisions)), "rank0_bytes": received + sent},
        options.json,
    )


if __name__ == "__main__":
    main()
