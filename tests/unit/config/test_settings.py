"""Settings: what the groups compose to, and one clear line for everything that cannot work."""

from contextlib import nullcontext

import pytest

from adloco_dist.config import (
    Amount,
    Averages,
    BatchRequest,
    GradientNorm,
    Placement,
    RoundLength,
    SettingsError,
    WireFormat,
)
from adloco_dist.config.compose import compose, from_plain, to_plain
from helpers.commands import ROOT


def test_defaults_are_the_demonstration() -> None:
    settings = compose([])
    assert (settings.pool.trainers, settings.pool.workers_per_trainer) == (1, None)
    assert settings.pool.placement is Placement.pack
    assert settings.budget_amount == Amount(1_200_000, "tokens")


@pytest.mark.parametrize(("given", "chosen"), [("3:5", [3, 4, 5]), ("4", [4]), ("2:2", [2]), ("null", [])])
def test_rounds_to_profile_include_the_last(given: str, chosen: list[int]) -> None:
    assert list(compose([f"profile.rounds={given}"]).profile.chosen) == chosen


TOGETHER = ("pool.ranks_per_worker=2", "wire=fp32", "algorithm.round=updates")
CHOICES = ["model=tiny", *sorted(f"{file.parent.name}={file.stem}" for file in (ROOT / "conf").glob("*/*.yaml"))]
INCOMPLETE = {
    **dict.fromkeys(("data=csv", "data=json", "data=parquet", "data=text", "data=tokens"), r"data\.train=\[\]: "),
    "data=hub": "data.hub=null: ",
    "outer=nesterov": r"wire\.format=adaptive: keeps what it has not sent",
    **dict.fromkeys(("model=causal", "model=pretrained"), "model.architecture=null: "),
}
"""Choices that want another setting, with what is said of it."""


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_every_group_composes(choice: str) -> None:
    expected = pytest.raises(SettingsError, match=INCOMPLETE[choice]) if choice in INCOMPLETE else nullcontext()
    with expected:
        compose([choice])


@pytest.mark.parametrize(
    ("algorithm", "outer"),
    [("diloco", (0.7, 0.9)), ("adloco", (1.0, 0.0)), ("localsgd", (1.0, 0.0))],
)
def test_an_algorithm_brings_its_outer_optimizer(algorithm: str, outer: tuple[float, float]) -> None:
    settings = compose([f"algorithm={algorithm}"])
    assert settings.algorithm.averages is Averages.pseudo_gradients
    assert (settings.outer.lr, settings.outer.momentum) == outer


def test_a_named_outer_optimizer_wins_over_the_algorithms_own() -> None:
    assert compose(["algorithm=localsgd", "outer=nesterov"]).outer.momentum == 0.9
    assert compose(["outer=nesterov", "algorithm=localsgd"]).outer.momentum == 0.9
    assert compose(["algorithm=localsgd", "outer.lr=0.3"]).outer.lr == 0.3


def test_presets_hold_the_settings_of_their_sources() -> None:
    paper = compose(["experiment=paper"])
    assert (paper.pool.trainers, paper.pool.workers_per_trainer) == (4, 1)
    assert (paper.budget, paper.algorithm.updates_per_round, paper.inner.lr) == ("20rounds", 200, 2e-5)
    assert (paper.outer.lr, paper.outer.momentum, paper.batching.switch_n) == (0.5, 0.0, 2)
    merge = paper.merge
    assert (merge.every_rounds, merge.width) == (2, 2)
    batching = paper.batching
    assert (batching.request, batching.gradient_norm) == (BatchRequest.norm_test, GradientNorm.plugin)
    assert (batching.eta, batching.local_batch, batching.shrink_limit, batching.padding_fraction) == (0.8, 1, 1, 0.9)
    assert (paper.data.sequence_length, paper.model.overrides["hidden_size"]) == (512, 1024)
    readme = compose(["experiment=readme"])
    assert (readme.algorithm.updates_per_round, readme.inner.lr) == (5, 1e-5)
    assert (readme.outer.lr, readme.outer.momentum) == (1.0, 0.0), "weights are averaged"
    for preset in (paper, readme):  # a fine-tuning, with torch's defaults for AdamW
        assert (preset.model.warm_start, preset.model.reset_output) == ("keeeeenw/MicroLlama", True)
        inner = preset.inner
        assert (inner.beta2, inner.weight_decay, inner.clip_norm) == (0.999, 0.01, None)
        assert (inner.schedule.name, inner.lr_scaling.name, inner.reset_each_round) == ("constant", "none", True)
        assert inner.warmup_fraction == 0
        assert preset.batching.span == 0, "the formula has the last measurement alone"
        assert preset.batching.every_updates == 1, "in every round"
        assert preset.algorithm.round is RoundLength.updates, "rounds are as long as they say"
        assert preset.wire.format is WireFormat.fp32
    batching = readme.batching
    assert (batching.eta, batching.local_batch, batching.padding_fraction) == (0.1, 3, 0.85)
    assert compose(["experiment=paper", "model=tiny", "batching.eta=0.5"]).model.overrides["hidden_size"] == 128


def test_settings_survive_json() -> None:
    settings = compose(["model.overrides.hidden_size=64", "algorithm=ddp", "data=text", "data.train=[a.txt]"])
    assert from_plain(to_plain(settings)) == settings
    other = compose(["model=gpt2", "algorithm=localsgd"])
    assert from_plain(to_plain(other)) == other, "and not the default's fields of a model among them"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("inner.lrr=0.1", ["inner.lrr=0.1", "no such setting", "inner.lr"]),
        ("lr=0.1", ["lr=0.1", "inner.lr", "outer.lr"]),
        ("+inner.foo=1", ["inner.foo", "no such setting"]),
        ("bogus=1", ["bogus=1", "no such setting"]),
        ("algoritm=diloco", ["did you mean algorithm"]),
        ("algorithm=dilco", ["algorithm=dilco", "diloco, localsgd"]),
        ("algorithm.averages=foo", ["algorithm.averages=foo", "[pseudo_gradients, gradients]"]),
        ("inner.lr=fast", ["inner.lr=fast", "Float"]),
        ("inner.lr=1,2", ["inner.lr=1,2", "several values"]),
        ("batching.local_batch=2.5", ["batching.local_batch=2.5", "Integer"]),
        ("inner=[1", ["inner=[1"]),
        ("pool=3", ["pool=3", "section", "pool.trainers"]),
        ("inner.lr=-1", ["inner.lr=-1", "> 0"]),
        ("inner.lr=0", ["inner.lr=0", "> 0"]),
        ("inner.other_lr_factor=0", ["inner.other_lr_factor=0", "> 0"]),
        ("inner.lr=nan", ["inner.lr=nan", "> 0"]),
        ("inner.optimizer=adamw", ["inner.lr=null", "inner.optimizer=muon alone", "use inner=adamw"]),
        ("inner.beta2=1", ["inner.beta2=1", "[0, 1)"]),
        ("pool.trainers=0", ["pool.trainers=0", ">= 1"]),
        ("batching.local_batch=0", ["batching.local_batch=0", ">= 1"]),
        ("batching.capacity=0", ["batching.capacity=0", ">= 1"]),
        ("budget=0tokens", ["budget=0tokens", "> 0", "rounds or tokens or seconds or epochs", "budget=20rounds"]),
        ("budget=2.5rounds", ["budget=2.5rounds", "rounds and tokens are whole"]),
        ("budget=20", ["budget=20: ", "with its unit"]),
        ("budget=2hours", ["budget=2hours: ", "with its unit"]),
        ("budget=-2epochs", ["budget=-2epochs: ", "> 0"]),
        ("budget=1e999seconds", ["budget=1e999seconds: ", "> 0"]),
        ("budget=null", ["budget=null: "]),
        ("evaluation.every=0.05", ["evaluation.every=0.05: ", "rounds or %"]),
        ("evaluation.every=101%", ["evaluation.every=101%: ", "at most 100%"]),
        ("evaluation.every=5tokens", ["evaluation.every=5tokens: ", "rounds or %"]),
        ("checkpoint.every=5%", ["checkpoint.every=5%: ", "minutes or rounds or tokens"]),
        ("profile.rounds=5:3", ["profile.rounds=5:3", "the first and the last round", "as in 3:5"]),
        ("profile.rounds=0", ["profile.rounds=0", "counted from 1"]),
        ("profile.rounds=abc", ["profile.rounds=abc", "or one number"]),
        ("profile.rounds=3:", ["profile.rounds=3:", "as in 3:5"]),
        ("profile.rounds=-1:2", ["profile.rounds=-1:2", "counted from 1"]),
        ("cluster.timeout_seconds=0", ["cluster.timeout_seconds=0", "in (0, 1000000] seconds"]),
        ("run.watch=70000", ["run.watch=70000", "a port from 0 to 65535"]),
        ("run.watch=localhost", ["run.watch=localhost", "as in 0.0.0.0:8080"]),
        ("data.train=[x.txt]", ["data.train", "data=text"]),
        ("data=text", ["data.train"]),
        ("data.train=a.txt", ["data.train=a.txt", "must be a list"]),
        ("model=causal", ["model.architecture=null"]),
        ("model=pretrained", ["model.architecture=null", "warm_start"]),
        ("~inner", ["~inner", "cannot be removed"]),
        ("seed=-1", ["seed=-1", ">= 0"]),
        ("pool.trainers=9000000000", ["pool.trainers=9000000000", "pool.workers_per_trainer=null must be <= 1048576"]),
        ("seed=18446744073709551616", ["seed=18446744073709551616", "below 2**64"]),
        (f"batching.request=staged & batching.stages=[[0,{10**400}]]", ["batching.stages=[[0, 1000", "total batch"]),
        ("batching.eta=0", ["batching.eta=0", "> 0"]),
        ("batching.theta=-1", ["batching.theta=-1", "> 0"]),
        ("batching.nu=0", ["batching.nu=0", "> 0"]),
        ("batching.eta=nan", ["batching.eta=nan", "> 0"]),
        ("batching.shrink_limit=0.9", ["batching.shrink_limit=0.9", ">= 1"]),
        ("algorithm.updates_range=[3,2]", ["algorithm.updates_range=[3, 2]", "[1,400]"]),
        ("batching.switch_n=0.5", ["batching.switch_n=0.5", ">= 1"]),
        ("batching.switch_n=often", ["batching.switch_n=often", "auto"]),
        ("batching.switch_n=nan", ["batching.switch_n=nan", ">= 1"]),
        ("batching.growth_limit=1", ["batching.growth_limit=1", "> 1"]),
        ("batching.ramp_factor=0.9", ["batching.ramp_factor=0.9", "> 1"]),
        ("batching.max_batch=0", ["batching.max_batch=0", "batching.min_batch=1"]),
        ("batching.span=1.5", ["batching.span=1.5", "[0, 1]"]),
        ("batching.padding_fraction=1.1", ["batching.padding_fraction=1.1", "(0, 1]"]),
        ("batching.request=staged", ["batching.stages=[]", "[[0,16],[0.3,64]]"]),
        ("batching.request=replay", ["batching.replay=null", "name the run"]),
        ("batching.replay=runs/x", ["batching.replay=runs/x", "batching.request=replay"]),
        ("batching.stages=[[0,4]]", ["batching.stages=[[0, 4]]", "batching.request=staged"]),
        ("cluster.memory_bytes=0", ["cluster.memory_bytes=0", ">= 1 byte"]),
        ("merge.width=1", ["merge.width=1", ">= 2"]),
        ("merge.min_trainers=0", ["merge.min_trainers=0", ">= 1"]),
        ("merge.every_rounds=0", ["merge.every_rounds=0", ">= 1"]),
        ("merge=worst", ["merge=worst", "best_with_worst, none, worst_loss_with_best, worst_with_worst"]),
        ("merge.policy=best", ["merge.policy=best", "[worst_with_worst, best_with_worst, worst_loss_with_best, none]"]),
        ("data.shards=mine", ["data.shards=mine", "[disjoint, shared]"]),
        ("final=worst", ["final=worst", "[best, average]"]),
        ("instances.concurrency=all", ["instances.concurrency=all", "[serial, streams, threads, auto]"]),
        ("instances.resident=0", ["instances.resident=0", ">= 1"]),
    ],
)
def test_a_mistake_is_reported_in_one_line(override: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        compose(override.split(" & "))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_combinations_that_cannot_work() -> None:
    for overrides, word in (
        (["algorithm=ddp", "pool.trainers=2"], "pool.trainers=2"),
        (["cluster.device=cpu", "cluster.backend=nccl"], "cluster.backend=nccl"),
        (["model.architecture=null"], "model.architecture=null"),
        (["batching.min_batch=9", "batching.max_batch=8"], r"max_batch=8.*min_batch=9"),
        (["algorithm=ddp", "batching.request=norm_test"], r"batching.request=norm_test: algorithm=ddp"),
        (["batching.request=replay", "batching.replay=x", "budget=9seconds"], r"batching.request=replay.*seconds"),
        (["instances.concurrency=threads", "instances.resident=1"], r"instances.resident=1: instances that swap"),
        (["batching.switch_n=auto", "batching.request=ramp"], r"batching.switch_n=auto.*noise"),
        (["pool.ranks_per_worker=0"], r"pool.ranks_per_worker=0: must be >= 1"),
        (["algorithm=ddp", *TOGETHER], r"ranks_per_worker=2: algorithm=ddp .*whole models on its ranks; set both to 1"),
        (["model.compile=true", *TOGETHER], r"model.compile=True: .*ranks_per_worker > 1.*leave it out"),
        *(
            (
                ["batching.request=staged", f"batching.stages={stages}"],
                r"stages=\[.*rising from 0 and below 1, and a total batch >= 1, for example",
            )
            for stages in (
                "[[0.1,4],[0.5,8]]",
                "[[0,4],[0,8]]",
                "[[0.5,4],[0,8]]",
                "[[0,4],[1,8]]",
                "[[0,4],[nan,8]]",
                "[[0,4],[0.5]]",
                "[[0,4.5]]",
                "[[0,x]]",
                "[[0,0]]",
                "[[0,null]]",
            )
        ),
    ):
        with pytest.raises(SettingsError, match=word):
            compose(overrides)
