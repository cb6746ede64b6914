"""DiLoCo on machines that come and go: each is started by itself, may be ended at any time, and started again.

On each machine, with the addresses of both; on one machine, in two terminals:

torchrun --nproc-per-node 1 examples/members.py --meet 127.0.0.1:29400,127.0.0.1:29401
"""

import argparse
import os

import torch
from torch.nn import functional

from adloco_dist import DiLoCo, Members

parser = argparse.ArgumentParser()
parser.add_argument("--meet", default="127.0.0.1:29400,127.0.0.1:29401", help="where members look for each other")
parser.add_argument("--max-rounds", type=int, default=2000)
parser.add_argument("--least", type=int, default=1, help="fewer members wait for others")
options = parser.parse_args()

torch.manual_seed(os.getpid())  # every member draws its own data
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
members = Members(options.meet, least=options.least)

with DiLoCo(model, optimizer, updates_per_round=25, members=members) as diloco:
    while diloco.round < options.max_rounds:
        inputs = torch.randn(16, 8)
        loss = functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()  # every 25th step is followed by an outer step, with whoever is there
        optimizer.zero_grad()
        if diloco.is_round_end:
            size = len(members.group.ranks) if members.group else 1
            print(f"round {diloco.round}: {size} members, loss {loss.item():.4f}", flush=True)
