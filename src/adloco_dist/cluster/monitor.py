"""What this process and its device use: sampled beside the training, reported in a few figures per round."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pynvml
import torch

HIGHEST = frozenset({"memory_bytes", "gpu_memory_bytes", "gpu_celsius"})
"""Figures whose highest sample is reported; of the others, the mean is."""
WATTS_PER_MILLIWATT = 1e-3
TCP_COUNTERS = Path("/proc/self/net/snmp")
"""The kernel's counters of a Linux host: names in a line, and values in the next that begins with the same word."""


class Gpu:
    """One GPU as NVML, its driver's library, sees it: all processes on it, not only this one."""

    def __init__(self, uuid: str, nvml: Any = pynvml) -> None:
        """Find the GPU by its UUID as torch writes it.

        Raises:
            pynvml.NVMLError: no driver library, or it does not know this GPU.
        """
        self._nvml = nvml
        nvml.nvmlInit()
        try:  # torch leaves out NVML's prefix, which distinguishes a whole GPU from a part of one (MIG)
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def read(self) -> dict[str, float]:
        """Memory in use (with what the driver reserves), percentage of time busy, power and temperature, as far as the
        driver offers them: a part of a GPU (MIG) has no power of its own.
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


class Monitor:
    """Samples this process and its device in a thread, until closed. The GPU, unless given, is found by `device`."""

    def __init__(self, device: torch.device, every_seconds: float = 1.0, gpu: Gpu | None = None) -> None:
        self._every = every_seconds
        self._gpu = gpu or _find_gpu(device)
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call starts its clock
        self._samples: dict[str, list[float]] = {}
        """The samples of every figure since the last take."""
        self._resent_packets = resent_packets()
        self._lock = threading.RLock()  # re-entrant: take() samples while it holds the lock
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, name="monitor", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """The figures since the last take, at first since the start, of one sample or more.

        `memory_bytes` is the highest resident set of this process, `cpu_percent` its mean (100 is one core). Of what
        `Gpu.read` has, memory and temperature are the highest, the others means. `resent_packets` is what the host's
        TCP connections, not only this process', have sent again.
        """
        with self._lock:
            if not self._samples:
                self.sample()
            samples, self._samples = self._samples, {}
            cpu_percent = self._process.cpu_percent()  # counts from its last call: no samples needed for this mean
        resources = {name: max(values) if name in HIGHEST else fmean(values) for name, values in samples.items()}
        resent = {}
        if (now := resent_packets()) is not None and self._resent_packets is not None:
            resent, self._resent_packets = {"resent_packets": now - self._resent_packets}, now
        return resources | {"cpu_percent": cpu_percent} | resent

    def sample(self) -> None:
        """Look once, now."""
        with self._lock:
            sampled: dict[str, float] = {"memory_bytes": self._process.memory_info().rss}
            if self._gpu:
                sampled |= self._gpu.read()
            for name, value in sampled.items():
                self._samples.setdefault(name, []).append(value)

    def close(self) -> None:
        """End the thread, at once."""
        self._closing.set()
        self._thread.join()

    def _sample_on(self) -> None:
        while not self._closing.wait(self._every):
            self.sample()


def resent_packets() -> int | None:
    """TCP segments that this host has sent again since it started; None: its kernel does not say so."""
    with suppress(OSError, ValueError, KeyError):
        lines = [line.split() for line in TCP_COUNTERS.read_text().splitlines() if line.startswith("Tcp:")]
        names, values = lines
        return int(dict(zip(names, values, strict=True))["RetransSegs"])
    return None


def _find_gpu(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    try:
        return Gpu(str(torch.cuda.get_device_properties(device).uuid))
    except pynvml.NVMLError:  # no driver library, as with AMD's GPUs: the process alone is measured
        return None
