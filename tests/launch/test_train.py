"""Training from the command line, end to end: the driver, torchrun, the run directory, the model it leaves."""

import math
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.commands import (
    ROOT,
    SMALL,
    environment,
    facts,
    metrics,
    run,
    run_on_a_terminal,
    small_without,
    torchrun_command,
    train_command,
)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, with algorithm, pool, model and tracking as they are by default."""
    shorter = small_without("algorithm=", "pool.", "model", "tracking")
    return run_seen(tmp_path_factory.mktemp("train"), *shorter)


@pytest.fixture(scope="module")
def several_trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four trainers of one worker each on two ranks, which do not merge yet."""
    return run_seen(tmp_path_factory.mktemp("several"), *SMALL)


def run_seen(cwd: Path, *settings: str) -> Path:
    """The run directory of a run on a terminal; what was seen there lies beside it."""
    done = run_on_a_terminal(train_command("run.directory=first", *settings), cwd)
    (cwd / "terminal").write_text(done.output)
    assert done.code == 0, done.output
    return cwd / "first"


def test_the_display_is_live(finished_run: Path) -> None:
    terminal = (finished_run.parent / "terminal").read_text()
    assert "\x1b[" in terminal, "redrawn in place"
    for word in ("tokens/s", "passes", "noise scale", "train loss", "trainer 0", "saved"):
        assert word in terminal
    assert "run directory: first" in terminal
    assert "Traceback" not in terminal


def test_a_named_length_of_rounds_is_said_to_be_the_first_ones(finished_run: Path, several_trainers: Path) -> None:
    note = "for rounds of 4, set algorithm.min_updates=4 algorithm.max_updates=4"
    seen = [" ".join((folder.parent / "terminal").read_text().split()) for folder in (finished_run, several_trainers)]
    assert [note in words for words in seen] == [True, False], "by the link, and by its number"


def test_the_display_has_every_trainer(several_trainers: Path) -> None:
    terminal = (several_trainers.parent / "terminal").read_text()
    assert all(word in terminal for word in ("\x1b[", "trainer 3", "average of all trainers", "saved")), terminal


def test_the_run_directory(finished_run: Path) -> None:
    names = {path.name for path in finished_run.iterdir()}
    assert names == {"run.json", "metrics.jsonl", "model", "logs", "checkpoints", "wandb", ".lock"}
    record = facts(finished_run)
    assert record["layout"]["workers"] == {"0": [[0], [1]]}, "a worker on each rank"
    assert record["settings"]["algorithm"]["averages"] == "pseudo_gradients"
    assert record["settings"]["algorithm"]["round"] == "link"
    assert record["settings"]["wire"]["format"] == "sparse"
    assert record["script"] == "__main__.py"
    assert record["cluster"]["world_size"] == 2
    assert record["cluster"]["backend"] == "gloo"
    assert record["versions"]["torch"] == torch.__version__
    assert record["result"]["stop"] == "budget.rounds=3 reached"
    assert list((finished_run / "wandb").glob("offline-run-*")), "W&B is offline for who is not logged in"


def trained_rows(directory: Path, num_trainers: int) -> list[dict[str, Any]]:
    """The records of the rounds, after a check of what all have in common."""
    rows = metrics(directory)
    assert [(row["round"], row["trainer"]) for row in rows] == [(r, t) for r in range(4) for t in range(num_trainers)]
    for row in rows[num_trainers:]:
        assert row["tokens"] == row["updates"] * row["total_batch"] * 32
        assert row["pool_tokens"] == sum(
            earlier.get("tokens", 0) for earlier in rows if earlier["round"] <= row["round"]
        )
        assert row["seconds"]["inner"] > 0
        assert row["bytes_sent"]["control"] > 0
    return rows[num_trainers:]


def test_one_record_per_round_and_trainer(finished_run: Path, several_trainers: Path) -> None:
    payload_bytes = 4 * facts_num_elements(finished_run)
    for row in trained_rows(finished_run, 1):
        assert 0 < row["bytes_sent"]["outer"] < 2 * payload_bytes / 16, "each of two ranks sends a part, in few bits"
        assert 1 <= row["delay_updates"] < row["updates"], "it arrives before the next is sent"
    for row in trained_rows(several_trainers, 4):
        assert row["updates"] == 4
        assert row["bytes_sent"]["outer"] == 0, "a trainer of one rank sends nothing"


def test_a_batch_that_progress_asks_for_stays_in_its_bounds(finished_run: Path) -> None:
    rows, settings = trained_rows(finished_run, 1), facts(finished_run)["settings"]["batching"]
    assert settings["request"] == "progress"
    assert rows[0]["total_batch"] == 4
    for before, row in pairwise(rows):
        last, request = before["bounded_request"], math.inf if row["request"] is None else row["request"]
        least, most = max(4, last / settings["shrink_limit"]), settings["growth_limit"] * last
        assert row["bounded_request"] == pytest.approx(min(max(request, least), most))
        assert row["total_batch"] == 2 * math.ceil(row["bounded_request"] / 2), "the same for each of two workers"
        assert row["worth"] > 0
        assert row["mode"] == "whole"
        assert row["statistics"]["trace"] > 0


def test_the_records_say_why_a_batch_is_what_it_is(several_trainers: Path) -> None:
    """Every batch can be worked out from the row before: the test's request, then its bounds."""
    rows = {(row["round"], row["trainer"]): row for row in metrics(several_trainers)}
    settings = facts(several_trainers)["settings"]["batching"]
    assert settings["request"] == "norm_test"
    for trainer in range(4):
        assert rows[1, trainer]["total_batch"] == 2
        for round_ in (2, 3):
            row, before = rows[round_, trainer], rows[round_ - 1, trainer]
            smoothed = before["smoothed"]
            noise_only = smoothed["squared_norm"] <= 0
            request = None if noise_only else smoothed["trace"] / (settings["eta"] ** 2 * smoothed["squared_norm"])
            assert row["request"] == (None if request is None else pytest.approx(request))
            limit = settings["growth_limit"] * before["bounded_request"]
            if request is None or request > limit:
                assert (row["bounded_request"], row["bound"]) == (limit, "growth_limit")
            elif request < 2:
                assert (row["bounded_request"], row["bound"]) == (2, "measurable")
            else:
                assert (row["bounded_request"], row["bound"]) == (row["request"], None)
            assert row["total_batch"] == math.ceil(row["bounded_request"])
            assert row["passes"] == math.ceil(row["local_batch"] / row["micro_batch"])
            assert row["mode"] == "whole"
            assert row["statistics"]["trace"] > 0


def test_a_table_shows_why_batches_grew(several_trainers: Path) -> None:
    command = [sys.executable, str(ROOT / "launch" / "batches.py")]
    shown = run([*command, str(several_trainers), "--trainer", "2"], several_trainers.parent)
    assert shown.code == 0, shown.output
    lines = [line.split("│") for line in shown.output.splitlines() if line.startswith("│")]
    rows = [row for row in metrics(several_trainers) if row["trainer"] == 2 and row["round"]]
    assert [(line[1].strip(), line[2].strip()) for line in lines] == [
        (str(row["round"]), str(row["total_batch"])) for row in rows
    ]
    assert lines[1][7].strip() == f"{rows[0]['smoothed']['trace']:,.4g}", "what its request stands on"
    wrong = run([*command, str(several_trainers), "--trainer", "9"], several_trainers.parent)
    assert (wrong.code, wrong.output) == (2, "error: --trainer=9: the run has trainers 0, 1, 2, 3\n")


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
    launch = Path(train_command()[1]).parent
    cwd = finished_run.parent
    evaluated = run([train_command()[0], str(launch / "evaluate.py"), "first", "--sequences", "8"], cwd)
    result = facts(finished_run)["result"]
    saved = next(candidate for candidate in result["candidates"] if candidate["name"] == result["saved"])
    assert f"validation loss {saved['validation_loss']:.4f}" in evaluated.output
    texts = [
        run([train_command()[0], str(launch / "generate.py"), "first", "def f(", "--tokens", "9", *more], cwd).output
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
    again = run(train_command("run.directory=second", *warm, "budget.rounds=1"), cwd)
    assert again.code == 0, again.output
    result = facts(finished_run)["result"]
    saved = next(candidate for candidate in result["candidates"] if candidate["name"] == result["saved"])
    start = metrics(cwd / "second")[0]["validation_loss"]
    assert start == pytest.approx(saved["validation_loss"], abs=1e-5), "it begins where the other ended"


def test_torchrun_and_every_placement_of_ranks_do_the_same(tmp_path: Path) -> None:
    """torchrun starts the same job: two trainers of two workers on two ranks, hence groups over both."""
    more = ("experiment=two_by_two", "run.directory=run", "run.root=unused")
    standalone = ("--standalone", "--nproc-per-node", "2")
    done = run(torchrun_command(*small_without("pool."), *more, torchrun=standalone), tmp_path)
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


@pytest.mark.parametrize("algorithm", ["adloco", "ddp"])
def test_other_algorithms(tmp_path: Path, algorithm: str) -> None:
    settings = [*small_without("algorithm=", "pool."), f"algorithm={algorithm}", "run.directory=run", "inner.lr=5e-3"]
    done = run(train_command(*settings), tmp_path)
    assert done.code == 0, done.output
    rows = metrics(tmp_path / "run")
    assert rows[-1]["validation_perplexity"] < rows[0]["validation_perplexity"]
    assert ("gradients" in rows[-1]["bytes_sent"]) == (algorithm == "ddp")


def test_ctrl_c_leaves_a_checkpoint_and_whole_rounds(tmp_path: Path) -> None:
    process = subprocess.Popen(
        train_command(*SMALL, "run.directory=run", "budget.rounds=100000"), cwd=tmp_path, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("round 2 "):
            break
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    output += process.communicate(timeout=120)[0]
    assert process.returncode == 75, output
    assert "Traceback" not in output
    assert facts(tmp_path / "run")["result"]["stop"] == "interrupted"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*/manifest.json")] == ["manifest.json"]
    rows = metrics(tmp_path / "run")
    assert len(rows) % 4 == 0, "whole rounds only"
    assert rows[-1]["round"] >= 2


def test_merges_are_shown_recorded_and_drawn(tmp_path: Path) -> None:
    """Three trainers on three ranks become one; the second merge leaves nobody out."""
    overrides = ("--nproc-per-node", "3", *SMALL, "pool.trainers=3", "merge.every_rounds=1", "run.directory=run")
    done = run(train_command(*overrides), tmp_path)
    assert done.code == 0, done.output
    detail = [line for line in done.output.splitlines() if line.startswith("before round ")]
    assert [line.split(":")[0] for line in detail] == ["before round 2", "before round 3"]
    assert "average together" in detail[0]
    assert "; ranks {0-2} now average together; validation losses " in detail[1]
    merges = facts(tmp_path / "run")["merges"]
    assert [merge["before_round"] for merge in merges] == [2, 3]
    assert [len(merge["ranks"]) for merge in merges] == [2, 3]
    (last,) = [row for row in metrics(tmp_path / "run") if row["round"] == 3]
    assert (last["workers"], last["ranks"], last["trainer"]) == (3, [0, 1, 2], merges[1]["survivor"])
    assert len(facts(tmp_path / "run")["result"]["candidates"]) == 1
    drawn = run([sys.executable, str(ROOT / "launch" / "merges.py"), "run"], tmp_path)
    assert drawn.code == 0, drawn.output
    assert drawn.output.splitlines()[-2:] == detail
    (candidate,) = facts(tmp_path / "run")["result"]["candidates"]
    assert f"▼ perplexity {candidate['validation_perplexity']:.3f}" in drawn.output
