"""DiLoCo in transformers' Trainer: a small Llama with random weights learns this repository's README, byte by byte.

torchrun --nproc-per-node 2 examples/trainer.py
torchrun --nproc-per-node 2 examples/trainer.py --max-rounds 8 --resume    # resumes from the last checkpoint

With several GPUs in a machine, start torchrun with --virtual-local-rank: each Trainer then sees one of them.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from adloco_dist.integrations.ranks import join_ranks
from adloco_dist.integrations.trainer import DiLoCoCallback, newest_checkpoint

UPDATES, SEQUENCE = 25, 64

parser = argparse.ArgumentParser()
parser.add_argument("--max-rounds", type=int, default=4)
parser.add_argument("--output-dir", default="trainer-example")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

logging.set_verbosity_error()  # Trainer warns that it takes no notice of other ranks, which is as it should be
logging.disable_progress_bar()
rank, num_ranks = join_ranks()  # before TrainingArguments: each Trainer takes its rank for the only one

text = (Path(__file__).parent.parent / "README.md").read_bytes()
rows = [list(text[start : start + SEQUENCE]) for start in range(0, len(text) - SEQUENCE, SEQUENCE)]
dataset = Dataset.from_dict({"input_ids": rows, "labels": rows}).shard(num_ranks, rank)  # every rank reads its own part

config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir=f"{options.output_dir}/rank-{rank}",  # every rank saves its own worker
    max_steps=options.max_rounds * UPDATES,  # the same on every rank
    save_steps=UPDATES,  # a multiple of updates_per_round: what is saved is what was averaged
    logging_steps=UPDATES,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    disable_tqdm=True,
    report_to="none",
    seed=rank,
    dataloader_pin_memory=torch.cuda.is_available(),
)
callback = DiLoCoCallback(updates_per_round=UPDATES)
trainer = Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[callback])
if rank:
    trainer.remove_callback(PrinterCallback)  # every Trainer would print
trainer.train(resume_from_checkpoint=newest_checkpoint(arguments) if options.resume else None)
if rank == 0 and callback.diloco and callback.diloco.last_step:
    print(f"{callback.diloco.round} rounds, {callback.diloco.last_step.bytes_sent} bytes sent in each")

torch.distributed.destroy_process_group()
