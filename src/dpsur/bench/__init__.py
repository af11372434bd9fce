"""Speed and memory of a step, side by side with plain PyTorch, Opacus and the simple ways."""
