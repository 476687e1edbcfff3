"""Kernels of modtrace's own on CUDA: how they are compiled and launched."""
