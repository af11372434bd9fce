"""Figures in the text of the reproduction's pages, written from the rows."""
