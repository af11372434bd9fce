"""CUDA kernels for per-example gradients, compiled when they are first needed."""
