"""What docs/privacy.md says of the tail of the noise follows from its formula."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_ndtr

PAGE = (Path(__file__).parent.parent.parent / "docs" / "privacy.md").read_text()
END = math.sqrt(106 * math.log(2))
DENSITY = math.exp(-0.5 * END**2) / math.sqrt(2 * math.pi)


def tail(x):
    return np.exp(log_ndtr(-np.asarray(x)))


def beyond(shifts):
    """Probability that one of several coordinates, moved by these, lies beyond the end."""
    return float((tail(END - shifts) - tail(END)).sum())


def stated(text):
    """A number with the precision that it is stated to."""
    digits = len(text.split("e")[0].replace(".", ""))
    return pytest.approx(float(text), rel=0.5 * 10.0 ** (1 - digits))


def test_the_figures_are_those_of_the_formula():
    said = re.search(r"Q\(8\.57 - 1/σ\)\s+is (.*?): nothing", PAGE, flags=re.DOTALL)[1]
    pairs = re.findall(r"([\d.]+e-\d+) at (?:σ = )?([\d.]+)", " ".join(said.split()))
    assert len(pairs) == 4
    for figure, sigma in pairs:
        assert float(tail(END - 1 / float(sigma))) == stated(figure)
    assert stated("8.57") == END
    assert stated("4.4e-17") == DENSITY


@pytest.mark.parametrize("sigma", [0.25, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("dimension", [1, 10, 10_000])
def test_the_bound_holds_however_the_gradient_lies(sigma, dimension):
    bound = float(tail(END - 1 / sigma)) + DENSITY * math.sqrt(dimension) / sigma
    generator = np.random.default_rng(0)
    alone = np.eye(1, dimension)[0]
    even = np.full(dimension, dimension**-0.5)
    heavy = np.abs(generator.standard_cauchy(dimension))
    for direction in (alone, even, heavy / np.linalg.norm(heavy)):
        assert beyond(direction / sigma) <= bound
    assert beyond(alone / sigma) >= 0.5 * float(tail(END - 1 / sigma))  # half would not do
