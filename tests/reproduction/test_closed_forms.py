"""The rows of the analytic figures against independent computations."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from reproduction.base import Options
from reproduction.experiments import acceptance, gate_density, sigma_v, truncation
from tests.reproduction.test_registered import committed

# Chance of a false alarm below 3e-12 for one comparison.
STANDARD_ERRORS = 7.0


def rows_of(module):
    return committed(module.EXPERIMENT).rows


def fresh(module, number=0):
    cell = list(module.EXPERIMENT.cells(Options()))[number]
    return {**cell, **module.EXPERIMENT.measure(cell, Options())}


def area(heights, at):
    return float((heights[1:] + heights[:-1]) @ np.diff(at)) / 2


def agrees(frequency, probability, draws):
    error = math.sqrt(probability * (1 - probability) / draws)
    return abs(frequency - probability) <= STANDARD_ERRORS * error


def expected(beta, sigma, kind):
    shift = 1 if kind == "better" else -1
    return NormalDist().cdf((beta + shift) / (2 * sigma))


@pytest.mark.parametrize("row", rows_of(acceptance), ids=lambda row: row["config"]["sigma_v"])
def test_acceptance_follows_the_formula_and_the_gate_follows_it_too(row):
    sigma, draws = row["config"]["sigma_v"], row["config"]["draws"]
    for kind in ("better", "worse"):
        curve = [expected(beta, sigma, kind) for beta in row["beta"]]
        assert np.allclose(row[kind], curve, atol=1e-6)
        probes = row["measured"]
        assert all(agrees(p[kind], expected(p["beta"], sigma, kind), draws) for p in probes)
        # control: the same comparison rejects a gate with half as much noise again
        wrong = [agrees(p[kind], expected(p["beta"], 1.5 * sigma, kind), draws) for p in probes]
        assert not all(wrong)


@pytest.mark.parametrize("row", rows_of(acceptance), ids=lambda row: row["config"]["sigma_v"])
def test_the_best_threshold_is_zero_and_beats_the_papers(row):
    assert row["best_beta"] == pytest.approx(0, abs=1e-6)
    gaps = np.subtract(row["better"], row["worse"])
    assert row["beta"][int(np.argmax(gaps))] == pytest.approx(0, abs=0.026)
    assert row["at_best"]["gap"] == pytest.approx(gaps.max(), abs=1e-6)
    assert row["at_paper"]["gap"] < row["at_best"]["gap"] - 0.02


def test_densities_hold_all_of_the_probability():
    for row in rows_of(gate_density):
        at, threshold = np.array(row["difference"]), row["config"]["Z"]
        for kind in ("better", "worse"):
            density = np.array(row[f"{kind}_density"])
            assert area(density, at) == pytest.approx(1, abs=2e-3)
            below = at <= threshold + 1e-9
            accepted = area(density[below], at[below])
            assert accepted == pytest.approx(row[kind], abs=2e-3)
            published = row["paper"][kind]
            assert published is None or 100 * row[kind] == pytest.approx(published, abs=0.06)


def test_released_answers_follow_the_truncated_law():
    for row in rows_of(truncation):
        config = row["config"]
        low = -math.inf if config["a"] is None else config["a"]
        for name, mean in (("zero", 0.0), ("mu", config["mu"])):
            law = NormalDist(mean, config["mu"] * config["sigma"])
            kept = law.cdf(config["b"]) - (0.0 if config["a"] is None else law.cdf(low))
            assert row["kept"][name] == pytest.approx(kept, abs=1e-12)
            edges = np.clip(row["bins"], low, config["b"])
            shares = np.diff([law.cdf(edge) for edge in edges]) / kept
            counts = np.array(row["released"][name])
            inside = shares > 0
            assert counts[~inside].sum() == 0
            assert _all_agree(counts[inside], shares[inside], config["draws"])
            # control: the law before truncation is rejected
            assert not _all_agree(counts[inside], shares[inside] * kept, config["draws"])


def _all_agree(counts, shares, draws):
    return all(agrees(c / draws, s, draws) for c, s in zip(counts, shares, strict=True))


def test_truncation_lowers_the_divergence():
    for row in rows_of(truncation):
        for figures in row["divergence"]:
            assert 0 < figures["zero_first"] < figures["before"]
            assert 0 < figures["shifted_first"] < figures["before"]


def test_sigma_v_rows_say_what_the_gate_does():
    rows = rows_of(sigma_v)
    assert len(rows) == 16
    for row in rows:
        sigma = row["config"]["val_noise_multiplier"]
        assert row["accept_max"] == pytest.approx(0.5)
        assert row["accept_min"] == pytest.approx(NormalDist().cdf(-1 / sigma))
        assert row["ratio"] == pytest.approx(row["accept_max"] / row["accept_min"])
        assert row["epsilon"]["published"] <= row["config"]["epsilon"] < row["epsilon"]["proven"]


@pytest.mark.parametrize("module", [acceptance, gate_density, truncation, sigma_v])
def test_committed_rows_are_what_the_code_gives(module):
    new, old = fresh(module), rows_of(module)[0]
    assert new["config"] == old["config"]
    _same(new, {field: old[field] for field in new})


def _same(new, old):
    if isinstance(new, dict):
        assert new.keys() == old.keys()
        for key, value in new.items():
            _same(value, old[key])
    elif isinstance(new, list):
        assert len(new) == len(old)
        for one, other in zip(new, old, strict=True):
            _same(one, other)
    elif isinstance(new, float):
        assert new == pytest.approx(old, rel=1e-4, abs=1e-6)
    else:
        assert new == old
