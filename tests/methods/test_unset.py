"""An option that is left open is None, so that the value it would get can be given as well."""

import pytest

import dpsur
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.privacy.budget import Budget


def test_options_of_a_gate_are_none_until_they_are_resolved():
    method = dpsur.Dpsgd(batch_size=20)
    assert (method.loss_clip, method.clip_norm) == (None, None)
    plain = method.resolve(400, Budget(3.0, 1e-4), "every-trial")[0]
    assert (plain.loss_clip, plain.clip_norm) == (None, None)


@pytest.mark.parametrize(
    ("options", "usual"),
    [
        ({}, "proven-pld"),
        ({"gate": "loss"}, "proven-pld"),
        ({"accept_ratio": 1.5}, "proven-pld"),
        ({"gate": "none"}, "proven"),
        ({"gate": "block"}, "proven"),
        # measurements steer the run, which distributions do not cover
        ({"gate": "none", "metrics_budget": 0.1}, "proven"),
    ],
)
def test_the_usual_accounting_is_the_tightest_that_covers_the_run(options, usual):
    method = dpsur.Dpsur(**options)
    assert method.usual_accounting == usual
    assert RunConfig(method=method).charged_by == usual
    assert RunConfig(method=method, accounting="every-trial").charged_by == "every-trial"
    assert dpsur.Dpsgd().usual_accounting == "proven"


@pytest.mark.parametrize(
    ("gate", "name", "usual"), [("loss", "loss_clip", 0.001), ("block", "clip_norm", "median")]
)
def test_the_usual_value_implies_the_gate_that_it_belongs_to(gate, name, usual):
    given = dpsur.Dpsur(batch_size=20, gate=None, **{name: usual})
    open_one = dpsur.Dpsur(batch_size=20, gate=gate)
    resolved = [one.resolve(400, Budget(3.0, 1e-4), "every-trial")[0] for one in (given, open_one)]
    assert [(one.gate, getattr(one, name)) for one in resolved] == 2 * [(gate, usual)]
    with pytest.raises(InvalidInputError, match=f"{name} .* belongs to the gate {gate}"):
        dpsur.Dpsur(gate="coin", **{name: usual})
