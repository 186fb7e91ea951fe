"""What a profiler needs and may not have: the GPU, the program, its version, the right to read counters."""

from __future__ import annotations

import enum
import re
import shutil
import subprocess
from pathlib import Path

# The first Nsight Compute that knows an architecture (its release notes).
_FIRST_VERSION = {89: (2022, 4), 90: (2022, 3), 100: (2025, 1), 103: (2025, 3), 120: (2025, 1), 121: (2025, 3)}
_ELSEWHERE = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*", "/opt/nvidia/nsight-systems/*/bin")


class Outcome(enum.IntEnum):
    """How a profile ended; the value is the exit code of the command."""

    OK = 0
    WRONG = 1  # the output is wrong, so that no figure is shown
    NO_GPU = 3
    NO_TOOL = 4
    NO_PERMISSION = 5
    UNSUPPORTED = 6
    FAILED = 7


class ProfileError(RuntimeError):
    """No counters: which kind, and a sentence that says what to do."""

    def __init__(self, outcome: Outcome, sentence: str) -> None:
        super().__init__(sentence)
        self.outcome = outcome


def find(name: str) -> Path | None:
    """A profiler on PATH or where its installer puts it, the newest there."""
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    places = [p for pattern in _ELSEWHERE for p in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)]
    return next((place / name for place in places if (place / name).is_file()), None)


def version(ncu: Path) -> tuple[int, ...]:
    """Such as (2025, 3, 1); empty when the program does not say."""
    done = subprocess.run([str(ncu), "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"Version (\d+)\.(\d+)\.(\d+)", done.stdout)
    return tuple(map(int, match.groups())) if match else ()


def ready(arch: int | None) -> Path:
    """Nsight Compute for a GPU of this architecture, or ProfileError; None is no GPU."""
    if arch is None:
        raise ProfileError(
            Outcome.NO_GPU, "There is no GPU in this process, and counters are read from one; peakattn doctor says why."
        )
    ncu = find("ncu")
    if ncu is None:
        raise ProfileError(
            Outcome.NO_TOOL,
            "Nsight Compute (ncu) is not here; it comes with a CUDA toolkit, or from developer.nvidia.com/nsight-compute.",
        )
    found, first = version(ncu), _FIRST_VERSION.get(arch)
    if found and first and found[:2] < first:
        raise ProfileError(
            Outcome.UNSUPPORTED,
            f"ncu {'.'.join(map(str, found))} does not know sm_{arch}; install {first[0]}.{first[1]} or newer.",
        )
    return ncu


def diagnose(output: str) -> ProfileError:
    """Why Nsight Compute gave no report, from what it printed."""
    if "ERR_NVGPUCTRPERM" in output:
        return ProfileError(
            Outcome.NO_PERMISSION,
            "The driver gives hardware counters to administrators only (ERR_NVGPUCTRPERM). Run as root; or load the module "
            "nvidia with NVreg_RestrictProfilingToAdminUsers=0; in a container, add --cap-add=SYS_ADMIN.",
        )
    if re.search(
        r"not supported|Unsupported (GPU|device)|InsufficientDriver|driver version is (too old|insufficient)", output, re.I
    ):
        return ProfileError(Outcome.UNSUPPORTED, f"This ncu does not support the GPU or its driver: {said(output)}")
    if re.search(r"driver resource (was|is) unavailable", output, re.I):
        return ProfileError(
            Outcome.FAILED, "Another profiler holds the counters (DCGM does: dcgmi profile --pause); stop it and run again."
        )
    if "No kernels were profiled" in output:
        return ProfileError(Outcome.FAILED, "ncu saw no launch between the marks; the kernel did not run in the child process.")
    return ProfileError(Outcome.FAILED, f"ncu gave no report: {said(output)}")


def said(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"==ERROR==|\w*(Error|Exception)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1]
