"""Wrong mechanisms, each with the law that it breaks: the law holds, and not for the mutant."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest


class Mutant(NamedTuple):
    """A law, and a change of the code that breaks it."""

    law: Callable[[], None]
    apply: Callable[[pytest.MonkeyPatch], None]


def law_tests(mutants: Sequence[Mutant]) -> tuple[Callable[..., None], Callable[..., None]]:
    """A test that every law holds, and one that it finds its mutants."""
    laws = sorted({mutant.law for mutant in mutants}, key=lambda law: law.__name__)

    @pytest.mark.parametrize("law", laws, ids=lambda law: law.__name__)
    def law_holds(law):
        law()

    names = [f"{mutant.apply.__name__}-{mutant.law.__name__}" for mutant in mutants]

    @pytest.mark.parametrize("mutant", mutants, ids=names)
    def mutant_is_killed(mutant, monkeypatch):
        mutant.apply(monkeypatch)
        with pytest.raises(AssertionError):
            mutant.law()

    return law_holds, mutant_is_killed
