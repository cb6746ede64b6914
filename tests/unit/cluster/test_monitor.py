"""What the monitor tells of this process, which is real, and of a GPU, whose driver is made up here."""

import json
import mmap
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from adloco_dist.cluster.monitor import Gpu, Monitor

CPU = torch.device("cpu")
NEVER_SECONDS = 3600.0
"""The thread does not sample in a test that lets it wait for so long."""
BLOCK_BYTES = 64 * 2**20


class FakeNvml:
    """The functions of pynvml that are used, with the readings of one GPU, which a test may change or refuse."""

    def __init__(self, uuid: str = "GPU-abc") -> None:
        self.uuid, self.num_samples = uuid, 0
        self.used, self.busy, self.milliwatts, self.celsius = 100, 10, 50_000, 40
        self.refused: set[str] = set()
        self.sampled_twice = threading.Event()

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != self.uuid:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"handle of {uuid}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        self._refuse("nvmlDeviceGetMemoryInfo")
        self.num_samples += 1
        if self.num_samples == 2:
            self.sampled_twice.set()
        assert handle == f"handle of {self.uuid}"
        return SimpleNamespace(used=self.used)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        self._refuse("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=self.busy)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        self._refuse("nvmlDeviceGetPowerUsage")
        return self.milliwatts

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        self._refuse("nvmlDeviceGetTemperature")
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self.celsius

    def _refuse(self, function: str) -> None:
        if function in self.refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def gpu_figures(monitor: Monitor) -> dict[str, float]:
    return {name: value for name, value in monitor.take().items() if name.startswith("gpu_")}


def test_a_peak_of_memory_is_reported_once() -> None:
    with closing(Monitor(CPU, NEVER_SECONDS)) as monitor:
        before = monitor.take()["memory_bytes"]
        block = mmap.mmap(-1, BLOCK_BYTES)  # not of the heap, which may keep what is freed
        for start in range(0, BLOCK_BYTES, mmap.PAGESIZE):
            block[start] = 1
        monitor.sample()
        block.close()
        monitor.sample()
        assert monitor.take()["memory_bytes"] > before + BLOCK_BYTES / 2
        assert monitor.take()["memory_bytes"] < before + BLOCK_BYTES / 2


def test_work_is_reported_in_percent_of_one_core() -> None:
    with closing(Monitor(CPU, NEVER_SECONDS)) as monitor:
        start = time.process_time()
        while time.process_time() - start < 0.1:
            pass
        assert monitor.take()["cpu_percent"] > 0.0


def test_packets_that_were_sent_again_are_counted_where_the_kernel_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = tmp_path / "snmp"
    monkeypatch.setattr("adloco_dist.cluster.monitor.TCP_COUNTERS", counters)
    counters.write_text("Ip: Forwarding\nIp: 1\nTcp: OutSegs RetransSegs InErrs\nTcp: 900 10 0\n")
    with closing(Monitor(CPU, NEVER_SECONDS)) as monitor:
        counters.write_text("Tcp: OutSegs RetransSegs InErrs\nTcp: 1000 13 0\n")
        assert [monitor.take()["resent_packets"] for _ in range(2)] == [3, 0]
        counters.unlink()
        assert "resent_packets" not in monitor.take()


def test_without_a_gpu_the_process_alone_is_reported_in_plain_values() -> None:
    with closing(Monitor(CPU, NEVER_SECONDS)) as monitor:
        figures = monitor.take()
    assert figures.keys() - {"resent_packets"} == {"memory_bytes", "cpu_percent"}
    assert json.loads(json.dumps(figures)) == figures


def test_the_thread_samples_by_itself() -> None:
    nvml = FakeNvml()
    with closing(Monitor(CPU, every_seconds=0.001, gpu=Gpu("abc", nvml))):
        assert nvml.sampled_twice.wait(timeout=30.0)


def test_a_closed_monitor_has_no_thread() -> None:
    before = set(threading.enumerate())
    monitor = Monitor(CPU, NEVER_SECONDS)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    monitor.close()
    assert not thread.is_alive()
    assert monitor.take().keys() - {"resent_packets"} == {"memory_bytes", "cpu_percent"}


def test_the_figures_of_a_gpu_in_their_units() -> None:
    nvml = FakeNvml()
    with closing(Monitor(CPU, NEVER_SECONDS, Gpu("abc", nvml))) as monitor:
        monitor.sample()
        nvml.used, nvml.busy, nvml.milliwatts, nvml.celsius = 300, 30, 150_000, 60
        monitor.sample()
        nvml.used, nvml.busy, nvml.milliwatts, nvml.celsius = 200, 20, 100_000, 50
        monitor.sample()
        highest_and_means = {"gpu_memory_bytes": 300, "gpu_percent": 20.0, "gpu_watts": 100.0, "gpu_celsius": 60}
        assert gpu_figures(monitor) == pytest.approx(highest_and_means)
        only_now = {"gpu_memory_bytes": 200, "gpu_percent": 20.0, "gpu_watts": 100.0, "gpu_celsius": 50}
        assert gpu_figures(monitor) == pytest.approx(only_now)


@pytest.mark.parametrize(
    ("function", "figure"),
    [
        ("nvmlDeviceGetMemoryInfo", "gpu_memory_bytes"),
        ("nvmlDeviceGetUtilizationRates", "gpu_percent"),
        ("nvmlDeviceGetPowerUsage", "gpu_watts"),
        ("nvmlDeviceGetTemperature", "gpu_celsius"),
    ],
)
def test_only_what_the_driver_does_not_offer_is_left_out(function: str, figure: str) -> None:
    nvml = FakeNvml()
    with closing(Monitor(CPU, NEVER_SECONDS, Gpu("abc", nvml))) as monitor:
        everything = monitor.take().keys()
        nvml.refused = {function}
        assert monitor.take().keys() == everything - {figure}


def test_a_part_of_a_gpu_is_found_too() -> None:
    assert Gpu("abc", FakeNvml("MIG-abc")).read()["gpu_memory_bytes"] == 100


def test_a_gpu_that_nvml_does_not_know_is_refused() -> None:
    with pytest.raises(pynvml.NVMLError):
        Gpu("abc", FakeNvml("GPU-another"))


def test_a_gpu_without_a_driver_that_knows_it_costs_only_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="of no GPU anywhere"))
    with closing(Monitor(torch.device("cuda"), NEVER_SECONDS)) as monitor:
        assert monitor.take().keys() - {"resent_packets"} == {"memory_bytes", "cpu_percent"}
