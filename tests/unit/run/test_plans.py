"""Plans that are recorded, read, and repeated."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from adloco_dist.config import SettingsError
from adloco_dist.config.compose import to_plain
from adloco_dist.policy.layout import Layout
from adloco_dist.policy.plan import REPLAYED, PlanInputs, PoolReport, RoundPlan
from adloco_dist.policy.planning import plan_round
from adloco_dist.run.journal import PlansFile
from adloco_dist.run.reading import read_plans
from adloco_dist.setup.agreement import examine_plans
from helpers.run_directories import run_directory
from helpers.support import small_settings, small_splits

PAIR = Layout.one_rank_per_worker({0: (0, 1)})
SETTINGS = small_settings("budget=9rounds", "pool.trainers=1", "pool.workers_per_trainer=2")


def made(count: int, inputs: PlanInputs | None = None) -> list[RoundPlan]:
    """The plans of the first rounds, of a second each."""
    plans = list[RoundPlan]()
    for number in range(count):
        found = PoolReport(number - 1.0, 1.0, updates=5, outer_steps=1) if number != 1 else None
        plans.append(plan_round(SETTINGS, inputs or PlanInputs(PAIR), plans[-1] if plans else None, found))
    return plans


def written(folder: Path, plans: list[RoundPlan], keep_rounds: int = 0) -> None:
    file = PlansFile(folder, keep_rounds)
    for plan in plans:
        file.take_plan(plan)
    file.close(None)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    plans = made(5)
    written(tmp_path, plans)
    assert read_plans("run.replay", tmp_path) == plans
    first, *others = [json.loads(line) for line in (tmp_path / "plans.jsonl").read_text().splitlines()]
    assert "layout" in first, "the whole plan"
    assert not any("layout" in line for line in others), "what has changed"


def test_a_run_that_resumes_keeps_the_plans_of_rounds_that_have_begun(tmp_path: Path) -> None:
    plans = made(6)
    written(tmp_path, [*plans[:3], replace(plans[3], updates=99)])
    with (tmp_path / "plans.jsonl").open("a") as file:
        file.write('{"round": 4, "upd')  # the power was cut
    written(tmp_path, plans[3:], keep_rounds=3)
    assert read_plans("run.replay", tmp_path) == plans


def test_a_run_that_goes_on_otherwise_cannot_be_repeated(tmp_path: Path) -> None:
    plans = made(4)
    written(tmp_path, plans[:2])
    written(tmp_path, plans[2:])
    with pytest.raises(SettingsError, match=r"run.replay=.*: does not hold every plan from the first round on"):
        read_plans("run.replay", tmp_path)


@pytest.mark.parametrize("content", [b"[]\n", b"{}\n", b'{"round": "x"}\n', b"\xff\n", b"[" * 100_000 + b"\n", b""])
def test_damaged_plans_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plans.jsonl").write_bytes(content)
    with pytest.raises(SettingsError, match=r"run.replay=") as refused:
        read_plans("run.replay", tmp_path)
    assert "\n" not in str(refused.value)


def test_plans_are_repeated_to_the_end() -> None:
    plans = made(3)
    again = made(4, PlanInputs(PAIR, plans=plans))
    assert again[:3] == plans
    assert (again[3].round, again[3].stop, again[3].error) == (3, REPLAYED, None)
    assert again[3].pool_tokens == plans[2].pool_tokens + plans[2].round_tokens


def test_ranks_that_disagree_end_a_repeated_run_too() -> None:
    plans = made(3)
    found = PoolReport(updates=5, errors=["the anchor of trainer 0 differs"])
    assert plan_round(SETTINGS, PlanInputs(PAIR, plans=plans), plans[1], found).error == found.errors[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    splits = small_splits()
    facts = {"settings": to_plain(SETTINGS), "corpus": {"source": splits.source, "digest": splits.digest}}
    directory = run_directory(tmp_path / "run", [], facts=facts)
    written(directory, made(3))
    return directory


def examined(run: Path, *overrides: str, layout: Layout = PAIR, nodes: tuple[int, ...] = (0, 0)) -> int:
    settings = small_settings(
        "budget=9rounds", "pool.trainers=1", "pool.workers_per_trainer=2", f"run.replay={run}", *overrides
    )
    return len(examine_plans(settings, small_splits(), layout, nodes))


def test_a_run_is_repeated_with_the_settings_and_ranks_that_it_had(run: Path) -> None:
    assert examined(run, "run.step_losses=true", "checkpoint.every=null", "cluster.silence_seconds=30") == 3
    with pytest.raises(SettingsError, match=r"^inner.lr=0.25: the run in run.replay=.* had "):
        examined(run, "inner.lr=0.25")
    for layout, nodes in ((Layout.one_rank_per_worker({0: (0, 0)}), (0, 0)), (PAIR, (0, 1))):
        with pytest.raises(SettingsError, match="was trained on 2 ranks of 1 node; start it on the same"):
            examined(run, layout=layout, nodes=nodes)
    facts = json.loads((run / "run.json").read_text())
    facts["corpus"] = {"source": "other text", "digest": "1"}
    (run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(SettingsError, match=r"was trained on other data \(other text, digest 1; here a Markov chain, "):
        examined(run)
