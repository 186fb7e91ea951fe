"""Kernels in cuTile, NVIDIA's tile language for Python."""
