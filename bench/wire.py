"""What averages cost on slow links: hosts as network namespaces with shaped links (Linux, root, iproute2).

exposed: the launcher on two hosts, `small`, H 25, batch 4 x 128, and on four with `tiny`; each host's rank has one core
    of its own (two share one on fewer cores). exposed_* is the share of a round that is not spent in inner updates, the
    median over rounds of the mean over ranks, the first round left out; tokens_* is tokens per second over those of
    wire=fp32 on unshaped links. All sides of one link are run in turn.
averages: `Averager.all_reduce` of 41 MB between two hosts, all formats in turn. bytes_* are what the kernel has counted
    on the link over what it has counted for fp32, *_over_its_bytes the time over what the link needs for those bytes.
nodes: int4 averages of 41 MB at 100 Mbit/s between two hosts of two ranks each, inside of hosts first over among all:
    inside_first_seconds, and inside_first_bytes of a host.
overlap: overlap_costs is tokens per second of a round's updates of `small` with the averages of slow_link under way at
    100 Mbit/s, over that without any, rounds of both in turn; *_busy_* the same where the link is busy all the time
    with int4 averages, one after the other.
peers: tokens per second of own loops with our DiLoCo (fp32; as slow_link), torchft's DiLoCo and streaming DiLoCo (five
    fragments, four updates of delay, one bucket), and DistributedDataParallel, at 100 Mbit/s, over the same without
    averages.
codec: encoding and decoding 41 MB as int4 on one core.
loss, loss_average: validation loss of `tiny` after equal tokens of real text over that of wire=fp32, three seeds, no
    links, with DiLoCo's outer optimizer and with outer=average. They take an hour: only where they are asked for.
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from runs import Record, on_core, on_hosts

from adloco_dist.averaging.codecs import WholeNumbers
from adloco_dist.averaging.quantized import Quantized
from common import median_ratio, parse, report, spread
from helpers.hosts import hosts, run_on, why_unavailable

ROOT = Path(__file__).parents[1]
NUM_ELEMENTS = 10_245_760
"""Of `small`: 41 MB in fp32."""
SHARED = (
    "algorithm=diloco", "pool.trainers=1", "merge=none", "batching.request=none", "batching.local_batch=4",
    "data.sequence_length=128", "algorithm.updates_per_round=25", "budget=20rounds", "evaluation.every=null",
    "evaluation.final_sequences=8", "tracking=none", "run.report=false",
    "cluster.threads_per_rank=1", "checkpoint.every=null",
    "run.directory=run",
)  # fmt: skip
LINKS = {"100mbit": 100e6, "10mbit": 10e6}
LOSSES = {
    "fp32": ["wire=fp32"],
    "bf16": ["wire=bf16"],
    "int8": ["wire=int8"],
    "int4": ["wire=int4"],
    "sparse": ["wire=sparse", "outer=average"],
    "average": ["outer=average"],
    "fragments_4": ["wire.fragments=4"],
    **{f"tau_{tau}": [f"wire.delay_updates={tau}"] for tau in (1, 2, 5, 10)},
    "streaming": ["wire=slow_link"],
}
Figures = dict[str, float]
Rows = list[list[str]]


def main() -> None:
    parser = parse(__doc__ or "")
    parts = tuple(PARTS)
    parser.add_argument("--only", choices=parts, action="append", help="leave the others out")
    options = parser.parse_args()
    chosen = options.only or [part for part in parts if not part.startswith("loss")]
    if set(chosen) & {"averages", "nodes", "overlap", "peers", "exposed"} and (reason := why_unavailable()):
        sys.exit(f"no hosts on this machine: {reason}")
    figures: Figures = {}
    rows: Rows = []
    for part in parts:
        if part in chosen:
            found, more = PARTS[part](options.quick)
            figures |= found
            rows += more
    report("averages on slow links", ("side", "min", "median", "max"), rows, figures, options.json)


def codec(quick: bool) -> tuple[Figures, Rows]:
    torch.set_num_threads(1)
    averager, values = Quantized(WholeNumbers(4)), torch.randn(NUM_ELEMENTS) * 1e-3
    total = torch.zeros(NUM_ELEMENTS)
    seconds = []
    for _ in range(6 if quick else 21):
        start = time.perf_counter()
        averager.add(averager.encode(values), total)
        seconds.append(time.perf_counter() - start)
    milliseconds = [one * 1e3 for one in seconds[1:]]
    return {"codec_ms": statistics.median(milliseconds)}, [["codec, ms", *spread(milliseconds)]]


def averages(quick: bool) -> tuple[Figures, Rows]:
    link, rate = "100mbit", LINKS["100mbit"]
    found = _on_hosts("averages", link, 2 if quick else 6)
    exact = statistics.median(one["bytes"] for one in found["fp32"])
    figures: Figures = {}
    rows: Rows = []
    for name, times in found.items():
        sent = statistics.median(one["bytes"] for one in times)
        over = [one["seconds"] / (one["bytes"] * 8 / rate) for one in times]
        figures |= {f"bytes_{name}": sent / exact, f"{name}_over_its_bytes": statistics.median(over)}
        rows.append([f"{name} at {link}, s", *spread([one["seconds"] for one in times])])
    return figures, rows


def nodes(quick: bool) -> tuple[Figures, Rows]:
    found = _on_hosts("nodes", "100mbit", 2 if quick else 6, ranks_per_host=2)
    ratios = {
        unit: median_ratio(*([one[unit] for one in found[side]] for side in ("inside_first", "flat")))
        for unit in ("seconds", "bytes")
    }
    figures = {f"inside_first_{unit}": ratio for unit, ratio in ratios.items()}
    return figures, [[f"int4 {side}, s", *spread([one["seconds"] for one in times])] for side, times in found.items()]


def overlap(quick: bool) -> tuple[Figures, Rows]:
    figures: Figures = {}
    rows: Rows = []
    for link in LINKS:
        found = _on_hosts("overlap", link, 3 if quick else 6)
        figures[f"overlap_costs_busy_{link}"] = median_ratio(found["alone"], found["beside"])
        rows += [[f"updates {side}, link busy at {link}, s", *spread(found[side])] for side in ("alone", "beside")]
    found = _on_hosts("scheduled", "100mbit", 2 if quick else 6)
    figures["overlap_costs"] = median_ratio(found["alone"], found["beside"])
    rows += [
        [f"a round's updates {side}, slow_link at 100mbit, s", *spread(found[side])] for side in ("alone", "beside")
    ]
    return figures, rows


def _on_hosts(part: str, link: str, repetitions: int, ranks_per_host: int = 1) -> dict[str, Any]:
    """What rank 0 of bench/wire_rank.py has measured, on two hosts."""
    script = str(ROOT / "bench" / "wire_rank.py")
    with hosts(2, link) as made, tempfile.TemporaryDirectory() as folder:
        arguments = [str(2 * ranks_per_host), made[0].address, part, str(NUM_ELEMENTS), str(repetitions)]

        def on_host(place: int) -> list[str]:
            ranks = range(place * ranks_per_host, (place + 1) * ranks_per_host)
            each = [[*on_core(rank), sys.executable, script, str(rank), *arguments] for rank in ranks]
            return ["sh", "-c", f"{' & '.join(map(shlex.join, each))}; wait"]

        commands = [(host, on_host(place)) for place, host in enumerate(made)]
        (code, output), *_ = run_on(commands, Path(folder), 900)
        assert code == 0, output
        return json.loads(output.splitlines()[-1])


def exposed(quick: bool) -> tuple[Figures, Rows]:
    rounds, repetitions = (2, 1) if quick else (3, 2)
    sides = [("fp32", None, 2, "small"), ("fp32", "100mbit", 2, "small"), ("slow_link", "100mbit", 2, "small")]
    sides += [("fp32", "1gbit", 2, "small"), ("slow_link", "10mbit", 2, "small"), ("slow_link", "10mbit", 4, "tiny")]
    sides += [] if quick else [("fp32", "10mbit", 2, "small"), ("int4", "10mbit", 2, "small")]
    records: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repetitions):
        for wire, link, num_hosts, model in sides:
            key = f"{wire}_{link or 'unshaped'}" + (f"_{num_hosts}_hosts" if num_hosts > 2 else "")
            records.setdefault(key, []).extend(
                rounds_on_hosts(link, num_hosts, [f"model={model}", f"wire={wire}"], rounds)
            )
    figures: Figures = {}
    rows: Rows = []
    rates = {key: [_tokens_per_second(record) for record in found] for key, found in records.items()}
    for key, found in records.items():
        shares = [1 - statistics.mean(record["utilisation"].values()) for record in found]
        figures[f"exposed_{key}"] = statistics.median(shares)
        rows.append([f"{key}: share not in updates", *spread(shares)])
        if not key.endswith("hosts"):
            figures[f"tokens_{key}"] = statistics.median(rates[key]) / statistics.median(rates["fp32_unshaped"])
    return figures, rows


def peers(quick: bool) -> tuple[Figures, Rows]:
    script = str(ROOT / "bench" / "wire_peers.py")
    with hosts(2, "100mbit") as made, tempfile.TemporaryDirectory() as folder:
        commands = [
            (host, [*on_core(i), sys.executable, script, str(i), host.address, made[0].address, "1" if quick else "2"])
            for i, host in enumerate(made)
        ]
        (code, output), *_ = run_on(commands, Path(folder), 1800)
        assert code == 0, output
    found: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    base = statistics.median(found["alone"])
    figures = {f"peer_tokens_{name}": base / statistics.median(times) for name, times in found.items()}
    return figures, [[f"{name} at 100mbit, s of a round", *spread(times)] for name, times in found.items()]


def _tokens_per_second(record: dict[str, Any]) -> float:
    """A round's tokens over all of its time on the slowest rank."""
    seconds = record["seconds"]
    return record["tokens"] / (seconds["inner"] + seconds.get("outer", 0) + seconds["control"])


def rounds_on_hosts(
    link: str | None, num_hosts: int, overrides: Sequence[str], rounds: int, shared: Sequence[str] = SHARED
) -> list[Record]:
    """The records of a run's rounds but the first."""
    pool = [f"pool.workers_per_trainer={num_hosts}", f"budget={rounds + 1}rounds"]
    rows, _ = on_hosts(num_hosts, [*shared, *pool, *overrides], link, timeout_seconds=900, a_core_each=True)
    return [record for record in rows if record["round"] > 1]


def loss(quick: bool) -> tuple[Figures, Rows]:
    return _losses("loss", ["fp32", "streaming"] if quick else list(LOSSES), quick)


def loss_average(quick: bool) -> tuple[Figures, Rows]:
    names = ["fp32", "int8", "int4", "tau_5", "tau_10", "streaming"]
    return _losses("loss_average", names[:2] if quick else names, quick, "outer=average")


def _losses(figure: str, names: Sequence[str], quick: bool, *outer: str) -> tuple[Figures, Rows]:
    found: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1 if quick else 3):
            for name in names:
                run = Path(folder) / f"{name}-{seed}"
                overrides = [*SHARED[:-1], f"run.directory={run}", f"seed={seed}", "model=tiny", *outer, *LOSSES[name]]
                overrides += ["pool.workers_per_trainer=2", f"budget={4 if quick else 30}rounds"]
                overrides += ["evaluation.final_sequences=400", "inner.lr=2e-3", "inner.warmup_fraction=0.05"]
                _train(overrides)
                candidates = json.loads((run / "run.json").read_text())["result"]["candidates"]
                found[name].append(candidates[0]["validation_loss"])
                print(f"seed {seed}, {name}: {found[name][-1]:.5f}", file=sys.stderr)
    ratios = {name: [one / other for one, other in zip(found[name], found["fp32"], strict=True)] for name in names}
    figures = {f"{figure}_{name}": statistics.mean(values) for name, values in ratios.items()}
    rows = [[f"{figure} {name}", *(f"{value:.4f}" for value in sorted(found[name])[:3])] for name in names]
    return figures, rows if not quick else [[row[0], row[1], "", ""] for row in rows]


def _train(overrides: Sequence[str]) -> None:
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--nproc-per-node", "2", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


PARTS = {
    "codec": codec, "averages": averages, "nodes": nodes, "overlap": overlap, "peers": peers, "exposed": exposed,
    "loss": loss, "loss_average": loss_average,
}  # fmt: skip


if __name__ == "__main__":
    main()
