"""Tests of the names of Opacus."""
