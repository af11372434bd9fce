"""Training programs as users write them, by family.

A program is a function that makes a `Setup`; a decorator says of which records, whether its records
may meet, and what it should come to in each form.
"""

from collections.abc import Callable

from tests.oracle.harness import BOUNDED, Expected, Program, Setup, refused
from tests.oracle.programs import opacus_form
from tests.oracle.records import Kind

PROGRAMS: list[Program] = []

Make = Callable[[], Setup]


def add(
    kind: Kind,
    make: Make,
    *,
    family: str,
    name: str = "",
    legitimate: bool,
    private_step: Expected | None = BOUNDED,
    opacus: Expected | None = BOUNDED,
    fit: Expected | None = None,
    draws: bool = False,
) -> None:
    """Note a program; a form of None does not exist for it."""
    name = name or make.__name__.replace("_", " ")
    if opacus is BOUNDED:
        opacus = opacus_form.expected(family, name)
    forms = {"private_step": private_step, "opacus": opacus, "fit": fit}
    expected = {form: outcome for form, outcome in forms.items() if outcome is not None}
    assert (family, name) not in {(p.family, p.name) for p in PROGRAMS}, (family, name)
    PROGRAMS.append(Program(name, family, kind, make, expected, legitimate, draws))


def family(name: str) -> tuple[Callable[..., Callable[[Make], Make]], ...]:
    """Decorators for programs of a family: `legitimate`, and `coupled` for records that meet."""

    def decorator(is_legitimate: bool) -> Callable[..., Callable[[Make], Make]]:
        def of(kind: Kind, **options: object) -> Callable[[Make], Make]:
            def note(make: Make) -> Make:
                add(kind, make, family=name, legitimate=is_legitimate, **options)  # type: ignore[arg-type]
                return make

            return note

        return of

    return decorator(True), decorator(False)


def all_programs() -> list[Program]:
    """Every program of every family."""
    from tests.oracle.programs import (  # noqa: F401
        attributes,
        batches,
        hugging_face,
        layers,
        loops,
        losses,
        mixing,
        several_calls,
        state,
        weights,
    )

    return PROGRAMS


__all__ = ["BOUNDED", "PROGRAMS", "add", "all_programs", "family", "refused"]
