"""Settings that nothing reads beside the others: what the annotations say, and what is named."""

from enum import Enum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from adloco_dist.config import Settings, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.config.marks import Condition
from adloco_dist.config.settings import sections, setting_names
from adloco_dist.config.without_effect import alternatives_by_setting, without_effect
from adloco_dist.sweep.points import Point, expand, name_without_effect

CONDITIONS = {
    (setting, condition)
    for setting, alternatives in alternatives_by_setting().items()
    for alternative in alternatives
    for condition in alternative.conditions
}


def types() -> dict[str, Any]:
    """The type of every setting, by dotted name."""
    hints = {
        f"{name}.{field}".removeprefix("."): kind
        for name, section in sections(Settings()).items()
        for field, kind in get_type_hints(type(section)).items()
    }
    return {setting: hints[setting] for setting in setting_names()}


def words(kind: Any) -> set[str] | None:
    """The words that a setting of this type may be, without those that stand for numbers; None: any."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {choice.name for choice in kind}
    if kind is bool:
        return {"true", "false"}
    if kind is NoneType:
        return {"null"}
    if get_origin(kind) is list:
        return {"[]"}
    if isinstance(kind, UnionType):
        return set().union(*(words(one) or set() for one in get_args(kind)))
    return set()


@pytest.mark.parametrize(("setting", "condition"), sorted(CONDITIONS, key=str), ids=str)
def test_conditions_are_about_other_settings_and_their_values(setting: str, condition: Condition) -> None:
    of = types()
    assert setting in of
    assert condition.setting in of.keys() - {setting}
    kind = of[condition.setting]
    if condition.operator == ">":
        assert kind in (int, float)
        assert float(condition.values[0]) >= 0
    else:
        assert set(condition.values) <= (words(kind) or set())
        assert len(set(condition.values)) == len(condition.values)


def test_every_setting_that_is_not_always_read_can_be_read() -> None:
    """No alternative contradicts itself."""
    for setting, alternatives in alternatives_by_setting().items():
        for alternative in alternatives:
            settings = [condition.setting for condition in alternative.conditions]
            assert len(settings) == len(set(settings)), setting


@pytest.mark.parametrize(
    ("given", "because", "needed"),
    [
        (
            "batching.eta=0.8",
            "batching.request=progress",
            "batching.request=norm_test, inner_product_test or aug",
        ),
        ("batching.switch_n=2", "batching.request=ramp", "batching.request=norm_test"),
        ("merge.width=2", "pool.trainers=1", "pool.trainers>1 and merge.policy!=none"),
        ("merge=best_with_worst", "pool.trainers=1", "pool.trainers>1"),
        ("outer=sgd", "algorithm.averages=gradients", "algorithm.averages=pseudo_gradients"),
        ("tracking.project=mine", "tracking.mode=disabled", "tracking.mode!=disabled"),
        ("data.validation_documents=9", "data.corpus=python_stdlib", "data.corpus=json, parquet, csv or hub"),
        ("run.root=mine", "run.directory=x", "run.directory=null"),
        (
            "data.packing=document",
            "data.corpus=python_packages",
            "data.corpus!=tokens and data.corpus!=python_pack",
        ),
    ],
)
def test_what_is_given_and_not_read_is_named_with_what_it_needs(given: str, because: str, needed: str) -> None:
    """At its default or not."""
    others = {
        "algorithm.averages=gradients": ["algorithm=ddp"],
        "data.corpus=python_packages": ["data=python_packages", "model=bert_nano"],
    }.get(because, [])
    overrides = [*others, *([because] if because not in ("algorithm.averages=gradients",) else []), given]
    found = without_effect(compose(overrides), overrides)
    assert list(found)[-1] == given
    assert f"has no effect with {because}" in found[given] or f" and {because};" in found[given]
    assert needed in found[given]


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=paper"],
        ["experiment=two_by_two"],
        ["algorithm=ddp"],
        ["algorithm=diloco", "batching.request=norm_test", "batching.eta=0.5", "batching.switch_n=3"],
        ["experiment=paper", "batching.eta=0.5", "batching.switch_n=3"],
        ["merge=none", "pool.trainers=2"],
        ["inner=sgd", "inner.momentum=0.5", "wire=sparse", "wire.fraction=0.5"],
        ["+model.overrides.head_dim=16", "model.overrides.hidden_size=64", "hydra.sweep.dir=x"],
        ["data=python_packages", "model=bert_nano", "data.num_labels=300"],
    ],
    ids=" ".join,
)
def test_what_is_read_is_not_named(overrides: list[str]) -> None:
    """Nor what an experiment or an algorithm sets beside it."""
    assert without_effect(compose(overrides), overrides) == {}


def checked(*overrides: str) -> list[str]:
    points: list[Point] = expand(overrides)[0]
    return name_without_effect(points, [without_effect(compose(one.overrides), one.overrides) for one in points])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["batching.eta=0.5,0.8"], "-m batching.eta=0.5,0.8: has no effect with batching.request=progress"),
        (["seed=1,2", "batching.switch_n=1.5,2", "batching.request=ramp"], "-m batching.switch_n=1.5,2: has no eff"),
        (["merge=none,best_with_worst"], "-m merge=none,best_with_worst: has no effect with pool.trainers=1"),
        (["wire.fraction=0.1,0.2", "wire=fp32,int4"], "-m wire.fraction=0.1,0.2: has no effect with wire.format=fp32"),
    ],
)  # fmt: skip
def test_a_sweep_over_what_no_run_reads_is_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(SettingsError, match="all its values give the same run") as refused:
        checked(*overrides)
    assert str(refused.value).startswith(line)


def test_a_sweep_names_what_some_runs_do_not_read() -> None:
    assert checked("wire=fp32,sparse", "wire.fraction=0.1,0.2", "outer=average") == [
        "wire.fraction: in 2 of 4 runs has no effect with wire.format=fp32; it is read when wire.format=sparse"
    ]
    (line,) = checked("seed=1,2", "batching.eta=0.5")
    assert line.startswith("batching.eta=0.5: in 2 of 2 runs has no effect with batching.request=progress")
    assert checked("experiment=paper", "batching.eta=0.5,0.8,1.0", "batching.switch_n=1.5,2,3") == []


def test_every_setting_is_known_to_be_read_always_or_sometimes() -> None:
    """A new setting is looked at: whoever adds one here has asked under which others it is read."""
    always = set(setting_names()) - set(alternatives_by_setting())
    assert always == ALWAYS_READ


ALWAYS_READ = {
    "algorithm.averages", "algorithm.round", "algorithm.updates_per_round", "batching.capacity", "batching.max_batch",
    "batching.min_batch", "batching.request", "budget", "checkpoint.copies", "checkpoint.every",
    "checkpoint.keep_every_rounds", "checkpoint.keep_last", "cluster.backend", "cluster.check_links",
    "cluster.device", "cluster.interface", "cluster.silence_seconds",
    "cluster.threads_per_rank", "cluster.timeout_seconds", "data.corpus", "data.sequence_length", "data.shards",
    "deterministic", "evaluation.every", "evaluation.final_sequences", "evaluation.sequences",
    "inner.clip_norm", "inner.lr", "inner.lr_scaling", "inner.optimizer", "inner.schedule",
    "inner.warmup_fraction", "inner.weight_decay", "instances.concurrency", "model.architecture", "model.attention",
    "model.compile", "model.gradient_checkpointing", "model.overrides", "model.reset_output", "model.warm_start",
    "outer.average_span", "pool.placement", "pool.ranks_per_worker", "pool.trainers",
    "pool.workers_per_trainer", "precision", "profile.rounds", "run.directory", "run.replay", "run.report",
    "run.step_losses", "run.watch", "seed", "simulation.update_seconds", "tracking.mode",
    "tracking.tensorboard", "wire.delay_updates", "wire.format", "wire.fragments",
}  # fmt: skip
