"""DiLoCo in transformers' Trainer."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.training_args import TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from adloco_dist.averaging.averager import Averager
from adloco_dist.averaging.checks import checksum, configurations_differ
from adloco_dist.averaging.group import group_of
from adloco_dist.averaging.outer import OuterSGD
from adloco_dist.averaging.schedule import Streaming
from adloco_dist.diloco import DiLoCo
from adloco_dist.text import ranks_by_value

FILE_NAME = "diloco.pt"
"""File with DiLoCo's state in every checkpoint folder of Trainer."""


class DiLoCoCallback(TrainerCallback):
    """Takes an outer step after every `updates_per_round` updates of transformers' Trainer, and after the last one::

        rank, num_ranks = join_ranks()  # before TrainingArguments
        arguments = TrainingArguments(output_dir=f"run/rank-{rank}", max_steps=10_000)
        dataset = dataset.shard(num_ranks, rank)
        callback = DiLoCoCallback(updates_per_round=500)
        Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[callback]).train()

    Every rank has a Trainer that takes itself for the only one, and trains one worker. So every rank needs its own part
    of the data, and its own output_dir, where its Trainer saves this worker's optimizer and the callback DiLoCo's
    state. All ranks have to take the same number of updates: give max_steps.

    Trainer calls its optimizer inside of its loop, where an outer step would not show: this callback takes it in
    `on_optimizer_step`, before Trainer logs, evaluates or saves the update. It counts the updates that Trainer counts,
    also those that GradScaler skips; ranks then meet after the same update of each.

    Attributes:
        diloco: DiLoCo of the training that runs, or ran last; None before `Trainer.train`.
    """

    def __init__(
        self, updates_per_round: int = 500, outer: OuterSGD = OuterSGD(), group: dist.ProcessGroup | None = None,
        averager: Averager | None = None, streaming: Streaming = Streaming(), timeout_seconds: float = 1800.0,
    ) -> None:  # fmt: skip
        """
        Args:
            updates_per_round, outer, group, averager, streaming, timeout_seconds: DiLoCo's arguments of these names.
        """
        self._updates_per_round, self._outer = updates_per_round, outer
        self._group, self._averager, self._streaming = group, averager, streaming
        self._timeout_seconds = timeout_seconds
        self.diloco: DiLoCo | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Construct DiLoCo around Trainer's model and optimizer, or resume it from the checkpoint's folder. Collective.

        Raises:
            ValueError: Trainer is set up in a way that DiLoCo cannot work with, or ranks differ; one line.
            PeerLostError: another rank is gone, or did not come in time.
        """
        refuse(args)
        model: nn.Module = kwargs["model"]
        saved = _load(_file(args, state), model) if state.global_step else None
        # Construction gives all ranks the lowest rank's weights. A worker that resumes has its own.
        own = [tensor.detach().clone() for tensor in _own_tensors(model)] if saved else []
        self.diloco = DiLoCo(
            model, torch_optimizer(kwargs["optimizer"]), self._updates_per_round, self._outer, self._group,
            self._averager, self._streaming, self._timeout_seconds,
        )  # fmt: skip
        self._compare(args, state, model)
        if saved:
            for tensor, value in zip(_own_tensors(model), own, strict=True):
                tensor.detach().copy_(value)
            self.diloco.load_state_dict(saved["diloco"])

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count an update, and take the outer step that ends a round."""
        assert self.diloco is not None
        self.diloco.count_update()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the last outer step before Trainer evaluates and saves its last update."""
        if control.should_training_stop:
            self._finish()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the last outer step where the training stopped in another way."""
        self._finish()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save DiLoCo's state beside what Trainer has saved, and the weights where it has not."""
        if args.save_only_model:
            return  # Trainer cannot resume from it
        assert self.diloco is not None
        path = _file(args, state)
        if not any(path.parent.rglob("*.safetensors")):
            # Models of transformers save themselves on torch.distributed's rank 0 alone. Without this worker's weights,
            # which are its own in the middle of a round, its Trainer would not resume.
            save_model(kwargs["model"], str(path.with_name(SAFE_WEIGHTS_NAME)), metadata={"format": "pt"})
        content = {"diloco": self.diloco.state_dict(), "weights": _checksums(kwargs["model"])}
        unfinished = path.with_suffix(".unfinished")
        torch.save(content, unfinished)
        unfinished.replace(path)

    def _finish(self) -> None:
        assert self.diloco is not None
        if self.diloco.updates:
            self.diloco.outer_step()

    def _compare(self, args: TrainingArguments, state: TrainerState, model: nn.Module) -> None:
        """
        Raises:
            ValueError: the ranks' Trainers would not meet, or would write over each other's files; one line.
        """
        device = next(model.parameters()).device
        group = group_of(self._group, device, self._timeout_seconds)
        if group is None:
            return
        if difference := configurations_differ(group, {"global_step": str(state.global_step)}):
            raise ValueError(f"{difference}; resume all ranks from checkpoints of the same update")
        if difference := configurations_differ(group, {"max_steps": str(state.max_steps)}):
            raise ValueError(f"{difference}; set max_steps, or give every rank as many batches as the others")
        folders = group.exchange_text(os.path.realpath(_folder(args)))
        shared = [ranks for ranks in ranks_by_value(zip(group.ranks, folders, strict=True)).values() if "{" in ranks]
        if args.save_strategy != SaveStrategy.NO and shared:
            rule = "give each rank its own, as in output_dir=f'run/rank-{rank}'"
            raise ValueError(f"output_dir={args.output_dir}: {shared[0]} would save to it; {rule}")


def refuse(args: TrainingArguments) -> None:
    """Refuse what DiLoCo cannot work with.

    Raises:
        ValueError: Trainer averages gradients itself, or loads other weights at its end; one line.
    """
    if args.world_size > 1:
        rule = "call adloco_dist.integrations.ranks.join_ranks() before TrainingArguments"
        what = "Trainer would average their gradients in every update (DistributedDataParallel)"
        raise ValueError(f"world_size={args.world_size}: {what}; {rule}")
    if args.load_best_model_at_end:
        rule = "set it to False, and load the checkpoint of your choice afterwards"
        raise ValueError(f"load_best_model_at_end=True: each rank would load what it found best by itself; {rule}")


def torch_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside of accelerate's AcceleratedOptimizer, which has neither hooks nor state of its own."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _folder(args: TrainingArguments) -> str:
    assert args.output_dir is not None  # TrainingArguments has replaced None
    return args.output_dir


def _file(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(_folder(args)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FILE_NAME


def _own_tensors(model: nn.Module) -> list[torch.Tensor]:
    """What a worker has of its own in the middle of a round, and DiLoCo's construction overwrites."""
    return [*(parameter for parameter in model.parameters() if parameter.requires_grad), *model.buffers()]


def _checksums(model: nn.Module) -> dict[str, list[int]]:
    return {name: checksum(tensor) for name, tensor in model.named_parameters() if tensor.requires_grad}


def _load(path: Path, model: nn.Module) -> dict[str, Any]:
    """What `on_save` has saved with the weights that Trainer has loaded.

    Raises:
        ValueError: it is not there, or belongs to other weights; one line.
    """
    rule = "resume from a checkpoint in this rank's output_dir that was saved with DiLoCoCallback"
    if not path.exists():
        raise ValueError(f"resume_from_checkpoint: {path} does not exist; {rule}")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if saved["weights"] != _checksums(model):
        raise ValueError(f"resume_from_checkpoint: {path} was saved with other weights than Trainer has loaded; {rule}")
    return saved
