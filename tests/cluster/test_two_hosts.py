"""Two real hosts, each a network namespace with its own address, name and link, under `torchrun --nnodes 2`."""

import json
import sys
from pathlib import Path

import pytest

from helpers.commands import ROOT, documented
from helpers.hosts import Host, hosts, run_on

SETTINGS = (
    "algorithm=diloco",
    "model=nano",
    "pool.trainers=2",
    "pool.workers_per_trainer=2",
    "pool.placement=spread",
    "data.sequence_length=64",
    "algorithm.updates_per_round=5",
    "inner.lr=2e-3",
    "budget=6rounds",
    "evaluation.every=2rounds",
    "tracking=none",
    "run.report=false",
    "cluster.threads_per_rank=1",
)

pytestmark = pytest.mark.needs("hosts")


def torchrun_on(nodes: list[Host]) -> list[str]:
    """The command of docs/guide/nodes.md, with one rank per host."""
    ours = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "launch/train.py": [str(ROOT / "launch" / "train.py")],
        "node1:29500": [f"{nodes[0].name}:29511"],
        "2": [str(len(nodes))],
        "4": ["1"],
    }
    return [word for theirs in documented("docs/guide/nodes.md", "torchrun") for word in ours.get(theirs, [theirs])]


def train_on_two_hosts(tmp_path: Path, *settings: str) -> tuple[list[Host], list[str], list[int]]:
    """Under plain torchrun, to the end; returns as `train_on`."""
    return train_on(2, tmp_path, *settings)


def train_on(count: int, tmp_path: Path, *settings: str) -> tuple[list[Host], list[str], list[int]]:
    """One rank on each of so many hosts.

    Returns:
        The hosts, what they printed, and the bytes that left each of them.
    """
    with hosts(count, rate="200mbit") as nodes:
        commands = []
        for host in nodes:
            commands.append((host, [*torchrun_on(nodes), *SETTINGS, *settings, "run.directory=run"]))
        done = run_on(commands, tmp_path)
        outputs = [output for _, output in done]
        assert [code for code, _ in done] == [0] * count, "\n".join(outputs)
        return nodes, outputs, [host.bytes_sent() for host in nodes]


def test_two_hosts_train_to_the_end(tmp_path: Path) -> None:
    nodes, outputs, on_the_wire = train_on_two_hosts(tmp_path, "merge=none", "cluster.check_links=false")
    (directory,) = (path.parent for path in tmp_path.glob("*/run/run.json"))  # rank 0 alone writes
    facts = json.loads((directory / "run.json").read_text())
    assert [rank["interface"] for rank in facts["cluster"]["ranks"]] == ["eth0", "eth0"], "found, not given"
    logs = [[path.name for path in (tmp_path / host.name / "run" / "logs").iterdir()] for host in nodes]
    assert sorted(logs) == [["rank0.log"], ["rank1.log"]], "each on its own host"
    assert sorted(facts["cluster"]["hosts"]) == sorted(host.name for host in nodes)
    assert facts["cluster"]["nodes"] == [0, 1]
    assert facts["layout"]["workers"] == {"0": [[0], [1]], "1": [[0], [1]]}

    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    start, end = rows[0]["validation_perplexity"], rows[-1]["validation_perplexity"]
    assert end < 0.8 * start
    assert facts["result"]["stop"] == "budget=6rounds reached"

    result = facts["result"]
    (saved,) = (one["validation_perplexity"] for one in result["candidates"] if one["name"] == result["saved"])
    other = next(output for host, output in zip(nodes, outputs, strict=True) if host.name != directory.parent.name)
    detail = f"ended: budget=6rounds reached; perplexity {saved:.3f}; run directory on "
    assert detail in other, "both hosts tell the same"

    # Anchors were equal on both hosts in every round, or the run would have ended; and the bytes that the records
    # count are those that left the links, but for headers, acknowledgements and the rendezvous.
    counted = sum(sum(row["bytes_sent"].values()) for row in rows)
    last_exchanges = 3 * 4 * 120_000 * 2 * 2  # the average and the chosen anchor at the end, at most
    assert counted < sum(on_the_wire) < 1.25 * counted + last_exchanges


def test_trainers_on_different_hosts_merge_across_the_link(tmp_path: Path) -> None:
    """Disjoint trainers: nothing but control messages travels before the merge, pseudo-gradients do after it."""
    _, outputs, _ = train_on_two_hosts(
        tmp_path, "pool.workers_per_trainer=1", "pool.placement=pack", "merge.every_rounds=3"
    )
    (metrics,) = tmp_path.glob("*/run/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    before, after = ([row for row in rows if (row["round"] > 3) == merged] for merged in (False, True))
    assert {tuple(row["ranks"]) for row in before} == {(0,), (1,)}
    assert all(row["bytes_sent"].get("outer", 0) == 0 for row in before)
    assert [(row["round"], row["ranks"], row["workers"]) for row in after] == [(n, [0, 1], 2) for n in (4, 5, 6)]
    first = after[0]
    assert sum(first["merge"]["shares"].values()) == pytest.approx(1.0)
    assert first["bytes_sent"]["merge"] > 2 * 4 * 100_000, "anchors and outer momentum, half of each from each host"
    assert all(row["bytes_sent"]["outer"] > 4 * 100_000 for row in after)
    perplexities = [row["validation_perplexity"] for row in rows if "validation_perplexity" in row]
    assert perplexities[-1] < 0.8 * perplexities[0]
    detail = f"before round 4: trainer {next(trainer for trainer in (0, 1) if trainer != first['trainer'])}"
    assert any(detail in output for output in outputs), "rank 0 shows the merge as it happens"
    facts = json.loads((metrics.parent / "run.json").read_text())
    assert [(merge["before_round"], merge["survivor"]) for merge in facts["merges"]] == [(4, first["trainer"])]


def test_averages_in_four_bits_are_counted_as_the_link_counts_them(tmp_path: Path) -> None:
    wire = ("wire=slow_link", "wire.fragments=2", "wire.delay_updates=1")
    overrides = ("merge=none", "cluster.check_links=false", "evaluation.every=null", *wire)
    _, _, on_the_wire = train_on_two_hosts(tmp_path, *overrides)
    (metrics,) = tmp_path.glob("*/run/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    sent = [row["bytes_sent"]["outer"] for row in rows if row["round"]]
    in_full = 2 * 4 * 110_000  # of two ranks, for each of the two trainers
    assert all(0.1 * in_full < count < 0.15 * in_full for count in sent)
    counted = sum(sum(row["bytes_sent"].values()) for row in rows)
    last_exchanges = 3 * 4 * 120_000 * 2 * 2
    assert counted < sum(on_the_wire) < 1.25 * counted + last_exchanges
    assert all(0 < share <= 1 for row in rows if row["round"] for share in row["utilisation"].values())
    assert all(spent["transfer"] > 0 for row in rows if row["round"] > 1 for spent in row["rank_seconds"].values())


@pytest.mark.parametrize(("wire", "share"), [("signs", 0.0352), ("sparse", 0.0071)])
def test_what_owners_of_slices_send_is_counted_as_the_link_counts_it(wire: str, share: float, tmp_path: Path) -> None:
    """Each of three hosts sends two thirds of an average to their owners, and its third of the sum to both others."""
    overrides = ("pool.trainers=1", "pool.workers_per_trainer=3", "outer=average", "budget=60rounds", f"wire={wire}",
                 "evaluation.every=null", "cluster.check_links=false", "checkpoint.every=null")  # fmt: skip
    _, _, on_the_wire = train_on(3, tmp_path, *overrides)
    (directory,) = (path.parent for path in tmp_path.glob("*/run/run.json"))
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    sent = [row["bytes_sent"]["outer"] for row in rows if row["round"]]
    in_full = 3 * 4 * 117_120
    assert all(count == pytest.approx(4 / 3 * share * in_full, rel=0.1) for count in sent), sent[0] / in_full
    counted = sum(sum(row["bytes_sent"].values()) for row in rows)
    last_exchanges = 3 * 4 * 120_000 * 3 * 2
    assert counted < sum(on_the_wire) < 1.25 * counted + last_exchanges
