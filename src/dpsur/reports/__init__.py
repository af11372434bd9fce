"""Run reports, plots and what they are made of."""

from dpsur.reports.contents import ReportContents, read_report
from dpsur.reports.html import render_report

__all__ = ["ReportContents", "read_report", "render_report"]
