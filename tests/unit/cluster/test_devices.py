"""A rank's device and the backend of all: what is chosen, and why something is unsupported, in one line."""

import socket
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pynvml
import pytest
import torch

from adloco_dist.cluster import devices, environment
from adloco_dist.cluster.devices import Gpu, choose_backend, choose_device, identity
from adloco_dist.config import Backend, Device, SettingsError

HOST = socket.gethostname()
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update it."
A, B, OTHER_MACHINE = Gpu("a", "node1 [0, 1, 0]"), Gpu("b", "node1 [0, 2, 0]"), Gpu("c", "node2 [0, 1, 0]")
PART = Gpu("another part of a", A.slot)


@pytest.mark.parametrize(
    ("wanted", "gpus", "chosen"),
    [
        (Backend.auto, [A, B, OTHER_MACHINE], Backend.nccl),
        (Backend.auto, [A, B, A], Backend.gloo),
        (Backend.auto, [A, PART], Backend.gloo),
        (Backend.auto, [A, None], Backend.gloo),
        (Backend.auto, [None, None], Backend.gloo),
        (Backend.gloo, [A, B], Backend.gloo),
        (Backend.nccl, [A, B], Backend.nccl),
    ],
)
def test_the_backend_follows_the_devices_of_all_ranks(wanted: Backend, gpus: list[Gpu | None], chosen: Backend) -> None:
    assert choose_backend(wanted, gpus) is chosen


@pytest.mark.parametrize(
    ("gpus", "detail"),
    [
        ([A, B, A], "ranks 0, 2 share one GPU, which NCCL cannot do; start one rank per GPU"),
        ([A, PART, B], "ranks 0, 1 are on parts (MIG) of one GPU, which NCCL cannot do; "),
        ([A, None], "rank 1 has no GPU; set cluster.backend=gloo"),
    ],
)
def test_what_nccl_cannot_do_is_refused(gpus: list[Gpu | None], detail: str) -> None:
    with pytest.raises(SettingsError) as raised:
        choose_backend(Backend.nccl, gpus)
    assert str(raised.value).startswith(f"cluster.backend=nccl: {detail}")


def test_layers_are_not_gathered_over_gloo_from_gpus() -> None:
    for wanted, gpus in ((Backend.auto, [A, A]), (Backend.gloo, [A, B]), (Backend.auto, [A, None])):
        with pytest.raises(SettingsError, match=r"pool\.ranks_per_worker=2: must be 1 where"):
            choose_backend(wanted, gpus, ranks_per_worker=2)
    assert choose_backend(Backend.auto, [A, B], ranks_per_worker=2) is Backend.nccl
    assert choose_backend(Backend.auto, [None, None], ranks_per_worker=2) is Backend.gloo


class Cuda:
    """torch.cuda as it is on a machine with these GPUs, of which one may fail at its first use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_gpus: int, error: Exception | None = None) -> None:
        self.error, self.current = error, None
        self.allocated: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch, "ones", self.ones)

    def set_device(self, device: torch.device) -> None:
        self.current = device

    def ones(self, size: int, device: torch.device) -> torch.Tensor:
        if self.error:
            raise self.error
        self.allocated.append(device)
        return torch.zeros(size)


def test_ranks_beyond_the_gpus_share_them_and_each_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, num_gpus=2)
    for wanted in (Device.auto, Device.cuda):
        found = [choose_device(wanted, local_rank) for local_rank in range(3)]
        assert [one.device for one in found] == [torch.device("cuda", index) for index in (0, 1, 0)]
        assert all(one.error is None and one.unused_gpu is None for one in found)
        assert cuda.current == torch.device("cuda", 0)
    assert cuda.allocated == [torch.device("cuda", index) for index in (0, 1, 0)] * 2
    assert choose_device(Device.cpu, 0).device == torch.device("cpu")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with TORCH_USE_CUDA_DSA"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nmore"),
    ],
)
@pytest.mark.parametrize("wanted", [Device.auto, Device.cuda])
def test_a_gpu_that_cannot_be_used_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, wanted: Device, error: Exception
) -> None:
    Cuda(monkeypatch, 2, error)
    found = choose_device(wanted, 3)
    assert found.device == torch.device("cpu")
    why = str(error).splitlines()[0]
    line = f"cluster.device={wanted.name}: GPU 1 of {HOST} cannot be used ({why}); nvidia-smi shows"
    assert str(found.error).startswith(line)
    assert "\n" not in str(found.error)


def refuse(message: str, kind: type[Exception] = RuntimeError) -> object:
    def raising(*_: object) -> NoReturn:
        raise kind(message)

    return raising


def test_a_gpu_that_was_asked_for_and_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def available() -> bool:
        warnings.warn("CUDA initialization: the driver is too old", stacklevel=1)  # an error here, where it gets out
        return False

    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "init", refuse(TOO_OLD))
    line = str(choose_device(Device.cuda, 0).error)
    assert line.startswith(f"cluster.device=cuda: {HOST} has no GPU that torch {torch.__version__} can use (The NVIDIA")
    assert "is too old (found version 11040).); set cluster.device=cpu" in line


@pytest.mark.parametrize(
    ("files", "visible", "detail"),
    [
        (["nvidia0", "nvidiactl"], None, "Torch not compiled with CUDA enabled"),
        (["nvidia0", "nvidiactl"], "0", "Torch not compiled with CUDA enabled"),
        (["nvidia0", "nvidiactl"], "", None),
        (["nvidiactl"], None, None),
        ([], None, None),
    ],
)
def test_a_gpu_that_torch_cannot_use_does_not_go_unsaid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], visible: str | None, detail: str | None
) -> None:
    """Of a machine with these devices, unless its GPUs were hidden on purpose."""
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse("Torch not compiled with CUDA enabled", AssertionError))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = choose_device(Device.auto, 0)
    assert (found.device, found.error, found.unused_gpu) == (torch.device("cpu"), None, detail)


def test_parts_of_one_gpu_are_in_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"MIG-{device.index}", pci_domain_id=0, pci_bus_id=7, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    first, second = (identity(torch.device("cuda", index)) for index in range(2))
    assert first and second
    assert first.uuid != second.uuid
    assert first.slot == second.slot
    assert HOST in first.slot
    monkeypatch.setenv("NCCL_HOSTID", "another")  # so that NCCL takes this rank for one on another machine
    third = identity(torch.device("cuda", 1))
    assert third and third.slot != second.slot
    assert identity(torch.device("cpu")) is None


def test_without_the_drivers_library_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> NoReturn:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert environment._driver_version() is None
