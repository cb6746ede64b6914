"""LoRA adapters of peft: they alone are averaged, and they alone travel."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adloco_dist import DiLoCo
from adloco_dist.averaging.checks import MARK_ELEMENTS, checksum
from adloco_dist.cluster.runtime import Runtime
from helpers.plain import on_ranks

pytest.importorskip("peft", reason="peft is not installed")

UPDATES = 2


def base_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )  # fmt: skip
    return LlamaForCausalLM(config)


def with_adapters(seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = base_model()
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def tokens(runtime: Runtime, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * runtime.rank + number)
    return torch.randint(64, (2, 16), generator=generator)


def train(runtime: Runtime) -> dict[str, Any]:
    model = with_adapters(seed=runtime.rank)
    adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2)
    with DiLoCo(model, optimizer, updates_per_round=UPDATES) as diloco:
        for number in range(2 * UPDATES):
            rows = tokens(runtime, number)
            model(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert diloco.last_step
    frozen = {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {
        "sent": diloco.last_step.bytes_sent,
        "norm": diloco.last_step.pseudo_gradient_norm,
        "anchor": sorted(diloco.state_dict()["anchor"]),
        "adapters": {name: parameter.detach() for name, parameter in adapters.items()},
        "base": {name.removeprefix("base_model.model.").replace(".base_layer", ""): p for name, p in frozen.items()},
    }


def in_trainer(runtime: Runtime, folder: str) -> dict[str, Any]:
    """Trainer saves adapters alone; a run that resumes from them is the run that was not interrupted."""
    from transformers import Trainer, TrainingArguments

    from adloco_dist.integrations.trainer import DiLoCoCallback

    rows: Any = [{"input_ids": row, "labels": row} for number in range(5) for row in tokens(runtime, number)]
    settings: dict[str, Any] = {
        "output_dir": f"{folder}/rank-{runtime.rank}", "max_steps": 5, "save_steps": 3, "report_to": "none",
        "per_device_train_batch_size": 2, "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True,
    }  # fmt: skip
    ends = []
    for resumed in (None, f"{folder}/rank-{runtime.rank}/checkpoint-3"):
        callback = DiLoCoCallback(updates_per_round=UPDATES)
        model: Any = with_adapters(seed=runtime.rank)
        trainer = Trainer(model=model, args=TrainingArguments(**settings), train_dataset=rows, callbacks=[callback])
        trainer.train(resume_from_checkpoint=resumed)
        ends.append({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    checkpoint = Path(folder) / f"rank-{runtime.rank}" / "checkpoint-3"
    return {"ends": ends, "files": sorted(path.name for path in checkpoint.iterdir())}


def both(runtime: Runtime, folder: str) -> dict[str, Any]:
    return {"train": train(runtime), "trainer": in_trainer(runtime, folder)}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(both, 2, str(tmp_path_factory.mktemp("peft")))


def test_adapters_alone_travel(done: list[dict[str, Any]]) -> None:
    one, other = (rank["train"] for rank in done)
    num_elements = sum(adapter.numel() for adapter in one["adapters"].values())
    assert num_elements == 2 * 2 * 2 * 4 * 32  # layers, projections, A and B, rank, width
    for rank in (one, other):
        # In a ring of two, as many bytes as the adapters have (they need no padding), the mark of the anchor, and the
        # number of workers.
        assert rank["sent"] == 4 * (num_elements + MARK_ELEMENTS + 1)
        assert rank["anchor"] == sorted(rank["adapters"])
        assert rank["norm"] > 0
    torch.testing.assert_close(one["adapters"], other["adapters"], rtol=0, atol=0)


def test_the_base_model_is_left_alone(done: list[dict[str, Any]]) -> None:
    base = dict(base_model().named_parameters())
    for rank in (rank["train"] for rank in done):
        assert rank["base"].keys() == base.keys()
        for name, parameter in rank["base"].items():
            assert checksum(parameter) == checksum(base[name]), name


def test_trainer_resumes_adapters_in_the_middle_of_a_round(done: list[dict[str, Any]]) -> None:
    (whole, resumed), (others_whole, _) = (rank["trainer"]["ends"] for rank in done)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    torch.testing.assert_close(others_whole, whole, rtol=0, atol=0)
    for rank in done:
        assert "adapter_model.safetensors" in rank["trainer"]["files"]
        assert "model.safetensors" not in rank["trainer"]["files"]
