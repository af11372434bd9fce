"""Modules that Opacus keeps in `opacus.accountants`."""
