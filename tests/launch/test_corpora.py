"""Corpora and models as users name them on the command line: what trains, and what is refused in one line."""

import gzip
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Device
from helpers.commands import (
    ONE_RANK,
    ROOT,
    SMALL,
    documented,
    environment,
    facts,
    metrics,
    run,
    tool,
    train_command,
    use,
)
from helpers.corpora import numbered_document, write_shards, write_tokenizer
from helpers.lone import lone_rank
from helpers.refusals import refusal_of_rank

TRAIN = "c4-train.00000-of-00002.json.gz"


def rows(path: Path, contents: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(content) + "\n" for content in contents))


def write_copy_of_hub(folder: Path) -> None:
    """A folder as somebody would download it: a data set's files, split by their names."""
    write_shards(folder / "en", (30, 30), "train")
    write_shards(folder / "en", [12], "validation", first=10_000)
    card = "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/train*\n"
    (folder / "README.md").write_text(card + "  - split: validation\n    path: en/validation*\n---\n")


def test_tokenize_train_generate(tmp_path: Path) -> None:
    """From C4-format shards over a tokenizer of one's own and token files to a model that transformers loads."""
    write_shards(tmp_path, (60, 40))
    write_shards(tmp_path, [20], "c4-validation", first=10_000)
    _, script, *arguments = documented("docs/guide/data.md", "python launch/tokenize_corpus.py")
    smaller = ["--train-tokenizer", "400", "--processes", "2"]
    done = run([sys.executable, str(ROOT / script), *arguments, *smaller], tmp_path)
    assert done.code == 0, done.output
    *_, train, validation, _ = tokens = documented("docs/guide/data.md", "python launch/train.py data=tokens")[2:]
    assert f"train from it: data=tokens '{train}' '{validation}'" in done.output
    done = run(train_command(*ONE_RANK, *tokens, *SMALL, "run.directory=run"), tmp_path)
    assert done.code == 0, done.output
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert len(tokenizer) == facts(tmp_path / "run")["corpus"]["vocab_size"] <= 400
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.vocab_size == len(tokenizer)
    done = use("generate.py", "run", "<1> river", "--tokens", "5", "--temperature", "0", cwd=tmp_path)
    assert done.code == 0 and done.output.startswith("<1> river"), done.output
    done = use("evaluate.py", "run", cwd=tmp_path)
    assert done.code == 0 and "perplexity" in done.output, done.output
    resources = metrics(tmp_path / "run")[-1]["resources"]
    assert all(used["memory_bytes"] > 1e7 for used in resources.values()), resources


def test_tokenizing_twice_or_interrupted_gives_the_same_bytes(tmp_path: Path) -> None:
    texts = write_shards(tmp_path, (300,) * 6)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", texts)
    corpus = ["data=json", "data.train=[c4-train*]", f"data.tokenizer={tokenizer}", "--shard-tokens", "5000"]
    assert use("tokenize_corpus.py", "one", *corpus, "--processes", "1", cwd=tmp_path).code == 0
    assert run(tool("tokenize_corpus.py", "two", *corpus, "--processes", "2"), tmp_path).code == 0
    process = subprocess.Popen(
        tool("tokenize_corpus.py", "three", *corpus, "--processes", "1"), cwd=tmp_path, env=environment(),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:  # killed when the second unit is done
        if line.startswith("train 00001 done"):
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "three" / "train" / "manifest.json").exists()
    refused = run(train_command(*ONE_RANK, *SMALL, "data=tokens", "data.train=[three/train]"), tmp_path)
    assert refused.code == 2 and "without manifest.json" in refused.output, refused.output
    kept = (tmp_path / "three" / "train" / "00000_000.npy").stat().st_mtime_ns
    assert use("tokenize_corpus.py", "three", *corpus, "--processes", "1", cwd=tmp_path).code == 0
    assert (tmp_path / "three" / "train" / "00000_000.npy").stat().st_mtime_ns == kept, "what was done is kept"
    for name in ("two", "three"):
        files = sorted(path.name for path in (tmp_path / "one" / "train").iterdir())
        assert sorted(path.name for path in (tmp_path / name / "train").iterdir()) == files
        for file in files:
            assert (tmp_path / name / "train" / file).read_bytes() == (tmp_path / "one" / "train" / file).read_bytes()
    done = use("tokenize_corpus.py", "one", *corpus[:2], "--shard-tokens", "5000", cwd=tmp_path)
    assert done.code == 2 and "holds tokens of other settings" in done.output, "bytes are another tokenizer"


def test_a_copy_of_a_hub_data_set_is_streamed(tmp_path: Path) -> None:
    """As data=c4 does it, with its subset and splits, from a folder in place of the hub."""
    write_copy_of_hub(tmp_path / "c4")
    arguments = ["data=c4", "data.hub=c4:en", "data.tokenizer=null", "run.directory=run", "data.sequence_length=32"]
    done = run(train_command(*ONE_RANK, *SMALL, *arguments), tmp_path)
    assert done.code == 0, done.output
    assert facts(tmp_path / "run")["corpus"]["source"] == "2 json file(s), streamed"
    done = use("check_data.py", *arguments[:3], "--samples", "1", cwd=tmp_path)
    assert done.code == 0 and "train: '<" in done.output, done.output


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpora, right and wrong, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpora")
    rows(folder / "rows.jsonl", [{"text": numbered_document(number), "label": number % 3} for number in range(60)])
    (folder / "empty.jsonl").touch()
    (folder / "broken.parquet").write_bytes(b"PAR1 and then nothing PAR1")
    whole = gzip.compress(
        b'{"text": "one two three"}\n' * 100_000 + np.random.default_rng(0).bytes(5000).hex().encode()
    )
    (folder / TRAIN).write_bytes(whole[:-2000])
    write_tokenizer(folder / "tokenizer", [numbered_document(number) for number in range(60)])
    write_copy_of_hub(folder / "copy")
    return folder


@pytest.fixture(scope="module")
def rank() -> Iterator[Runtime]:
    with lone_rank(Device.cpu) as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data.text_column=body"], ["data.text_column=body", "no such column", "text, label"]),
        (["data.label_column=label", "data.num_labels=2"], ["data.num_labels=2", "label 2"]),
        (["data.label_column=text", "data.text_column=label"], ["data.text_column=label", "it must be text"]),
        (["data.tokenizer=nowhere.json"], ["data.tokenizer=nowhere.json", "tokenizer.json"]),
        (["data.tokenizer=tokenizer", "+model.overrides.vocab_size=300"], ["vocab_size=300", "set at least"]),
        (["data.train=[empty.jsonl]"], ["empty.jsonl"]),
        (["data.validation=[empty.jsonl]"], ["data.validation", "no document"]),
        ([f"data.train=[{TRAIN}]"], [TRAIN, "at byte", "data.damaged=skip"]),
        (["data=parquet", "data.train=[broken.parquet]"], ["broken.parquet", "cannot be read"]),
        (["data.streaming=true"], ["data.validation=[]", "a stream cannot hold documents back"]),
        (["+model.overrides.max_position_embeddings=16"], ["data.sequence_length=32", "context is 16"]),
        (["data=hub", "data.hub=copy:fr"], ["data.hub=copy:fr"]),
        (
            ["data=hub", "data.hub=copy:en", "data.train=[test]"],
            ["data.train=test", "train, validation"],
        ),
        (["model=pretrained", "model.warm_start=./nowhere"], ["model.warm_start=./nowhere", "no config.json"]),
    ],
)
def test_mistakes_are_reported_in_one_line(
    corpora: Path, rank: Runtime, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    """As ranks find them: in this process, which has imported what takes each of them seconds."""
    monkeypatch.chdir(corpora)
    before = sorted(corpora.rglob("*"))
    line = refusal_of_rank(rank, *SMALL, "data=json", "data.train=[rows.jsonl]", *arguments)
    assert all(word in line for word in words), line
    assert sorted(corpora.rglob("*")) == before, "nothing is left behind"


def test_a_damaged_shard_is_left_out_if_asked_and_told(tmp_path: Path) -> None:
    write_shards(tmp_path, (2000, 2000))
    path = tmp_path / TRAIN
    path.write_bytes(path.read_bytes()[:-500])
    done = run(train_command(*ONE_RANK, *SMALL, "data=json", "data.train=[c4-train*]", "data.damaged=skip"), tmp_path)
    assert done.code == 0, done.output
    assert done.output.count(f"{TRAIN} cannot be read after row") == 1, done.output


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    """And no other data in its place. (An endpoint that refuses connections stands for a machine without a network.)"""
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    program = "from helpers.refusals import print_refusals; print_refusals()"
    wanted = {
        ("data=c4", "data.tokenizer=null"): "data.hub=allenai/c4",
        ("data=imdb", "data.tokenizer=null", "model=bert_nano"): "data.hub=stanfordnlp/imdb",
        (
            "data.tokenizer=null",
            "model=pretrained",
            "model.warm_start=keeeeenw/MicroLlama",
        ): "model.warm_start=keeeeenw",
    }
    command = [sys.executable, "-c", program, *(shlex.join([*SMALL, *arguments]) for arguments in wanted)]
    done = run(command, tmp_path, variables={**offline, "PYTHONPATH": str(ROOT / "tests")})
    for line, word in zip(done.output.splitlines(), wanted.values(), strict=True):
        assert word in line and "HF_ENDPOINT" in line, line
    done = run(train_command(*ONE_RANK, *SMALL, "data=c4", "data.tokenizer=null"), tmp_path, variables=offline)
    assert done.code == 2, done.output
    (line,) = done.output.splitlines()
    assert line.startswith("error: data.hub=allenai/c4")
