"""Occupancy: how many blocks of a kernel an SM holds at once, and what allows no more, by the rules of each architecture."""

from __future__ import annotations

from dataclasses import dataclass

from peakattn.device import Device

# Threads and blocks that an SM holds at once, by architecture (CUDA programming guide, compute capabilities).
_RESIDENT = {80: (2048, 32), 86: (1536, 16), 89: (1536, 24), 90: (2048, 32), 100: (2048, 32), 120: (1536, 24), 121: (1536, 24)}
_REGISTERS = 64 * 1024  # per SM, in four quarters with warps of their own
_QUARTERS = 4
_REGISTER_UNIT = 256  # a warp's registers are handed out in units of this
_SHARED_UNIT = 128
_SHARED_RESERVED = 1024  # the system's part of each block's shared memory


@dataclass(frozen=True)
class Occupancy:
    """Blocks that an SM holds at once, their warps, and what allows no more of them."""

    blocks: int
    warps: int
    limiter: str


def occupancy(registers: int, num_threads: int, shared_bytes: int, device: Device) -> Occupancy:
    """How many blocks of a kernel an SM holds, and every resource that allows no more."""
    threads, most_blocks = _resident(device)
    warps = -(-num_threads // 32)
    warp_registers = _up(max(registers, 1) * 32, _REGISTER_UNIT)
    # Warps go to the four quarters in turn, and each quarter has its own registers.
    resident = _REGISTERS // _QUARTERS // warp_registers * _QUARTERS
    limits = {
        "registers": resident // _up(warps, _QUARTERS),
        "shared memory": device.smem_per_sm // _up(shared_bytes + _SHARED_RESERVED, _SHARED_UNIT),
        "threads": threads // (32 * warps),
        "blocks an SM": most_blocks,
    }
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, ", ".join(name for name, limit in limits.items() if limit == blocks))


def occupancy_rule(device: Device) -> str:
    """By what the occupancy of an architecture is computed, in a sentence."""
    threads, blocks = _resident(device)
    return (
        f"An SM of sm_{device.arch} has {_REGISTERS:,} registers in units of {_REGISTER_UNIT} a warp, {threads:,} threads, "
        f"{blocks} blocks, and {device.smem_per_sm // 1024} KiB of shared memory; a block takes 1 KiB more than it asks for."
    )


def _resident(device: Device) -> tuple[int, int]:
    try:
        return _RESIDENT[device.arch]
    except KeyError:
        known = ", ".join(f"sm_{arch}" for arch in _RESIDENT)
        raise ValueError(f"the occupancy rules of sm_{device.arch} are unknown; known are those of {known}.") from None


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
