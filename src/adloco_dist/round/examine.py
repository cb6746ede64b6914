"""What of a module is state beside its trained parameters, found out before there is a pool (docs/state.md)."""

import torch
from torch import nn

from adloco_dist.cluster.runtime import Runtime
from adloco_dist.config import Estimator, Settings, SettingsError
from adloco_dist.decisions.environment import first_difference
from adloco_dist.losses import losses
from adloco_dist.models import in_words
from adloco_dist.pool.buffers import changing_buffers, persistent_buffers
from adloco_dist.pool.flat_model import autocast, converted, vector_dtype
from adloco_dist.round.probe import trial_batch

TRIAL_SEQUENCES = 2
"""One sequence has no variance, which normalisation over a batch refuses."""


def examine_module(module: nn.Module, settings: Settings, runtime: Runtime) -> tuple[str, ...]:
    """Move the module to the rank's device and try it out there; the names of the buffers that training changes.

    Collective.

    Raises:
        SettingsError: on all ranks, where none of its parameters is trained, a changing buffer cannot be averaged, or
            ranks differ in what is not trained.
    """
    error: SettingsError | None = None
    changing: tuple[str, ...] = ()
    try:
        changing = _changing(converted(module, runtime.device, settings.precision), settings, runtime.device)
    except SettingsError as mistake:
        error = mistake
    runtime.control.agree(error)
    found = {"what training changes of the model": list(changing), "what the model keeps frozen": _frozen_bits(module)}
    if difference := first_difference(runtime.control.exchange(found)):
        raise SettingsError(f"{difference}; start every node with the same command and model")
    return changing


def _changing(module: nn.Module, settings: Settings, device: torch.device) -> tuple[str, ...]:
    model = in_words(settings.model)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise SettingsError(f"{model}: all of its parameters are frozen; leave requires_grad of some of them true")

    def forward() -> None:
        with autocast(device, settings.precision):
            losses(module, trial_batch(settings, TRIAL_SEQUENCES, device))

    try:
        changing = changing_buffers(module, vector_dtype(settings.precision), forward)
    except ValueError as mistake:
        remedy = "make it a dense, real tensor of one shape, or if it is a cache, register it with persistent=False"
        raise SettingsError(f"{model}: training changes its buffers, and {mistake}; {remedy}") from mistake
    if changing and settings.measures_gradients and settings.batching.estimator is Estimator.per_sequence:
        rule = f"cannot follow the model's buffer {changing[0]}, which training changes; use sketch"
        raise SettingsError(f"batching.estimator=per_sequence: {rule}")
    return changing


def _frozen_bits(module: nn.Module) -> int:
    """A checksum over the bits of what no checkpoint holds: frozen parameters, and persistent buffers as they begin."""
    frozen = [parameter.detach() for parameter in module.parameters() if not parameter.requires_grad]
    frozen += [tensor for buffer in persistent_buffers(module) if (tensor := buffer.tensor) is not None]
    checksum = 0
    for tensor in frozen:
        if tensor.layout != torch.strided or tensor.is_quantized:
            continue
        # A copy, whose memory begins at a whole word.
        content = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        words = content.view(torch.int64) if content.numel() % 8 == 0 else content
        checksum = (31 * checksum + int(words.sum())) % 2**64
    return checksum
