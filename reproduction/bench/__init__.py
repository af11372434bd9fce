"""Speed and memory of a step over a grid of networks and batch sizes, and how long grids take."""
