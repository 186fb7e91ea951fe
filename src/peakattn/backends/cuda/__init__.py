"""Kernels in CUDA C++ with inline PTX, compiled at run time by NVRTC."""
