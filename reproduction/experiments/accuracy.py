"""The paper's table of accuracies, every cell of it, and the arms that explain DPSUR's column."""

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from reproduction.arms import (
    ADAPTIVE_DPAGD,
    ARMS,
    DPSGD_PUBLISHED,
    DPSUR_ARMS,
    FAULT_ARMS,
    HF_PUBLISHED,
    METHOD_ARMS,
    NETWORK_ARMS,
    RELEASED_COMMANDS,
    RELEASED_DPAGD,
    RELEASED_NETWORK,
    TS_FIXED,
    TS_TRAMER_BONEH,
)
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Options, Row
from reproduction.experiments.accuracy_pages import draw_accuracy, extra_pages, has_points
from reproduction.experiments.paper_figures import figure_pages, state_page
from reproduction.experiments.sixteen import plain_arm, sixteen_pages
from reproduction.presets.settings import EPSILONS
from reproduction.training import TrainingCell, TrainingGrid, mean_and_spread

TASKS = ("fmnist", "mnist", "cifar10", "imdb")
MANY, FEW = tuple(range(5)), tuple(range(3))
MAIN_ARMS = ("published", "proven", "proven-pld", "released-code")
SIDE_EPSILONS = (1, 3)
# Where the proven figure is that of another accounting than `proven`.
PROVEN_FIGURES = {"proven-pld": "proven_pld"}
# The method of the paper's table that an arm stands beside, where it is not the arm's own name.
PAPER_METHODS = {
    **{
        arm.name: "dpsur" for arm in (*DPSUR_ARMS, *FAULT_ARMS, RELEASED_COMMANDS, RELEASED_NETWORK)
    },
    **{arm.name: arm.preset_of for arm in NETWORK_ARMS},
    HF_PUBLISHED.name: "dpsgd-hf",
    DPSGD_PUBLISHED.name: "dpsgd",
    TS_TRAMER_BONEH.name: "dpsgd-ts",
    TS_FIXED.name: "dpsgd-ts",
    ADAPTIVE_DPAGD.name: "dpagd",
    RELEASED_DPAGD.name: "dpagd",
}
TITLE = "Accuracy, beside the paper's"
TEXT = """
Accuracy in percent on the public test set of the last iterate (of DPIS on CIFAR-10: of the average
of weights that it releases), mean and standard deviation over seeds, beside the paper's figure.
DPSUR is shown in several arms: Algorithm 1 as the paper states it, by the published accounting and
by the proven one; the code that was released, whose epsilon is a claim; controls; and the faults of
that code one at a time. On IMDb every arm takes the ranks of words as public, as the paper does,
although they were counted on these reviews. All other private methods are charged by proven
accountings, but for one line of DPSGD-HF. *Proven epsilon* is blank where every trial is charged,
since *epsilon* is proved there, and for the released code, controls and single faults, for which
none is known. Settings are those of the preset `paper`; where the paper gives none they were chosen
on held-out training records. In the figure, bars are one standard deviation, grey ticks the paper's
figures, and an open marker says that the epsilon is a claim. [The main cells in
short](accuracy_short.md); [DPSUR's sixteen cells with intervals](accuracy_sixteen.md) and [the test
against a coin](accuracy_coin.md); [the released code against the paper](accuracy_agreement.md);
[ours minus the paper's in every cell](accuracy_differences.md); [what the authors
committed](accuracy_committed.md), [and the losses of their runs](accuracy_losses.md).
"""
COLUMNS = (
    Column("data set", "task"),
    Column("what", "label"),
    Column("accounting", "accounting"),
    Column("epsilon", "epsilon"),
    Column("accuracy", "mean", ".2f"),
    Column("+-", "spread", ".2f"),
    Column("seeds", "seeds"),
    Column("paper", "paper", ".2f"),
    Column("difference", "difference", "+.2f"),
    Column("updates", "updates", ".0f"),
    Column("trials", "trials", ".0f"),
    Column("proven epsilon", "proven", ".3f"),
    Column("made on", "made_on"),
)


class Accuracy(TrainingGrid):
    """One row per data set, arm, budget and seed."""

    name = "accuracy"

    def runs(self, seeds: tuple[int, ...] | None) -> Iterator[TrainingCell]:
        """Main arms of DPSUR first, then the other methods, then the controls."""
        for task in TASKS:
            for epsilon in EPSILONS:
                for arm in MAIN_ARMS:
                    yield from _seeds(task, arm, epsilon, seeds or MANY)
        if seeds is None or set(MANY) <= set(seeds):
            yield from _seeds("fmnist", HF_PUBLISHED.name, 3, seeds or MANY)
        for task in TASKS:
            for epsilon in EPSILONS:
                for method in METHOD_ARMS:
                    if applies(method.name, task) and (method.name != "nonprivate" or epsilon == 1):
                        few = MANY if method.name == plain_arm(task) else FEW
                        yield from _seeds(task, method.name, epsilon, seeds or few)
        for epsilon in EPSILONS:
            yield from _seeds("imdb", RELEASED_COMMANDS.name, epsilon, seeds or MANY)
            yield from _seeds("imdb", RELEASED_NETWORK.name, epsilon, seeds or MANY)
            for other in NETWORK_ARMS:
                if other.preset_of != "nonprivate" or epsilon == 1:
                    yield from _seeds("imdb", other.name, epsilon, seeds or FEW)
        for task in ("imdb", "cifar10"):  # where plain DPSGD is above the paper by most
            for epsilon in EPSILONS:
                yield from _seeds(task, DPSGD_PUBLISHED.name, epsilon, seeds or FEW)
        for task in TASKS:
            for epsilon in EPSILONS:
                yield from _seeds(task, RELEASED_DPAGD.name, epsilon, seeds or FEW)
                yield from _seeds(task, ADAPTIVE_DPAGD.name, epsilon, seeds or FEW)
        for task in TASKS:
            for epsilon in EPSILONS:
                if has_own_settings(task, epsilon):
                    yield from _seeds(task, TS_TRAMER_BONEH.name, epsilon, seeds or FEW)
        for epsilon in EPSILONS:  # where the preset is not what the paper's figures come from
            yield from _seeds("cifar10", TS_FIXED.name, epsilon, seeds or FEW)
        for task in TASKS:
            for epsilon in SIDE_EPSILONS:
                for side in DPSUR_ARMS:
                    if side.name not in MAIN_ARMS:
                        yield from _seeds(task, side.name, epsilon, seeds or FEW)
        for fault in FAULT_ARMS:
            yield from _seeds("fmnist", fault.name, 1, seeds or FEW)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The whole table with its figure, its short form, and where the paper is met."""
        records, paper = summary(rows), paper_accuracy()
        drawn = Picture(self.name, lambda: draw_accuracy(records, paper))
        picture = drawn if has_points(records) else None
        whole = table_page(self.name, TITLE, TEXT, Table(COLUMNS, records), picture)
        lacking = state_page(list(self.cells(Options())), rows)
        side_by_side = sixteen_pages(rows, paper)
        extra = extra_pages(records, paper)
        return [*whole, *side_by_side, *extra, *figure_pages(records, paper), *lacking]


EXPERIMENT = Accuracy()


def applies(method: str, task: str) -> bool:
    """Scattering features are for images."""
    return not (method == "dpsgd-hf" and task == "imdb")


def has_own_settings(task: str, epsilon: int) -> bool:
    """Whether Tramèr and Boneh tuned DPSGD-TS on this task to other settings than the paper's."""
    if task == "imdb":
        return False
    own, paper = (ARMS[arm].preset(task, epsilon) for arm in (TS_TRAMER_BONEH.name, "dpsgd-ts"))
    return own.options != paper.options


def _seeds(task: str, arm: str, epsilon: float, seeds: Sequence[int]) -> Iterator[TrainingCell]:
    for seed in seeds:
        yield TrainingCell(task, arm, epsilon, seed)


def paper_accuracy() -> dict[tuple[str, str, int], float]:
    """The paper's figures by data set, method and epsilon; epsilon 0 is the non-private column."""
    text = (files("reproduction.experiments") / "paper_accuracy.csv").read_text(encoding="utf-8")
    found: dict[tuple[str, str, int], float] = {}
    for row in csv.DictReader(text.splitlines()):
        for epsilon in EPSILONS:
            found[row["dataset"], row["method"], epsilon] = float(row[f"eps{epsilon}"])
        found[row["dataset"], "nonprivate", 0] = float(row["nonprivate"])
    return found


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Mean and spread over seeds for every data set, arm and budget, beside the paper's."""
    groups: dict[tuple[str, str, float], list[Row]] = defaultdict(list)
    for row in rows:
        config = row["config"]
        groups[config["task"], config["arm"], config["epsilon"]].append(row)
    order = list(ARMS)
    keys = sorted(groups, key=lambda k: (TASKS.index(k[0]), order.index(k[1]), k[2]))
    return [_record(key, groups[key]) for key in keys]


def _record(key: tuple[str, str, float], rows: Sequence[Row]) -> dict[str, Any]:
    task, name, epsilon = key
    mean, spread = mean_and_spread([100 * row["accuracy"] for row in rows])
    losses = [row["loss"] for row in rows]
    paper = _paper_figure(task, name, int(epsilon))
    epsilons: Mapping[str, float | None] = rows[0]["epsilon"]
    private = ARMS[name].preset_of != "nonprivate"
    return {
        "task": task,
        "arm": name,
        "label": ARMS[name].label,
        "accounting": ARMS[name].accounting if private else None,
        "epsilon": int(epsilon) if private else None,
        "mean": mean,
        "spread": spread,
        "seeds": len(rows),
        "loss": sum(losses) / len(losses),
        "least": min(losses),
        "most": max(losses),
        "paper": paper,
        "difference": None if paper is None else mean - paper,
        "updates": sum(row["updates"] for row in rows) / len(rows),
        "trials": sum(row["trials"] for row in rows) / len(rows),
        "proven": epsilons.get(PROVEN_FIGURES.get(name, "proven"))
        if private and ARMS[name].sound
        else None,
        "made_on": " and ".join(sorted({"CPU" if r["device"] == "cpu" else "GPU" for r in rows})),
    }


def _paper_figure(task: str, arm: str, epsilon: int) -> float | None:
    if ARMS[arm].preset_of == "nonprivate":
        return paper_accuracy()[task, "nonprivate", 0]
    method = PAPER_METHODS.get(arm, arm)
    return paper_accuracy().get((task, method, epsilon))
