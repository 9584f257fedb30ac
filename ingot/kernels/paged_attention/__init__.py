"""Attention over pages, by kernels of our own for GPUs."""
