"""Kernels written in Triton, for sm_80 to sm_121."""
