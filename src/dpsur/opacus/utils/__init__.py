"""Modules that Opacus keeps in `opacus.utils`."""
