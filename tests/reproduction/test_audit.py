"""The table of what audits find."""

from reproduction.audits.negative_controls import FAULTS
from reproduction.base import Options
from reproduction.experiments.audit import EXPERIMENT


def test_the_table_covers_every_fault():
    cells = [cell["config"] for cell in EXPERIMENT.cells(Options())]
    assert {cell["fault"] for cell in cells if "fault" in cell} == {"none", *FAULTS}
    finding = {
        "audit": "exact",
        "subject": "a unit",
        "accounting": "published",
        "claimed": 1.0,
        "lower": 2.0,
        "confidence": 1.0,
        "exact": 2.0,
        "p_value": None,
        "delta": 0.01,
        "verdict": "contradicted",
        "details": {},
    }
    page, *_ = EXPERIMENT.render([{"findings": [finding]}])
    assert "| exact | a unit | published | 1.000 | 2.000 |  | 100.0% | 2.000 |" in page.text
