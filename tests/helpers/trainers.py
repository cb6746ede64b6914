"""transformers' Trainer on forked ranks, each of which takes itself for the only one, and a small model for it."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedModel

from adloco_dist.cluster.runtime import Runtime
from helpers.plain import batch

WIDTH, TOKENS = 8, 11
MICRO_BATCHES = 2
RATE, CLIPPED = 5e-2, 0.5


class Model(nn.Module):
    """As Trainer wants it: its forward takes the items' names and returns the loss. It has buffers, too."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.double()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(torch.tanh(self.embedding(tokens))))
        return {"loss": F.cross_entropy(logits, labels)}


class Pretrained(PreTrainedModel):
    """The same as a model of transformers, which has a way of its own to save itself."""

    config_class = PreTrainedConfig

    def __init__(self, seed: int = 0) -> None:
        super().__init__(PreTrainedConfig())
        self.inner = Model(seed)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.inner(tokens, labels)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The rows of a worker's micro-batches, one after the other."""

    def __init__(self, worker: int, num_updates: int) -> None:
        self.rows = torch.cat([batch(worker, number) for number in range(num_updates * MICRO_BATCHES)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens, labels = self.rows[number]
        return {"tokens": tokens, "labels": labels}


def new_trainer(runtime: Runtime, folder: str, callback: Any, model: nn.Module, updates: int, **changes: Any) -> Any:
    """A Trainer of this rank, which reads its rows in their order."""
    from transformers import Trainer, TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": str(Path(folder) / f"rank-{runtime.rank}"), "max_steps": updates, "learning_rate": RATE,
        "lr_scheduler_type": "constant", "max_grad_norm": CLIPPED, "per_device_train_batch_size": len(batch(0, 0)),
        "gradient_accumulation_steps": MICRO_BATCHES, "train_sampling_strategy": "sequential", "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False, "logging_steps": 1,
    }  # fmt: skip
    arguments = TrainingArguments(**settings | changes)
    rows = Rows(runtime.rank, updates)
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback])
