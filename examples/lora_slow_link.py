"""LoRA adapters over a slow link: they alone are averaged, so an outer step sends a small part of the model's size.

torchrun --nproc-per-node 2 examples/lora_slow_link.py

A small Llama with random weights stands for the pretrained model; it learns this repository's README, byte by byte.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from adloco_dist import DiLoCo

UPDATES, SEQUENCE, MEGABITS_PER_SECOND = 25, 64, 10

parser = argparse.ArgumentParser()
parser.add_argument("--max-rounds", type=int, default=4)
rounds = parser.parse_args().max_rounds

dist.init_process_group()
text = (Path(__file__).parent.parent / "README.md").read_bytes()
rows = torch.tensor(list(text[: len(text) // SEQUENCE * SEQUENCE])).view(-1, SEQUENCE)
rows = rows[dist.get_rank() :: dist.get_world_size()]  # every rank reads its own part

torch.manual_seed(0)  # the frozen weights must be equal on all ranks, as those of a checkpoint would be
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
base = LlamaForCausalLM(config)
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"]))
optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)

torch.manual_seed(dist.get_rank())
with DiLoCo(model, optimizer, updates_per_round=UPDATES) as diloco:
    while diloco.round < rounds:
        batch = rows[torch.randint(len(rows), (8,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if diloco.last_step and diloco.is_round_end and dist.get_rank() == 0:
            print(f"round {diloco.round}: loss {loss.item():.4f}, {diloco.last_step.bytes_sent} bytes sent")

if dist.get_rank() == 0 and diloco.last_step:
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    for what, num_bytes in (("adapters, once a round", diloco.last_step.bytes_sent), ("the whole model", whole)):
        seconds = num_bytes * 8 / (MEGABITS_PER_SECOND * 1e6)
        print(f"{what}: {num_bytes} bytes, at {MEGABITS_PER_SECOND} Mbit/s at least {seconds:.3f} s")

dist.destroy_process_group()
