"""DiLoCo in a training loop of one's own.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn import functional

from adloco_dist import DiLoCo

parser = argparse.ArgumentParser()
parser.add_argument("--max-rounds", type=int, default=8)
rounds = parser.parse_args().max_rounds

dist.init_process_group()
torch.manual_seed(dist.get_rank())  # every rank draws its own data
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with DiLoCo(model, optimizer, updates_per_round=25) as diloco:
    while diloco.round < rounds:
        inputs = torch.randn(16, 8)
        loss = functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()  # every 25th step is followed by an outer step
        optimizer.zero_grad()
        if (step := diloco.last_step) and diloco.is_round_end and dist.get_rank() == 0:
            sent = f"sent {step.bytes_sent / 1e3:.1f} kB in {step.seconds:.3f} s"
            print(f"round {diloco.round}: averaged {step.num_finite:g} workers, {sent}")

dist.destroy_process_group()
