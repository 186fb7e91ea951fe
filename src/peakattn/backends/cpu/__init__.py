"""Attention on the CPU: torch's own fused kernel where it fits, else tiled torch code."""
