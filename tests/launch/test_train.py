"""Training from the command line, end to end: the driver, torchrun, the run directory, the model it leaves."""

import math
import os
import re
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.commands import (
    FOUR_TRAINERS,
    ONE_RANK,
    ROOT,
    SMALL,
    facts,
    metrics,
    run,
    run_on_a_terminal,
    running,
    small_without,
    torchrun_command,
    train_command,
    use,
)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, with algorithm, pool, model and tracking as they are by default."""
    short_rounds = ("algorithm.updates_per_round=4", "batching.local_batch=2", "batching.every_updates=1")
    shorter = (*small_without("model", "tracking"), *short_rounds)
    return run_seen(tmp_path_factory.mktemp("train"), *shorter)


@pytest.fixture(scope="module")
def several_trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four trainers of one worker each on two ranks, which do not merge yet."""
    return run_seen(tmp_path_factory.mktemp("several"), *SMALL, *FOUR_TRAINERS)


def run_seen(cwd: Path, *settings: str) -> Path:
    """The run directory of a run on a terminal; what was seen there lies beside it."""
    done = run_on_a_terminal(train_command("run.directory=first", *settings), cwd)
    (cwd / "terminal").write_text(done.output)
    assert done.code == 0, done.output
    return cwd / "first"


def test_a_round_trip_that_takes_longer_than_a_round_is_said_not_to_pay(tmp_path: Path) -> None:
    clock = ("simulation.update_seconds=0.01", "simulation.sequence_seconds=0.01", "simulation.latency_seconds=2")
    far = train_command("--nproc-per-node", "2", *small_without("budget"), *clock, "budget=9rounds")
    done = run([*far, "run.directory=far"], tmp_path)
    assert done.code == 0, done.output
    assert "averaging does not pay on this link: one worker alone would make more progress" in done.output
    assert [row["worth"] < 1 for row in metrics(tmp_path / "far")[3:8]] == [True] * 5


def test_the_display_is_live(finished_run: Path) -> None:
    terminal = (finished_run.parent / "terminal").read_text()
    assert "\x1b[" in terminal, "redrawn in place"
    for word in ("tokens/s", "passes", "noise scale", "train loss", "trainer 0", "saved"):
        assert word in terminal
    assert "run directory: first" in terminal
    assert "Traceback" not in terminal


def test_a_named_length_of_rounds_is_said_to_be_the_first_ones(finished_run: Path, several_trainers: Path) -> None:
    note = "for rounds of 4, set algorithm.updates_range=[4,4]"
    seen = [" ".join((folder.parent / "terminal").read_text().split()) for folder in (finished_run, several_trainers)]
    assert [note in words for words in seen] == [True, False], "by the link, and by its number"


def test_the_first_lines_say_what_muon_updates_and_at_which_rate(finished_run: Path) -> None:
    words = " ".join((finished_run.parent / "terminal").read_text().split())
    assert "muon updates " in words
    assert "a worker's rate is 0.005" in words


def test_the_display_has_every_trainer(several_trainers: Path) -> None:
    terminal = (several_trainers.parent / "terminal").read_text()
    assert all(word in terminal for word in ("\x1b[", "trainer 3", "average of all trainers", "saved")), terminal


def test_the_run_directory(finished_run: Path) -> None:
    names = {path.name for path in finished_run.iterdir()}
    assert names == {"run.json", "metrics.jsonl", "plans.jsonl", "model", "logs", "checkpoints", "wandb", ".lock"}
    record = facts(finished_run)
    assert record["layout"]["workers"] == {"0": [[0], [1]]}, "a worker on each rank"
    assert record["settings"]["algorithm"]["averages"] == "pseudo_gradients"
    assert record["settings"]["algorithm"]["round"] == "link"
    assert record["settings"]["wire"]["format"] == "adaptive"
    assert record["command"].split()[0] == "__main__.py"
    assert record["cluster"]["world_size"] == 2
    assert record["cluster"]["backend"] == "gloo"
    assert record["versions"]["torch"] == torch.__version__
    assert record["result"]["stop"] == "budget=3rounds reached"
    assert list((finished_run / "wandb").glob("offline-run-*")), "W&B is offline for who is not logged in"


def trained_rows(directory: Path, num_trainers: int) -> list[dict[str, Any]]:
    """The records of the rounds, after a check of what all have in common."""
    rows = metrics(directory)
    assert [(row["round"], row["trainer"]) for row in rows] == [(r, t) for r in range(4) for t in range(num_trainers)]
    for row in rows[num_trainers:]:
        assert row["tokens"] == sum(row["worker_updates"]) * row["local_batch"] * 32
        assert row["pool_tokens"] == sum(
            earlier.get("tokens", 0) for earlier in rows if earlier["round"] <= row["round"]
        )
        assert row["seconds"]["inner"] > 0
    for trainer in range(num_trainers):
        # A report may leave after the next round, if that is short, but not after the one that it decides.
        own = [row["bytes_sent"]["control"] for row in rows if row["round"] and row["trainer"] == trainer]
        assert sum(own) > 0
    return rows[num_trainers:]


def test_one_record_per_round_and_trainer(finished_run: Path, several_trainers: Path) -> None:
    payload_bytes = 4 * facts_num_elements(finished_run)
    for row in trained_rows(finished_run, 1):
        share = 1.05 / 8 if row.get("in_four_bits") else 1 / 16
        assert 0 < row["bytes_sent"]["outer"] < 2 * payload_bytes * share, "each of two ranks sends a part, in few bits"
        assert 0 <= row["delay_updates"] < row["updates"], "it arrives before the next is sent"
    sent = [row["bytes_sent"] for row in trained_rows(finished_run, 1)]
    sketches = [row["statistics"] for row in sent if "statistics" in row]
    assert sketches
    assert all(row["control"] < min(sketches) for row in sent), "sketches, which travel in reports, are counted apart"
    for row in trained_rows(several_trainers, 4):
        assert row["updates"] == 4
        assert row["bytes_sent"]["outer"] == 0, "a trainer of one rank sends nothing"


def test_a_batch_that_progress_asks_for_stays_in_its_bounds(finished_run: Path) -> None:
    rows, settings = trained_rows(finished_run, 1), facts(finished_run)["settings"]["batching"]
    assert settings["request"] == "progress"
    assert rows[0]["total_batch"] == 4
    for before, row in pairwise(rows):
        last, request = before["bounded_request"], row.get("request")
        request = math.inf if request is None else request  # JSON has no infinity
        least, most = max(4, last / settings["shrink_limit"]), settings["growth_limit"] * last
        assert row["bounded_request"] == pytest.approx(min(max(request, least), most))
        assert row["total_batch"] == 2 * math.ceil(row["bounded_request"] / 2), "the same for each of two workers"
        assert ("worth" in row) == (row["round"] > 2), "it follows what a round has cost"
        assert row["mode"] == "whole"
        assert row["statistics"]["trace"] > 0


def test_the_records_say_why_a_batch_is_what_it_is(several_trainers: Path) -> None:
    """Every batch can be worked out from rows before it: the test's request from the last but one, whose reports
    travelled while the last was computed, then its bounds."""
    rows = {(row["round"], row["trainer"]): row for row in metrics(several_trainers)}
    settings = facts(several_trainers)["settings"]["batching"]
    assert settings["request"] == "norm_test"
    for trainer in range(4):
        assert rows[1, trainer]["total_batch"] == rows[2, trainer]["total_batch"] == 2
        for round_ in (3,):
            row, before = rows[round_, trainer], rows[round_ - 1, trainer]
            smoothed = rows[round_ - 2, trainer]["smoothed"]
            noise_only = smoothed["squared_norm"] <= 0
            request = None if noise_only else smoothed["trace"] / (settings["eta"] ** 2 * smoothed["squared_norm"])
            assert row.get("request") == (None if request is None else pytest.approx(request))
            limit = settings["growth_limit"] * before["bounded_request"]
            if request is None or request > limit:
                assert (row["bounded_request"], row["bound"]) == (limit, "growth_limit")
            elif request < 2:
                assert (row["bounded_request"], row["bound"]) == (2, "measurable")
            else:
                assert (row["bounded_request"], row.get("bound")) == (row["request"], None)
            assert row["total_batch"] == math.ceil(row["bounded_request"])
            assert row["passes"] == math.ceil(row["local_batch"] / row["micro_batch"])
            assert row["mode"] == "whole"
            assert row["statistics"]["trace"] > 0


def test_transformers_loads_the_model(finished_run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished_run / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished_run / "model")
    assert model.num_parameters() == 824_576
    text = tokenizer("import os\n", return_tensors="pt")
    loss = model(**text, labels=text["input_ids"]).loss
    assert loss < 5.6, "no worse than uniform over the vocabulary"
    weights = dict(model.named_parameters())
    assert all(torch.isfinite(weight).all() and weight.abs().sum() > 0 for weight in weights.values())


def test_evaluate_agrees_with_the_run_and_generate_continues_a_text(finished_run: Path) -> None:
    cwd = finished_run.parent
    evaluated = use("evaluate.py", "first", cwd=cwd)  # on as many sequences as the run's own result
    result = facts(finished_run)["result"]
    saved = next(candidate for candidate in result["candidates"] if candidate["name"] == result["saved"])
    assert f"validation loss {saved['validation_loss']:.4f}" in evaluated.output
    command = [sys.executable, str(ROOT / "launch" / "evaluate.py"), "first", "--sequences", "64"]
    on_terminal = run_on_a_terminal(command, cwd)
    assert on_terminal.code == 0
    assert re.search(r"evaluating 64 sequences .*100%", on_terminal.output), "a bar, to its end"
    texts = [
        use("generate.py", "first", "def f(", "--tokens", "9", *more, cwd=cwd).output
        for more in ([], [], ["--seed", "1"])
    ]
    assert texts[0].startswith("def f(")
    assert texts[0] == texts[1] != texts[2]


def test_a_second_run_needs_another_directory_and_may_start_warm(finished_run: Path) -> None:
    cwd = finished_run.parent
    before = (finished_run / "run.json").read_bytes()
    refused = run(train_command("run.directory=first", *SMALL), cwd)
    assert refused.code == 2
    assert refused.output.splitlines()[-1].startswith("error: run.directory=first: already holds a run")
    assert (finished_run / "run.json").read_bytes() == before
    warm = [*small_without("model"), "model=pretrained", "model.warm_start=first"]
    again = run(train_command(*ONE_RANK, "run.directory=second", *warm, "budget=1rounds"), cwd)
    assert again.code == 0, again.output
    result = facts(finished_run)["result"]
    saved = next(candidate for candidate in result["candidates"] if candidate["name"] == result["saved"])
    start = metrics(cwd / "second")[0]["validation_loss"]
    assert start == pytest.approx(saved["validation_loss"], abs=1e-5), "it begins where the other ended"


def test_torchrun_and_every_placement_of_ranks_do_the_same(tmp_path: Path) -> None:
    """torchrun starts the same job: two trainers of two workers on two ranks, hence groups over both."""
    more = ("algorithm=diloco", "experiment=two_by_two", "run.directory=run", "run.root=unused")
    standalone = ("--standalone", "--nproc-per-node", "2")
    done = run(torchrun_command(*SMALL, *more, torchrun=standalone), tmp_path)
    assert done.code == 0, done.output
    rows = metrics(tmp_path / "run")
    payload_bytes = 4 * (facts_num_elements(tmp_path / "run") + 1)
    assert {row["bytes_sent"]["outer"] for row in rows[2:]} == {2 * payload_bytes}, "each of two ranks sends it once"
    assert rows[-1]["validation_perplexity"] < rows[0]["validation_perplexity"]
    assert "round 3" in done.output


def facts_num_elements(directory: Path) -> int:
    """Elements of the flat vector of the model that the run saved."""
    from adloco_dist.config import Precision
    from adloco_dist.pool.flat_model import FlatModel

    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    return FlatModel(model, torch.device("cpu"), Precision.fp32).num_elements


def test_ddp(tmp_path: Path) -> None:
    done = run(train_command(*SMALL, "algorithm=ddp", "run.directory=run", "inner.lr=5e-3"), tmp_path)
    assert done.code == 0, done.output
    rows = metrics(tmp_path / "run")
    assert rows[-1]["validation_perplexity"] < rows[0]["validation_perplexity"]
    assert "gradients" in rows[-1]["bytes_sent"]


def test_ctrl_c_leaves_a_checkpoint_and_whole_rounds(tmp_path: Path) -> None:
    pool = (*FOUR_TRAINERS, "merge=none")  # however many rounds a busy machine gets to, each is one of four trainers
    command = train_command(*ONE_RANK, *SMALL, *pool, "run.directory=run", "budget=100000rounds")
    with running(command, tmp_path) as (process, output):
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        output += process.communicate(timeout=120)[0]
    assert process.returncode == 75, output
    assert "Traceback" not in output
    assert facts(tmp_path / "run")["result"]["stop"] == "interrupted"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*/manifest.json")] == ["manifest.json"]
    rows = metrics(tmp_path / "run")
    assert len(rows) % 4 == 0, "whole rounds only"
    assert rows[-1]["round"] >= 2


def test_merges_are_shown_and_recorded(tmp_path: Path) -> None:
    """Three trainers on three ranks become one; the second merge leaves nobody out."""
    pool = ("--nproc-per-node", "3", *FOUR_TRAINERS, "pool.trainers=3", "merge.every_rounds=1")
    done = run(train_command(*SMALL, *pool, "run.directory=run", "budget=4rounds"), tmp_path)
    assert done.code == 0, done.output
    detail = [line for line in done.output.splitlines() if line.startswith("before round ")]
    assert [line.split(":")[0] for line in detail] == ["before round 3", "before round 4"]
    assert "average together" in detail[0]
    assert "; ranks {0-2} now average together; validation losses " in detail[1]
    merges = facts(tmp_path / "run")["merges"]
    assert [merge["before_round"] for merge in merges] == [3, 4]
    assert [len(merge["ranks"]) for merge in merges] == [2, 3]
    (last,) = [row for row in metrics(tmp_path / "run") if row["round"] == 4]
    assert (last["workers"], last["ranks"], last["trainer"]) == (3, [0, 1, 2], merges[1]["survivor"])
    assert len(facts(tmp_path / "run")["result"]["candidates"]) == 1
