"""Proven figures of the paper's settings, checked in interval arithmetic.

The library bounds the Rényi divergence of an accepted update by a certificate: a few lines (m, θ)
around a centre u0, valid if one expectation each is at most 0 (docs/privacy.md, sections 5 and 6).
Floating point and margins are behind it. Here the lines and the mesh are taken from the library as
a proposal only. Everything that they have to satisfy, and what follows, is computed again by
mpmath with intervals of 200 bits: weights of cells, tails, heights of lines, the range of ρ, the
largest value, composition and conversion. The one thing that is trusted is mpmath's `erfc`, to 120
of its 200 bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mpmath import iv, mp

from dpsur.privacy.accountants import proven
from dpsur.privacy.accountants.selective.divergence import edge, envelope
from dpsur.privacy.accountants.selective.pair import Direction, bracket, frame, mesh, vertices
from dpsur.privacy.accounting import CAP_SHARE
from dpsur.privacy.events import Gaussian, LossTest, SampledGaussian
from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.experiments.accounting import costs, setting_cells, setting_of
from reproduction.presets.settings import DELTA, PaperSetting

CHECKED = (("fmnist", 3), ("cifar10", 3), ("imdb", 1))
NODES, PIECES, BITS, TRUSTED = 1500, 400, 200, 120
TITLE = "The certificate in interval arithmetic"
TEXT = """
The proven epsilon of T accepted updates (delta = 1e-5, feature statistics charged where the paper
takes them) for three of the paper's settings: as the library computes it in floating point with
margins, and recomputed by mpmath in intervals of 200 bits, the upper end. Orders are those that the
library finds best, to two digits; both directions are checked and the larger figure is shown. Only
the certificate's lines and the mesh are taken from the library, and neither has to be right for the
figure to hold. The difference is that of the meshes and of the order. Rounded up to four decimals,
as epsilons are printed, the figures are the same.
"""
COLUMNS = (
    Column("data set", "dataset"),
    Column("target", "target"),
    Column("T", "updates"),
    Column("order", "order", ".2f"),
    Column("lines", "lines"),
    Column("proven, floating point", "floating", ".6f"),
    Column("in intervals", "interval", ".6f"),
    Column("difference", "difference", "+.1e"),
)


class Certificate(OneByOne):
    """One row per setting."""

    name = "certificate"

    def cells(self, options: Options) -> Iterator[Cell]:  # noqa: ARG002
        """The settings that are checked."""
        for cell in setting_cells():
            if (cell["config"]["dataset"], cell["config"]["epsilon"]) in CHECKED:
                yield cell

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """Both figures of one setting."""
        setting = setting_of(cell)
        return check(setting, int(costs(setting)["updates"]))

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The table."""
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, [_record(row) for row in rows]))


EXPERIMENT = Certificate()


def _record(row: Row) -> dict[str, Any]:
    config = row["config"]
    difference = row["interval"] - row["floating"]
    return {
        **row,
        "dataset": config["dataset"],
        "target": config["epsilon"],
        "difference": difference,
    }


def check(setting: PaperSetting, updates: int) -> Row:
    """Epsilon of so many updates, in floating point and from an interval certificate."""
    charges = [*((event, 1) for event in setting.setup), (setting.trial, updates)]
    delta = DELTA * (1 - CAP_SHARE)
    known = proven.composed_epsilon(proven.compose(charges), delta)
    order = round(known.order, 2)
    found = [one_update(setting, order, direction) for direction in proven.DIRECTIONS]
    rest = iv.mpf(0)
    for event in setting.setup:
        assert isinstance(event, Gaussian)
        rest += iv.mpf(order) / (2 * iv.mpf(event.noise_multiplier) ** 2)
    epsilons = [converted(order, updates * each.divergence + rest, delta) for each in found]
    return {
        "updates": updates,
        "order": order,
        "lines": max(each.lines for each in found),
        "floating": known.upper,
        "interval": float(max(epsilons)) * (1 + 2**-50),
    }


@dataclass(frozen=True)
class Bound:
    """The divergence of one accepted update, from above, and how many lines certify it."""

    divergence: Any
    lines: int


def one_update(setting: PaperSetting, order: float, direction: Direction) -> Bound:
    """The Rényi divergence of one accepted update, bounded by an interval certificate."""
    iv.prec = mp.prec = BITS
    update, test = setting.trial.update, setting.trial.gate
    assert isinstance(update, SampledGaussian)
    assert isinstance(test, LossTest)
    size = setting.dataset_size
    q, q_v = iv.mpf(setting.batch_size) / size, iv.mpf(setting.val_batch_size) / size
    s, alpha = iv.mpf(update.noise_multiplier), iv.mpf(order)
    # The gate may accept less often by 2^-53 (the noise ends somewhere): as in the library.
    spread = 2 * iv.mpf(test.noise_multiplier)
    beta = iv.mpf(test.accept_threshold)
    r = _upper(_phi((beta + 1) / spread) / (_phi((beta - 1) / spread) - iv.mpf(2) ** -53))
    # Proposals of the library: centre, lines, range and mesh.
    four = proven.SelectiveUpdate.of(update.sample_rate, update.noise_multiplier, test)
    both = bracket(four.sample_rate, four.noise_multiplier, order, direction, NODES)
    corner = vertices(four.accept_ratio, four.val_sample_rate)
    chord = frame(both.chord, both.tails, corner, order, direction, 0.0)
    proposal = envelope(chord, 1e-6)
    nodes = mesh(four.sample_rate, four.noise_multiplier, order, direction, NODES)
    atoms = Atoms(q, s, q_v, r, alpha, direction, [iv.mpf(float(z)) for z in nodes])
    lines = [
        (iv.mpf(line.slope), atoms.height(iv.mpf(line.slope), iv.mpf(line.height), values=True))
        for line in proposal.lines
    ]
    high = atoms.height(iv.mpf(-1), iv.mpf(edge(chord, 1.0)[0]), values=False)
    low = atoms.height(iv.mpf(1), iv.mpf(-edge(chord, -1.0)[0]), values=False)
    start, end = max(_lower(1 - low), _lower(1 / r)), min(_upper(1 + high), _upper(r))
    excess = _largest(lines, alpha, start, end)
    return Bound(iv.log(1 + excess) / (alpha - 1), len(lines))


class Atoms:
    """The mesh as atoms whose sums bound expectations of convex functions of L (Lemmas 9 to 11)."""

    def __init__(
        self, q: Any, s: Any, q_v: Any, r: Any, alpha: Any, direction: Direction, nodes: list[Any]
    ) -> None:
        self._q, self._s, self._r, self._alpha = q, s, r, alpha
        self._add = direction == "add"
        ratios = [iv.exp((2 * z - 1) / (2 * s**2)) for z in nodes]
        weights = [iv.mpf(0)] * len(nodes)
        for i in range(len(nodes) - 1):
            mass0 = _mass(nodes[i] / s, nodes[i + 1] / s)
            mass1 = _mass((nodes[i] - 1) / s, (nodes[i + 1] - 1) / s)
            right = (mass1 - ratios[i] * mass0) / (ratios[i + 1] - ratios[i])
            weights[i] += mass0 - right
            weights[i + 1] += right
        corners = ((1, 1), (1, 1 - q_v + q_v * r), (r, (1 - q_v) * r + q_v), (r, r))
        # by atom and vertex: w den phi(x), w den (x - 1), w den, with u0 = 1
        self._terms: list[list[tuple[Any, Any, Any]]] = []
        self._floor = iv.mpf(0)
        for weight, odds in zip(weights, ratios, strict=True):
            ratio = 1 - q + q * odds
            each = []
            for a0, a1 in corners:
                den, num = (iv.mpf(a0), ratio * a1) if self._add else (ratio * a1, iv.mpf(a0))
                x = num / den
                phi = iv.exp(alpha * iv.log(x)) - 1 - alpha * (x - 1)
                each.append((weight * den * phi, weight * den * (x - 1), weight * den))
            self._terms.append(each)
            self._floor += min(_lower(term[2]) for term in each)
        self._moment, self._outside = self._tails(nodes[0], nodes[-1])
        powers = [
            iv.exp(alpha * iv.log(top) + (1 - alpha) * iv.log(bottom))
            for a0, a1 in corners
            for top, bottom in [(a1, a0) if self._add else (a0, a1)]
        ]
        self._most = max(_upper(power) for power in powers)

    def height(self, slope: Any, height: Any, *, values: bool) -> Any:
        """The least height found, from `height` on, at which the expectation is at most 0.

        Of den phi(x) - slope den (x - 1) - height den with `values`, else without its first term.
        """
        total = iv.mpf(0)
        for each in self._terms:
            total += max(
                _upper((value if values else 0) - slope * lean - height * den)
                for value, lean, den in each
            )
        total += self._r * self._outside * 2 * (abs(height) + abs(slope))
        if values:
            total += self._most * self._moment + self._r * self._outside * (self._alpha - 1)
        return iv.mpf(_upper(height + iv.mpf(max(_upper(total), 0)) / _lower(self._floor)))

    def _tails(self, low: Any, high: Any) -> tuple[Any, Any]:
        """E[L^p] and P0 + P1 outside of the mesh, from above (Lemma 11)."""
        s, q = self._s, self._q
        power = self._alpha if self._add else 1 - self._alpha
        ratio = {z: 1 - q + q * iv.exp((2 * z - 1) / (2 * s**2)) for z in (low, high)}
        left, right = _phi(low / s), _phi(-high / s)
        mass = 2 * (left + right) + q * (_phi((low - 1) / s) + _phi((1 - high) / s))
        if self._add:
            k = power / s**2
            far = iv.exp(-k * high + k**2 * s**2 / 2) * _phi((k * s**2 - high) / s)
            moment = _raised(ratio[high], power) * far + _raised(ratio[low], power) * left
        else:
            k = -power * (ratio[low] - 1 + q) / (s**2 * ratio[low])
            far = iv.exp(k * low + k**2 * s**2 / 2) * _phi((k * s**2 + low) / s)
            moment = _raised(ratio[low], power) * far + _raised(ratio[high], power) * right
        return iv.mpf(_upper(moment)), iv.mpf(_upper(mass))


def _largest(lines: Sequence[tuple[Any, Any]], alpha: Any, start: Any, end: Any) -> Any:
    """The largest bound on Mom - 1 for any ρ in the range, a line of choice on each piece."""
    cuts = [start + (end - start) * k / PIECES for k in range(PIECES + 1)]

    def bound(line: tuple[Any, Any], rho: Any) -> Any:  # Lemma 8, with c = m + alpha
        c = line[0] + alpha
        return _raised(iv.mpf(rho), -alpha) * (line[1] + 1 - c + c * iv.mpf(rho)) - 1

    worst = iv.mpf(0)
    for low, high in pairwise(cuts):
        values = []
        for line in lines:
            slope, height = line
            ends = [_upper(bound(line, low)), _upper(bound(line, high))]
            flat = (alpha - 1) * (slope + alpha)
            if _lower(flat) <= 0 <= _upper(flat):
                continue
            still = 1 + (slope - alpha * height) / flat
            if _upper(still) >= low and _lower(still) <= high:
                ends.append(_upper(bound(line, still)))
            values.append(max(ends))
        worst = max(worst, min(values))
    return iv.mpf(_upper(iv.mpf(worst)))


def converted(order: float, divergence: Any, delta: float) -> Any:
    """Epsilon at delta of a Rényi divergence, from above: the smaller of (a) and (b), section 8."""
    alpha, d = iv.mpf(order), iv.mpf(delta)
    plain = divergence + iv.log(1 - 1 / alpha) - iv.log(alpha * d) / (alpha - 1)
    moment = iv.exp((alpha - 1) * divergence) - 1
    gap = moment - alpha * (alpha - 1) * d
    p = iv.mpf(1)
    if _lower(gap) > 0 and _upper(alpha * moment * d / gap) < 1:
        p = alpha * moment * d / gap
    other = iv.log(p - d) - (alpha * iv.log(p) - iv.log(moment + alpha * p)) / (alpha - 1)
    return min(_upper(plain), _upper(other))


def _raised(base: Any, power: Any) -> Any:
    return iv.exp(power * iv.log(base))


def _upper(value: Any) -> Any:
    return mp.mpf(iv.mpf(value).b)


def _lower(value: Any) -> Any:
    return mp.mpf(iv.mpf(value).a)


def _phi(x: Any) -> Any:
    """The normal distribution function: mpmath's erfc at both ends, widened."""
    ends = [mp.erfc(-end / mp.sqrt(2)) / 2 for end in (_lower(x), _upper(x))]
    slack = mp.mpf(2) ** -TRUSTED
    return iv.mpf([ends[0] * (1 - slack), ends[1] * (1 + slack)])


def _mass(a: Any, b: Any) -> Any:
    """The normal mass of an interval, from the tail in which nothing cancels."""
    if _lower(a) >= 0:
        return _phi(-a) - _phi(-b)
    return _phi(b) - _phi(a)
