"""Instances of Algorithm 1 whose true privacy loss exceeds the published accounting.

`reproduction.audits.exact` describes the data set. Three instances differ in the losses away from
0.

`dead_unit`: the others have the squared error of a two-sided ReLU unit that is off at 0, plus
weight decay: loss(w) = (1 - relu(|w| - 1))^2 / 2 + decay w^2. Small moves cost weight decay and do
not switch the unit on: the test rejects them more often. Large moves, which are what x makes
likelier, switch it on: the test accepts them more often. x has the linear loss -gain * w.

`worst_case`: the losses are step functions of w that drop or rise by more than C_v, chosen as the
adversary of the lower bound chooses; a single record's loss may be so large that it decides the
mean of any batch it is in.

`unselected`, the control: the same candidates, and a test that distinguishes none of them.

`python -m reproduction.counterexample` prints the figures that docs/privacy.md quotes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsur.privacy.accountants.proven import SelectiveUpdate
from dpsur.privacy.accountants.selective.divergence import attack, envelope
from dpsur.privacy.accountants.selective.pair import (
    Array,
    Direction,
    bracket,
    frame,
    mesh,
    vertices,
)
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.statement import format_epsilon
from reproduction.audits.exact import Instance, Setting, composed_delta, one_update
from reproduction.audits.mechanism import FMNIST_3

Flags = NDArray[np.bool_]

# The paper's settings for Fashion-MNIST at epsilon 1 and for CIFAR-10 at epsilon 3; FMNIST_3 is an
# audit's too.
FMNIST_1 = Setting(60000, 2048, 4.0, 256, 1.3, 651)
CIFAR_3 = Setting(50000, 8192, 5.67, 256, 1.1, 493)
# One update with a strong test: here the published figure is the larger one.
STRONG_TEST = Setting(100_000, 10_000, 1.0, 1000, 0.5, 1)

WORST_ORDER = 5.76  # near the order at which the proven epsilon of FMNIST_3 is smallest
DEAD_UNIT_REACH = 1.5  # in standard deviations of the noise


def dead_unit(
    setting: Setting, reach: float = DEAD_UNIT_REACH, decay: float = 0.01, gain: float = 1e4
) -> Instance:
    """A dead ReLU unit under weight decay; |z| beyond `reach` noise deviations switches it on."""
    scale = reach * setting.noise_multiplier

    def others(z: Array) -> Array:
        w = np.abs(z) / scale
        return np.asarray(0.5 * (1.0 - np.maximum(w - 1.0, 0.0)) ** 2 - 0.5 + decay * w * w)

    return Instance(setting, others, lambda z: -gain * z / scale)


def worst_case(setting: Setting, order: float, direction: Direction, nodes: int = 600) -> Instance:
    """Step losses that realise the adversary's a0 and a1 (up to the empty validation batch)."""
    q, s, q_v, r = SelectiveUpdate.of(
        setting.update.sample_rate, setting.noise_multiplier, setting.test
    )
    corner = vertices(r, q_v)
    both = bracket(q, s, order, direction, nodes)
    f = frame(both.chord, both.tails, corner, order, direction, 0.0)
    lines = envelope(f, 1e-4).lines
    choice = attack(both.cells, corner, order, direction, 0.0, lines, f.scale).choice
    edges = mesh(q, s, order, direction, nodes)
    return step_losses(setting, edges, choice >= 2, choice % 2 == 1)


def step_losses(
    setting: Setting, edges: Array, others_better: Flags, extra_better: Flags
) -> Instance:
    """Losses that fall (True) or rise (False) by a large amount on each piece between the edges."""

    def piecewise(better: Flags, size: float) -> Callable[[Array], Array]:
        return lambda z: np.where(better[np.searchsorted(edges, z)], -size, size)

    return Instance(setting, piecewise(others_better, 1.0), piecewise(extra_better, 1e9))


def unselected(setting: Setting) -> Instance:
    """The same candidates, all of which the test accepts alike."""
    return Instance(setting, np.zeros_like, np.zeros_like)


def claimed_epsilon(setting: Setting, accounting: str) -> float:
    """Epsilon of the setting under an accounting."""
    return accounting_named(accounting).planned((), setting.trial, setting.updates, setting.delta)


@dataclass(frozen=True)
class Report:
    """True delta of an instance at the published and the proven epsilon, each (lower, upper)."""

    published_epsilon: float
    proven_epsilon: float
    delta_at_published: tuple[float, float]
    delta_at_proven: tuple[float, float]

    def row(self, name: str) -> str:
        """A row of a table."""
        cells = (
            name,
            format_epsilon(self.published_epsilon),
            _interval(self.delta_at_published),
            format_epsilon(self.proven_epsilon),
            _interval(self.delta_at_proven),
        )
        return f"| {' | '.join(cells)} |"


def report(instance: Instance, direction: Direction, width: float = 1e-5) -> Report:
    """Composes an instance and holds it against both accountings."""
    setting = instance.setting
    published, proven = (claimed_epsilon(setting, name) for name in ("published", "proven"))
    losses = one_update(instance, direction, width)
    return Report(
        published,
        proven,
        composed_delta(losses, setting.updates, published),
        composed_delta(losses, setting.updates, proven),
    )


def _interval(bounds: tuple[float, float]) -> str:
    """Three digits, rounded outward."""
    texts = []
    for value, away in zip(bounds, (math.floor, math.ceil), strict=True):
        exponent = math.floor(math.log10(value)) if value > 0 else 0
        digits = away(value / 10.0 ** (exponent - 2)) / 100
        texts.append(f"{digits:.2f}e{exponent}" if value > 0 else "0")
    return f"[{', '.join(texts)}]"


QUOTED: dict[str, Callable[[], Report]] = {
    "dead unit, Fashion-MNIST, ε 3": lambda: report(dead_unit(FMNIST_3), "add"),
    "dead unit, Fashion-MNIST, ε 1": lambda: report(dead_unit(FMNIST_1), "add"),
    "dead unit, CIFAR-10, ε 3": lambda: report(dead_unit(CIFAR_3), "add"),
    "worst case, Fashion-MNIST, ε 3": lambda: report(
        worst_case(FMNIST_3, WORST_ORDER, "add"), "add"
    ),
    "control, Fashion-MNIST, ε 3": lambda: report(unselected(FMNIST_3), "add"),
}


def main() -> None:
    """Prints the figures quoted in docs/privacy.md."""
    print("| instance | published ε | true δ there | proven ε | true δ there |")
    print("|---|---|---|---|---|")
    for name, make in QUOTED.items():
        print(make().row(name))
    print(f"\nboth accountings claim δ = {FMNIST_3.delta:g} at their ε")
    published, proven = (claimed_epsilon(STRONG_TEST, name) for name in ("published", "proven"))
    print(f"one update with a strong test: published {published:.2f}, proven {proven:.2f}")


if __name__ == "__main__":
    main()
