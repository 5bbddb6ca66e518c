"""Clocks: the host's, and one that a GPU keeps of its own work, which leaves out the host's time of launching."""

import gc
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grace.errors import ConfigError

WARM_UP = 3
"""Calls before work is captured: they compile kernels, and allocate buffers that stay."""
FLUSHED = 4
"""Multiple of the L2 cache's bytes that is written, so that no earlier data are left in it."""
LEAST_FLUSH = 256 << 20
"""Least number of bytes that are written to flush the cache."""
DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
"""Files in which Linux has the version of the driver that it has loaded."""


class HostClock:
    """Clock of a CPU's work: the host runs nothing else meanwhile."""

    def prepared(self, work: Callable[[], object]) -> tuple[Callable[[], object], bool]:
        """Return the work in the form that is timed, and True if that is a replay without the host."""
        return work, False

    def flush(self) -> None:
        """Empty the device's cache, if it has to be."""

    def synchronize(self) -> None:
        """Wait until all work is done."""

    def now(self) -> Any:
        """Return a moment, in the order of the device's work."""
        return time.perf_counter()

    def ms(self, began: Any, ended: Any) -> float:
        """Return the milliseconds between two moments, after :meth:`synchronize`."""
        return 1e3 * (ended - began)


class DeviceClock(HostClock):
    """Clock of a GPU's work: CUDA's events around replays of CUDA graphs.

    Eager calls are bound by how fast the host launches, so work is captured into a graph and replayed, unless it reads
    something back, or waits, in between: such work is timed as it runs, the host's part included. The buffer that
    flushes the L2 cache is written before each measurement; meanwhile the host launches what is measured.
    """

    def __init__(self) -> None:
        cache = getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0)
        self._flushing = torch.empty(max(FLUSHED * cache, LEAST_FLUSH), dtype=torch.uint8, device="cuda")
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Callable[[], object]]] = []
        """Captured graphs, and what was captured: a replay reads the tensors that the work holds."""
        self._pool = torch.cuda.graph_pool_handle()
        """Temporary memory of all graphs: none needs the data that another one left there."""

    def prepared(self, work: Callable[[], object]) -> tuple[Callable[[], object], bool]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                work()
        torch.cuda.synchronize()
        if synchronizes_host(work):
            return work, False
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):  # tables were copied on this stream
                work()
        except RuntimeError:  # the work waits in a way that synchronizes_host does not see
            torch.cuda.synchronize()
            return work, False
        self._graphs.append((graph, work))
        return graph.replay, True

    def flush(self) -> None:
        self._flushing.zero_()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended))

    def forget(self) -> None:
        """Free the captured graphs and their memory."""
        self._graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()


def synchronizes_host(work: Callable[[], object]) -> bool:
    """Return True if work makes the host wait for the GPU, as far as torch knows."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize()
    return any("synchronizing" in str(warning.message) for warning in caught)


def device_facts() -> dict[str, str]:
    """Return the GPU and its driver, as they are recorded."""
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    drivers = [Path(path).read_text().splitlines()[0].strip() for path in DRIVERS if Path(path).exists()]
    return {"gpu": torch.cuda.get_device_name(), "gpu_driver": "; ".join(drivers) or "unknown", "gpu_runtime": runtime}


def missing() -> str:
    """Return the reason why nothing can be measured on a GPU here; empty if it can."""
    if torch.cuda.is_available():
        return ""
    built = torch.version.cuda or torch.version.hip
    why = "its driver or the GPU is missing" if built else f"torch {torch.__version__} is built for CPUs only"
    return f"torch sees no GPU here (torch.cuda.is_available() is False: {why})"


def check_device(device: str) -> None:
    """Raise a ConfigError if the value of ``--device`` is none, or there is no GPU to measure on."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device is cpu or cuda, not {device!r}")
    reason = missing() if device == "cuda" else ""
    if reason:
        raise ConfigError(f"--device cuda: {reason}; use --device cpu")
