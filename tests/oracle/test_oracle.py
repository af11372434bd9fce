"""One record moves a private step by at most the clipping norm, and no other step, for any program.

The default suite runs private steps: programs whose records meet in two pairs of worlds with one
extreme record, and the gradients of the others. `make test-all` runs all worlds, forms and records.
"""

import pytest
import torch

from dpsur.engine.loader import PoissonSampler
from dpsur.engine.model_tests import ModelTests
from dpsur.functional import problem
from dpsur.functional.persons import PersonRecords
from dpsur.per_example import clipping, record_level
from tests.oracle.harness import (
    ADD,
    ALONE,
    FORMS,
    LIMITS,
    PERSONS,
    REPLACE,
    SHORT_EXTREME,
    SHORT_PAIRS,
    gradient_error,
    judge,
)
from tests.oracle.programs import all_programs

PROGRAMS = all_programs()
NAMED = {f"{program.family}-{program.name}": program for program in PROGRAMS}


def of(form):
    return [name for name, program in NAMED.items() if form in program.expected]


def check(verdict):
    assert verdict.as_expected, str(verdict)


# Those behind a block gate differ in what records do to each other, and take seconds each.
COUPLED = [
    pytest.param(name, marks=pytest.mark.slow)
    if "block gate" in name
    and not name.endswith(("centred, norm given", "as it is, norm measured"))
    else name
    for name in of("private_step")
    if not NAMED[name].legitimate
]


@pytest.mark.parametrize("name", COUPLED)
def test_records_that_meet_in_a_private_step(name):
    if "stopped" in NAMED[name].expected["private_step"].outcome:
        pytest.skip("is stopped by other records")
    check(judge(NAMED[name], "private_step", pairs=SHORT_PAIRS, extreme=SHORT_EXTREME))


# Programs of Hugging Face take longer than all others together.
LEGITIMATE = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith("Hugging Face") else name
    for name in of("private_step")
    if NAMED[name].legitimate and not NAMED[name].draws
]


@pytest.mark.parametrize("name", LEGITIMATE)
def test_each_record_has_its_right_gradient(name):
    """Private is not enough: a program whose records do not meet trains on what it says."""
    assert "bounded" in NAMED[name].expected["private_step"].outcome
    assert gradient_error(NAMED[name]) <= 1e-9


@pytest.mark.parametrize(
    "name",
    [
        name if place % 24 == 0 else pytest.param(name, marks=pytest.mark.slow)
        for place, name in enumerate(of("private_step"))
    ],
)
def test_a_person_moves_a_sum_by_at_most_the_bound(name):
    check(judge(NAMED[name], PERSONS, pairs=SHORT_PAIRS, extreme=SHORT_EXTREME))


def test_a_person_who_is_clipped_by_record_is_found(monkeypatch):
    own = PersonRecords.draw
    monkeypatch.setattr(
        PersonRecords,
        "draw",
        lambda *given: [(row,) for rows in own(*given) for row in rows],
    )
    monkeypatch.setattr(PoissonSampler, "most", property(lambda _: 100, lambda *_: None), False)
    found = judge(NAMED["layers-mlp"], PERSONS, pairs=(ADD,), extreme=("large",))
    assert found.outcome == "above"
    assert found.worst == pytest.approx(2.0, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMED)
def test_all_worlds(name, form):
    if form not in NAMED[name].expected:
        pytest.skip("has no such form")
    verdict = judge(NAMED[name], form)
    check(verdict)
    if NAMED[name].expected[form].outcome == "limit":
        assert verdict.outcome == LIMITS[verdict.key][0], "measure it anew: --write-limits"


# A GRU wants the sizes of a PackedSequence on the CPU, and a private step moves the whole batch.
ON_CPU = {"batches-packed by the collate function"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in of("private_step") if name not in ON_CPU])
def test_private_steps_on_cuda(name):
    check(
        judge(NAMED[name], "private_step", pairs=SHORT_PAIRS, extreme=SHORT_EXTREME, device="cuda")
    )


# --- the oracle itself ----------------------------------------------------------------------------


def shorten_norms(monkeypatch, factor):
    own = clipping.clip_factors
    monkeypatch.setattr(clipping, "clip_factors", lambda norms, *rest: own(norms * factor, *rest))


def test_what_is_not_clipped_is_found(monkeypatch):
    shorten_norms(monkeypatch, 1e-9)
    found = judge(NAMED["layers-mlp"], "private_step", pairs=(ADD,), extreme=("large",))
    assert found.outcome == "above"


def test_survivors_that_nobody_looks_for_are_found(monkeypatch):
    """In worlds of equal batch size a tensor of an earlier level fits into a later one."""
    monkeypatch.setattr(
        "dpsur.per_example.record_level.RecordLevel.check_survivors", lambda self: None
    )
    found = judge(
        NAMED["state-tensor in a namespace"], "private_step", pairs=(REPLACE,), extreme=("large",)
    )
    assert found.outcome in ("above", "leak")


@pytest.mark.parametrize(
    "name", ["longest in a number", "lengths in a set in a list in a dict", "buffer filled"]
)
def test_attributes_that_nobody_puts_back_are_found(monkeypatch, name):
    monkeypatch.setattr(problem.Attributes, "put_back", lambda self: [])
    found = judge(
        NAMED[f"attributes-{name}"], "private_step", pairs=SHORT_PAIRS, extreme=SHORT_EXTREME
    )
    assert found.outcome == "leak"


def test_a_gradient_that_is_lost_is_found(monkeypatch):
    def unseen(_, func, args, kwargs):
        return func(*args, **kwargs)

    monkeypatch.setitem(record_level._SPECIAL, torch.Tensor.roll, unseen)
    assert gradient_error(NAMED["weights-squeezed rolled and as scores"]) > 1e-3


def test_a_copy_of_a_weight_that_is_followed_as_one_is_found(monkeypatch):
    """Its gradient went nowhere where a layer took it as its input."""

    def copied(self, value):
        if id(value) not in self.tape.names:
            return value
        with self._popped():
            copies = self.tape.copies(value)
        return self.hide(copies)

    monkeypatch.setattr(record_level.RecordLevel, "_copy", copied)
    assert gradient_error(NAMED["weights-learned queries added"]) > 1e-3


@pytest.mark.parametrize("name", ["dispatch mode that mixes", "saved tensors that mix"])
def test_onlookers_that_nobody_looks_for_are_found(monkeypatch, name):
    monkeypatch.setattr(record_level, "is_of_a_library", lambda _: True)
    found = judge(NAMED[f"mixing-{name}"], "private_step", pairs=SHORT_PAIRS, extreme=SHORT_EXTREME)
    assert found.outcome == "above"


def test_a_loop_that_passes_records_on_is_found():
    name = "loops-figures passed on as an argument"
    found = judge(NAMED[name], "private_step", pairs=(ADD,), extreme=("huge",))
    assert found.outcome == "leak"


def test_a_gates_values_that_are_not_bounded_are_found(monkeypatch):
    own = ModelTests._values
    monkeypatch.setattr(ModelTests, "_values", lambda *given: 3 * own(*given))
    name = "loops-block gate as it is, norm given"
    found = judge(NAMED[name], "private_step", pairs=(REPLACE,), extreme=("NaN",))
    assert found.outcome == "above"
    assert "test" in found.worst_at


def test_a_limit_that_grows_is_found(monkeypatch):
    found = judge(
        NAMED["losses-target centred by batch"], "opacus", pairs=SHORT_PAIRS, extreme=SHORT_EXTREME
    )
    assert found.as_expected
    monkeypatch.setitem(LIMITS, found.key, ["above", found.worst / 1.1])
    assert not found.as_expected
    monkeypatch.setitem(LIMITS, found.key, ["leak", found.worst])
    assert not found.as_expected
    monkeypatch.delitem(LIMITS, found.key)
    assert not found.as_expected


def test_every_limit_is_measured_and_none_besides():
    named = {
        f"{form}: {program.family}: {program.name}"
        for program in PROGRAMS
        for form, expected in program.expected.items()
        if expected.outcome == "limit"
    }
    assert set(LIMITS) == named


def test_a_record_that_counts_twice_is_found(monkeypatch):
    """Also where it is alone in its batch."""
    shorten_norms(monkeypatch, 0.5)
    found = judge(NAMED["layers-mlp"], "private_step", pairs=(ALONE,), extreme=("large",))
    assert found.outcome == "above"
    assert found.worst == pytest.approx(2.0, rel=1e-3)
