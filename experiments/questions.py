"""What is asked, and the runs that answer it: a side is named by what it does."""

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

from cases import FREE, LINKS, NANO, NANO_SHARE, SEEDS, TINY, Case, cases, corpora, link
from further import delays, lengths, outer_steps, published, rounds, sizes, texts
from machines import machines
from pools import merged
from shapes import shapes
from tuning import tuning

ALONE = ("algorithm=localsgd", "batching.request=none", "inner.warmup_fraction=0.2", "inner.lr=2e-3")
"""One worker that averages with nobody, at the best of the settings that were tried: rates of 1, 2 and 3e-3, warm-ups
of 0.05 to 0.2, batches of 2, 4 and 8 (docs/lab-notes.md). The warm-up is the longest of them."""
COSINE = ("inner.schedule=cosine", "outer.average_span=null")
SCHEDULED = (20, 40, 75, 90)
"""Seconds for which schedules are compared."""
ALONE_RATES = ("1e-3", "2e-3", "3e-3")
AVERAGED = ("inner.schedule=constant", "outer.average_span=0.05")
"""What the default has."""
PLAIN = ("algorithm=localsgd", "batching.request=none", "inner.lr=2e-3")
"""Plain averaging of fp32 in rounds of a fixed length."""
DILOCO = ("algorithm=diloco", "batching.request=none")
"""DiLoCo as published: Nesterov momentum of 0.9 at a rate of 0.7, fp32."""
DDP = ("algorithm=ddp",)
CONSTANT = ("batching.request=none", "batching.local_batch=4")
BATCHES = (8, 16, 4, 32)
"""Constant batches of two workers together."""
DIFFERENT = ("10", "30")
"""Links that differ to `nano`: at 100 Mbit/s as at 30 an average takes less than an update, and runs are the same."""
ROUNDS = (2, 5, 10, 25)
"""Lengths of rounds, in updates."""
SOURCES_RATES = ("1e-3", "4e-3", "8e-3")
"""Beside the 2e-3 of the paper's sides."""
POOLS = {
    "merged_early": (("merge.every_rounds=2",), 0.08),
    "merged_by_a_quarter": (("merge.every_rounds=8",), 0.25),
    "merged_late": (("merge.every_rounds=25",), 0.75),
    "merged_by_loss": (("merge=worst_loss_with_best", "merge.every_rounds=8"), 0.25),
}
"""Four trainers of one worker, in rounds of 10 updates until the first two of them have merged; with the share of the
run by which all have. A trainer has as many sequences a worker as one of four workers from the start: its batch doubles
on the way, and again when all have merged."""


def second_machine(_: Path | None) -> list[Case]:
    """What are a second and a fourth machine worth, beside one alone in 150 s?"""
    found = [*cases("second_machine", "alone", 1, (*TINY, *ALONE), (150,), SEEDS)]
    for side, ranks, where, seconds in (
        ("two_10", 2, link("10"), (75, 90)),
        ("two_30", 2, link("30"), (75, 90)),
        ("two_100", 2, link("100"), (82.5, 90)),
        ("two_free", 2, FREE, (75,)),
        ("four_100", 4, link("100"), (60, 67.5)),
    ):
        found += cases("second_machine", side, ranks, (*TINY, *where), seconds, SEEDS)
    return found


def controls(_: Path | None) -> list[Case]:
    """What do DDP, DiLoCo and plain averaging reach at 10 Mbit/s, at their best settings?"""
    slow = (*TINY, *link("10"))
    found = [*cases("controls", "ours", 2, slow, (20, 40, 180), SEEDS)]
    for batch, rate in ((4, "2e-3"), (16, "4e-3"), (64, "4e-3")):
        sides = (*slow, *DDP, f"batching.local_batch={batch}", f"inner.lr={rate}")
        budgets = (850, 1700) if batch == 64 else (1700,)
        found += cases("controls", f"ddp_b{batch}", 2, sides, budgets, SEEDS)
    for updates in (50, 100):
        length = (f"algorithm.updates_per_round={updates}",)
        found += cases("controls", f"plain_H{updates}", 2, (*slow, *PLAIN, *length), (90,), SEEDS)
    for updates, rate in ((50, "1e-3"), (100, "1e-3")):
        sides = (*slow, *DILOCO, f"algorithm.updates_per_round={updates}", f"inner.lr={rate}")
        found += cases("controls", f"diloco_H{updates}_lr{rate}", 2, sides, (90,), SEEDS)
    streamed = ("algorithm.updates_per_round=70", "wire.fragments=2", "wire.delay_updates=30")
    found += cases("controls", "plain_streamed", 2, (*slow, *PLAIN, *streamed), (90,), SEEDS)
    return found


def rhythm(_: Path | None) -> list[Case]:
    """Does the H that a run chooses do as well as the best fixed one?"""
    found = []
    for name in LINKS:
        place = (*NANO, *link(name, NANO_SHARE), "batching.request=none")
        found += cases("rhythm", f"link_{name}", 2, place, (40, 60), SEEDS)
        for updates in ROUNDS if name in DIFFERENT else ():
            fixed = (f"algorithm.updates_range=[{updates},{updates}]",)
            found += cases("rhythm", f"H{updates}_{name}", 2, (*place, *fixed), (60,), SEEDS)
    return found


def batches(_: Path | None) -> list[Case]:
    """Do batches by progress per second, as second_machine has them, do as well as the best constant one?

    On `tiny`: the sketches that measure gradients are as large for `nano`, and would weigh seven times as much there.
    """
    found = []
    for name, batch in product(LINKS, BATCHES):
        rate = 1.5e-3 * (batch / 8) ** 0.5
        constant = ("batching.request=none", f"batching.local_batch={batch // 2}", f"inner.lr={rate:.3g}")
        found += cases("batches", f"constant_{batch}_{name}", 2, (*TINY, *link(name), *constant), (90,), SEEDS)
    norm_test = (*TINY, *link("10"), "batching.request=norm_test")
    found += cases("batches", "norm_test_10", 2, norm_test, (90,), SEEDS[:1])
    return found


def schedules(_: Path | None) -> list[Case]:
    """Is a constant rate with an average of anchors better than a cosine, at whatever length of the run?"""
    slow = (*TINY, *link("10"))
    found = [*cases("schedules", "cosine", 2, (*slow, *COSINE), SCHEDULED, SEEDS)]
    for rate in ALONE_RATES:
        constant = (*ALONE, *AVERAGED, f"inner.lr={rate}")
        found += cases("schedules", f"alone_constant_{rate}", 1, (*TINY, *constant), (150,), SEEDS)
    return found


def merging(_: Path | None) -> list[Case]:
    """Are trainers that merge as good as one trainer of as many workers from the start?"""
    place = (*NANO, *link("10", NANO_SHARE), "batching.request=none", "evaluation.every=50%")
    found = [*cases("merging", "one_trainer", 4, place, (30, 45), SEEDS)]
    pool = (*place, "pool.trainers=4", "pool.workers_per_trainer=1", "algorithm.updates_per_round=10")
    for side, (merges, merged_at) in POOLS.items():
        begins = f"[[0,4],[{merged_at / 2:g},8],[{merged_at:g},16]]"
        stages = ("batching.request=staged", f"batching.stages={begins}")
        found += cases("merging", side, 4, (*pool, *merges, *stages), (45,), SEEDS)
    return found


def other_corpora(wikitext: Path | None) -> list[Case]:
    """Does a second machine pay on other text, too?"""
    found = []
    for name, data in corpora(wikitext).items():
        found += cases("other_corpora", f"alone_{name}", 1, (*TINY, *ALONE, *data), (150,), SEEDS)
        found += cases("other_corpora", f"two_10_{name}", 2, (*TINY, *link("10"), *data), (75, 90), SEEDS)
    return found


def sources(_: Path | None) -> list[Case]:
    """The experiments of AdLoCo's paper, from scratch, with the controls that it lacks; all at equal tokens."""
    scratch = (
        "experiment=paper", "data=python_stdlib", "model=nano", "model.warm_start=null", "model.reset_output=false",
        "algorithm.updates_per_round=25", "inner.lr=2e-3",
    )  # fmt: skip
    controls = {
        "one_trainer": ("pool.trainers=1", "pool.workers_per_trainer=4"),
        "one_trainer_constant": ("pool.trainers=1", "pool.workers_per_trainer=4", *CONSTANT),
        "default": ("model=nano", "inner=adamw", "inner.lr=2.2e-3"),
        "default_fp32": ("model=nano", "inner=adamw", "inner.lr=2.2e-3", "wire=fp32"),
        "ddp": ("algorithm=ddp", "model=nano", "inner=adamw", "inner.lr=4e-3"),
        "alone": ("model=nano", *ALONE, "inner=adamw", "inner.lr=4e-3"),
    }
    ablation = {
        "paper": (),
        "without_merging": ("merge=none",),
        "without_growing_batches": CONSTANT,
        "without_clipping": ("batching.switch_n=1",),
    }
    found = []
    for side, overrides in {**controls, **ablation}.items():
        whole = overrides if overrides[:1] in (("model=nano",), ("algorithm=ddp",)) else (*scratch, *overrides)
        found += cases("sources", side, 1 if side == "alone" else 4, whole, (1_000_000,), SEEDS, "tokens")
    for eta in ("0.5", "0.8", "1.0"):
        for n in ("1.5", "2", "3"):
            chosen = (*scratch, f"batching.eta={eta}", f"batching.switch_n={n}", "batching.capacity=8")
            found += cases("sources", f"eta{eta}_n{n}", 4, chosen, (1_000_000,), (0,), "tokens")
    for rate in SOURCES_RATES:
        tuned = [f"inner.lr={rate}" if override.startswith("inner.lr=") else override for override in scratch]
        for side, overrides in {"paper": (), "one_trainer": controls["one_trainer"]}.items():
            found += cases("sources", f"{side}_{rate}", 4, (*tuned, *overrides), (1_000_000,), (0,), "tokens")
    for side, overrides in {"paper": scratch, "default": controls["default"]}.items():
        found += cases("sources", side, 4, overrides, (2_000_000, 3_000_000), (0,), "tokens")
    return found


QUESTIONS: Mapping[str, Callable[[Path | None], list[Case]]] = {
    question.__name__: question
    for question in (
        machines,
        tuning,
        shapes,
        published,
        outer_steps,
        texts,
        lengths,
        sizes,
        rounds,
        delays,
        merged,
        second_machine,
        controls,
        rhythm,
        batches,
        schedules,
        merging,
        other_corpora,
        sources,
    )
}
