"""DiLoCo in transformers' Trainer."""

import json
import os
import pickle
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.training_args import TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from adloco_dist.averaging.averager import Wire
from adloco_dist.averaging.checks import checksum
from adloco_dist.averaging.group import Group, group_of
from adloco_dist.averaging.outer_sgd import OuterSGD
from adloco_dist.diloco import DiLoCo
from adloco_dist.text import first_difference, ranks_by_value, reason

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
    of the data, and its own output_dir, where its Trainer saves this worker's optimizer, and the callback DiLoCo's
    state. All ranks have to take the same number of updates: give max_steps.

    Trainer calls its optimizer inside of its loop, where an outer step would not show: this callback takes it in
    `on_optimizer_step`, before Trainer logs, evaluates or saves the update. It counts the updates that Trainer counts,
    also those that GradScaler skips; ranks then meet after the same update of each.

    Attributes:
        diloco: DiLoCo of the training that runs, or ran last; None before `Trainer.train`.
    """

    def __init__(
        self,
        updates_per_round: int = 500,
        outer: OuterSGD = OuterSGD(),
        group: dist.ProcessGroup | None = None,
        wire: Wire = Wire(),
        timeout_seconds: float = 1800.0,
    ) -> None:
        """All of these are DiLoCo's arguments of the same names."""
        self._group, self._timeout_seconds = group, timeout_seconds
        self._new = partial(
            DiLoCo,
            updates_per_round=updates_per_round,
            outer=outer,
            group=group,
            wire=wire,
            timeout_seconds=timeout_seconds,
        )
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
        saved, problem = None, None
        try:
            saved = _load(_checkpoint(args, state.global_step) / FILE_NAME, model) if state.global_step else None
        except ValueError as error:
            problem = str(error)
        self._compare(args, state, next(model.parameters()).device, problem)
        # Construction gives all ranks the lowest rank's weights. A worker that resumes has its own.
        own = [tensor.detach().clone() for tensor in _own_tensors(model)] if saved else []
        self.diloco = self._new(model, torch_optimizer(kwargs["optimizer"]))
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
        """Take the last outer step where the training stopped in another way; nothing travels afterwards."""
        self._finish().leave()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save DiLoCo's state beside what Trainer has saved, and the weights where it has not."""
        if args.save_only_model:
            return  # Trainer cannot resume from it
        assert self.diloco is not None
        path = _checkpoint(args, state.global_step) / FILE_NAME
        if not any(path.parent.rglob("*.safetensors")):
            # Models of transformers save themselves on torch.distributed's rank 0 alone. Without this worker's weights,
            # which are its own in the middle of a round, its Trainer would not resume.
            save_model(kwargs["model"], str(path.with_name(SAFE_WEIGHTS_NAME)), metadata={"format": "pt"})
        content = {"diloco": self.diloco.state_dict(), "weights": _checksums(kwargs["model"])}
        unfinished = path.with_suffix(".unfinished")
        torch.save(content, unfinished)
        unfinished.replace(path)

    def _finish(self) -> DiLoCo:
        assert self.diloco is not None
        if not self.diloco.holds_anchor:
            self.diloco.outer_step()
        return self.diloco

    def _compare(self, args: TrainingArguments, state: TrainerState, device: torch.device, problem: str | None) -> None:
        """Raise a ValueError of one line, the same on all ranks, where one of them cannot resume, or where the ranks'
        Trainers would not meet or would write over each other's files. Collective."""
        counts = {"global_step": state.global_step, "max_steps": state.max_steps}
        own = {**counts, "folder": os.path.realpath(_folder(args)), "problem": problem, "whole": _whole_updates(args)}
        group = group_of(self._group, device, self._timeout_seconds)
        ranks = group.ranks if group else (0,)
        each = _exchanged(group, own)
        newest = _newest_in_common([facts["whole"] for facts in each])
        remedy = "no update has a whole checkpoint on all ranks: start anew, with resume_from_checkpoint=None"
        if newest is not None:
            what = f"{PREFIX_CHECKPOINT_DIR}-{newest}, the newest that all have whole (newest_checkpoint finds it)"
            remedy = f"resume all ranks from their {what}"
        if problems := [facts["problem"] for facts in each if facts["problem"]]:
            raise ValueError(f"{problem or problems[0]}; {remedy}")
        to_end_alike = "set max_steps, or give every rank as many batches as the others"
        for name, what_to_do in {"global_step": remedy, "max_steps": to_end_alike}.items():
            if difference := first_difference([{name: facts[name]} for facts in each], ranks):
                raise ValueError(f"{difference}; {what_to_do}")
        folders = ranks_by_value(zip(ranks, (facts["folder"] for facts in each), strict=True))
        shared = [which for which in folders.values() if "{" in which]
        if args.save_strategy != SaveStrategy.NO and shared:
            rule = "give each rank its own, as in output_dir=f'run/rank-{rank}'"
            raise ValueError(f"output_dir={args.output_dir}: {shared[0]} would save to it; {rule}")


def newest_checkpoint(args: TrainingArguments, group: dist.ProcessGroup | None = None) -> str | None:
    """The folder from which this rank's Trainer resumes the newest update that all ranks have saved whole. Collective.

        trainer.train(resume_from_checkpoint=newest_checkpoint(arguments))

    A run that was ended while it saved leaves torn checkpoints, and ranks that have come to different updates. It is
    None where the ranks of the group, that of DiLoCoCallback, have no such update in common: Trainer then starts anew.
    """
    joined = group_of(group, torch.device(args.device), timeout_seconds=1800.0)
    newest = _newest_in_common(_exchanged(joined, _whole_updates(args)))
    return None if newest is None else str(_checkpoint(args, newest))


def refuse(args: TrainingArguments) -> None:
    """Raise a ValueError of one line where Trainer averages gradients itself, or loads other weights at its end."""
    if args.world_size > 1:
        rule = "call adloco_dist.integrations.ranks.join_ranks() before TrainingArguments"
        what = "Trainer would average their gradients in every update (DistributedDataParallel)"
        raise ValueError(f"world_size={args.world_size}: {what}; {rule}")
    if args.auto_find_batch_size:
        rule = "set it to False, and per_device_train_batch_size to what fits on every rank"
        raise ValueError(f"auto_find_batch_size=True: a rank that runs out of memory would start anew alone; {rule}")
    if args.load_best_model_at_end:
        rule = "set it to False, and load the checkpoint of your choice afterwards"
        raise ValueError(f"load_best_model_at_end=True: each rank would load what it found best by itself; {rule}")


def torch_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside of accelerate's AcceleratedOptimizer, which has neither hooks nor state of its own."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _folder(args: TrainingArguments) -> Path:
    assert args.output_dir is not None  # TrainingArguments has replaced None
    return Path(args.output_dir)


def _checkpoint(args: TrainingArguments, update: int) -> Path:
    return _folder(args) / f"{PREFIX_CHECKPOINT_DIR}-{update}"


def _whole_updates(args: TrainingArguments) -> list[int]:
    """The updates of which this rank's folder has whole checkpoints."""
    numbers = (path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for path in _folder(args).glob("*"))
    updates = sorted(int(number) for number in numbers if number.isdecimal())
    return [update for update in updates if _is_whole(_checkpoint(args, update))]


def _is_whole(folder: Path) -> bool:
    """Whether a checkpoint has all that Trainer and DiLoCo resume from, and none of it is torn."""
    weights, archives = list(folder.glob("*.safetensors")), list(folder.glob("*.pt"))
    if not weights or folder / FILE_NAME not in archives or folder / "optimizer.pt" not in archives:
        return False
    try:
        json.loads((folder / "trainer_state.json").read_text())
        for path in weights:
            with safe_open(path, framework="pt"):  # it compares the file's length with what its head says
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return all(zipfile.is_zipfile(path) for path in archives)  # their table of contents is at their end


def _exchanged(group: Group | None, own: Any) -> list[Any]:
    """What every rank has, as plain values. Collective; None: this rank is alone."""
    return [json.loads(text) for text in group.exchange_text(json.dumps(own))] if group else [own]


def _newest_in_common(each: Sequence[Sequence[int]]) -> int | None:
    return max(set.intersection(*map(set, each)), default=None)


def _own_tensors(model: nn.Module) -> list[torch.Tensor]:
    """What a worker has of its own in the middle of a round, and DiLoCo's construction overwrites."""
    return [*(parameter for parameter in model.parameters() if parameter.requires_grad), *model.buffers()]


def _checksums(model: nn.Module) -> dict[str, list[int]]:
    return {name: checksum(tensor) for name, tensor in model.named_parameters() if tensor.requires_grad}


def _load(path: Path, model: nn.Module) -> dict[str, Any]:
    """What `on_save` has saved with the weights that Trainer has loaded; a ValueError where it has not."""
    if not path.exists():
        raise ValueError(f"resume_from_checkpoint: {path} does not exist, as DiLoCoCallback saves it")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"resume_from_checkpoint: {path} is torn ({reason(error)})") from error
    if saved["weights"] != _checksums(model):
        raise ValueError(f"resume_from_checkpoint: {path} was saved with other weights than Trainer has loaded")
    return saved
