"""The gradient noise scale under DistributedDataParallel, without DiLoCo: how large a batch is worth its cost.

torchrun --nproc-per-node 2 examples/noise_scale_ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from adloco_dist import NoiseScale

parser = argparse.ArgumentParser()
parser.add_argument("--max-measurements", type=int, default=5)
measurements = parser.parse_args().max_measurements

dist.init_process_group()
torch.manual_seed(dist.get_rank())  # every rank draws its own data
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
noise = NoiseScale(model, every_updates=20)

while measurements:
    inputs = torch.randn(16, 8)
    loss = functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    loss.backward()
    noise.observe(num_sequences=len(inputs))  # this rank's gradient, before it was averaged
    if estimate := noise.update():  # the same on all ranks
        measurements -= 1
        if dist.get_rank() == 0:
            print(estimate)
            print(f"  the norm test asks for a batch of {estimate.batch_of_norm_test(eta=0.8):.0f}")
    optimizer.step()
    optimizer.zero_grad()

dist.destroy_process_group()
