"""Kernels in the CuTe DSL, the Python form of CUTLASS."""
