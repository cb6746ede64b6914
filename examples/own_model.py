"""The launcher's pools, growing batches, merges and checkpoints for a model, data and a loss of one's own.

torchrun --nproc-per-node 2 examples/own_model.py pool.trainers=2 budget=5rounds tracking=none

Every option and setting of launch/train.py can follow, except those of the model and the data.
"""

import torch
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from adloco_dist.launch import launch

Rows = Dataset[tuple[torch.Tensor, ...]]


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def load() -> tuple[Rows, Rows]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5000, 8, generator=generator)
    labels = inputs[:, :4].argmax(dim=1)
    return TensorDataset(inputs[:4500], labels[:4500]), TensorDataset(inputs[4500:], labels[4500:])


def loss(module: torch.nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    inputs, labels = batch
    return functional.cross_entropy(module(inputs), labels, reduction="sum"), len(labels)


if __name__ == "__main__":
    launch(model=build, data=load, loss=loss)
