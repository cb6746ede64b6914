"""What it costs and saves that ranks hold a worker's model together (pool.ranks_per_worker=S), on one machine.

memory: whole runs of `small` with a vocabulary of 32,000 (20.4M parameters): one worker on S ranks, two rounds of three
    updates, an evaluation, the model saved. sharded_memory_S is the peak of the fullest rank over that of S = 1, both
    beyond what the process had before it built the model (sharded_rank.py); on a GPU of what torch has allocated. With
    gloo it is taken three times: *_in_use lets malloc return every block above 256 kB as soon as it is free
    (MALLOC_MMAP_THRESHOLD_), so that resident memory is what is in use; *_in_training is that of runs that try no
    micro-batches before (batching.capacity); *_resident leaves malloc as it is, which keeps freed blocks of up to
    32 MiB.
outer: bytes that a rank sends in an outer step of two workers, S = 2 over S = 1, as the run records them (fp32).
speed: tokens per second of one worker on two ranks in the inner phase, over a plain loop with fully_shard of every
    layer and the root, fused AdamW over the parts, clip_grad_norm_, and the same split of the batch; pairs interleaved.
save: what a rank has in its memory to save the model, over its share of that: the share itself, which it holds anyway,
    and all that saving adds to its resident memory (VmHWM - VmRSS before), pages of mapped files included.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from adloco_dist.averaging.group import Group
from adloco_dist.checkpoint.model import save_model
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import ClusterSettings, Device, Settings
from adloco_dist.config.compose import compose
from adloco_dist.data.encoding import Vocabulary
from adloco_dist.data.tokens import TokenTable
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.layout import experiment_layout
from adloco_dist.policy.plan import PlanInputs, PoolReport
from adloco_dist.policy.planning import plan_round
from adloco_dist.pool.arithmetic import set_up_arithmetic
from adloco_dist.pool.flat_model import computes_in_bf16
from adloco_dist.pool.sharding import blocks_of, shard_module
from adloco_dist.pool.slot import new_slot
from adloco_dist.round.inner import InnerPhase
from common import interleave, median_ratio, parse, plain_update, report, spread, together
from helpers.lone import lone_trainer
from helpers.processes import run_ranks
from sharded_rank import FOLDER, Memory

VOCAB_SIZE = 32_000
UPDATES = 5
"""Of one turn of a side."""
SHARED = (
    "algorithm=diloco", "pool.trainers=1", "merge=none", "batching.request=none", "tracking=none", "run.report=false",
    "cluster.threads_per_rank=1",
)  # fmt: skip
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
Figures = dict[str, float]
Rows = list[list[str]]


def main() -> None:
    parser = parse(__doc__ or "")
    parser.add_argument("--only", choices=PARTS, action="append", help="leave the others out")
    parser.add_argument("--model", default="small", help="of speed, a config of conf/model (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of an update (%(default)s)")
    options = parser.parse_args()
    figures: Figures = {}
    rows: Rows = []
    for name, part in PARTS.items():
        if name in (options.only or PARTS):
            found, more = part(options.quick, options.model, options.batch)
            figures |= found
            rows += more
    title = f"a worker on several ranks, {options.batch} sequences of 128 tokens, 1 thread per rank"
    report(title, ("", "min", "median", "max"), rows, figures, options.json)


# --- memory and outer: whole runs


def memory(quick: bool, model: str, batch: int) -> tuple[Figures, Rows]:
    sizes = [size for size in (1, 2, 4) if device() is Device.cpu or size <= torch.cuda.device_count()]
    ways = {"allocated": ({}, [])}
    if device() is Device.cpu:
        known = [f"batching.capacity={batch}"]
        ways = {"in_use": (RETURNED, []), "in_training": (RETURNED, known), "resident": ({}, [])}
    peaks: dict[tuple[str, int], list[float]] = {(way, size): [] for way in ways for size in sizes}
    before: dict[tuple[str, int], list[float]] = {key: [] for key in peaks}
    for _ in range(1 if quick else 3):
        for way, size in peaks:
            overrides = ["pool.workers_per_trainer=1", f"pool.ranks_per_worker={size}", f"batching.local_batch={batch}"]
            variables, more = ways[way]
            ranks, _ = trained(size, ["model=small", *overrides, *more], variables)
            fullest = max(ranks, key=lambda rank: rank["peak"] - rank["before"])
            peaks[way, size].append(fullest["peak"] - fullest["before"])
            before[way, size].append(fullest["before"])
    figures = {
        f"sharded_memory_{size}_{way}": statistics.median(found) / statistics.median(peaks[way, 1])
        for (way, size), found in peaks.items()
        if size > 1
    }
    rows = [[f"S = {size}, {way}: peak beyond the baseline, MB", *spread(peaks[way, size], 1e6)] for way, size in peaks]
    rows += [[f"S = {size}, {way}: the baseline, MB", *spread(before[way, size], 1e6)] for way, size in peaks]
    return figures, rows


def outer(quick: bool, model: str, batch: int) -> tuple[Figures, Rows]:
    if device() is Device.cuda and torch.cuda.device_count() < 4:
        return {}, []
    sent: dict[int, list[float]] = {}
    for size in (1, 2):
        overrides = ["pool.workers_per_trainer=2", f"pool.ranks_per_worker={size}", f"model={model}"]
        _, records = trained(2 * size, overrides)
        sent[size] = [record["bytes_sent"]["outer"] / (2 * size) for record in records if record["round"]]
    rows = [[f"S = {size}: an outer step, MB sent per rank", *spread(found, 1e6)] for size, found in sent.items()]
    return {"sharded_outer": statistics.median(sent[2]) / statistics.median(sent[1])}, rows


def trained(
    num_ranks: int, overrides: Sequence[str], environment: dict[str, str] | None = None
) -> tuple[list[dict[str, int]], list[dict[str, Any]]]:
    """A run of two rounds on random tokens: what each rank took of memory, and the records."""
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), np.random.default_rng(0)
        for split, count in (("train", 100_000), ("validation", 10_000)):
            np.save(folder / f"{split}.npy", rng.integers(0, VOCAB_SIZE, count).astype(np.uint16))
        data = [f"data.{split}=[{folder / split}.npy]" for split in ("train", "validation")]
        rest = [
            "data=tokens", *data, f"+model.overrides.vocab_size={VOCAB_SIZE}", "algorithm.updates_per_round=3",
            "budget=2rounds", "evaluation.every=null", "evaluation.final_sequences=8", "checkpoint.every=null",
            f"cluster.device={device().name}", f"run.directory={folder / 'run'}",
        ]  # fmt: skip
        script = str(Path(__file__).parent / "sharded_rank.py")
        command = [sys.executable, script, "--nproc-per-node", str(num_ranks), *SHARED, *rest, *overrides]
        variables = {**os.environ, FOLDER: name, **(environment or {})}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        return ranks, [json.loads(line) for line in lines]


# --- speed and save: ranks by themselves


def speed(quick: bool, model: str, batch: int) -> tuple[Figures, Rows]:
    seconds: list[list[float]] = [[], []]
    for _ in range(1 if quick else 2):
        found = on_ranks(2, seconds_of_sides, model, batch, 6 if quick else 10)[0]
        for side, more in zip(seconds, found, strict=True):
            side += more
    processed = UPDATES * batch * 128
    rows = [
        [f"{name}, {model}: tokens/s", *spread([processed / second for second in side])]
        for name, side in zip(("adloco_dist", "plain FSDP2"), seconds, strict=True)
    ]
    return {"sharded_speed": median_ratio(seconds[1], seconds[0])}, rows


def seconds_of_sides(runtime: Runtime, model: str, batch: int, pairs: int) -> list[list[float]]:
    settings = settings_of(model, runtime.world_size, batch)
    objective, module = built(settings, runtime, 257)
    in_bf16 = computes_in_bf16(settings.precision, runtime.device)
    shard_module(module, blocks_of(module), group_of(runtime), runtime.device, in_bf16)
    table = TokenTable([np.random.default_rng(0).integers(0, 256, 1_000_000).astype(np.uint16)], 128)
    trainer, slot = lone_trainer(settings, objective, module, table, device=runtime.device)
    plan = plan_round(settings, PlanInputs(experiment_layout(settings, [0] * runtime.world_size)), None, PoolReport())

    def ours() -> None:
        InnerPhase(plan, settings).run([trainer], [slot])
        trainer.cursor.advance(batch, (plan.updates,), {})

    plain = plain_loop(built(settings, runtime, 257)[1], settings, table, runtime)
    return interleave([together(ours), together(plain)], pairs)


def plain_loop(model: nn.Module, settings: Settings, table: TokenTable, runtime: Runtime) -> Callable[[], None]:
    """Updates as one would write them by hand, every rank with its share of each batch."""
    for one in (*blocks_of(model), model):
        fully_shard(one)
    adam, batch = settings.inner, settings.batching.local_batch
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(adam.beta1, adam.beta2), weight_decay=adam.weight_decay, fused=True
    )
    tokens = torch.from_numpy(table.parts[0].astype(np.int64))
    rng = np.random.default_rng(0)  # draws the same on all ranks

    def run() -> None:
        for _ in range(UPDATES):
            starts = rng.integers(0, len(tokens) - 129, size=batch)
            rows = torch.stack([tokens[start : start + 129] for start in starts[runtime.rank :: runtime.world_size]])
            rows = rows.to(runtime.device)
            plain_update(model, optimizer, rows, computes_in_bf16(settings.precision, runtime.device))
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()

    return run


def save(quick: bool, model: str, batch: int) -> tuple[Figures, Rows]:
    figures: Figures = {}
    rows: Rows = []
    for size in (2, 4):
        if device() is Device.cuda and torch.cuda.device_count() < size:
            continue
        found = [rank for _ in range(1 if quick else 5) for rank in on_ranks(size, added_by_saving)]
        figures[f"sharded_save_{size}"] = max((added + share) / share for added, share in found)
        rows.append([f"S = {size}: a rank's share, MB", *spread([share for _, share in found], 1e6)])
        rows.append([f"S = {size}: added while it is saved, MB", *spread([added for added, _ in found], 1e6)])
    return figures, rows


def added_by_saving(runtime: Runtime) -> tuple[int, int]:
    """Bytes that saving adds to this rank's resident memory at its peak, and bytes of its share of the model."""
    settings = settings_of("small", runtime.world_size, 4)
    objective, module = built(settings, runtime, VOCAB_SIZE)
    shard_module(module, blocks_of(module), group_of(runtime), runtime.device, in_bf16=False)
    flat_model = new_slot(objective, module, runtime.device, settings).flat_model
    weights = flat_model.initial_weights()
    folder = [tempfile.mkdtemp() if runtime.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    assert isinstance(folder[0], str)
    taken = Memory()
    save_model(Path(folder[0]), flat_model, weights, objective)
    added = taken.peak - taken.before
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return added, 4 * flat_model.parameter_layout.num_elements


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    cluster = ClusterSettings(device=device(), threads_per_rank=1, timeout_seconds=60)
    return run_ranks(function, [0] * num_ranks, *arguments, cluster=cluster, timeout_seconds=600)


def settings_of(model: str, num_ranks: int, batch: int) -> Settings:
    return compose(
        [*SHARED, f"model={model}", "pool.workers_per_trainer=1", f"pool.ranks_per_worker={num_ranks}",
         f"batching.local_batch={batch}", f"algorithm.updates_per_round={UPDATES}", "inner.schedule=constant"]
    )  # fmt: skip


def built(settings: Settings, runtime: Runtime, vocab_size: int) -> tuple[LanguageObjective, nn.Module]:
    set_up_arithmetic(settings, runtime.device)
    objective = LanguageObjective.fitted(settings, Vocabulary(vocab_size))
    in_bf16 = computes_in_bf16(settings.precision, runtime.device)
    return objective, nn.Module.to(objective.build(torch.device("cpu"), in_bf16), runtime.device)


def group_of(runtime: Runtime) -> Group:
    """All ranks."""
    ranks = tuple(range(runtime.world_size))
    found = dist.new_group(list(ranks), backend=runtime.backend.name)
    assert isinstance(found, dist.ProcessGroup)
    return Group(ranks, found, runtime.device, 60.0, 60.0)


def device() -> Device:
    return Device.cuda if torch.cuda.device_count() > 1 else Device.cpu


PARTS = {"memory": memory, "outer": outer, "speed": speed, "save": save}


if __name__ == "__main__":
    main()
