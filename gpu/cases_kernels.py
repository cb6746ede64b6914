"""What one device computes: against a CPU, without waiting for it, with the kernels that are meant."""

import torch
import torch._dynamo.utils
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz  # has no public name
from torch.profiler import ProfilerActivity, profile

from adloco_dist.averaging.shards import Shards
from adloco_dist.config import Settings
from adloco_dist.objective.matrices import Matrices
from adloco_dist.pool.flat_model import FlatModel
from adloco_dist.pool.muon import MIN_NORM, STEPS, A, B, C, Muon, orthogonalized
from adloco_dist.vectors import ALIGNMENT
from harness import Case, Here, SkippedError
from helpers.lone import CPU, lone_trainer
from helpers.support import FOUR_TRAINERS, small_module, small_objective, small_settings, small_store
from subjects import LLAMA_LAYERS, Bench, new_bench

FLASH = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
SLOW = ("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_attention_math")


def flat_model_as_on_a_cpu(here: Here) -> dict[str, float]:
    """Three updates in fp64; parameters and gradients stay aligned views of the flat vectors."""
    settings = small_settings(*FOUR_TRAINERS)
    vectors = []
    for device in (CPU, here.device):
        objective = small_objective(settings)
        trainer, slot = lone_trainer(settings, objective, small_module(settings), small_store(), device=device)
        bench = Bench(settings, trainer, slot)
        bench.run(batch=4, updates=1)
        gradient = slot.flat_model.gradient.cpu().clone()
        bench.run(batch=4, updates=2)
        _assert_views(slot.flat_model)
        vectors.append((gradient, trainer.workers[0].weights.cpu()))
    gradients, weights = (max_difference(mine, theirs) for mine, theirs in zip(*vectors, strict=True))
    assert gradients < 1e-10, f"gradients differ by {gradients:.3g}"
    assert weights < 1e-9, f"weights differ by {weights:.3g} after three updates"
    return {"gradient_difference": gradients, "weight_difference": weights}


def _assert_views(flat_model: FlatModel) -> None:
    whole = {"weights": flat_model.weights, "gradient": flat_model.gradient}
    for name, parameter in flat_model.module.named_parameters():
        assert parameter.grad is not None
        for kind, view in (("weights", parameter.data), ("gradient", parameter.grad)):
            offset = view.data_ptr() - whole[kind].data_ptr()
            assert 0 <= offset < whole[kind].nbytes, f"{name}: its {kind} left the flat vector"
            assert offset % (ALIGNMENT * view.itemsize) == 0, f"{name}: its {kind} are not aligned"


def outer_step_as_on_a_cpu(here: Here) -> dict[str, float]:
    """To the bit, for a trainer may have ranks of both kinds: one to three workers, outer state on device and host."""
    different: dict[str, float] = {}
    for workers in (1, 2, 3):
        anchors = {}
        for place, device in (("cpu", CPU), ("device", here.device), ("pinned", here.device)):
            state = "cpu" if place == "pinned" else "device"
            more = ("precision=fp32", "outer=nesterov", f"pool.outer_state={state}")
            anchors[place] = _after_outer_steps(small_settings(*FOUR_TRAINERS, *more), device, workers)
        for place in ("device", "pinned"):
            different[f"{place}_{workers}_workers"] = float((anchors[place] != anchors["cpu"]).sum())
    assert not any(different.values()), f"elements that differ from the CPU's: {different}"
    return different


def _after_outer_steps(settings: Settings, device: torch.device, workers: int) -> torch.Tensor:
    """The anchor after three outer steps from the same differences everywhere."""
    trainer, _ = lone_trainer(
        settings, small_objective(settings), small_module(settings), small_store(), range(workers), device=device
    )
    random = torch.Generator().manual_seed(0)
    for _ in range(3):
        for worker in trainer.workers:
            change = torch.randn(len(worker.weights), generator=random) * 1e-2
            worker.weights.add_(change.to(device))
        trainer.step(0, None)
    return trainer.anchor.cpu()


def muon_as_torchs(here: Here) -> dict[str, float]:
    """Equal matrices that are orthogonalised at once, in bf16: no further from fp64 than those of torch.optim.Muon."""
    ours, theirs, elements, differing = 0.0, 0.0, 0, 0
    for shape in ((8, 512, 512), (8, 512, 1376), (8, 1376, 512), (32, 64, 512)):
        matrices = torch.randn(*shape, device=here.device, generator=torch.Generator(here.device).manual_seed(0))
        exact, at_once = orthogonalized(matrices.double(), torch.float64), orthogonalized(matrices, torch.bfloat16)
        one_by_one = torch.stack([_zeropower_via_newtonschulz(one, (A, B, C), STEPS, MIN_NORM) for one in matrices])
        ours = max(ours, float((at_once - exact).norm() / exact.norm()))
        theirs = max(theirs, float((one_by_one - exact).norm() / exact.norm()))
        elements, differing = elements + matrices.numel(), differing + int((at_once != one_by_one).sum())
    assert ours < 1.1 * theirs, f"off by {ours:.3g} of their norm, torch's by {theirs:.3g}"
    figures = {"error": ours, "error_of_torchs": theirs, "differing_share": differing / elements}
    return figures | {"differing_after_steps": _differing_after_steps(here.device)}


def _differing_after_steps(device: torch.device) -> float:
    """The share of elements that three steps of Muon and of torch.optim.Muon leave different."""
    random, rate, weight_decay, momentum = torch.Generator(device).manual_seed(0), 0.02, 0.1, 0.95
    shapes = [(512, 512), (512, 1376), (512, 512), (1376, 512), (512, 1376)]
    sides = [[nn.Parameter(torch.ones(shape, device=device)) for shape in shapes] for _ in range(2)]
    groups = [
        {
            "params": [parameter],
            "matrices": Matrices.of(parameter.shape, is_convolution=False, head_rows=None),
            "lr": rate,
            "weight_decay": weight_decay,
        }
        for parameter in sides[0]
    ]
    ours = Muon(groups, momentum, torch.bfloat16, Shards({}, (), 1.0))
    for parameter in sides[0]:
        ours.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    theirs = torch.optim.Muon(sides[1], rate, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for one, other in zip(*sides, strict=True):
            one.grad = torch.randn(one.shape, device=device, generator=random)
            other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    differing = sum(int((one != other).sum()) for one, other in zip(*sides, strict=True))
    return differing / sum(parameter.numel() for parameter in sides[0])


def no_waiting_between_updates(here: Here) -> dict[str, float]:
    """From the first update to the last, nothing waits for the device (torch raises an error where it does)."""
    updates = 4
    bench = new_bench(here.device, "precision=bf16")
    bench.run(batch=4, updates=2)  # what waits once, when kernels are loaded
    (worker,), taken = bench.trainer.workers, 0

    def count(*_: object) -> None:
        nonlocal taken
        taken += 1
        if here.is_cuda:
            torch.cuda.set_sync_debug_mode("error" if taken < updates else "default")

    worker._optimizers[0].register_step_post_hook(count)
    bench.run(batch=4, updates=updates)
    assert taken == updates
    return {"updates": float(taken)}


def flash_attention(here: Here) -> dict[str, float]:
    """Of a causal model in bf16, eager."""
    return _attention(here, is_compiled=False)


def flash_attention_compiled(here: Here) -> dict[str, float]:
    """The same compiled, and without graph breaks; a changing batch is compiled three times at most."""
    if not here.is_cuda:
        raise SkippedError("compiling takes minutes on a CPU")
    figures = _attention(here, is_compiled=True)
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    bench = new_bench(here.device, "precision=bf16", "model.compile=true")
    for batch in (4, 8, 6, 1):
        bench.run(batch, updates=2)
    figures |= {
        "graphs": float(counters["stats"]["unique_graphs"]),
        "graph_breaks": float(sum(counters["graph_break"].values())),
    }
    assert figures["graph_breaks"] == 0, f"graph breaks: {dict(counters['graph_break'])}"
    assert figures["graphs"] <= 3, f"{figures['graphs']:.0f} graphs for batches of 4, 8, 6, 1"
    return figures


def _attention(here: Here, is_compiled: bool) -> dict[str, float]:
    updates = 2
    bench = new_bench(here.device, "precision=bf16", f"model.compile={str(is_compiled).lower()}")
    bench.run(batch=4, updates=1)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if here.is_cuda else [])]
    with profile(activities=activities) as profiled:
        bench.run(batch=4, updates=updates)
    counts = {event.key: event.count for event in profiled.key_averages()}
    fast = sum(counts.get(name, 0) for name in FLASH)
    slow = {name: counts[name] for name in SLOW if name in counts}
    assert not slow, f"attention by other kernels: {slow}"
    assert fast == LLAMA_LAYERS * updates, f"{fast} calls of flash attention in {updates} updates"
    waits = counts.get("aten::_local_scalar_dense", 0)
    return {"flash_calls": float(fast), "reads_of_a_scalar": float(waits)}


def max_difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of any two elements, on whatever devices."""
    return float((mine.cpu() - theirs.cpu()).abs().max())


CASES = [
    Case("flat model in fp64 as on a CPU", flat_model_as_on_a_cpu),
    Case("outer step as on a CPU, to the bit", outer_step_as_on_a_cpu),
    Case("Muon as torch's", muon_as_torchs),
    Case("no waiting between updates", no_waiting_between_updates),
    Case("flash attention, eager", flash_attention),
    Case("flash attention, compiled, and graphs", flash_attention_compiled, seconds=150),
]
