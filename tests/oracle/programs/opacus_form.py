"""What programs come to in the Opacus form (`loss.backward(); optimizer.step()`).

There the loss is computed from the outputs of the whole batch, by code that the engine can only check.
It accepts what it knows and refuses the rest; what no check can see is a limit with a name, and the
statement of such a training says "checked".
"""

from tests.oracle.harness import BOUNDED, REFUSED_OR_BOUNDED, Expected, limit

LIMITS: dict[str, tuple[str, ...]] = {}
REFUSED: dict[str, tuple[str, ...]] = {}


def expected(family: str, name: str) -> Expected:
    """What the program of a family is expected to come to."""
    for words, programs in LIMITS.items():
        if f"{family}: {name}" in programs:
            return limit(words)
    return REFUSED_OR_BOUNDED if name in REFUSED.get(family, ()) else BOUNDED
