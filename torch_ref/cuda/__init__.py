"""Adapters to CUDA kernels and to a serving engine's own functions; each says why it can't run."""
