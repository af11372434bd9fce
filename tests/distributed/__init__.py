"""Tests of runs of several processes, with gloo on the CPU."""
