"""Whole runs: from records and a budget to a release folder, through interruptions."""
