"""Two real hosts, each a network namespace with its own address, name and link, under `torchrun --nnodes 2`."""

import json
import sys
from pathlib import Path

import pytest

from adloco_dist.testing.hosts import hosts, why_unavailable

ROOT = Path(__file__).parent.parent.parent
SETTINGS = (
    "model=nano",
    "pool.trainers=2",
    "pool.workers_per_trainer=2",
    "pool.placement=spread",
    "data.sequence_length=64",
    "algorithm.updates_per_round=5",
    "inner.lr=2e-3",
    "budget=rounds",
    "budget.rounds=6",
    "evaluation.every_rounds=2",
    "tracking=none",
)

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")


def test_two_hosts_train_to_the_end(tmp_path: Path) -> None:
    """Each host has a working directory of its own: nothing is shared but the link."""
    with hosts(2, rate="200mbit") as nodes:
        processes = []
        for host in nodes:
            (tmp_path / host.name).mkdir()
            torchrun = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0].name}:29511", "--rdzv-id", "test",
                "--local-addr", host.name,
            ]  # fmt: skip
            command = [*torchrun, str(ROOT / "launch" / "train.py"), *SETTINGS, "run.directory=run"]
            with (tmp_path / host.name / "output").open("w") as output:
                processes.append(host.start(command, output, cwd=tmp_path / host.name))
        for process in processes:
            process.wait(timeout=180)
        on_the_wire = [host.bytes_sent() for host in nodes]
    outputs = [(tmp_path / host.name / "output").read_text() for host in nodes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)

    directories = [path for path in tmp_path.glob("*/run") if (path / "run.json").exists()]
    (directory,) = directories  # rank 0 alone writes
    facts = json.loads((directory / "run.json").read_text())
    assert sorted(facts["cluster"]["hosts"]) == sorted(host.name for host in nodes)
    assert facts["cluster"]["nodes"] == [0, 1]
    assert facts["layout"]["hosts"] == {"0": [0, 1], "1": [0, 1]}

    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    start, end = rows[0]["validation_perplexity"], rows[-1]["validation_perplexity"]
    assert end < 0.8 * start
    assert facts["result"]["stop"] == "budget.rounds=6 reached"

    best = min(candidate["validation_perplexity"] for candidate in facts["result"]["candidates"])
    other = next(host.name for host in nodes if not (tmp_path / host.name / "run").exists())
    told = f"ended: budget.rounds=6 reached; best perplexity {best:.3f}; run directory on "
    assert told in (tmp_path / other / "output").read_text(), "both hosts tell the same"

    # Anchors were equal on both hosts in every round, or the run would have ended; and the bytes that the records
    # count are those that left the links, but for headers, acknowledgements and the rendezvous.
    counted = sum(sum(row["bytes_sent"].values()) for row in rows)
    last_exchanges = 3 * 4 * 120_000 * 2 * 2  # the average and the chosen anchor at the end, at most
    assert counted < sum(on_the_wire) < 1.25 * counted + last_exchanges
