"""One of the two ranks of peer.py: `tiny` on the standard library, in a plain loop with torchft's DiLoCo around it.

Rank 0 prints the validation loss of the workers' average as JSON.
"""

import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import numpy as np
import torch
import torch.distributed as dist
from cases import MEASURED
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (that is its documented place)

import their_diloco
from adloco_dist.config.compose import compose
from adloco_dist.data.corpora import TextSplits, load_corpus
from adloco_dist.objective.language import LanguageObjective
from adloco_dist.policy.evaluation import Evaluation, subsets
from adloco_dist.policy.schedule import Progress, rate_share

BATCH = 4
PORT = 29515


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    rank: int
    own: str
    """This host's address."""
    master: str
    seconds: float
    seed: int
    updates: int
    """H."""
    fragments: int
    delay: int
    lr: float
    outer_lr: float
    outer_momentum: float


def train(job: Job) -> float:
    """The validation loss of the workers' average when the time is over."""
    settings = compose([*MEASURED, "model=tiny", f"inner.lr={job.lr}", "inner.warmup_fraction=0.1", f"seed={job.seed}"])
    splits = load_corpus(settings.data)
    assert isinstance(splits, TextSplits)
    table, inner = splits.train.table, settings.inner  # type: ignore[attr-defined]
    torch.manual_seed(job.seed)
    objective = LanguageObjective.fitted(settings, splits.vocabulary)
    module = objective.build(torch.device("cpu"), in_bf16=False)
    betas = (inner.beta1, inner.beta2)
    optimizer = torch.optim.AdamW(module.parameters(), betas=betas, weight_decay=inner.weight_decay, fused=True)
    order = np.random.default_rng(job.seed).permutation(table.num_sequences)[job.rank :: 2]
    fragments = their_diloco.dealt(module, job.fragments) if job.fragments > 1 else [module]
    outer = [
        torch.optim.SGD(part.parameters(), job.outer_lr, job.outer_momentum, nesterov=job.outer_momentum > 0)
        for part in fragments
    ]
    with ExitStack() as cleanup:
        store = their_diloco.enter(
            cleanup, fragments, optimizer, outer, job.own, job.master, sync_every=job.updates,
            use_bucketization=False, fragment_sync_delay=job.delay,
        )  # fmt: skip
        assert store.port
        dist.barrier()
        start, done = time.monotonic(), 0
        while not _is_over(start, job):
            for _ in range(job.updates):
                share = min((time.monotonic() - start) / job.seconds, 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = job.lr * rate_share(inner, Progress(0, share, 0.0), 0)
                chosen = [(done * BATCH + i) % len(order) for i in range(BATCH)]
                loss, _ = objective.loss(module, table.batch(order[chosen]))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), inner.clip_norm or float("inf"))
                optimizer.step()
                optimizer.zero_grad()
                done += 1
    for parameter in module.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= 2
    places = subsets(splits.validation.num_sequences, settings.evaluation).final
    batches = [splits.validation.batch(np.array(places[i : i + 64])) for i in range(0, len(places), 64)]
    return sum((objective.evaluate(module, batch) for batch in batches), Evaluation()).loss


def _is_over(start: float, job: Job) -> bool:
    """By rank 0's clock. Collective."""
    over = torch.tensor(float(time.monotonic() - start >= job.seconds))
    dist.broadcast(over, 0)
    return bool(over)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    store = TCPStore(job.master, PORT, 2, job.rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=2)
    loss = train(job)
    if job.rank == 0:
        print("\n" + json.dumps({"loss": loss}), flush=True)
    dist.barrier()
    os._exit(0)  # torchft's threads would keep the process


if __name__ == "__main__":
    main()
