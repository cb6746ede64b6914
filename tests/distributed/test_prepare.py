"""What ranks refuse before a run exists: all raise the same line, whoever found the mistake."""

import json
from pathlib import Path

import numpy as np
import pytest

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.setup.agreement import compare_settings, prepare
from adloco_dist.setup.parts import NamedParts
from adloco_dist.testing.processes import run_ranks

REPLAY = ("batching.request=replay", "budget=rounds", "budget.rounds=3")
NANO = ("algorithm=diloco", "model=nano", "data.sequence_length=32", "pool.trainers=2", "pool.workers_per_trainer=1")


def refused(runtime: Runtime, directory: str, settings: list[str]) -> str:
    try:
        prepare(compose([*NANO, *(setting.replace("DIR", directory) for setting in settings)]), runtime, NamedParts())
    except SettingsError as error:
        return str(error)
    return "accepted"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    (directory / "short.txt").write_text("too short")
    (directory / "medium.txt").write_text("some text, but not much of it. " * 100)
    np.save(directory / "ids.npy", np.arange(10_000, dtype=np.uint16) % 500)
    (directory / "rows.jsonl").write_text("".join(json.dumps({"text": "some text " * 99}) + "\n" for _ in range(9)))
    run = directory / "run"
    run.mkdir()
    rows = [{"round": round_, "trainer": trainer, "total_batch": 4} for round_ in (1, 2, 3) for trainer in (0, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"round": 0, "trainer": 0}, *rows]))
    (directory / "gap.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (rows[0], rows[4])))
    (directory / "one.jsonl").write_text(json.dumps(rows[0]))
    return directory


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], ["accepted"]),
        (["pool.trainers=1"], ["workers_per_trainer=1", "2 ranks idle"]),
        (["algorithm=ddp", "pool.trainers=1", "pool.workers_per_trainer=3"], ["pool.workers_per_trainer=3", "2 ranks"]),
        (["data=text", "data.train=[DIR/none*.txt]"], ["none*.txt", "no such file"]),
        (["data=text", "data.train=[DIR/short.txt]"], ["train split", "less than one sequence"]),
        (["data=text", "data.train=[DIR/medium.txt]", "batching.local_batch=99"], ["accepted"]),
        (
            ["data=text", "data.train=[DIR/medium.txt]", "pool.workers_per_trainer=50"],
            ["workers_per_trainer=50", "shard has 46 sequences"],
        ),
        (["data=tokens", "data.train=[DIR/ids.npy]", "+model.overrides.vocab_size=100"], ["=100", "up to 499"]),
        (["data=tokens", "data.train=[DIR/ids.npy]"], ["accepted"]),
        (
            [
                "data=json",
                "data.train=[DIR/rows.jsonl]",
                "data.validation=[DIR/rows.jsonl]",
                "data.streaming=true",
                "budget=epochs",
            ],
            ["budget.epochs=1", "stream", "budget.tokens"],
        ),
        (["model.architecture=lama"], ["model.architecture=lama", "llama"]),
        (["+model.overrides.hidden_sise=8"], ["hidden_sise", "hidden_size"]),
        (["model.overrides.num_attention_heads=7"], ["model.overrides", "7"]),
        (["model.warm_start=DIR"], ["model.warm_start", "no config.json"]),
        ([*REPLAY, "batching.replay=DIR/run"], ["accepted"]),
        ([*REPLAY, "batching.replay=DIR/run/metrics.jsonl"], ["accepted"]),
        ([*REPLAY, "batching.replay=DIR/run", "budget.rounds=4"], ["batching.replay=", "holds 3 rounds", "=4"]),
        (
            [*REPLAY, "batching.replay=DIR/run", "budget=tokens", "budget.rounds=null", "budget.tokens=20000"],
            ["batching.replay=", "19200 tokens", "budget.tokens=20000"],
        ),
        ([*REPLAY, "batching.replay=DIR/run", "pool.trainers=3"], ["holds trainers 0, 1", "run has 3"]),
        ([*REPLAY, "batching.replay=DIR/none.jsonl"], ["none.jsonl", "cannot be read"]),
        ([*REPLAY, "batching.replay=DIR/short.txt"], ["holds no record of a round", "line 1: "]),
        ([*REPLAY, "batching.replay=DIR/gap.jsonl"], ["trainer 0 has no total_batch in round 2"]),
        ([*REPLAY, "batching.replay=DIR/one.jsonl"], ["holds trainers 0, the run has 2"]),
        (["data.sequence_length=2000", "+model.overrides.max_position_embeddings=1000"], ["2000", "context is 1000"]),
    ],
)
def test_all_ranks_refuse_with_one_line(files: Path, settings: list[str], words: list[str]) -> None:
    first, second = run_ranks(refused, [0, 0], str(files), settings)
    assert first == second
    assert "\n" not in first
    for word in words:
        assert word in first, first


def compared(runtime: Runtime, setting: str) -> str:
    try:
        compare_settings(runtime.control, compose([setting.replace("RANK", str(runtime.rank + 1))]))
    except SettingsError as error:
        return str(error)
    return "accepted"


def test_only_what_belongs_to_a_node_may_differ_between_ranks() -> None:
    assert run_ranks(compared, [0, 1], "batching.capacity=RANK") == ["accepted"] * 2
    assert run_ranks(compared, [0, 1], "cluster.memory_bytes=RANK") == ["accepted"] * 2
    first, second = run_ranks(compared, [0, 1], "batching.eta=0.RANK")
    assert first == second
    assert "batching.eta differs between ranks: 0.1 on rank 0, 0.2 on rank 1" in first
