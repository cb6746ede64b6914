"""Compressed averages of every update's gradient, on the simulated clock: python experiments/compressed.py FOLDER SIDE.

FOLDER is runs/experiments/compressed, where figures.py --folder finds it; SIDE names hook, amount, Mbit/s, seconds,
seed, batch of a host, optimizer, rate, model, and the share of an update that hides what the hook sends:
sparse,0.0625,10,99,10,8,muon,5e-3,nano,0. None: those of the page.

Each side is torch's DistributedDataParallel with a communication hook: PowerSGD as torch has it, or this project's
formats as a hook (the sparse one with error feedback). Hooks see the whole gradient at once, and yet, where nothing
else is said, two thirds of an update hide what they send, which no such hook can do: the clock is kind to them.
Optimizer, course of the rate, data, evaluation and the average of the weights are those of the default.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from by_hand import Plain
from cases import COMPARED, LINKS, MEASURED, NANO_SHARE, clock_of
from further import FURTHER_SEEDS, HALF, LENGTHS
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from adloco_dist.averaging.averager import Averager
from adloco_dist.averaging.codecs import WholeNumbers
from adloco_dist.averaging.group import Group
from adloco_dist.averaging.quantized import Quantized
from adloco_dist.averaging.sparse import Sparse
from adloco_dist.cluster.runtime import Runtime
from adloco_dist.policy.schedule import Progress, rate_share
from adloco_dist.policy.simulation import HIDDEN_GRADIENTS
from helpers.processes import run_ranks

LOOKS = 5
"""Evaluations of a run."""
LATENCY_SECONDS = 0.0005
(SEED, *_) = FURTHER_SEEDS
HOOKS = {
    "10": (("sparse,0.03125", 8, "1e-2"), ("sparse,0.0625", 8, "1e-2"), ("sparse,0.0625", 16, "7e-3"),
           ("sparse,0.0625", 16, "1e-2"), ("powersgd,4", 16, "1e-2"), ("int4,0", 16, "1e-2"), ("int8,0", 16, "1e-2")),
    "100": (("sparse,0.0625", 8, "1e-2"), ("powersgd,4", 8, "1e-2"), ("int4,0", 8, "7e-3"), ("int4,0", 8, "1e-2"),
            ("int4,0", 16, "7e-3"), ("int4,0", 16, "1e-2"), ("int4,0", 16, "1.4e-2"), ("int4,0", 16, "2e-2"),
            ("int8,0", 8, "1e-2"), ("int8,0", 16, "1e-2"), ("int8,0", 16, "1.4e-2"), ("int8,0", 16, "2e-2"),
            ("int8,0", 16, "2.8e-2")),
}  # fmt: skip
"""By link: hooks, batches of a host, and rates."""
SECONDS = HALF * LENGTHS[1]
"""As long as the default's runs on two hosts have beside 150 s of one alone."""
WAITING = (("int4,0", 16, "1.4e-2"), ("int8,0", 16, "2e-2"))
"""The best of 4 and of 8 bits at 100 Mbit/s once more, where nothing hides what they send."""
SIDES = (
    *(
        f"{hook},{link},{SECONDS:g},{SEED},{batch},muon,{rate},nano"
        for link, tried in HOOKS.items()
        for hook, batch, rate in tried
    ),
    *(f"{hook},100,{SECONDS:g},{SEED},{batch},muon,{rate},nano,0" for hook, batch, rate in WAITING),
)


@dataclass(frozen=True)
class Side:
    """What is trained, and how its gradients travel."""

    hook: str
    """sparse, int8, int4 or powersgd."""
    amount: float
    """Share of the elements, or the rank of PowerSGD's matrices; 0: the hook has none."""
    link: str
    seconds: float
    seed: int
    local_batch: int
    optimizer: str
    lr: float
    model: str
    hidden: float = HIDDEN_GRADIENTS
    """Share of an update that hides what the hook sends."""

    @property
    def name(self) -> str:
        side = f"{self.hook}{self.amount or ''}_b{self.local_batch}_{self.optimizer}{self.lr:g}_{self.link}"
        waits = "" if self.hidden else "_waits"
        return f"compressed/{side}_{self.model}{waits}/{self.seconds:g}s/seed{self.seed}"

    @property
    def bytes_per_second(self) -> float:
        """Of a link, which is slower for a smaller model in proportion."""
        return LINKS[self.link] * (NANO_SHARE if self.model == "nano" else 1.0)


def train(runtime: Runtime, side: Side) -> tuple[list[tuple[float, float]], int, int]:
    """Losses of the averaged weights by seconds of the clock, updates, and bytes that a rank sent."""
    plain = Plain.of([*MEASURED, *COMPARED, f"model={side.model}", f"inner={side.optimizer}", f"inner.lr={side.lr}",
                      f"seed={side.seed}"])  # fmt: skip
    batch, settings = side.local_batch, plain.settings
    update_seconds = sum(clock * count for clock, count in zip(clock_of(side.optimizer), (1, batch), strict=True))
    replica = DistributedDataParallel(plain.module, bucket_cap_mb=1000, gradient_as_bucket_view=True)
    sent = _register(replica, side, runtime)
    average = plain.copied()
    order = np.random.default_rng(side.seed).permutation(plain.table.num_sequences)[runtime.rank :: runtime.world_size]
    done, seconds, curve, looks = 0, 0.0, [], [side.seconds * (number + 1) / LOOKS for number in range(LOOKS)]
    while looks:
        rate = side.lr * rate_share(settings.inner, Progress(0, seconds / side.seconds, 0.0), 0)
        plain.update(order[[(done * batch + place) % len(order) for place in range(batch)]], rate, replica)
        done += 1
        weight = max(1 / done, 1 / (1 + (settings.outer.average_span or 0) * done))
        for mean, parameter in zip(average, plain.parameters, strict=True):
            mean.lerp_(parameter.detach(), weight)
        transfer = sent() / side.bytes_per_second + LATENCY_SECONDS
        seconds += update_seconds + max(0.0, transfer - side.hidden * update_seconds)
        if seconds >= looks[0]:
            looks.pop(0)
            curve.append((round(seconds, 3), plain.validation_loss(average) if runtime.rank == 0 else 0.0))
    return curve, done, int(sent() * done)


def _register(replica: DistributedDataParallel, side: Side, runtime: Runtime) -> Callable[[], float]:
    """Register the side's hook; a function that says how many bytes a rank sends for an update."""
    num_elements = sum(parameter.numel() for parameter in replica.parameters())
    if side.hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(side.amount), start_powerSGD_iter=10)
        replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        # Of the two factors of every matrix, and vectors as they are: twice (n - 1) / n in an all-reduce.
        floats = sum(
            p.numel() if p.ndim < 2 else min(p.numel(), int(side.amount) * (p.shape[0] + p[0].numel()))
            for p in replica.parameters()
        )
        share = 2 * (runtime.world_size - 1) / runtime.world_size
        return lambda: 4 * floats * share
    ranks = tuple(range(runtime.world_size))
    connected: Any = dist.new_group(ranks)
    group = Group(ranks, connected, torch.device("cpu"), 60.0, 60.0)
    averager: Averager = Sparse(side.amount) if side.hook == "sparse" else Quantized(WholeNumbers(int(side.hook[3:])))
    residual = torch.zeros(num_elements) if averager.keeps_residual else None

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        assert bucket.is_last(), "one bucket has the whole gradient"
        total = averager.exchange(bucket.buffer().clone(), 0, group, residual)()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(total / len(ranks))
        return done

    replica.register_comm_hook(None, hook)
    return lambda: averager.bytes_per_rank(num_elements, 0, ranks)


def record(side: Side) -> dict[str, Any]:
    """The side's record, as experiments/runs.py keeps those of the launcher."""
    curve, updates, sent = run_ranks(train, [0, 1], side, timeout_seconds=7200.0)[0]
    return {"name": side.name, "budget": side.seconds, "loss": curve[-1][1], "curve": curve, "updates": updates,
            "bytes_sent": 2 * sent, "tokens": 2 * updates * side.local_batch * 128, "side": asdict(side)}  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for text in sys.argv[2:] or SIDES:
        hook, amount, link, seconds, seed, batch, optimizer, lr, model, *hidden = text.split(",")
        numbers = float(seconds), int(seed), int(batch)
        side = Side(hook, float(amount), link, *numbers, optimizer, float(lr), model, *map(float, hidden))
        file = folder / f"{side.name.replace('/', '_')}.json"
        if not file.exists():
            file.write_text(json.dumps(record(side)), encoding="utf-8")
        print(side.name, json.loads(file.read_text(encoding="utf-8"))["loss"], flush=True)


if __name__ == "__main__":
    main()
