"""How a rank's device computes: what torch is set to before the first product, and what is reported of it."""

import os

import torch

from adloco_dist.config import Precision, Settings, require
from adloco_dist.pool.flat_model import computes_in_bf16, has_bf16
from adloco_dist.pool.slot import ComputeSlot

TF32_CAPABILITY = (8, 0)
"""Compute capability of Ampere, the first of NVIDIA's GPUs that have TF32."""
CUBLAS_WORKSPACE = ":4096:8"
"""What cuBLAS needs to give the same bits on any stream (its documentation, section on reproducibility)."""


def set_up_arithmetic(settings: Settings, device: torch.device) -> None:
    """Set how torch computes in this process, before anything is computed on a GPU; raises a SettingsError where the
    device cannot compute that way."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        rule = f"{name} does not compute in bf16; use precision=fp32 or auto"
        require(settings.precision is not Precision.bf16 or has_bf16(device), "precision", settings.precision, rule)
        has_tf32 = torch.version.hip is None and torch.cuda.get_device_capability(device) >= TF32_CAPABILITY
        require(has_tf32 or not settings.tf32, "tf32", settings.tf32, f"{name} has no TF32; leave it out")
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
        torch.use_deterministic_algorithms(True)
        # Nobody reads such memory, and to fill it takes time. (torch defines the name in a class of the module.)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.cudnn.benchmark = False


def planned_in_words(settings: Settings, device: torch.device) -> str:
    """What the settings come to on this device: precision, TF32, determinism."""
    if settings.precision is Precision.fp64:
        precision = "fp64"
    elif computes_in_bf16(settings.precision, device):
        precision = "bf16 autocast over fp32 weights"
    else:
        precision = "fp32"
    words = [f"{precision} on {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'the CPU'}"]
    if device.type == "cuda":
        words.append("TF32 for what stays in fp32" if settings.tf32 else "no TF32")
    elif settings.tf32:
        words.append("tf32=true has no effect on a CPU")
    if settings.deterministic:
        words.append("deterministic algorithms")
    return ", ".join(words)


def in_words(settings: Settings, slot: ComputeSlot) -> str:
    """What is in force on this rank, in one line."""
    implementation = slot.objective.implementation(slot.flat_model.module)
    return f"{planned_in_words(settings, slot.flat_model.device)}, {implementation}"
