"""Drawings of the algorithm: they show how it works, not what was measured, and need no rows."""

from collections.abc import Iterator, Sequence

from reproduction.artifacts import Artifact, Picture
from reproduction.base import Cell, Experiment, Options, Row
from reproduction.experiments.schematics import (
    clipping,
    concepts,
    evaluation,
    sequence,
    workflow,
)


class Schematics(Experiment):
    """Five drawings and no rows."""

    name = "schematics"

    def cells(self, options: Options) -> Sequence[Cell]:  # noqa: ARG002
        """There is nothing to measure."""
        return ()

    def make(self, cells: Sequence[Cell], options: Options) -> Iterator[Row]:  # noqa: ARG002
        """There is nothing to measure."""
        return iter(())

    def render(self, rows: Sequence[Row]) -> list[Artifact]:  # noqa: ARG002
        """The drawings."""
        return [
            Picture("schematic-concepts", concepts.draw),
            Picture("schematic-workflow", workflow.draw, png=True),
            Picture("schematic-evaluation", evaluation.draw),
            Picture("schematic-clipping", clipping.draw),
            Picture("schematic-sequence", sequence.draw),
        ]


EXPERIMENT = Schematics()
