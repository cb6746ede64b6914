"""The scripts and commands of the pages, run as they are written there; what trains has smaller settings."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.commands import ONE_RANK, ROOT, documented, environment, facts, run, use

SMALLER = (
    "model=nano", "data.sequence_length=32", "algorithm.updates_per_round=2", "batching.local_batch=2",
    "evaluation.sequences=8", "evaluation.final_sequences=8", "tracking=none", "run.report=false",
)  # fmt: skip
"""Without the algorithm and the pool, which the commands set."""
TWO_ROUNDS = (*ONE_RANK, *SMALLER, "budget=2rounds")
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def script(page: str, directory: Path) -> str:
    """Write the first Python block of a guide to a file of `directory`."""
    text = (ROOT / "docs" / "guide" / page).read_text(encoding="utf-8")
    path = directory / "my_script.py"
    path.write_text(text.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    return str(path)


def test_the_own_loop_runs_on_two_ranks(tmp_path: Path) -> None:
    path = script("own-loop.md", tmp_path)
    done = run([sys.executable, *TWO_RANKS, path], tmp_path)
    assert done.code == 0, done.output
    rounds = [line.partition(":")[0] for line in done.output.splitlines() if line.startswith("round ")]
    assert rounds == [f"round {number}" for number in range(1, 9)], done.output


def test_the_noise_scale_is_printed_with_every_measurement(tmp_path: Path) -> None:
    path = script("noise-scale.md", tmp_path)
    done = run([sys.executable, path], tmp_path)
    assert done.code == 0, done.output
    assert [line for line in done.output.splitlines() if line.startswith("noise scale ")] == done.output.splitlines()
    assert done.output.count("\n") == 10, done.output


def test_an_own_model_trains_in_the_launcher(tmp_path: Path) -> None:
    path = script("own-model.md", tmp_path)
    settings = ("pool.trainers=2", "pool.workers_per_trainer=2", "budget=3rounds", "tracking=none")
    done = run([sys.executable, path, "--nproc-per-node", "2", *settings, "run.directory=run"], tmp_path)
    assert done.code == 0, done.output
    assert facts(tmp_path / "run")["result"]["stop"] == "budget=3rounds reached"


def command(page: str, start: str, *more: str) -> list[str]:
    """A command of a page that begins with `start`, with the scripts of this checkout."""
    _, *words = documented(f"docs/{page}", start)
    return [sys.executable, *(str(ROOT / word) if word.startswith("launch/") else word for word in words), *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the pages name, all of them copies of one, and a corpus."""
    folder = tmp_path_factory.mktemp("guides")
    settings = (*TWO_ROUNDS, "run.directory=runs/2026-...")
    done = run(command("guide/report.md", "python launch/train.py run.watch=0", *settings), folder)
    assert done.code == 0, done.output
    assert "the run is shown on http://127.0.0.1:" in done.output
    swept = [f"sweep_lr_wire/inner.lr={rate}" for rate in (0.0025, 0.005)]
    for name in ("first", "second", "2026-...-demo/two_machines", *swept):
        shutil.copytree(folder / "runs" / "2026-...", folder / "runs" / name)
    (folder / "corpus").mkdir()
    for name in ("some", "more"):
        (folder / "corpus" / f"{name}.txt").write_text(f"Of {name} text there is not much. " * 200, encoding="utf-8")
    return folder


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("page", "start", "more", "shown"),
    [
        ("guide/start.md", "python launch/evaluate.py", (), "perplexity"),
        ("guide/start.md", "python launch/generate.py", ("--tokens", "4"), "def main("),
        ("guide/start.md", "python launch/check_data.py", (), "labels"),
        ("guide/report.md", "python launch/report.py runs/2026", (), "runs/2026-.../report.html"),
        ("guide/report.md", "python launch/report.py runs/first", (), "report/report.html"),
        ("guide/report.md", "python launch/report.py runs/sweep_lr_wire", (), "runs/sweep_lr_wire/report.html"),
    ],
)
def test_what_shows_a_run_or_data(page: str, start: str, more: tuple[str, ...], shown: str, folder: Path) -> None:
    _, script, *arguments = command(page, start, *more)
    assert shown in use(Path(script).name, *arguments, cwd=folder).output


@pytest.mark.parametrize(
    ("page", "start", "more", "shown"),
    [
        ("guide/start.md", "python launch/analyze_gradients.py", (*ONE_RANK, "--sequences", "16"), "noise scale"),
        ("guide/start.md", "python launch/train.py algorithm=localsgd", TWO_ROUNDS, "ended: budget=2rounds reached"),
        ("guide/start.md", "python launch/train.py data=text", TWO_ROUNDS, "ended: budget=2rounds reached"),
        ("guide/start.md", "python launch/train.py --print-config", (), "updates_per_round: 8"),
        (
            "concepts.md", "python launch/train.py --nproc-per-node 4",
            (*ONE_RANK, *SMALLER, "merge.every_rounds=1", "budget=4rounds"), "before round 4: ",
        ),
    ],
)  # fmt: skip
def test_what_trains(page: str, start: str, more: tuple[str, ...], shown: str, folder: Path) -> None:
    done = run(command(page, start, *more), folder)
    assert done.code == 0, done.output
    assert shown in done.output


def test_the_saved_model_is_one_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, code = documented("docs/guide/start.md", "python -c")
    monkeypatch.chdir(folder)
    exec(code, {})


def test_a_run_is_watched_on_a_port(folder: Path) -> None:
    words = ["0" if word == "8000" else word for word in command("guide/report.md", "python launch/watch.py")]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
    assert line.startswith("runs/2026-... is shown on http://127.0.0.1:")
