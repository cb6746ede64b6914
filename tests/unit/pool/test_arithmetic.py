"""How a device computes is set before it does, and reported."""

from collections.abc import Iterator

import pytest
import torch

from adloco_dist.checkpoint.resume import check_resumed
from adloco_dist.config import Precision, Settings, SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.pool.arithmetic import in_words, planned_in_words, set_up_arithmetic
from adloco_dist.pool.flat_model import computes_in_bf16
from adloco_dist.pool.slot import ComputeSlot, new_slot
from helpers.support import small_module, small_objective, small_settings

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch keeps all of this for the whole process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    precision, is_deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(is_deterministic)


@pytest.mark.parametrize(
    ("settings", "detail"),
    [
        ([], "fp32 on the CPU"),
        (["precision=bf16"], "bf16 autocast over fp32 weights on the CPU"),
        (["precision=fp64", "deterministic=true"], "fp64 on the CPU, deterministic algorithms"),
        (["tf32=true"], "fp32 on the CPU, tf32=true has no effect on a CPU"),
    ],
)
def test_what_the_settings_come_to(settings: list[str], detail: str) -> None:
    assert planned_in_words(compose(settings), CPU) == detail


def test_only_what_was_asked_for_is_set() -> None:
    set_up_arithmetic(compose([]), CPU)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()
    set_up_arithmetic(compose(["tf32=true", "deterministic=true"]), CPU)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]


def test_a_cpu_computes_in_bf16_only_where_it_is_asked_to() -> None:
    assert [computes_in_bf16(precision, CPU) for precision in Precision] == [
        precision is Precision.bf16 for precision in Precision
    ]


def slot_of(settings: Settings) -> ComputeSlot:
    return new_slot(small_objective(settings), small_module(settings), CPU, settings)


def test_the_line_names_attention_and_loss() -> None:
    settings = small_settings()
    assert in_words(settings, slot_of(settings)) == ("fp64 on the CPU, attention maskless_sdpa, loss not fused")
    eager = small_settings("model.attention=eager")
    assert "attention eager" in in_words(eager, slot_of(eager))


def test_a_run_may_go_on_with_another_way_to_compute_the_same() -> None:
    saved = {"model.compile": False, "model.architecture": "llama", "tf32": False}
    assert len(check_resumed("x", saved, {**saved, "model.compile": True, "tf32": True})) == 2
    with pytest.raises(SettingsError, match=r"model\.architecture=gpt2"):
        check_resumed("x", saved, {**saved, "model.architecture": "gpt2"})
