"""Sentences about attacks, with the figures of the rows."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from reproduction.base import Options
from reproduction.experiments.membership import EXPERIMENT as MEMBERSHIP
from reproduction.experiments.membership import NONPRIVATE, PIXELS
from reproduction.experiments.membership import summary as membership_summary
from reproduction.page_figures.records import BUDGETS, INTERVAL, NUMBER, Claim, rows_of, shown


@cache
def attack_records() -> list[dict[str, Any]]:
    """Figures of all attacks."""
    return list(membership_summary(rows_of("membership")))


def attacked(task: str, attack: str) -> dict[str, Any]:
    """The balanced accuracy of an attack on targets without privacy."""
    records = attack_records()
    cell = {"task": task, "target": NONPRIVATE, "attack": attack}
    return next(r for r in records if cell.items() <= r.items())


def range_of_attacks(*, private: bool, names: Sequence[str]) -> tuple[float, float]:
    """Least and most accuracy of attacks."""
    found = [
        r["accuracy"]
        for r in attack_records()
        if (r["target"] != NONPRIVATE) == private and r["attack"] in names
    ]
    return min(found), max(found)


def private_targets() -> list[dict[str, Any]]:
    """Attacks on targets that were trained privately."""
    return [r for r in attack_records() if r["target"] != NONPRIVATE]


def better_attacks() -> dict[tuple[Any, ...], dict[str, Any]]:
    """Figures of RMIA, the best of the better attacks, by private target that has them."""
    rows = [r for r in rows_of("membership") if r["config"]["method"] != NONPRIVATE]
    rows = [row for row in rows if row["config"]["shadow_models"]]
    places = [tuple(r["config"][k] for k in ("task", "method", "epsilon")) for r in rows]
    named = {("fmnist", method, e) for method in ("dpsur", "dpsgd") for e in BUDGETS}
    assert set(places) == named | {("cifar10", *place[1:]) for place in named}
    return {place: r["attacks"]["rmia-online"] for place, r in zip(places, rows, strict=True)}


def _about_attacks() -> Iterator[Claim]:
    both = ("shadow", "white-box")
    for task, name in (("fmnist", "Fashion-MNIST"), ("cifar10", "CIFAR-10")):
        found = [attacked(task, attack) for attack in both]
        yield (
            rf"{NUMBER} and {NUMBER} on {name} \(paper {NUMBER} and {NUMBER}\)",
            shown(".3f", [*(r["accuracy"] for r in found), *(r["paper"] for r in found)]),
        )
    gap = [attacked(task, "gap")["accuracy"] for task in ("fmnist", "cifar10")]
    yield rf"is a member reaches {NUMBER} and {NUMBER}", shown(".3f", gap)
    lots = range_of_attacks(private=False, names=[f"{name}, shuffled" for name in both])
    yield rf"drawn by lot they stay between {NUMBER} and {NUMBER}", shown(".3f", lots)
    private = range_of_attacks(private=True, names=both)
    yield rf"On private targets they stay between {NUMBER} and {NUMBER}", shown(".3f", private)
    better = better_attacks()
    areas = {place: figures["auc"] for place, figures in better.items()}
    above = sum(area["low"] > 0.5 for area in areas.values())
    yield rf"on one seed of all {NUMBER} private targets but those on pixels", (str(len(better)),)
    yield rf"than its interval on {NUMBER} of the {NUMBER}", (str(above), str(len(better)))
    most = max(better, key=lambda place: areas[place]["value"])
    assert most == ("cifar10", "dpsur", 4)
    figures = [better[most][name][k] for name in ("balanced_accuracy", "auc") for k in INTERVAL]
    yield (
        rf"an accuracy of {NUMBER} \({NUMBER} to {NUMBER}\), and an area of "
        rf"{NUMBER} \({NUMBER} to {NUMBER}\)",
        shown(".3f", figures),
    )
    learned = [
        extreme(r["test"] for r in private_targets() if r["task"] == task)
        for task in ("fmnist", "cifar10")
        for extreme in (min, max)
    ]
    yield (
        rf"classify {NUMBER} to {NUMBER} correctly on Fashion-MNIST and {NUMBER} to {NUMBER} on",
        shown(".3f", learned),
    )
    grid = [cell for cell in MEMBERSHIP.cells(Options()) if cell["config"]["method"] != PIXELS]
    made = {MEMBERSHIP.key(row) for row in rows_of("membership")}
    assert {MEMBERSHIP.key(cell) for cell in grid} <= made


def claims() -> Iterator[Claim]:
    """All of them."""
    yield from _about_attacks()
