"""Values in few words, for tables and reasons: configs, and what went wrong."""

from __future__ import annotations

import os
import traceback
from typing import Any


def knobs(config: dict[str, Any]) -> str:
    """The knobs of a config in one line, those that are off left out."""
    words = [name if value is True else f"{name}={value}" for name, value in config.items() if value not in (None, False)]
    return " ".join(word.replace("num_", "") for word in words)


def failure(error: BaseException) -> str:
    """An exception in one line: what ptxas said where it is in there, the last line of a compiler's excerpt, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        where = traceback.extract_tb(error.__traceback__)
        lines = [f"no message, at {os.path.basename(where[-1].filename)}:{where[-1].lineno}" if where else "no message"]
    said = lines[-1] if lines[0].startswith("at ") else lines[0]
    said = next((line for line in lines if line.startswith("ptxas") and ("error" in line or "fatal" in line)), said)
    return f"{type(error).__name__}: {said}"
