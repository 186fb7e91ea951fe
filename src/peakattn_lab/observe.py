"""What the GPU did while it was timed: clocks, power, temperature, throttle reasons. Without NVML, nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

_MIN_GAP = 0.05  # seconds between readings: NVML itself averages power over about a tenth of a second

# Bits of NVML's clock event reasons that mean the chip was held back, or idle.
_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


class Observer:
    """Readings of one GPU, taken when ``read`` is called; ``summary`` gives minimum, median and maximum of each."""

    def __init__(self, read: Callable[[], dict[str, Any]] | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._last = float("-inf")
        self._readings: list[dict[str, Any]] = []

    def read(self) -> None:
        """Take a reading, unless the last one was a moment ago."""
        now = self._clock()
        if self._read is None or now - self._last < _MIN_GAP:
            return
        self._last = now
        self._readings.append(self._read())

    def summary(self) -> dict[str, Any]:
        """``{"sm_mhz": [min, median, max], ..., "throttle": [...], "readings": n}``; empty without NVML. Starts anew."""
        readings, self._readings, self._last = self._readings, [], float("-inf")
        if not readings:
            return {}
        result: dict[str, Any] = {"readings": len(readings)}
        for name in ("sm_mhz", "memory_mhz", "power_w", "temperature_c"):
            values = [r[name] for r in readings if name in r]
            if values:
                result[name] = [min(values), statistics.median(values), max(values)]
        result["throttle"] = sorted({reason for r in readings for reason in r.get("throttle", ())})
        return result


def of_cuda(index: int) -> Observer:
    """The observer of a CUDA device, by its UUID; one that reads nothing where NVML is missing."""
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID("GPU-" + uuid.removeprefix("GPU-"))
        except pynvml.NVMLError:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except Exception:  # no package, no driver, no permission: a bench without readings is still a bench
        return Observer(None)

    def read() -> dict[str, Any]:
        reading: dict[str, Any] = {}
        for name, get in (
            ("sm_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            ("memory_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            ("power_w", lambda: round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3, 1)),
            ("temperature_c", lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            ("throttle", lambda: reasons(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))),
        ):
            try:
                reading[name] = get()
            except pynvml.NVMLError:
                continue
        return reading

    return Observer(read)


def reasons(mask: int) -> list[str]:
    """The names of NVML's clock event bits."""
    return [name for bit, name in _REASONS.items() if mask & bit]


def driver_version() -> str | None:
    """NVIDIA's driver version, or None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)
