"""The published accounting promises too much, on exact instances of Algorithm 1; the proven one
holds.
"""

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtr

from dpsur.privacy.accountants.proven import SelectiveUpdate, selective_divergence
from dpsur.privacy.accountants.rdp import event_rdp
from reproduction import counterexample
from reproduction.audits.exact import Losses, Setting, composed_delta, densities, one_update, renyi
from reproduction.counterexample import (
    CIFAR_3,
    FMNIST_1,
    FMNIST_3,
    QUOTED,
    STRONG_TEST,
    WORST_ORDER,
    claimed_epsilon,
    dead_unit,
    report,
    unselected,
    worst_case,
)
from tests.privacy.selective_cases import empty_cache

DOCS = Path(__file__).parents[2] / "docs" / "privacy.md"
ROWS = [(FMNIST_1, 0.999), (FMNIST_3, 2.999), (CIFAR_3, 2.997)]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with (
        pytest.MonkeyPatch.context() as patch,
        empty_cache(tmp_path_factory.mktemp("cache"), patch) as folder,
    ):
        yield folder


def accepted_update(setting: Setting) -> SelectiveUpdate:
    return SelectiveUpdate.of(setting.update.sample_rate, setting.noise_multiplier, setting.test)


@pytest.mark.parametrize(("setting", "figure"), ROWS)
def test_published_figures_are_the_papers(setting, figure):
    assert claimed_epsilon(setting, "published") == pytest.approx(figure, abs=6e-4)


@pytest.mark.parametrize("setting", [setting for setting, _ in ROWS])
def test_a_dead_unit_breaks_the_published_promise(setting):
    found = report(dead_unit(setting, reach=1.4), "add", width=2e-5)
    assert found.delta_at_published[0] > 2 * setting.delta
    assert found.delta_at_proven[1] < setting.delta
    assert found.delta_at_published[0] < found.delta_at_published[1]


@pytest.mark.parametrize("direction", ["add", "remove"])
def test_the_worst_case_attains_the_lower_value(direction):
    instance = worst_case(FMNIST_3, WORST_ORDER, direction)
    bounds = selective_divergence(accepted_update(FMNIST_3), WORST_ORDER, direction)
    attained = renyi(instance, WORST_ORDER, direction)
    assert attained == pytest.approx(bounds.lower, rel=5e-5)
    assert attained <= bounds.upper
    found = report(instance, direction, width=2e-5)
    assert found.delta_at_published[0] > 20 * FMNIST_3.delta
    assert found.delta_at_proven[1] < FMNIST_3.delta


def test_without_selection_the_published_promise_holds():
    """The control: the same candidates with a test that accepts all alike."""
    losses = one_update(unselected(FMNIST_3), "add", 2e-5)
    published = claimed_epsilon(FMNIST_3, "published")
    assert composed_delta(losses, FMNIST_3.updates, published)[1] < FMNIST_3.delta


def test_acceptance_stays_in_the_parallelogram():
    a0, a1 = dead_unit(FMNIST_3, reach=1.4).acceptance(np.linspace(-20, 20, 2001))
    test = FMNIST_3.test
    rest = (a1 - (1 - test.sample_rate) * a0) / test.sample_rate
    for a in (a0, rest):
        assert a.min() >= test.accept_min * (1 - 1e-9)
        assert a.max() <= test.accept_max * (1 + 1e-9)
    assert a0.max() / a0.min() > 0.99 * accepted_update(FMNIST_3).accept_ratio


def test_acceptance_is_that_of_the_loss_test():
    differences = np.linspace(-3, 3, 25) * FMNIST_3.loss_clip
    expected = [FMNIST_3.test.acceptance(x) for x in np.clip(differences / 1e-3, -1, 1)]
    assert FMNIST_3.accept(differences) == pytest.approx(expected, rel=1e-13)


def test_composition_against_the_exact_gaussian():
    """Losses of T Gaussians have a closed delta; both roundings must enclose it."""
    plain = unselected(Setting(100, 100, 20.0, 1, 1.0, 100))
    losses = one_update(plain, "add", 1e-5, cells=60000)
    mu, eps = 10.0 / 20.0, 1.0
    exact = ndtr(mu / 2 - eps / mu) - np.exp(eps) * ndtr(-mu / 2 - eps / mu)
    low, high = composed_delta(losses, 100, eps)
    assert low < exact < high < 1.2 * low
    wrong = Losses(losses.width, losses.up, losses.up, losses.offset)
    assert composed_delta(wrong, 100, eps)[0] > exact  # rounding the wrong way is seen


# --- the figures in the docs ----------------------------------------------------------------------

NUMBER = re.compile(r"\d+(?:\.(\d+))?(?:e(-?\d+))?")


@lru_cache
def quoted(name: str) -> str:
    return QUOTED[name]().row(name)


def numbers(cells: str) -> list[tuple[float, float]]:
    """Every number of a row, with one unit of its last printed digit."""
    return [
        (float(m[0]), 10.0 ** (int(m[2] or 0) - len(m[1] or ""))) for m in NUMBER.finditer(cells)
    ]


def drift(text: str, name: str) -> str | None:
    """What is wrong with the row of this name in a text, if anything."""
    rows = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    if len(rows) != 1:
        return f"{len(rows)} rows named {name}"
    stated, found = (numbers(row.removeprefix(f"| {name}")) for row in (rows[0], quoted(name)))
    if len(stated) != 6:
        return f"{len(stated)} figures instead of 6: {rows[0]}"
    for (value, unit), (actual, _) in zip(stated, found, strict=True):
        if abs(value - actual) > unit * (1 + 1e-9):
            return f"{value} is stated, {actual} is computed"
    return None


@pytest.mark.parametrize("name", QUOTED)
def test_the_docs_quote_what_the_code_gives(name):
    assert drift(DOCS.read_text(), name) is None


def test_a_drifted_figure_is_caught():
    name = next(iter(QUOTED))
    text = DOCS.read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    cells = row.split(" | ")
    for column in (1, 3):  # epsilon, off by two units of its last digit
        wrong = list(cells)
        wrong[column] = f"{float(cells[column]) + 2e-4:.4f}"
        assert drift(text.replace(row, " | ".join(wrong)), name)
    assert drift(text.replace(row, row.replace("e-5", "e-6")), name)
    assert drift(text.replace(row, ""), name)


def test_the_docs_quote_the_strong_test():
    stated = re.search(r"published (\d+\.\d\d), proven (\d+\.\d\d)", DOCS.read_text())
    for figure, name in zip(stated.groups(), ("published", "proven"), strict=True):
        assert float(figure) == pytest.approx(claimed_epsilon(STRONG_TEST, name), abs=0.01)
    assert STRONG_TEST.update.sample_rate == 0.1
    assert STRONG_TEST.test.sample_rate == 0.01


def test_main_prints_the_quoted_rows(capsys, monkeypatch):
    first = next(iter(QUOTED))
    monkeypatch.setattr(counterexample, "QUOTED", {first: QUOTED[first]})
    counterexample.main()
    printed = capsys.readouterr().out
    assert quoted(first) in printed
    assert "published 4.92, proven 2.68" in printed


def test_an_instance_with_other_losses_has_another_price():
    """The extra record matters: without its pull on the loss the acceptance does not move."""
    instance = dead_unit(FMNIST_3)
    z = np.linspace(-8, 8, 101)
    a0, a1 = instance.acceptance(z)
    same0, same1 = replace(instance, extra=instance.others).acceptance(z)
    assert same0 == pytest.approx(a0)
    assert same1 == pytest.approx(same0, rel=1e-6)
    assert not np.allclose(a1, a0, rtol=1e-4)


def test_one_update_costs_more_than_the_paper_charges(capsys):
    """The page's own code, the library's exact densities and its certificate agree."""
    page = (DOCS.parent / "proof.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(code, "proof.md", "exec"), {})
    true, paper, ratio = map(float, capsys.readouterr().out.split())
    assert f"`{true:.3e} {paper:.3e} {ratio}`" in page
    without, with_x, _ = densities(dead_unit(FMNIST_3))
    assert true == pytest.approx(np.log((with_x**2 / without).sum()), rel=1e-3)
    assert paper == pytest.approx(
        event_rdp(FMNIST_3.update, 2) + event_rdp(FMNIST_3.test, 2), rel=1e-3
    )
    worst = selective_divergence(accepted_update(FMNIST_3), 2.0, "add")
    assert paper < true < worst.upper
    assert f"{worst.lower / paper:.2f} times in the worst case of order 2" in " ".join(page.split())
