"""Whole runs on a device: what they stand on, how they fail and resume, every algorithm, and the tools."""

import gzip
import json
import os
import signal
import sys
from collections import Counter
from contextlib import closing

import torch

from adloco_dist.cluster.monitor import Monitor
from harness import Case, Here, SkippedError
from helpers.commands import errors, facts, metrics, run, tool
from small_runs import ENDLESS, finish, hurt_rank, small_run

END_SECONDS = 15.0
"""Within this the other ranks have ended when one is dead or silent: the ten seconds of silence, and the end."""
RETURNED_BYTES = 200e6
"""Of a GPU's memory: what may be missing when all ranks have ended (contexts come and go)."""
MERGING = ("pool.trainers=3", "merge.every_rounds=1", "budget=4rounds")
"""Merges in rounds 3 and 4: reports decide the plan of the round after the next."""


def check_with_and_without_nvml(here: Here) -> dict[str, float]:
    """The environment check and a run, with the driver's library for figures and as in containers that lack it."""
    check = tool("check.py", "--nproc-per-node", "1", f"cluster.device={here.device.type}")
    finish(check, here)
    figures = {}
    if here.is_cuda:
        torch.ones(1, device=here.device)
        with closing(Monitor(here.device, 1e6)) as monitor:
            figures = {name: value for name, value in monitor.take().items() if name.startswith("gpu_")}
        assert figures["gpu_memory_bytes"] > 0
    hiding = here.folder / "without_nvml"
    hiding.mkdir()
    (hiding / "libnvidia-ml.so.1").touch()  # what is found first, and cannot be loaded
    os.environ["LD_LIBRARY_PATH"] = f"{hiding}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    seen = run([sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"], here.folder)
    if seen.code == 0:
        raise SkippedError("NVML cannot be hidden here; with it all is well")
    finish(check, here)
    finish(small_run(here, "run"), here)
    return figures


def merges_of_two_ranks(here: Here) -> dict[str, float]:
    """A run of three trainers on two ranks that share the device: they merge, and the loss falls."""
    finish(small_run(here, "run", *MERGING, "inner.lr=5e-3", num_ranks=2), here)
    merges, rows = facts(here.folder / "run")["merges"], metrics(here.folder / "run")
    assert len(merges) == 2, f"{len(merges)} merges"
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    return {"first_loss": rows[0]["validation_loss"], "last_loss": rows[-1]["validation_loss"]}


def traces_and_figures(here: Here) -> dict[str, float]:
    """A profiled round has the device's kernels in its trace, and rounds have the figures of the whole device."""
    finish(small_run(here, "run", "pool.trainers=1", "merge=none", "profile.rounds=2"), here)
    (trace,) = (here.folder / "run" / "profile").iterdir()
    kinds = Counter(event.get("cat") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    (used,) = metrics(here.folder / "run")[-1]["resources"].values()
    if here.is_cuda:
        assert kinds["kernel"], f"no kernel among {dict(kinds)}"
        assert used["gpu_memory_bytes"] > 0
    return {"kernels": float(kinds["kernel"]), **{name: one for name, one in used.items() if name.startswith("gpu_")}}


def killed_rank(here: Here) -> dict[str, float]:
    """kill -9: the run ends with the rank's name, in time, and the device's memory is free again."""
    before = _free_bytes(here)
    hurt = hurt_rank(small_run(here, "run", *ENDLESS, num_ranks=2), here, 1, signal.SIGKILL)
    assert hurt.code == 1
    (line,) = errors(hurt.output)
    assert "rank 1 on " in line and "ended by SIGKILL" in line, line
    return _in_time(here, hurt.seconds, before)


def stopped_rank(here: Here) -> dict[str, float]:
    """SIGSTOP: a rank that is there and says nothing is taken for dead, and named."""
    before = _free_bytes(here)
    hurt = hurt_rank(small_run(here, "run", *ENDLESS, num_ranks=2), here, 1, signal.SIGSTOP)
    assert hurt.code == 1
    log = (here.folder / "run" / "logs" / "rank0.log").read_text(encoding="utf-8")
    assert "rank 1 on " in log and "silent for " in log, log
    return _in_time(here, hurt.seconds, before)


def _in_time(here: Here, seconds: float, free_before: float) -> dict[str, float]:
    assert seconds < END_SECONDS, f"the others took {seconds:.1f} s to end"
    missing = free_before - _free_bytes(here)
    assert missing < RETURNED_BYTES, f"{missing / 1e6:.0f} MB of the device did not come back"
    return {"end_seconds": seconds, "missing_mb": missing / 1e6}


def _free_bytes(here: Here) -> float:
    return float(torch.cuda.mem_get_info(here.device)[0]) if here.is_cuda else 0.0


def elastic_restart(here: Here) -> dict[str, float]:
    """After kill -9 the run is started again, and resumes from its newest checkpoint."""
    more = ("run.unfinished=resume", "checkpoint.every=1rounds", "--max-restarts", "1")
    command = small_run(here, "run", *ENDLESS, *more, num_ranks=2)
    hurt = hurt_rank(command, here, 1, signal.SIGKILL, until="note: resumes from", minimum="round 4 ")
    assert hurt.code == 75, f"code {hurt.code}"
    (resumed,) = facts(here.folder / "run")["resumed"]
    rounds = [row["round"] for row in metrics(here.folder / "run") if row["trainer"] == 0]
    assert rounds == sorted(set(rounds)), f"rounds reported twice or out of order: {rounds}"
    return {"restart_seconds": hurt.seconds, "resumed_in_round": float(resumed["checkpoint"].rpartition("-")[2])}


def other_algorithms(here: Here) -> dict[str, float]:
    """DDP on two ranks, and batches that follow gradients: the loss falls, and the batch is measured."""
    figures = {}
    learning = ("inner.lr=5e-3", "merge=none")
    for name, num_ranks, overrides in (
        ("ddp", 2, ["algorithm=ddp", "batching.request=none", "pool.trainers=1", "pool.workers_per_trainer=null"]),
        ("adaptive", 1, ["pool.trainers=1", "pool.workers_per_trainer=2"]),
    ):
        finish(small_run(here, name, *learning, *overrides, num_ranks=num_ranks), here)
        rows = metrics(here.folder / name)
        figures[f"loss_{name}"] = rows[-1]["validation_loss"]
        assert rows[-1]["validation_loss"] < rows[0]["validation_loss"], name
        if name != "ddp":
            assert rows[-1]["statistics"]["trace"] > 0, name
    return figures


def labels(here: Here) -> dict[str, float]:
    """A classifier on padded rows of a file."""
    lines = [f"{'up' if number % 2 else 'down'} {'word ' * (number % 7)}{number},{number % 2}" for number in range(400)]
    (here.folder / "rows.csv").write_text("text,label\n" + "\n".join(lines) + "\n", encoding="utf-8")
    rows = ("data=csv", "data.train=[rows.csv]", "data.label_column=label", "model=bert_nano")
    finish(small_run(here, "run", *rows, "pool.trainers=1", "merge=none"), here)
    last = metrics(here.folder / "run")[-1]
    assert last["validation_loss"] > 0
    return {"validation_loss": last["validation_loss"]}


def tools(here: Here) -> dict[str, float]:
    """What is done with a run that has ended; the saved model computes on the device what was reported at the end."""
    finish(small_run(here, "run", "pool.trainers=1", "merge=none"), here)
    result = facts(here.folder / "run")["result"]
    saved = next(one for one in result["candidates"] if one["name"] == result["saved"])
    evaluated = finish(tool("evaluate.py", "run", "--sequences", "8"), here).output
    loss = float(evaluated.partition("validation loss ")[2].split(",")[0])
    assert abs(loss - saved["validation_loss"]) < 1e-3, f"{loss} instead of {saved['validation_loss']}"
    assert finish(tool("generate.py", "run", "the pool", "--tokens", "9"), here).output.startswith("the pool")
    finish(tool("report.py", "run"), here)
    finish(tool("analyze_gradients.py", "run", "--sequences", "16", "--nproc-per-node", "1"), here)
    return {"validation_loss": saved["validation_loss"]}


CASES = [
    Case("check and run, with and without NVML", check_with_and_without_nvml, 90),
    Case("merges of two ranks on one device", merges_of_two_ranks),
    Case("traces and figures of rounds", traces_and_figures),
    Case("a killed rank", killed_rank, alone=True),
    Case("a stopped rank", stopped_rank, 90, alone=True),
    Case("elastic restart", elastic_restart, 90),
    Case("other algorithms", other_algorithms, 120),
    Case("labels", labels),
    Case("tools and the saved model", tools, 120),
]
