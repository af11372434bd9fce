"""What the parts of the rule of the gate block are worth, on held-out training records."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpsur.mechanism import rate_search
from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Cell, Options, Row
from reproduction.selection_runs import CASES, SelectionRuns, cell_of, made_together
from reproduction.series import series
from reproduction.training import limit_gpu_share

EPSILON, SEEDS = 1, (0, 1)
TITLE = "The rule of the gate block, part by part"
TEXT = f"""
Mean accuracy in percent on a sixth of the training records that was held out, epsilon {EPSILON}, up
to {len(SEEDS)} seeds: the gate block as it is, and with one part of its rule changed. The rule was
chosen by these and by earlier runs on held-out records ([selection](../selection.md)).
"""


@dataclass(frozen=True)
class Variant:
    """A change of the rule: options of the method, the power of the length, the head start."""

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    power: float = rate_search.LENGTH_POWER
    head_start: bool = True


VARIANTS = {
    "usual": Variant("as it is"),
    "no head start": Variant("last block from the first weights", head_start=False),
    "power 0": Variant("last rate that of the best block", power=0.0),
    "power 0.5": Variant("last rate falls with the root of the length", power=0.5),
    "blocks 4": Variant("four short blocks", {"blocks": 4}),
    "updates 20": Variant("short blocks of 20 updates", {"block_updates": 20}),
}


class SelectionRule(SelectionRuns):
    """One row per case, variant and seed."""

    name = "selection-rule"

    def cells(self, options: Options) -> Iterator[Cell]:
        """All variants of a case after each other; `--arms` names variants."""
        for case in CASES.values():
            for name, variant in VARIANTS.items():
                if options.ask_for(case.name, name, EPSILON):
                    for seed in options.seeds or SEEDS:
                        cell = cell_of(
                            case, "block-free", EPSILON, seed, hold_out=True, **variant.options
                        )
                        rule = {"power": variant.power, "head_start": variant.head_start}
                        yield {**cell, "config": {**cell["config"], "variant": name, **rule}}

    def make(self, cells: Sequence[Cell], options: Options) -> Iterator[Row]:
        """Train the seeds of a variant together."""
        limit_gpu_share(options)
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            config = cell["config"]
            groups.setdefault((config["case"], config["variant"]), []).append(cell)
        for names in options.share(list(groups)):
            if options.takes(f"{self.name} {names}"):
                yield from made_together(groups[names], options.device)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """A line for each variant, a column for each case."""
        found = {
            (name, case): points[0].mean
            for name in VARIANTS
            for case in CASES
            for points in (series(_accuracies(rows, name, case)),)
            if points
        }
        shown = [case for case in CASES if any(place == case for _, place in found)]
        records = [
            {"variant": variant.label, **{case: found.get((name, case)) for case in shown}}
            for name, variant in VARIANTS.items()
        ]
        columns = (
            Column("rule", "variant"),
            *(Column(CASES[case].label, case, ".1f") for case in shown),
        )
        return table_page(self.name, TITLE, TEXT, Table(columns, records))


def _accuracies(rows: Sequence[Row], variant: str, case: str) -> list[tuple[float, float]]:
    wanted = {"variant": variant, "case": case}.items()
    return [(0.0, row["accuracy"]) for row in rows if wanted <= row["config"].items()]


EXPERIMENT = SelectionRule()
