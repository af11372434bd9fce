"""How much the number of rejected trials tells by itself, at the paper's settings."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dpsur.privacy.budget import Budget
from dpsur.privacy.events import LossTest
from dpsur.privacy.plan import CONSTANT, DELAY, NOT_HIDDEN, least_cap
from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.audits.rejection_leak import count_leak
from reproduction.audits.repetitions import epsilon_lower_bound
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.experiments.accounting import costs, setting_cells, setting_of
from reproduction.presets.settings import DELTA

BLOCKS = (1, 1000, 10_000)
RUNS = 200_000
TITLE = "What the number of rejected trials tells"
TEXT = f"""
Under the proven accounting the number of rejected trials is private, and it shows in the time that
a run takes. Here someone sees that number and nothing else. A record sways every test batch that it
is in, the way that tells most; the other records leave the acceptance probability where it tells
most (a_min), or where nothing speaks for or against a candidate (a(0)). The ε of the count alone is
computed from its law, at δ = {DELTA:g}; *advantage* is the most that guessing with and without the
record can gain over chance, at a_min. *Seen*: a lower bound at 95% from {RUNS:,} counts drawn with
and without the record.

What helps, at a_min. *Blocks*: the count is rounded up to whole blocks of trials, as by a run that
continues, with results that are dropped, until a block is full. *Delays*: after an accepted update
the run waits for as long as another search takes at a_min (`--hide-rejections delay`). *Constant*:
it continues to a number of trials that is fixed in advance (`--hide-rejections constant`), and the
count tells nothing: its ε is 0. *Time* is relative to a run that hides nothing at a(0), counted in
trials.
"""
COLUMNS = (
    Column("data set", "dataset"),
    Column("epsilon", "epsilon"),
    Column("T", "updates"),
    Column("proven ε", "proven", ".3f"),
    Column("ε of the count at a(0)", "usual", ".3f"),
    Column("ε of the count at a_min", "worst", ".3f"),
    Column("advantage", "advantage", ".3f"),
    Column("seen", "seen", ".3f"),
    Column("blocks of 1,000", "block_1000", ".3f"),
    Column("blocks of 10,000", "block_10000", ".3f"),
    Column("delays", "delayed", ".3f"),
    Column("time with delays", "delay_time", ".2f"),
    Column("time of constant", "constant_time", ".2f"),
)


class Rejections(OneByOne):
    """One row per setting of the paper."""

    name = "rejections"

    def cells(self, options: Options) -> Iterator[Cell]:  # noqa: ARG002
        """The paper's settings."""
        yield from setting_cells()

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """Exact leaks, and what a number of counts shows."""
        setting = setting_of(cell)
        test = setting.trial.gate
        assert isinstance(test, LossTest)
        known = costs(setting)
        updates = int(known["updates"])
        worst = count_leak(test, test.accept_min, updates, DELTA)
        counts = np.random.default_rng(0).negative_binomial
        without, swayed = (
            counts(updates, accept, RUNS).astype(float) for accept in (worst.accept, worst.swayed)
        )
        # more rejections speak against the record where it makes acceptance likelier
        sign = -1.0 if worst.swayed > worst.accept else 1.0
        return {
            **known,
            "usual": count_leak(test, test.acceptance(0.0), updates, DELTA).epsilon,
            "worst": worst.epsilon,
            "advantage": worst.advantage,
            "seen": epsilon_lower_bound(sign * swayed, sign * without, DELTA).epsilon,
            "blocks": {
                str(block): count_leak(test, test.accept_min, updates, DELTA, block).epsilon
                for block in BLOCKS
            },
            "delayed": count_leak(test, test.accept_min, updates, DELTA, delayed=True).epsilon,
            "time": _times(test, updates, Budget(known["epsilon"]["proven"], DELTA)),
        }

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The table."""
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, [_record(row) for row in rows]))


EXPERIMENT = Rejections()


def _times(test: LossTest, updates: int, budget: Budget) -> dict[str, float]:
    """Trials of a run that hides nothing, that waits, and that makes a constant number."""
    usual = updates / test.acceptance(0.0)
    return {
        NOT_HIDDEN: usual,
        DELAY: usual + updates / test.accept_min,
        CONSTANT: least_cap(test, updates, budget),
    }


def _record(row: Row) -> dict[str, Any]:
    blocks = {f"block_{block}": row["blocks"][str(block)] for block in BLOCKS}
    time = row["time"]
    times = {f"{way}_time": time[way] / time[NOT_HIDDEN] for way in (DELAY, CONSTANT)}
    return {**row, **row["config"], "proven": row["epsilon"]["proven"], **blocks, **times}
