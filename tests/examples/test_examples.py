"""Every file of examples/, run by its own command with fewer rounds."""

import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.commands import ROOT, Finished, run
from helpers.ports import two_places

EXAMPLES = ROOT / "examples"
FEW = {
    "own_loop.py": ["--max-rounds", "2"],
    "members.py": ["--max-rounds", "20", "--least", "2"],
    "noise_scale_ddp.py": ["--max-measurements", "2"],
    "own_model.py": ["budget=2rounds", "run.directory=run"],
    "trainer.py": ["--max-rounds", "2"],
    "lora_slow_link.py": ["--max-rounds", "2"],
}
"""What is added to each command."""


def commands_of(name: str) -> list[list[str]]:
    """The commands in the example's docstring, as a shell would read them."""
    docstring = (EXAMPLES / name).read_text(encoding="utf-8").split('"""')[1]
    return [shlex.split(line, comments=True) for line in docstring.splitlines() if line.startswith("torchrun ")]


def started(words: list[str], cwd: Path, *more: str) -> Finished:
    """Run a documented command from an empty directory, and on a port of its own."""
    arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in words[1:]]
    return run([sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments, *more], cwd)


def example(name: str, cwd: Path, *more: str) -> list[str]:
    """The lines that an example printed."""
    done = started(commands_of(name)[0], cwd, *FEW[name], *more)
    assert done.code == 0, done.output
    return done.output.splitlines()


def test_every_example_is_run_here_and_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == FEW.keys()
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert names == set(listed)


def test_the_own_loop(tmp_path: Path) -> None:
    rounds = [line for line in example("own_loop.py", tmp_path) if line.startswith("round ")]
    assert [line.partition(":")[0] for line in rounds] == ["round 1", "round 2"]


def test_members_that_are_started_each_by_itself(tmp_path: Path) -> None:
    meet = two_places()
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda folder: example("members.py", folder, "--meet", meet), folders))
    for lines in told:
        assert re.match(r"round 20: 2 members, loss ", [line for line in lines if line.startswith("round ")][-1])


def test_the_noise_scale_under_ddp(tmp_path: Path) -> None:
    lines = example("noise_scale_ddp.py", tmp_path)
    assert len([line for line in lines if line.startswith("noise scale ")]) == 2
    assert len([line for line in lines if line.startswith("  the norm test asks for a batch of ")]) == 2


def test_the_own_model(tmp_path: Path) -> None:
    example("own_model.py", tmp_path)
    assert (tmp_path / "run" / "run.json").exists()


@pytest.mark.needs("accelerate")
def test_the_trainer_which_resumes(tmp_path: Path) -> None:
    first, again = commands_of("trainer.py")
    lines = example("trainer.py", tmp_path)
    assert lines[-1].startswith("2 rounds, "), lines
    losses = [line for line in lines if line.startswith("{'loss'")]
    assert len(losses) == 2
    for rank in (0, 1):
        checkpoint = tmp_path / "trainer-example" / f"rank-{rank}" / "checkpoint-50"
        assert {"diloco.pt", "model.safetensors", "optimizer.pt"} <= {path.name for path in checkpoint.iterdir()}
    assert again[: len(first)] == first
    resumed = started(first, tmp_path, "--resume", "--max-rounds", "3")
    assert resumed.code == 0, resumed.output
    assert resumed.output.splitlines()[-1].startswith("3 rounds, ")
    assert resumed.output.count("{'loss'") == 1


@pytest.mark.needs("peft")
def test_lora_over_a_slow_link(tmp_path: Path) -> None:
    lines = example("lora_slow_link.py", tmp_path)
    sent = {int(found[1]) for line in lines if (found := re.search(r", (\d+) bytes sent$", line))}
    costs = [int(found[1]) for line in lines if (found := re.search(r": (\d+) bytes, at ", line))]
    assert sent == {costs[0]}
    assert costs[0] * 20 < costs[1]
