"""What this process and its device use: sampled beside the training, reported in a few figures per round."""

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import psutil
import pynvml
import torch

HIGHEST = frozenset({"memory_bytes", "gpu_memory_bytes", "gpu_celsius"})
"""Figures whose highest sample is reported; of the others, the mean is."""
WATTS_PER_MILLIWATT = 1e-3


@dataclass
class _Figure:
    """The samples of one figure since the last take."""

    highest: float = -math.inf
    total: float = 0.0
    num_samples: int = 0

    def add(self, value: float) -> None:
        self.highest = max(self.highest, value)
        self.total += value
        self.num_samples += 1


class Gpu:
    """One GPU as NVML, its driver's library, sees it: all processes on it, not only this one."""

    def __init__(self, uuid: str, nvml: Any = pynvml) -> None:
        """
        Args:
            uuid: the GPU's UUID as torch writes it, without NVML's prefix.
            nvml: the module pynvml, or an object with the functions of it that are used here.

        Raises:
            pynvml.NVMLError: no driver library, or it does not know this GPU.
        """
        self._nvml = nvml
        nvml.nvmlInit()
        try:
            self._handle = self._find(uuid)
        except pynvml.NVMLError:
            nvml.nvmlShutdown()
            raise

    def read(self) -> dict[str, float]:
        """`gpu_memory_bytes` in use (with what the driver reserves), `gpu_percent` of the time busy, `gpu_watts` and
        `gpu_celsius`, now; without what the driver does not offer (a part of a GPU (MIG) has no power of its own).
        """
        nvml, handle = self._nvml, self._handle
        readings: dict[str, Callable[[], float]] = {
            "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) * WATTS_PER_MILLIWATT,
            "gpu_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        }
        offered = {}
        for name, reading in readings.items():
            with suppress(pynvml.NVMLError):
                offered[name] = reading()
        return offered

    def close(self) -> None:
        """Give NVML back; it counts its users, others in this process keep it."""
        with suppress(pynvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _find(self, uuid: str) -> Any:
        # torch leaves the prefix out, and only it distinguishes a whole GPU from a part of one (MIG)
        with suppress(pynvml.NVMLError):
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


class Monitor:
    """Samples this process and its device in a thread, until closed.

    What rises and falls between two samples is not seen.
    """

    def __init__(self, device: torch.device, every_seconds: float = 1.0, gpu: Gpu | None = None) -> None:
        """
        Args:
            gpu: closed with the monitor; when not given it is found by `device`, if that is a GPU which NVML knows.
        """
        self._every = every_seconds
        self._gpu = gpu or _find_gpu(device)
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call starts its clock
        self._figures: dict[str, _Figure] = {}
        self._lock = threading.RLock()  # re-entrant: take() samples while it holds the lock
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, name="monitor", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self) -> dict[str, float]:
        """The figures since the last take (at first: since the start), of one sample or more.

        Returns:
            `memory_bytes` (highest resident set of this process) and `cpu_percent` (mean of this process, 100 is one
            core; in steps of the kernel's 10 ms, so rough when taken more than ten times a second); of a GPU
            `gpu_memory_bytes` and `gpu_celsius` (highest), `gpu_percent` and `gpu_watts` (means), without those that
            its driver does not offer.
        """
        with self._lock:
            if not self._figures:
                self.sample()
            figures, self._figures = self._figures, {}
            cpu_percent = self._process.cpu_percent()  # counts from its last call: no samples needed for this mean
        resources = {
            name: figure.highest if name in HIGHEST else figure.total / figure.num_samples
            for name, figure in figures.items()
        }
        return resources | {"cpu_percent": cpu_percent}

    def sample(self) -> None:
        """Look once, now."""
        with self._lock:
            sampled: dict[str, float] = {"memory_bytes": self._process.memory_info().rss}
            if self._gpu:
                sampled |= self._gpu.read()
            for name, value in sampled.items():
                self._figures.setdefault(name, _Figure()).add(value)

    def close(self) -> None:
        """End the thread, at once, and give NVML back; closing twice does no harm."""
        self._closing.set()
        self._thread.join()
        with self._lock:
            gpu, self._gpu = self._gpu, None
        if gpu:
            gpu.close()

    def _sample_on(self) -> None:
        while not self._closing.wait(self._every):
            self.sample()


def _find_gpu(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    try:
        return Gpu(str(torch.cuda.get_device_properties(device).uuid))
    except pynvml.NVMLError:  # no driver library, as with AMD's GPUs: the process alone is measured
        return None
