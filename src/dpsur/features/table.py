"""Rows of norm 1 from the inputs of a table, for a linear model that bends.

Declared ranges are guesses: a column that is declared from 0 to 100 may have nearly all of its
records between 58 and 64, and a linear model of the scaled numbers would see none of it. So every
number is replaced by its noisy quantile, and joined by soft bins of it: a linear model of those is
a piecewise linear function of each column. Categories stay as they are. A constant is added, and
every row is brought to norm 1, so that one clip norm and one learning rate suit every table.
Products of columns do not pay: hashed pairs and random features were worse on most tables.

Texts as rows of weighted words, without looking at any other text.

Formal guarantee: the row of a text depends on that text alone. Words are hashed to places, so there
is no vocabulary to learn from private texts, and the weights come from no private count. So the
rows cost no privacy.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.features.hashing import hashed_counts
from dpsur.privacy.events import Event

# Soft bins of a number: with 8 the mean AUC on held-out records is the same.
BINS = 12
# What the constant is beside columns that have a norm of about 1 together.
CONSTANT = 0.3
# Histograms of more columns have more noise than they are worth; such numbers stay as they are.
MOST_NUMBERS = 64
# Edges of the histograms on the scaled range: even ones, and finer ones towards both ends, where
# the records of a range that was declared too wide are.
_EVEN, _FINER = 128, 8
# Share of a range's quantiles that is spread evenly over it, whatever the histogram says.
_EVEN_SHARE = 0.1


def grid() -> Tensor:
    """The edges of the histograms, from -1 to 1."""
    even = torch.linspace(-1, 1, _EVEN + 1, dtype=torch.float64)
    steps = 2.0 / _EVEN * 2.0 ** -torch.arange(1, _FINER + 1, dtype=torch.float64)
    return torch.cat([even, -1 + steps, 1 - steps]).sort().values


@dataclass(frozen=True)
class TableLayout:
    """Where the numbers are among the inputs of a table: all of it public, from its schema.

    `width` inputs come from `columns` columns; those at `numbers` are scaled numbers, the rest are
    categories and weighted words. `charged` is what it cost to learn the schema.
    """

    width: int
    columns: int
    numbers: tuple[int, ...]
    charged: tuple[Event, ...] = ()

    def binned(self) -> "TableLayout":
        """The same without the numbers where there are too many of them for histograms."""
        few = len(self.numbers) <= MOST_NUMBERS
        return self if few else TableLayout(self.width, self.columns, ())

    @property
    def features(self) -> int:
        return 1 + self.width + BINS * len(self.binned().numbers)


def levels_of(counts: Tensor, noise: float) -> Tensor:
    """Quantiles of the edges of `grid`, scaled to [-1, 1], from noisy counts of each column.

    Counts below the standard deviation of their noise count as none. The fewer records there are
    for the noise, the more evenly the quantiles are spread.
    """
    edges = grid().to(counts.device)
    widths = edges.diff() / 2
    kept = torch.where(counts > noise, counts, torch.zeros_like(counts))
    total = kept.sum(1, keepdim=True)
    # about what noise alone would leave: its mean above one standard deviation
    spurious = 0.242 * noise * len(widths)
    even = (spurious / (total + 1e-9)).clamp(_EVEN_SHARE, 1)
    shares = (1 - even) * kept / total.clamp(min=1e-9) + even * widths
    below = torch.cat([torch.zeros_like(total), shares.cumsum(1)], dim=1)
    return 2 * below / below[:, -1:] - 1


class TableRows(nn.Module):
    """A constant, the inputs with numbers as quantiles, and soft bins of those; of norm 1.

    `levels` are quantiles of the edges of `grid` for each number. Those of private records must be
    private ones, released and charged before they get here.
    """

    def __init__(
        self, width: int, columns: int, numbers: Sequence[int], levels: Tensor | None = None
    ) -> None:
        super().__init__()
        checks.at_least_one("width", width)
        checks.at_least_one("columns", columns)
        if any(not 0 <= place < width for place in numbers):
            raise InvalidInputError(f"numbers must be places among {width} inputs, got {numbers}")
        self.width, self.columns, self.numbers = width, columns, list(numbers)
        if not self.numbers:
            return
        edges = grid()
        if levels is None:
            levels = edges.expand(len(self.numbers), -1)
        if levels.shape != (len(self.numbers), len(edges)) or not levels.isfinite().all():
            raise InvalidInputError(
                f"levels must hold {len(edges)} finite numbers for each of {len(self.numbers)} "
                f"columns; got shape {tuple(levels.shape)}"
            )
        self.register_buffer("levels", levels.detach().float().clone())
        self.register_buffer("edges", edges.float(), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        parts = [inputs]
        if self.numbers:
            found = self._quantiles(inputs[:, self.numbers])
            parts = [inputs.index_copy(1, _places(self.numbers, inputs), found), _bins(found)]
        rows = torch.cat(parts, dim=1) / math.sqrt(self.columns)
        return F.normalize(torch.cat([rows.new_full((rows.shape[0], 1), CONSTANT), rows], dim=1))

    def _quantiles(self, values: Tensor) -> Tensor:
        edges, levels = self.get_buffer("edges"), self.get_buffer("levels")
        values = values.clamp(-1, 1)
        if torch.compiler.is_exporting():  # ONNX has no search, and a sum is the same
            after = (values.unsqueeze(2) > edges).sum(2)
        else:
            after = torch.searchsorted(edges, values.contiguous())
        after = after.clamp(1, len(edges) - 1)
        low, high = edges[after - 1], edges[after]
        at = levels.t().gather(0, after), levels.t().gather(0, after - 1)
        return at[1] + (values - low) / (high - low) * (at[0] - at[1])


def _places(numbers: list[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device)


def _bins(values: Tensor) -> Tensor:
    """How near each value is to each of the `BINS` points that part [-1, 1] evenly."""
    points = torch.linspace(-1, 1, BINS, dtype=values.dtype, device=values.device)
    apart = (values.unsqueeze(2) - points).abs() * (BINS - 1) / 2
    return (1 - apart).clamp(min=0).flatten(1)


#: Numbers of a row, unless another number is asked for.
WORDS_DIMENSION = 8192


def words(texts: Iterable[str], dimension: int = WORDS_DIMENSION) -> Tensor:
    """One row of norm 1 for every text, (N, dimension): log counts of its words, hashed.

    Case is ignored and the hundred most common English words are left out. A text without any other
    word is a row of zeros. Use the same function on texts that the trained model is to see.
    """
    checks.at_least_one("dimension", dimension)
    if isinstance(texts, str):
        raise InvalidInputError("texts must be a list of texts, got one text; write [text]")
    listed = list(texts)
    for number, text in enumerate(listed):
        if not isinstance(text, str):
            raise InvalidInputError(
                f"texts must hold strings, but item {number} is of type {type(text).__name__}"
            )
    return torch.nn.functional.normalize(torch.from_numpy(hashed_counts(listed, dimension)))
