"""What ranks refuse before a run exists: all raise the same line, whoever found the mistake."""

import json
from pathlib import Path

import numpy as np
import pytest

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.setup.agreement import compare_settings
from helpers.processes import run_ranks
from helpers.refusals import ACCEPTED, refusal_of_rank

REPLAY = ("batching.request=replay", "budget=3rounds")
NANO = (
    "algorithm=diloco",
    "batching.request=norm_test",
    "model=nano",
    "data.sequence_length=32",
    "pool.trainers=2",
    "pool.workers_per_trainer=1",
)


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


CASES: list[tuple[list[str], list[str]]] = [
    ([], [ACCEPTED]),
    (["pool.trainers=1"], ["workers_per_trainer=1", "2 ranks idle"]),
    (
        ["algorithm=ddp", "batching.request=none", "pool.trainers=1", "pool.workers_per_trainer=3"],
        ["pool.workers_per_trainer=3", "2 ranks"],
    ),
    (["data=text", "data.train=[DIR/none*.txt]"], ["none*.txt", "no such file"]),
    (["data=text", "data.train=[DIR/short.txt]"], ["train split", "less than one sequence"]),
    (["data=text", "data.train=[DIR/medium.txt]", "batching.local_batch=99"], [ACCEPTED]),
    (
        ["data=text", "data.train=[DIR/medium.txt]", "pool.workers_per_trainer=50"],
        ["workers_per_trainer=50", "shard has 46 sequences"],
    ),
    (["data=tokens", "data.train=[DIR/ids.npy]", "+model.overrides.vocab_size=100"], ["=100", "up to 499"]),
    (["data=tokens", "data.train=[DIR/ids.npy]"], [ACCEPTED]),
    (
        [
            "data=json",
            "data.train=[DIR/rows.jsonl]",
            "data.validation=[DIR/rows.jsonl]",
            "data.streaming=true",
            "budget=1epoch",
        ],
        ["budget=1epochs", "stream", "in tokens, rounds or seconds"],
    ),
    (["model.architecture=lama"], ["model.architecture=lama", "llama"]),
    (["+model.overrides.hidden_sise=8"], ["hidden_sise", "hidden_size"]),
    (["model.overrides.num_attention_heads=7"], ["model.overrides", "7"]),
    (["model.warm_start=DIR"], ["model.warm_start", "no config.json"]),
    ([*REPLAY, "batching.replay=DIR/run"], [ACCEPTED]),
    ([*REPLAY, "batching.replay=DIR/run/metrics.jsonl"], [ACCEPTED]),
    ([*REPLAY, "batching.replay=DIR/run", "budget=4rounds"], ["batching.replay=", "holds 3 rounds", "=4"]),
    (
        [*REPLAY, "batching.replay=DIR/run", "budget=20000tokens"],
        ["batching.replay=", "19200 tokens", "budget=20_000tokens"],
    ),
    ([*REPLAY, "batching.replay=DIR/run", "pool.trainers=3"], ["holds trainers 0, 1", "run has 3"]),
    ([*REPLAY, "batching.replay=DIR/none.jsonl"], ["none.jsonl", "cannot be read"]),
    ([*REPLAY, "batching.replay=DIR/short.txt"], ["holds no record of a round", "line 1: "]),
    ([*REPLAY, "batching.replay=DIR/gap.jsonl"], ["trainer 0 has no total_batch in round 2"]),
    ([*REPLAY, "batching.replay=DIR/one.jsonl"], ["holds trainers 0, the run has 2"]),
    (["data.sequence_length=2000", "+model.overrides.max_position_embeddings=1000"], ["2000", "context is 1000"]),
]
"""Settings, with words of the line that refuses them."""


def refuse_all(runtime: Runtime, directory: str) -> list[str]:
    """One case after the other: what all ranks refuse leaves them in step."""
    cases = ([setting.replace("DIR", directory) for setting in settings] for settings, _ in CASES)
    return [refusal_of_rank(runtime, *NANO, *settings) for settings in cases]


@pytest.fixture(scope="module")
def lines(files: Path) -> list[list[str]]:
    """What each of two ranks said to each case."""
    return run_ranks(refuse_all, [0, 0], str(files))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(settings) or "nothing" for settings, _ in CASES])
def test_all_ranks_refuse_with_one_line(lines: list[list[str]], number: int) -> None:
    first, second = (of_rank[number] for of_rank in lines)
    assert first == second
    for word in CASES[number][1]:
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
