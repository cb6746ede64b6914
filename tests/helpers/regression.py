"""A small regression whose sequences' gradients are known exactly, for tests of `NoiseScale`."""

from collections.abc import Sequence

import torch
from torch import nn

from adloco_dist.noise.estimation import statistics_from_gram
from adloco_dist.noise.sketch import BUCKETS
from adloco_dist.noise.statistics import GradientStatistics

NUM_SEQUENCES = 100


def new_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets that the untrained model misses by far, but not all alike."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SEQUENCES, 6, generator=generator, dtype=torch.float64)
    targets = inputs[:, :3] + torch.randn(NUM_SEQUENCES, 3, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def sum_of_losses(model: nn.Module, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
    inputs, targets = data(next(model.parameters()).dtype)
    return (model(inputs[ids]) - targets[ids]).square().sum()


def mean_gradient(ids: Sequence[int]) -> list[torch.Tensor]:
    """Of the untrained model, exact: one tensor for each parameter."""
    model = new_model()
    (sum_of_losses(model, ids) / len(ids)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def sequence_gradients() -> torch.Tensor:
    """(NUM_SEQUENCES, parameters)."""
    return torch.stack([flat(mean_gradient([number])) for number in range(NUM_SEQUENCES)])


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def sketched_statistics(sketches: torch.Tensor, chunks: Sequence[Sequence[int]]) -> GradientStatistics:
    """What the launcher makes of sketches of these chunks' mean gradients."""
    sizes = torch.tensor([len(ids) for ids in chunks])
    return statistics_from_gram(sketches @ sketches.T, sizes, sketch_size=BUCKETS)
