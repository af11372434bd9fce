"""Every figure on the pages of reproduction is that of the rows, and none is left unchecked."""

import itertools
import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dpsur.methods import METHODS
from dpsur.presets import preset_named
from dpsur.presets.settings import (
    DATASET_SIZES,
    paper_setting,
    tuned_setting,
    tuned_settings,
)
from dpsur.privacy.accountants.rdp import composed_epsilon
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import SampledGaussian
from dpsur.privacy.plans import FilteredPlan
from dpsur.runs.input_features import InputFeatures
from reproduction.arms import ARMS, CHOICE_NOISE, FAULT_ARMS
from reproduction.base import Options
from reproduction.experiments.ablation import ARMS_SHOWN, paper_claims
from reproduction.experiments.accuracy import MAIN_ARMS, paper_accuracy, summary
from reproduction.experiments.accuracy_pages import (
    COMMANDS,
    DATA_SETS,
    NETWORK,
    RELEASED,
    TOLERANCE,
    agreement,
)
from reproduction.experiments.best import summary as best_summary
from reproduction.experiments.convergence import LOOKS, curves_of
from reproduction.experiments.convergence import records as curve_records
from reproduction.experiments.iterates import records as iterate_records
from reproduction.experiments.membership import EXPERIMENT as MEMBERSHIP
from reproduction.experiments.membership import NONPRIVATE, PIXELS
from reproduction.experiments.membership import summary as membership_summary
from reproduction.experiments.paper_figures import (
    committed_records,
    committed_runs,
    equal_cells,
    loss_records,
)
from reproduction.experiments.robustness import RATES
from reproduction.experiments.robustness import records as rate_records
from reproduction.registry import EXPERIMENTS, experiment_named
from reproduction.released_dpagd import COUNT, LARGEST
from reproduction.series import series
from reproduction.training import mean_and_spread

ROOT = Path(__file__).parents[2]
PAGES = ("reproduction.md", "reproduction_details.md")
LINES = [line for page in PAGES for line in (ROOT / "docs" / page).read_text().splitlines()]
PROSE = " ".join(" ".join(line for line in LINES if not line.startswith("|")).split())
TABLE = [line for line in LINES if line.startswith("|")]
BUDGETS = (1, 2, 3, 4)
DPSUR_ON_PHOTOS = ("CIFAR-10", "dpsur")
INTERVAL = ("value", "low", "high")
# Names, and budgets that a sentence is about; everything else with a digit is a finding.
NOT_FINDINGS = (
    r"\]\([^)]*\)",
    r"`[^`]*`",
    r"Algorithm 1",
    r"CIFAR-10",
    r"NVIDIA H200",
    r"at epsilon (?:1, 2, 3 and 4|1, 2 and [34]|1, 3 and 4|2, 3 and 4|2 and 4|1 and [23])",
    r"(?:[Aa]t|to|of) (?:a proven )?epsilon (?:of )?\d\b",
    r"beta = -1",
)


def rows_of(name):
    path = ROOT / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


ROWS = rows_of("accuracy")
FOUND = {(r["task"], r["arm"], r["epsilon"]): r for r in summary(ROWS)}


def fmnist(arm):
    return [FOUND["fmnist", arm, epsilon] for epsilon in BUDGETS]


def shown(form, values):
    return tuple(format(value, form) for value in values)


def gaps(one, other):
    return [b["mean"] - a["mean"] for a, b in zip(fmnist(one), fmnist(other), strict=True)]


def proven_of_published():
    for budget in BUDGETS:
        rows = [r["epsilon"]["proven"] for r in rows_of("accounting") if _target(r) == budget]
        yield from (min(rows), max(rows))


def _target(row):
    return row["config"]["epsilon"]


def audit(subject, accounting):
    findings = [f for row in rows_of("audit") for f in row["findings"]]
    return next(f for f in findings if (f["subject"], f["accounting"]) == (subject, accounting))


def demo(arm):
    values = [100 * row["accuracy"] for row in rows_of("demo") if row["arm"] == arm]
    return sum(values) / len(values)


def best_of(task, method, epsilon):
    cell = {"task": task, "method": method, "epsilon": epsilon}
    return next(r for r in best_summary(rows_of("best")) if cell.items() <= r.items())


@cache
def noise_of_dpis():
    """Noise of DPIS on CIFAR-10 over that of DP-SGD at the same batch and length.

    By a menu, as it is now, and by a filter, as it was in the rows.
    """
    dpis = preset_named("paper", "dpis", "cifar10", 3)
    setup = InputFeatures(dpis.features, dpis.normalisation).setup
    batch, updates = dpis.options["batch_size"], dpis.options["updates"]
    size, budget = DATASET_SIZES["cifar10"], Budget(3, 1e-5)
    _, plan = METHODS["dpis"](**dpis.options).settle(size, budget, "proven", setup)
    plain = METHODS["dpsgd"](batch_size=batch, learning_rate=1.0, updates=updates)
    settled, typical = plain.settle(size, budget, "proven", setup)
    kept = FilteredPlan.for_budget(budget, "proven", typical.trial, updates=updates, setup=setup)
    # Releases of the norms take 2% of the allowance.
    price = (kept.left_after_setup() - 0.02 * kept.allowance) / updates
    menu = plan.nearest(batch / size).noise_multiplier
    filtered = kept.noise_for(batch / size, price)
    return menu / settled.noise_multiplier, filtered / settled.noise_multiplier


def released_at_four(task="fmnist"):
    """Accuracies of the seeds of the released code, the lowest first."""
    wanted = (task, "released-code", 4)
    rows = [(tuple(row["config"][k] for k in ("task", "arm", "epsilon")), row) for row in ROWS]
    return sorted(100 * row["accuracy"] for key, row in rows if key == wanted)


@cache
def attack_records():
    return list(membership_summary(rows_of("membership")))


def attacked(task, attack):
    """The balanced accuracy of an attack on targets without privacy."""
    records = attack_records()
    cell = {"task": task, "target": NONPRIVATE, "attack": attack}
    return next(r for r in records if cell.items() <= r.items())


def range_of_attacks(*, private, names):
    found = [
        r["accuracy"]
        for r in attack_records()
        if (r["target"] != NONPRIVATE) == private and r["attack"] in names
    ]
    return min(found), max(found)


def private_targets():
    return [r for r in attack_records() if r["target"] != NONPRIVATE]


def better_attacks():
    """Figures of RMIA, the best of the better attacks, by private target that has them."""
    rows = [r for r in rows_of("membership") if r["config"]["method"] != NONPRIVATE]
    rows = [row for row in rows if row["config"]["shadow_models"]]
    places = [tuple(r["config"][k] for k in ("task", "method", "epsilon")) for r in rows]
    named = {("fmnist", method, e) for method in ("dpsur", "dpsgd") for e in BUDGETS}
    assert set(places) == named | {("cifar10", *place[1:]) for place in named}
    return {place: r["attacks"]["rmia-online"] for place, r in zip(places, rows, strict=True)}


def _mean(rows):
    return 100 * sum(row["accuracy"] for row in rows) / len(rows)


def worst_seed():
    accuracies = released_at_four()
    return sum(accuracies) / len(accuracies) - accuracies[0]


def trials_per_update():
    return [r["trials"] / r["updates"] for arm in ("published", "proven") for r in fmnist(arm)]


def released(task):
    return [FOUND[task, "released-code", e] for e in BUDGETS]


def printed(task):
    return [FOUND[task, "published", e] for e in BUDGETS]


def plain_on(task):
    """Plain DP-SGD on the features of DPSUR, at a proven epsilon."""
    return [FOUND[task, "dpsgd" if task == "imdb" else "dpsgd-hf", e] for e in BUDGETS]


def met(records):
    return sum(abs(record["difference"]) <= 0.7 for record in records)


def made_again():
    """Differences from the paper where reviews are those of the second draw."""
    other = [r for r in iterate_records(rows_of("iterates")) if r["task"] == "imdb"]
    other = [r for r in other if r["epsilon"] is not None]
    second = [r["last_difference"] for r in other if not r["changed"]]
    first = [r["difference"] for task in DATA_SETS if task != "imdb" for r in released(task)]
    assert len(first + second) == 16
    return first + second


def claims():
    """Patterns of sentences, and the figures that the rows give for them."""
    number = r"([-+]?\d+(?:\.\d+)?)"
    four = ", ".join([number] * 3) + f" and {number}"
    yield from claims_about_superseded(number)
    yield from claims_about_the_ablation_grid()
    yield from claims_about_agreement(number, four)
    yield from claims_about_committed_runs(number)
    yield from claims_about_printed(number, four)
    yield from claims_about_momentum(number, four)
    yield from claims_about_attacks(number)
    yield from claims_about_curves(number)
    yield from claims_about_reviews(number)
    yield from claims_about_single_settings(number)
    yield from claims_about_rates(number)
    yield from claims_about_epsilon(number)
    yield from claims_about_the_best(number, four)
    yield from claims_about_other_methods(number, four)
    yield from claims_about_the_network(number, four)
    yield from claims_about_dpagd(number, four)
    yield from claims_about_dpis(number)
    yield from claims_about_time(number)
    yield (
        rf"DPSUR reaches {number} and plain DP-SGD {number}",
        shown(".1f", (demo("dpsur, proven"), demo("dpsgd"))),
    )
    ratios = trials_per_update()
    yield rf"makes {number} to {number} trials", shown(".1f", (min(ratios), max(ratios)))


def claims_about_time(number):
    (part,) = rows_of("grid_part")
    assert part["config"] == {"part": "0/10", "jobs": 4}  # "every tenth", "four processes"
    assert part["device"] == "NVIDIA H200"
    whole = shown(".0f", [part["minutes_of_all"]])
    yield rf"all rows of accuracies takes about {number} minutes of one GPU", whole
    yield rf"So the whole takes {number} minutes, by this estimate", whole
    yield (
        rf"{number} of {number} runs in {number} minutes",
        (str(part["runs"]), str(part["runs_of_all"]), *shown(".1f", [part["seconds"] / 60])),
    )
    yield rf"that is {number} percent of the work", shown(".1f", [100 * part["share"]])
    alone = sum(row["seconds"] for row in rows_of("grid_time")) / 60
    assert alone == pytest.approx(part["seconds_alone_of_all"] / 60, abs=0.01)
    assert part["multi_process_service"]
    yield (
        rf"after the other it would take {number} \(",
        shown(".0f", [part["seconds_alone_of_all"] / 60]),
    )
    moved = part["points_moved"]
    same, near = (sum(abs(m) <= most for m in moved) for most in (0.0, 0.5))
    yield (
        rf"Of the {number} accuracies {number} came out within {number} points of the rows, "
        rf"{number} within half a point, and the others within {number}; on average they moved by "
        rf"{number} points",
        (
            *map(str, (len(moved), same, 0.005, near)),
            f"{max(map(abs, moved)):.1f}",
            f"{sum(moved) / len(moved):+.2f}",
        ),
    )


def claims_about_the_ablation_grid():
    """Which values have rows, in words."""
    sizes = [row["config"]["tried"].get("val_batch_size") for row in rows_of("ablation")]
    assert not {64, 512} & set(sizes)
    thresholds = {row["config"]["options"]["accept_threshold"] for row in rows_of("ablation")}
    assert min(thresholds) == -2.0  # "the lowest threshold"
    assert all(len(row["config"]["tried"]) < 2 for row in rows_of("ablation"))  # one base
    yield r"validation batches of (64) and (512), the lowest threshold", ("64", "512")


def claims_about_superseded(number):
    reasons = [row["superseded"] for row in rows_of("superseded")]
    faults = sum("floored" in r or "recurrent" in r for r in reasons)
    looser = sum("a filter of one" in r for r in reasons)
    grouped = sum("by group" in r for r in reasons)
    others = len(reasons) - faults - looser - grouped
    yield rf"{number} earlier rows", (str(len(reasons)),)
    yield rf"{number} were made before two faults", (str(faults),)
    yield rf"{number} with settings of DPIS and DPAGD", (str(others),)
    yield rf"{number} are of CIFAR-10 with features normalised by group", (str(grouped),)
    yield rf"{number} when the cost of DPIS", (str(looser),)


def claims_about_agreement(number, four):
    cells = agreement(list(FOUND.values()), paper_accuracy())
    near = sum(cell["within"] == "yes" for cell in cells)
    others = [
        sum(
            cell["within"] == "yes"
            for cell in agreement(list(FOUND.values()), paper_accuracy(), arm)
        )
        for arm in (COMMANDS, NETWORK)
    ]
    on_reviews = sum(cell["within"] == "yes" for cell in cells if cell["task"] == "imdb")
    yield (
        rf"meets {number} of the paper's {number} figures for DPSUR to {number} points, {number} "
        rf"of the {number} on images and {number} of the {number} on IMDb\. With the validation "
        rf"batch of the released commands on IMDb it is {number}, and {number} with the released "
        r"network too\.",
        (
            *(str(near), str(len(cells)), "0.7", str(near - on_reviews), "12"),
            *(str(on_reviews), "4", *map(str, others)),
        ),
    )
    yield rf"each cell that is off by more than {number} points", (str(TOLERANCE),)
    commanded, built = ([FOUND["imdb", arm, e] for e in BUDGETS] for arm in (COMMANDS, NETWORK))
    assert [record["seeds"] for record in commanded] == [1, 3, 1, 3]
    assert [record["seeds"] for record in built] == [3, 2, 3, 3]
    yield rf"The paper's text has a validation batch of {number} there", ("128",)
    yield (
        rf"commands have {number}, and the released network an activation that the paper does not "
        rf"list\. With that batch the arm is off by {four} at epsilon 1, 2, 3 and 4 \(one seed at "
        rf"(1) and (3), three at the others\), with the network too by {four} \(three seeds, two "
        r"at (2)\)\.",
        (
            "256",
            *shown("+.2f", (record["difference"] for record in commanded)),
            *("1", "3"),
            *shown("+.2f", (record["difference"] for record in built)),
            "2",
        ),
    )
    at_four = [r["accuracy"] for r in ROWS if _place_of(r) == ("imdb", NETWORK, 4)]
    lowest, *rest = sorted(100 * accuracy for accuracy in at_four)
    without = sum(rest) / len(rest) - paper_accuracy()["imdb", "dpsur", 4]
    assert abs(without) <= TOLERANCE  # the reason that is given for this cell
    yield (
        rf"one of those three seeds falls to {number}; the other two are off by {number} on",
        (f"{lowest:.2f}", f"{without:+.2f}"),
    )
    runs = [r for r in committed_records(paper_accuracy()) if r["data"] == "IMDb"]
    fallen = sorted(
        (r for r in runs if r["method"] == "dpsur"), key=lambda r: r["last"] - r["best"]
    )
    yield (
        rf"one ends at {number} after {number}, another at {number} after {number}\.",
        shown(".2f", (run[key] for run in fallen[:2] for key in ("last", "best"))),
    )
    below = [
        paper_accuracy()["imdb", "dpsur", e] - float(run["last"])
        for e in (1, 2)
        for run in committed_runs("dpsur", "imdb", e)
        if run["val_batch"] == "256"
    ]
    assert len(below) == 4  # "four"
    assert [r["difference"] > -max(below) for r in built[:2]] == [True, True]
    yield (
        rf"end {number} to {number} below the paper's figure, so ours",
        shown(".2f", (min(below), max(below))),
    )
    met_as_printed = {task: met(printed(task)) for task in DATA_SETS}
    assert met_as_printed == {"fmnist": 0, "mnist": 4, "cifar10": 0, "imdb": 2}  # in words
    yield (
        rf"Algorithm 1 as it is printed meets {number}\.",
        (str(sum(met_as_printed.values())),),
    )
    again = made_again()
    yield (
        rf"repeated with it, {number} of {number} are met\.",
        (str(sum(abs(gap) <= 0.7 for gap in again)), str(len(again))),
    )
    gaps = {t: [abs(r["difference"]) for r in released(t)] for t in DATA_SETS}
    yield (
        rf"off the paper by up to {number} points on Fashion-MNIST, {number} on MNIST, {number} on "
        rf"CIFAR-10 and {number} on IMDb",
        shown(".2f", map(max, gaps.values())),
    )
    # "Two figures are met by less than a tenth of a point"
    assert sum(0.6 < gap <= 0.7 for found in gaps.values() for gap in found) == 2
    yield (
        rf"comes to {number}, {number}, {number} and {number} points of",
        shown("+.2f", (r["difference"] for r in released("fmnist"))),
    )
    for pattern, task in (
        (rf"on MNIST to {four},", "mnist"),
        (rf"on CIFAR-10 to {four},", "cifar10"),
        (rf"and on IMDb to {four}\.", "imdb"),
    ):
        yield pattern, shown("+.2f", (r["difference"] for r in released(task)))
    *others, lowest = sorted(released_at_four("imdb"), reverse=True)
    rest = sum(others) / len(others)
    yield (
        rf"one seed falls to {number}; the other four have {number} on average and are still "
        rf"{number} below the paper",
        shown(".2f", (lowest, rest, FOUND["imdb", "released-code", 4]["paper"] - rest)),
    )
    yield rf"one seed of the five ends {number} points below", shown(".1f", [worst_seed()])


def claims_about_committed_runs(number):
    paper = paper_accuracy()
    runs, equal = committed_records(paper), equal_cells(paper)
    places = {(run["data"], run["method"], run["epsilon"]) for run in runs}
    assert list(equal) == [
        *(("Fashion-MNIST", "dpagd", e) for e in (1, 2, 3)),
        ("MNIST", "dpagd", 2),
        *(("CIFAR-10", "dpsgd", e) for e in (1, 4)),
        *(("IMDb", "dpagd", e) for e in (1, 2)),
    ]  # in words
    assert [run["equal"] for run in equal["CIFAR-10", "dpsgd", 4]] == ["best"]
    yield rf"the results of {number} single runs", (str(len(runs)),)
    yield (
        rf"for {number} of the {number} private cells of the paper's table\.",
        (str(len(places)), str(sum(epsilon > 0 for *_, epsilon in paper))),
    )
    yield rf"In {number} of these cells it is, to two decimals", (str(len(equal)),)
    yield r"on MNIST at (2) and on IMDb at (1) and (2), and", ("2", "1", "2")
    yield r"DPSGD on CIFAR-10 at (1) and at (4)\.", ("1", "4")
    reviews = [r for r in runs if (r["data"], r["method"]) == ("IMDb", "dpagd")]
    at_most_three = [run for run in reviews if run["epsilon"] < 4]
    assert len({(run["iterations"], run["sigma_t"]) for run in at_most_three}) == 1
    count, noise = at_most_three[0]["iterations"], at_most_three[0]["sigma_t"]
    rate = 1024 / DATASET_SIZES["imdb"]
    spent = composed_epsilon([(SampledGaussian(rate, noise), count)], 1e-5)
    yield (
        rf"made {number} iterations with a noise of {number}, as the committed run",
        (str(count), f"{noise:g}"),
    )
    yield rf"their gradients alone cost {number}\.", shown(".2f", [spent])
    (largest,) = (r for r in runs if r["val_batch"] == 1024)
    (stated,) = (c for c in paper_claims("val_batch_size") if c.low == 1024)
    assert largest["last"] == stated.accuracy
    yield rf"for a validation batch of {number}, {number}, is", ("1024", f"{stated.accuracy:.2f}")
    (four,) = (r for r in runs if (r["data"], r["method"], r["epsilon"]) == (*DPSUR_ON_PHOTOS, 4))
    ours = FOUND["cifar10", RELEASED, 4]["mean"]
    assert abs(four["last"] - ours) < abs(four["last"] - four["paper"])
    yield (
        rf"run of DPSUR ends at {number}, our arm at {number}, and the paper says {number}\.",
        shown(".2f", (four["last"], ours, four["paper"])),
    )
    tempered = [r for r in runs if (r["data"], r["method"]) == ("CIFAR-10", "dpsgd-ts")]
    assert {run["epsilon"] for run in tempered} == {4}
    ours = FOUND["cifar10", "dpsgd-ts", 4]
    yield (
        rf"DPSGD-TS ends at {number} and {number} there, ours at {number}, and the paper says "
        rf"{number}\.",
        shown(".2f", (*(run["last"] for run in tempered), ours["mean"], ours["paper"])),
    )
    yield from claims_about_losses(number)


def claims_about_losses(number):
    found = loss_records(list(FOUND.values()))
    for record in found:  # "within a tenth of theirs"
        assert record["loss"] == pytest.approx(record["authors"], rel=0.1), record
    assert len({(r["data"], r["method"], r["commit"]) for r in found}) == 9  # "of nine runs"

    def both(data, method, epsilon):
        place = (data, method, epsilon)
        some = [r for r in found if (r["data"], r["method"], r["epsilon"]) == place]
        return some[0]["loss"], sum(r["authors"] for r in some) / len(some)

    methods = ("dpsur", "dpsgd-hf", "dpsgd-ts", "dpsgd")
    pair = rf"{number} and {number}"
    yield (
        rf"on CIFAR-10 {pair} for DPSUR, {pair} for DPSGD-HF, {pair} for DPSGD-TS, {pair} for "
        rf"DPSGD, and on Fashion-MNIST at epsilon 3 {pair} for DPSUR\.",
        shown(
            ".3f",
            [
                *(loss for method in methods for loss in both("CIFAR-10", method, 4)),
                *both("Fashion-MNIST", "dpsur", 3),
            ],
        ),
    )
    one, theirs = both("CIFAR-10", "dpsgd-ts", 4)
    yield (
        rf"ours are: {number} with a loss of {number}, where theirs end at {number}\.",
        (f"{FOUND['cifar10', 'dpsgd-ts', 4]['mean']:.2f}", f"{one:.3f}", f"{theirs:.3f}"),
    )


def claims_about_printed(number, four):
    below = {t: [-r["difference"] for r in printed(t)] for t in DATA_SETS}
    images = below["fmnist"] + below["cifar10"]
    yield (
        rf"where it stays {number} to {number} points below the paper",
        shown(".2f", (min(images), max(images))),
    )
    yield rf"it stays {four} points below the paper", shown(".2f", below["fmnist"])
    yield rf"{four} on MNIST, and", shown(".2f", below["mnist"])
    yield rf"{four} on CIFAR-10\. On IMDb it is", shown(".2f", below["cifar10"])
    first, *others = below["imdb"]
    yield (
        rf"{number} above it at epsilon 1 and {number}, {number} and {number} below at 2, 3 and 4",
        shown(".2f", (-first, *others)),
    )
    for one, other in zip(printed("imdb"), released("imdb"), strict=True):
        spread = max(one["spread"], other["spread"])
        assert abs(one["mean"] - other["mean"]) < spread  # "as close as seeds are"
    ahead = {
        (task, e): plain["mean"] - FOUND[task, "proven", e]["mean"]
        for task in DATA_SETS
        for e, plain in zip(BUDGETS, plain_on(task), strict=True)
    }
    yield (
        rf"DP-SGD is ahead of Algorithm 1 in {number} of {number} cells",
        (str(sum(gap > 0 for gap in ahead.values())), str(len(ahead))),
    )
    others = [gap for (task, _), gap in ahead.items() if task != "fmnist"]
    assert sum(gap < 0 for gap in others) == 1  # "behind in one cell"
    yield (
        rf"is ahead by up to {number} points, and behind in one cell, by {number}",
        shown(".2f", (max(others), -min(others))),
    )


def claims_about_momentum(number, four):
    by_momentum = ("kept-momentum", "random-kept", "published", "random")
    for pattern, task, epsilon in (
        (
            rf"CIFAR-10 has {number} and {number} with the momentum of rejected steps, {number} "
            rf"and {number} without it",
            "cifar10",
            3,
        ),
        (
            rf"Fashion-MNIST {number} and {number} with it, {number} and {number} without",
            "fmnist",
            3,
        ),
        (rf"it is {number} and {number} with it, {number} and {number} without", "imdb", 1),
    ):
        yield pattern, shown(".2f", (FOUND[task, arm, epsilon]["mean"] for arm in by_momentum))
    code, kept, restored = (
        FOUND["cifar10", arm, 1] for arm in ("released-code", "kept-momentum", "published")
    )
    yield (
        rf"on CIFAR-10 {number} of {number} points",
        shown(".2f", (kept["mean"] - restored["mean"], code["mean"] - restored["mean"])),
    )
    longer = [
        FOUND[task, arm, 1]["updates"]
        for task in ("fmnist", "cifar10")
        for arm in (RELEASED, "published")
    ]
    yield (
        rf"A last one is {number} updates instead of {number}, and on CIFAR-10 {number} instead of "
        rf"{number}, for the released code",
        shown(".0f", longer),
    )
    faults = [FOUND["fmnist", arm.name, 1] for arm in FAULT_ARMS]
    printed_one = FOUND["fmnist", "published", 1]
    for fault in faults:  # "do nothing by themselves"
        allowed = 2 * max(fault["spread"], printed_one["spread"])
        assert abs(fault["mean"] - printed_one["mean"]) < allowed
    yield (
        rf"Algorithm 1 has {number} ± {number} where a candidate is compared with a stale loss, "
        rf"{number} ± {number} where sums are divided by the size of another batch, and {number} ± "
        rf"{number} where rejected updates stay until one is accepted",
        shown(".2f", (figure for f in faults for figure in (f["mean"], f["spread"]))),
    )
    carried = [
        r["trials"] / r["updates"]
        for (task, arm, _), r in FOUND.items()
        if task in ("fmnist", "cifar10") and arm in ("kept-momentum", "random-kept", RELEASED)
    ]
    yield (
        rf"{number} to {number} for each that is charged",
        shown(".1f", (min(carried), max(carried))),
    )
    plain, claimed = ([r["mean"] for r in side] for side in (plain_on("imdb"), released("imdb")))
    assert all(one > other for one, other in zip(plain, claimed, strict=True))
    yield (
        rf"plain DP-SGD has {four} here, at a proven epsilon, where the released code has {four} "
        r"at a claimed one",
        shown(".2f", plain + claimed),
    )
    paid = {
        (task, e): plain_on(task)[e - 1]["mean"] - FOUND[task, "every-trial", e]["mean"]
        for task in DATA_SETS
        for e in (1, 3)
    }
    (charged,) = {
        row["epsilon"]["every_trial"]
        for row in ROWS
        if [row["config"][k] for k in ("task", "arm", "epsilon")] == ["fmnist", "every-trial", 1]
    }
    yield (
        rf"it reaches {number} at an epsilon of {number} under the accounting `every-trial`, "
        rf"{number} points more than DP-SGD",
        (
            f"{FOUND['fmnist', 'every-trial', 1]['mean']:.2f}",
            f"{charged:.3f}",
            f"{-paid['fmnist', 1]:.2f}",
        ),
    )
    wanted = {"task": "imdb", "arm": "every-trial", "epsilon": 3}
    fallen = min(100 * r["accuracy"] for r in ROWS if wanted.items() <= r["config"].items())
    yield (
        rf"DP-SGD is ahead of it by {number} and {number} points on CIFAR-10 at epsilon 1 and 3, "
        rf"by {number} and {number} on IMDb \(one seed of the selective arm falls to {number} "
        rf"there\), by {number} on MNIST at epsilon 1 and by {number} on Fashion-MNIST at epsilon "
        rf"3; on MNIST at epsilon 3 it is behind by {number}\.",
        shown(
            ".2f",
            (
                *(paid["cifar10", e] for e in (1, 3)),
                *(paid["imdb", e] for e in (1, 3)),
                *(fallen, paid["mnist", 1], paid["fmnist", 3], -paid["mnist", 3]),
            ),
        ),
    )


def claims_about_epsilon(number):
    dead = audit("dead unit, Fashion-MNIST at ε 3", "published")
    kept = audit("one accepted step with momentum; fault: kept-momentum", "proven")
    proven = shown(".2f", proven_of_published())
    yield (
        rf"{number} to {number} where it says 1, {number} to {number} for 2, {number} to {number} "
        rf"for 3 and {number} to {number} for 4",
        proven,
    )
    yield rf"the paper says 3, what can be proved is {number} to {number}\.", proven[4:6]
    yield (
        rf"exact epsilon is {number} and the published one {number}",
        shown(".2f", (dead["exact"], dead["claimed"])),
    )
    yield (
        rf"a claim of {number}, it finds at least {number}",
        shown(".2f", (kept["claimed"], kept["lower"])),
    )
    best = {format(abs(round(row["best_beta"], 2)), "g") for row in rows_of("acceptance")}
    yield rf"formula the best is {number} for each sigma_v", tuple(best)


def claims_about_the_best(number, four):
    words, selective = (
        [best_of("imdb-words", method, budget) for budget in BUDGETS]
        for method in ("dpsgd", "dpsur")
    )
    clothes = [best_of("fmnist", "dpsgd", budget) for budget in BUDGETS]
    yield (
        rf"Reviews reach {number} at a proven epsilon of 1, the paper's DPSUR {number} at its own",
        shown(".2f", (words[0]["mean"], words[0]["paper"])),
    )
    yield (
        rf"the same linear model reaches {four}",
        shown(".2f", (record["mean"] for record in selective)),
    )
    yield (
        rf"reaches {four} at a proven epsilon of 1, 2, 3 and 4",
        shown(".2f", (record["mean"] for record in clothes)),
    )
    yield (
        rf"where the paper has {four} at its own: a little more at 1 and 3, a little less at 2 "
        r"and 4",
        shown(".2f", (record["paper"] for record in clothes)),
    )
    yield (
        rf"reaches {four} at epsilon 1, 2, 3 and 4, all",
        shown(".2f", (record["mean"] for record in words)),
    )
    yield (
        rf"reports {four} for DPSUR at its own",
        shown(".2f", (record["paper"] for record in words)),
    )
    digits = [best_of("mnist", "dpsgd", budget) for budget in BUDGETS]
    assert [record["difference"] > 0 for record in digits] == [True, False, False, False]
    yield (
        rf"On MNIST it reaches {four}; the paper has {four}, more at all but the smallest",
        shown(".2f", (record[key] for key in ("mean", "paper") for record in digits)),
    )
    photographs = [best_of("cifar10", "dpsgd", budget) for budget in (1, 3)]
    proven = [r for r in FOUND.values() if (r["task"], r["accounting"]) == ("cifar10", "proven")]
    assert {"dpis", "dpsgd-hf", "proven"} <= {r["arm"] for r in proven}
    wanted = {budget: paper_accuracy()["cifar10", "dpsur", budget] for budget in BUDGETS}
    ahead = [r for r in [*proven, *photographs] if r["mean"] > wanted[r["epsilon"]]]
    assert [(r["arm"], r["epsilon"]) for r in ahead] == [("dpis", 1)]
    yield rf"only those of DPIS at 1, with {number}, are", shown(".2f", [ahead[0]["mean"]])
    made = {r["epsilon"] for r in best_summary(rows_of("best")) if r["task"] == "cifar10"}
    assert made == {1, 3}  # "none there at the other two budgets"
    yield (
        rf"reaches {number} and {number} at 1 and 3, where the paper has {number} and {number}\.",
        shown(".2f", (r[key] for key in ("mean", "paper") for r in photographs)),
    )
    plain = paper_accuracy()["imdb", "nonprivate", 0]
    yield rf"{number} for that network without privacy", shown(".2f", [plain])


def claims_about_other_methods(number, four):
    images = ("fmnist", "mnist", "cifar10")
    featured, pixels = (
        {(t, e): FOUND[t, arm, e]["difference"] for t in images for e in BUDGETS}
        for arm in ("dpsgd-hf", "dpsgd")
    )
    farthest = max(pixels.values(), key=abs)
    assert farthest > 0  # "above them where it is off by most"
    yield (
        rf"DPSGD-HF is off the paper's figures by up to {number} points, plain DPSGD on pixels by "
        rf"up to {number},",
        shown(".2f", (max(map(abs, featured.values())), farthest)),
    )
    grey = [abs(gap) for (task, _), gap in featured.items() if task != "cifar10"]
    coloured = [gap for (task, _), gap in featured.items() if task == "cifar10"]
    yield (
        rf"by up to {number} points on Fashion-MNIST and MNIST, over all four budgets, and "
        rf"{number} to {number} above them on CIFAR-10",
        shown(".2f", (max(grey), min(coloured), max(coloured))),
    )
    clothes = [abs(pixels["fmnist", e]) for e in BUDGETS]
    photographs = [pixels["cifar10", e] for e in BUDGETS]
    yield (
        rf"plain DPSGD is off by up to {number} on the pixels of Fashion-MNIST, and {number} to "
        rf"{number} above the paper on those of CIFAR-10\.",
        shown(".2f", (max(clothes), min(photographs), max(photographs))),
    )
    committed = [
        next(
            run["iterations"]
            for run in committed_records(paper_accuracy())
            if (run["data"], run["method"], run["epsilon"]) == ("CIFAR-10", "dpsgd", epsilon)
        )
        for epsilon in BUDGETS
    ]
    ours = [FOUND["cifar10", "dpsgd", e]["updates"] for e in BUDGETS]
    more = [one / other for one, other in zip(ours, committed, strict=True)]
    yield (
        rf"it affords {number} to {number} times as many updates of DPSGD as",
        shown(".2f", (min(more), max(more))),
    )
    yield (
        rf"DPSGD on CIFAR-10 made {four} updates; our accountant affords {four}\.",
        shown(".0f", (*committed, *ours)),
    )
    one, other = (FOUND["cifar10", "dpsgd", e] for e in (3, 4))
    worth = (other["mean"] - one["mean"]) / (other["updates"] - one["updates"])
    surplus = [ours[i] - committed[i] for i in (2, 3)]
    yield (
        rf"between the two (100) updates are worth {number} points\. By that our surplus of "
        rf"updates explains {number} of {number} points at (3) and {number} of {number} at (4)\.",
        (
            "100",
            *shown(".2f", [100 * worth, worth * surplus[0], photographs[2]]),
            "3",
            *shown(".2f", [worth * surplus[1], photographs[3]]),
            "4",
        ),
    )
    fewer, usual = (FOUND["cifar10", arm, 1] for arm in ("dpsgd-published", "dpsgd"))
    assert (fewer["seeds"], usual["seeds"]) == (1, 3)
    assert fewer["mean"] > usual["mean"]  # "the updates explain nothing"
    yield (
        rf"with {number} updates one seed has {number}, and three seeds have {number} with ours",
        (f"{fewer['updates']:.0f}", *shown(".2f", (fewer["mean"], usual["mean"]))),
    )
    assert ("CIFAR-10", "dpsgd", 1) in equal_cells(paper_accuracy())
    yield (
        rf"as theirs one seed has {number} at epsilon 1, where the paper's figure, {number}, is",
        shown(".2f", (fewer["mean"], fewer["paper"])),
    )
    reviews = [
        FOUND["imdb", arm, e]["mean"] for arm in ("dpsgd-published", "dpsgd") for e in (1, 2)
    ]
    yield (
        rf"of the paper's accountant, DPSGD has {number} and {number} at epsilon 1 and 2, where it "
        rf"has {number} and {number} with ours\.",
        shown(".2f", reviews),
    )
    tempered = {t: [FOUND[t, "dpsgd-ts", e]["difference"] for e in BUDGETS] for t in images[:2]}
    coloured = [FOUND["cifar10", "dpsgd-ts", e] for e in BUDGETS]
    assert {record["seeds"] for record in coloured} == {1}
    yield (
        rf"On CIFAR-10 it is off by {four} at epsilon 1, 2, 3 and 4, in one seed",
        shown("+.2f", (record["difference"] for record in coloured)),
    )
    yield (
        r"paper at (3) and (4) and miss it by more at (1)\. What the paper ran at (1) and (2)",
        (
            *("3", "4"),
            *("1", "1", "2"),
        ),
    )
    tuned = [
        [FOUND["cifar10", arm, e] for e in BUDGETS]
        for arm in ("dpsgd-ts-fixed", "dpsgd-ts-authors")
    ]
    for records in tuned:  # "meet the paper at 3 and 4"
        assert all(abs(record["difference"]) <= TOLERANCE for record in records[2:])
        assert records[0]["difference"] < coloured[0]["difference"] < 0  # "at 1 above all of them"
    assert tuned[0][1]["difference"] < 0 < tuned[1][1]["difference"]  # "between these two"
    yield r"meet the paper at (3) and (4), both with their noise", ("3", "4")
    yield r"At (2) the paper lies between these two; at (1) it is above all of them\.", ("2", "1")
    runs = [
        run
        for run in committed_records(paper_accuracy())
        if (run["data"], run["method"], run["epsilon"]) == ("CIFAR-10", "dpsgd-ts", 4)
    ]
    yield (
        rf"These end at {number} and {number}, and the paper has {number}\.",
        shown(".2f", [*(run["last"] for run in runs), runs[0]["paper"]]),
    )
    yield (
        rf"released commands is within {number} of the paper on Fashion-MNIST and MNIST",
        shown(".2f", [max(abs(gap) for found in tempered.values() for gap in found)]),
    )
    yield (
        rf"DPSGD-TS with the paper's settings is off by {four} on Fashion-MNIST and by {four} on "
        r"MNIST\.",
        shown("+.2f", (gap for found in tempered.values() for gap in found)),
    )
    tuned = [FOUND["fmnist", "dpsgd-ts-authors", e]["difference"] for e in (1, 2, 4)]
    yield (
        rf"tuned at epsilon 3 is off by {number}, {number} and {number} at epsilon 1, 2 and 4 "
        r"\(at (3) it is what the paper has\)\.",
        (*shown("+.2f", tuned), "3"),
    )
    reviews = [
        r["difference"]
        for k, r in FOUND.items()
        if k[:2] in (("imdb", "dpsgd"), ("imdb", "dpsgd-ts"))
    ]
    yield (
        rf"On IMDb DPSGD and DPSGD-TS are {number} to {number} above the paper with our network",
        shown(".2f", (min(reviews), max(reviews))),
    )
    yield (
        rf"Without privacy the last of twenty epochs is {number} below the paper on IMDb\.",
        shown(".2f", [-FOUND["imdb", "nonprivate", None]["difference"]]),
    )
    plain = [row for row in ROWS if row["config"]["arm"] == "nonprivate"]
    losses = [row["loss"] for row in plain if row["config"]["task"] == "imdb"]
    assert np.mean(losses) > 2 * np.log(2)  # "twice"
    yield (
        rf"Its test loss is {number}, twice the {number} of guessing",
        shown(".2f", (np.mean(losses), np.log(2))),
    )
    (curve,) = [r for r in iterate_records(rows_of("iterates")) if r["epsilon"] is None]
    assert curve["seeds"] == 1
    assert 0.18 < curve["at"] < 0.22  # "after four of the epochs"
    assert abs(curve["best_difference"]) <= TOLERANCE  # "the best of them is within 0.7"
    yield (
        rf"after four of the epochs, is {number}, which is {number} below the paper",
        shown(".2f", (curve["best"], -curve["best_difference"])),
    )
    without = FOUND["cifar10", "nonprivate", None]
    claimed = FOUND["cifar10", "released-code", 4]
    assert claimed["mean"] > without["mean"]
    assert claimed["paper"] > without["paper"]
    yield (
        rf"the released code has {number} at its claimed epsilon of 4",
        shown(".2f", [claimed["mean"]]),
    )
    yield (
        rf"Without privacy CIFAR-10 has {number}, the paper {number}\.",
        shown(".2f", (without["mean"], without["paper"])),
    )


def claims_about_the_network(number, four):
    measured = rf"{number} ± {number}"
    network, ours = (FOUND["imdb", arm, 1] for arm in ("dpsgd-network", "dpsgd-published"))
    assert network["seeds"] == ours["seeds"] == 3
    assert network["updates"] == ours["updates"]  # "with as many updates"
    assert abs(network["difference"]) <= TOLERANCE  # "meets the paper's figure"
    (run,) = committed_runs("dpsgd", "imdb", 1)
    yield (
        rf"affords, has {measured} at epsilon 1; the paper has {number}, and one committed run of "
        rf"the authors {number}\. Without the second activation it has {number} with as many",
        shown(
            ".2f",
            (
                *(network["mean"], network["spread"], network["paper"]),
                *(float(run["last"]), ours["mean"]),
            ),
        ),
    )
    assert all(
        abs(FOUND["imdb", "dpsgd-network", e]["difference"]) <= TOLERANCE for e in BUDGETS
    )  # "at every budget"
    others = [FOUND["imdb", "dpsgd-network", e] for e in (2, 3, 4)]
    assert {record["seeds"] for record in others} == {3}
    three = rf"{number}, {number} and {number}"
    yield (
        rf"At epsilon 2, 3 and 4 DPSGD has {three} with it, where the paper has {three}\.",
        shown(".2f", [r[key] for key in ("mean", "paper") for r in others]),
    )
    tempered, ours = (
        [FOUND["imdb", arm, e] for e in BUDGETS] for arm in ("dpsgd-ts-network", "dpsgd-ts")
    )
    assert {record["seeds"] for record in tempered} == {3}
    for record in tempered:  # the reason that is given for these cells
        assert abs(record["difference"]) < max(TOLERANCE, 2 * record["spread"])
    yield (
        rf"DPSGD-TS has {four} with it, where the paper has {four} and our network {four}\.",
        shown(
            ".2f",
            [
                *(r[key] for key in ("mean", "paper") for r in tempered),
                *(r["mean"] for r in ours),
            ],
        ),
    )
    built = [FOUND["imdb", NETWORK, e] for e in BUDGETS]
    yield (
        rf"has {four} with it and the validation batch of the commands, where the paper has {four} "
        rf"and the arm {four} without either\.",
        shown(
            ".2f",
            [
                *(r[key] for key in ("mean", "paper") for r in built),
                *(r["mean"] for r in released("imdb")),
            ],
        ),
    )
    seeds = [
        [100 * r["accuracy"] for r in ROWS if _place_of(r) == ("imdb", NETWORK, e)] for e in BUDGETS
    ]
    differ = [max(found) - min(found) for found in seeds]
    assert max(differ) == differ[3]
    yield rf"differ by up to {number} points, at epsilon 4\.", (f"{max(differ):.2f}",)
    nearest = min(
        (r for r in committed_records(paper_accuracy()) if _is_of_dpsur(r, "IMDb", 4)),
        key=lambda r: abs(r["last"] - r["paper"]),
    )
    yield (
        rf"nearest to the paper at epsilon 4, {number}, has the batch of the paper's text, "
        rf"{number};",
        (f"{nearest['last']:.2f}", str(nearest["val_batch"])),
    )


def _is_of_dpsur(run, data, epsilon):
    return (run["data"], run["method"], run["epsilon"]) == (data, "dpsur", epsilon)


def claims_about_dpagd(number, four):
    yield (
        rf"moves {number} noisy gradients whatever is chosen, and the choice adds {number} at most",
        (f"{LARGEST / 2 * COUNT:g}", f"{LARGEST:g}"),
    )
    again = [FOUND["fmnist", "released-dpagd", e] for e in (1, 2, 3)]
    assert {record["seeds"] for record in again} == {3}
    measured = rf"{number} ± {number}"
    yield (
        rf"same has {measured}, {measured} and {measured} on Fashion-MNIST at epsilon 1, 2 and 3, "
        rf"which is what this code claims; the paper has {number}, {number} and {number}\.",
        shown(
            ".2f",
            [
                *(figure for r in again for figure in (r["mean"], r["spread"])),
                *(r["paper"] for r in again),
            ],
        ),
    )
    clothes = FOUND["fmnist", "released-dpagd", 4]
    digits = [FOUND["mnist", "released-dpagd", e] for e in (2, 3, 4)]
    assert {record["seeds"] for record in (clothes, *digits)} == {1}
    three = rf"{number}, {number} and {number}"
    yield (
        rf"One seed has {number} at epsilon 4 \(the paper {number}\), and on MNIST {three} at "
        rf"(2), (3) and (4) \({three}\)\.",
        (
            *shown(".2f", (clothes["mean"], clothes["paper"])),
            *shown(".2f", (r["mean"] for r in digits)),
            *("2", "3", "4"),
            *shown(".2f", (r["paper"] for r in digits)),
        ),
    )
    sound, early = fmnist("dpagd"), fmnist("dpagd-adaptive")
    assert {record["seeds"] for record in sound} == {3}
    digits = [FOUND["mnist", "dpagd", e]["difference"] for e in BUDGETS]
    assert [gap > 0 for gap in digits] == [True, True, True, False]
    yield (
        rf"on MNIST it is above at (1), (2) and (3), and below by {number} at (4), in one seed\.",
        ("1", "2", "3", f"{-digits[3]:.2f}", "4"),
    )
    yield (
        rf"Without both it has {four} on Fashion-MNIST, and {number} on CIFAR-10 at epsilon 3\.",
        shown(".2f", (*(r["mean"] for r in early), FOUND["cifar10", "dpagd-adaptive", 3]["mean"])),
    )
    yield (
        rf"it now makes {number} of them, and made {number} before",
        shown(".0f", (sound[2]["updates"], early[2]["updates"])),
    )
    # "above the paper's figures on Fashion-MNIST, CIFAR-10 and IMDb, and level with them on MNIST"
    for task in DATA_SETS:
        least = -0.2 if task == "mnist" else 0
        assert all(FOUND[task, "dpagd", e]["difference"] > least for e in BUDGETS)
    runs = [
        equal_cells(paper_accuracy())["Fashion-MNIST", "dpagd", epsilon] for epsilon in (1, 2, 3)
    ]
    yield (
        rf"makes {number}, {number} and {number} iterations on Fashion-MNIST at epsilon 1, 2 and "
        rf"3; the authors' committed runs whose figures are the paper's made {number}, {number} "
        rf"and {number}\.",
        shown(".0f", [*(r["updates"] for r in again), *(one["iterations"] for (one,) in runs)]),
    )
    wanted = [("fmnist", "released-dpagd", epsilon) for epsilon in (1, 2, 3)]
    seeds = [[100 * r["accuracy"] for r in ROWS if _place_of(r) == place] for place in wanted]
    yield (
        rf"so seeds differ: by {number}, {number} and {number} points",
        shown(".2f", (max(found) - min(found) for found in seeds)),
    )
    digits = FOUND["mnist", "released-dpagd", 1]
    yield (
        rf"On MNIST at epsilon 1 it has {measured}, the paper {number}\.",
        shown(".2f", (digits["mean"], digits["spread"], digits["paper"])),
    )
    planned = [tuned_setting("dpagd", "cifar10", e)["updates"] for e in BUDGETS]
    assert planned[1] == planned[2]
    yield (
        rf"were chosen so at (1), and the planned updates, {number} at (2) and (3) and {number} at "
        r"(4),",
        ("1", str(planned[1]), "2", "3", str(planned[3]), "4"),
    )
    tuned_at = {(t, e) for arm, t, e in tuned_settings() if arm == "dpagd"}
    assert {(t, e) for t in ("fmnist", "imdb") for e in BUDGETS} <= tuned_at  # "at every budget"
    swinging = FOUND["cifar10", "released-dpagd", 1]
    assert swinging["seeds"] == 1
    (run,) = committed_runs("dpagd", "cifar10", 1)
    yield (
        rf"On CIFAR-10 at epsilon 1 one seed ends at {number} after {number} iterations\. The "
        rf"authors' run with these settings ends at {number} after {number}, and had {number} at "
        rf"its best; the paper says {number}\.",
        (
            *(f"{swinging['mean']:.2f}", f"{swinging['updates']:.0f}", run["last"]),
            *(str(int(run["last_iteration"]) - 1), run["best"], f"{swinging['paper']:.2f}"),
        ),
    )
    reviews = [FOUND["imdb", "released-dpagd", e] for e in BUDGETS]
    assert {record["seeds"] for record in reviews} == {1}
    yield (
        rf"On IMDb one seed has {four}, and the paper {four}\. Its figures at (1) and (2) are",
        (*shown(".2f", (r[key] for key in ("mean", "paper") for r in reviews)), "1", "2"),
    )
    for epsilon in (1, 2):  # "the noise of epsilon 3 and twice the noise of a choice"
        ((run),) = equal_cells(paper_accuracy())["IMDb", "dpagd", epsilon]
        assert run["sigma_t"] == paper_setting("imdb", 3).noise_multiplier
        assert run["sigma_v"] == 2 * CHOICE_NOISE["imdb"]
    yield r"after the test accuracy at (2) with fewer had been seen\.", ("2",)
    yield r"every budget takes the settings of (1)\.", ("1",)
    settings = {e: tuned_setting("dpagd", "mnist", e) for e in BUDGETS}
    assert all(setting == settings[1] for setting in settings.values())
    longer = ("cifar10", "imdb", "fmnist")
    short = [_mean([r for r in rows_of("superseded") if _is_short(r, task)]) for task in longer]
    own = [FOUND[task, "dpagd", 2]["mean"] for task in longer]
    yield (
        rf"it had {number} on CIFAR-10, {number} on IMDb and {number} on Fashion-MNIST at epsilon "
        rf"2, and has {number}, {number} and {number} with its own\.",
        shown(".2f", [*short, *own]),
    )
    reviews = [100 * r["accuracy"] for r in ROWS if _place_of(r) == ("imdb", "dpagd", 4)]
    yield (
        rf"one seed of three falls to {number}; the longest step was {number} there",
        (f"{min(reviews):.2f}", f"{tuned_setting('dpagd', 'imdb', 4)['largest_step']:g}"),
    )


def _is_short(row, task):
    """Rows of DPAGD at epsilon 2 that were made with the settings of epsilon 1."""
    return "another budget" in row["superseded"] and _place_of(row) == (task, "dpagd", 2)


def _place_of(row):
    return tuple(row["config"][name] for name in ("task", "arm", "epsilon"))


def earlier_dpis(word):
    """The mean accuracy of DPIS on CIFAR-10 in rows that were set aside for a reason."""
    rows = [r for r in rows_of("superseded") if word in r["superseded"]]
    rows = [r for r in rows if r["experiment"] == "accuracy" and r["config"]["task"] == "cifar10"]
    rows = [r for r in rows if r["config"]["options"]["updates"] != 1000]
    assert {(r["config"]["arm"], r["config"]["epsilon"]) for r in rows} == {("dpis", 3)}
    assert [row["seed"] for row in rows] == [0, 1, 2]
    return sum(100 * row["accuracy"] for row in rows) / len(rows)


def longer_dpis(batch):
    """Rows of DPIS on CIFAR-10 with 1,000 updates, which were set aside."""
    rows = [r for r in rows_of("superseded") if r["config"]["arm"] == "dpis"]
    rows = [r for r in rows if (r["config"]["task"], r["config"]["epsilon"]) == ("cifar10", 3)]
    wanted = {"batch_size": batch, "updates": 1000}
    rows = [r for r in rows if wanted.items() <= r["config"]["options"].items()]
    return [r for r in rows if "floored" not in r["superseded"]]  # of a fault that was mended


def claims_about_dpis(number):
    plain, dpis = (FOUND["cifar10", arm, 3] for arm in ("dpsgd-hf", "dpis"))
    gap = plain["mean"] - dpis["mean"]
    assert 0 < gap < plain["spread"]  # "less than the spread of DP-SGD"
    yield rf"On CIFAR-10 at epsilon 3 it is {number} behind", shown(".2f", [gap])
    reasons = ("larger clip norms", "a filter of one", "before longer runs", "before averages")
    earlier = [earlier_dpis(reason) for reason in reasons]
    longer = [_mean(longer_dpis(batch)) for batch in (4096, 8192)]
    assert max(earlier + longer) < plain["mean"]  # "it was behind with every setting"
    yield (
        rf"{number} with the paper's clip norm, {number} with a larger one, {number} with that and "
        rf"less noise, {number} and {number} with 1,000 updates of either, {number} with more and "
        rf"shorter steps, and {number} with an average",
        shown(".2f", [*earlier[:3], *longer, earlier[3], dpis["mean"]]),
    )
    by_menu, by_filter = noise_of_dpis()
    yield rf"asked for {number} times the noise", shown(".2f", [by_filter])
    yield rf"asks for {number} times the noise", shown(".2f", [by_menu])
    assert "average_decay" in tuned_setting("dpis", "cifar10", 3)  # "the best on held-out records"
    shorter = (("cifar10", 1), ("cifar10", 2), ("mnist", 1))
    bold = [r for r in rows_of("superseded") if "too bold" in r["superseded"]]
    before = [
        _mean([r for r in bold if (r["config"]["task"], r["config"]["epsilon"]) == place])
        for place in shorter
    ]
    yield (
        rf"it had {number} and {number} on CIFAR-10 at epsilon 1 and 2, and {number} on "
        r"MNIST(?= at)",
        shown(".2f", before),
    )
    yield (
        rf"give {number}, {number} and {number}, where DP-SGD, whose settings were not tuned here, "
        rf"has {number}, {number} and {number}\.",
        shown(
            ".2f", (FOUND[t, arm, e]["mean"] for arm in ("dpis", "dpsgd-hf") for t, e in shorter)
        ),
    )
    yield (
        rf"At epsilon 4 it has {number} on CIFAR-10 and DP-SGD {number}\.",
        shown(".2f", (FOUND["cifar10", arm, 4]["mean"] for arm in ("dpis", "dpsgd-hf"))),
    )
    plainly = {task: "dpsgd" if task == "imdb" else "dpsgd-hf" for task in DATA_SETS}
    behind = [
        (task, e)
        for task, arm in plainly.items()
        for e in BUDGETS
        if FOUND[task, "dpis", e]["mean"] <= FOUND[task, arm, e]["mean"]
    ]
    assert behind == [("cifar10", 3)]
    yield rf"DPIS has the higher mean in {number} of {number} cells", ("15", "16")
    rated = [
        max(p.mean for p in curve)
        for (_, kind), curve in rate_curves().items()
        if kind == ("dpsgd-hf", "constant")
    ]
    yield (
        rf"it has {number} and {number} at epsilon 1 and 3, DPIS {number} and {number}\.",
        shown(".2f", (*rated, *(FOUND["fmnist", "dpis", e]["mean"] for e in (1, 3)))),
    )


def claims_about_reviews(number):
    records = [r for r in iterate_records(rows_of("iterates")) if r["task"] == "imdb"]
    found = {(r["epsilon"], r["changed"]): r for r in records}
    plain = [found[epsilon, ""] for epsilon in (2, 4)]
    yield (
        rf"other rounding errors, come to {number} and {number} at epsilon 2 and 4",
        shown(".2f", (record["last"] for record in plain)),
    )
    assert min(100 * row["accuracy"] for row in rows_of("iterates") if _as_printed(row, 4)) > 68
    yield (
        rf"one now falls to {number}, and the mean to {number} below the paper",
        shown(
            ".2f",
            (
                min(100 * row["accuracy"] for row in rows_of("iterates") if _as_printed(row, 3)),
                -found[3, ""]["last_difference"],
            ),
        ),
    )
    assert FOUND["imdb", "released-code", 3]["difference"] > -0.7  # "is counted as met"
    doubled = [found[epsilon, "learning_rate 0.04"] for epsilon in (4, 2)]
    yield (
        rf"Twice the rate ends {number} above the paper, and at epsilon 2 {number} above it",
        shown(".2f", (twice["last_difference"] for twice in doubled)),
    )
    yield (
        rf"the figures at epsilon 2 and 4 would be {number} and {number}\.",
        shown(".2f", (record["best"] for record in plain)),
    )
    yield (
        rf"within {number} of the paper at epsilon 2, and leaves {number} at epsilon 4",
        shown(".2f", (-record["best_difference"] for record in plain)),
    )


def ablated_seeds(arm, **change):
    """Accuracies of an arm with one setting changed, or none."""
    rows = [r for r in rows_of("ablation") if r["config"]["arm"] == arm]
    return [100 * row["accuracy"] for row in rows if row["config"]["tried"] == change]


def ablated(arm, **change):
    """Their mean."""
    return mean_and_spread(ablated_seeds(arm, **change))[0]


def claims_about_single_settings(number):
    curves = [r for r in iterate_records(rows_of("iterates")) if r["arm"] == RELEASED]
    again, halved = (r for r in curves if r["task"] == "cifar10")
    yield rf"again when it is repeated, by {number}\.", shown(".2f", [again["last_difference"]])
    yield rf"figure after {number} of their updates", shown(".2f", [again["reached"]])
    usual = preset_named("paper", "dpsur", "cifar10", 4).options["learning_rate"]
    assert halved["changed"] == f"learning_rate {usual / 2}"
    yield (
        rf"that was tried there, costs {number} points and ends {number} below the paper",
        shown(".2f", (again["last"] - halved["last"], -halved["last_difference"])),
    )
    preset = ablated("released-code")
    costs = {
        json.dumps(change): preset - ablated("released-code", **change)
        for change in (row["config"]["tried"] for row in rows_of("ablation"))
    }
    large = [
        costs.pop(json.dumps(change))
        for change in (
            {"learning_rate": 2.0},
            {"learning_rate": 1.0},
            {"val_batch_size": 1024},
            {"val_noise_multiplier": 0.8},
            {"learning_rate": 3.0},
            {"val_noise_multiplier": 0.9},
        )
    ]
    single = [{"learning_rate": 3.0}, {"val_noise_multiplier": 0.9}]
    assert [len(ablated_seeds("released-code", **change)) for change in single] == [1, 1]
    yield (
        rf"has half of the rate at {number} points less, a quarter at {number}, the largest "
        rf"validation batch at {number} and the least noise in the test at {number}\. Three "
        rf"quarters of the rate and the next less noise cost {number} and {number}, in one seed "
        rf"each; no other change costs more than {number}\.",
        shown(".2f", (*large, max(costs.values()))),
    )
    code, printed_arm = "released-code", "published"
    clip = preset_named("paper", "dpsur", "cifar10", 3).options["loss_clip"]
    usual, spread = mean_and_spread(ablated_seeds(printed_arm))
    blind = mean_and_spread(ablated_seeds(printed_arm, loss_clip=10.0))
    yield rf"With a loss clip of {number} instead of {number} the test", ("10", f"{clip:g}")
    yield (
        rf"Algorithm 1 then has {number} ± {number}, and {number} ± {number} with the paper's clip",
        shown(".2f", (*blind, usual, spread)),
    )
    yield (
        rf"With a loss clip of 10 the released code has {number} ± {number} on CIFAR-10 at epsilon "
        rf"3, and {number} ± {number} with the paper's;",
        shown(
            ".2f",
            (
                *mean_and_spread(ablated_seeds(code, loss_clip=10.0)),
                *mean_and_spread(ablated_seeds(code)),
            ),
        ),
    )
    afforded = [
        [r["updates"] for r in rows_of("ablation") if _changed(r, printed_arm) == change]
        for change in ({"val_batch_size": 1024}, {})
    ]
    yield (
        rf"batch of 1024 is found \({number}\), but it is that of {number} updates instead of "
        rf"{number},",
        (f"{ablated(printed_arm, val_batch_size=1024):.2f}", *(str(min(u)) for u in afforded)),
    )
    yield (
        rf"With a validation batch of 1024 it has {number}\.",
        shown(".2f", [ablated(code, val_batch_size=1024)]),
    )
    yield (
        rf"32 is worse than one of 256 is not found \({number} for Algorithm 1, {number} for the "
        r"released code\)",
        shown(".2f", (ablated(arm, val_batch_size=32) for arm in ARMS_SHOWN)),
    )
    faster = [ablated(code, learning_rate=rate) for rate in (5.0, 6.0, 7.0)]
    assert min(faster) > preset
    assert [len(ablated_seeds(code, learning_rate=rate)) for rate in (5.0, 6.0)] == [1, 1]
    yield (
        rf"a learning rate of 4 is the best for the released code, which has {number}, {number} "
        rf"and {number} with 5, 6 and 7 \(one seed at 5 and 6\)",
        shown(".2f", faster),
    )
    steady = [usual, *(ablated(printed_arm, val_noise_multiplier=v) for v in (0.8, 1.3))]
    yield (
        rf"is found for Algorithm 1 \({number} to {number} over",
        shown(".2f", (min(steady), max(steady))),
    )
    quiet = mean_and_spread(ablated_seeds(code, val_noise_multiplier=0.8))
    yield rf"the released code falls to {number} ± {number} where", shown(".2f", quiet)
    others = [mean_and_spread(ablated_seeds(printed_arm, accept_threshold=b)) for b in (-2, 0, 1)]
    assert 0 < usual - max(mean for mean, _ in others) < spread  # "is within the spread"
    # "No threshold changes it by more than its seeds do"
    assert all(usual - mean < max(spread, seeds) for mean, seeds in others)
    yield r"No threshold from -2 to 1 changes", ("No threshold from -2 to 1 changes",)
    yield (
        rf"a threshold of -1 is the best is within the spread: Algorithm 1 has {number} to "
        rf"{number} from -2 to 1",
        shown(".2f", (min(mean for mean, _ in others), usual)),
    )
    rates = [ablated(printed_arm, learning_rate=rate) for rate in (1.0, 2.0, 7.0)]
    assert max(rates) < usual  # "for Algorithm 1 it is"


def _changed(row, arm):
    return row["config"]["tried"] if row["config"]["arm"] == arm else None


def _as_printed(row, epsilon):
    config = row["config"]
    return not config["tried"] and (config["task"], config["epsilon"]) == ("imdb", epsilon)


KINDS = {
    "every trial charged": ("every-trial", "constant"),
    "Algorithm 1, proven": ("proven", "constant"),
    "DP-SGD": ("dpsgd-hf", "constant"),
    "DP-SGD, rate decaying": ("dpsgd-hf", "linear"),
}


@cache
def rate_curves():
    """Accuracy against the learning rate, by epsilon and by arm and schedule."""
    curves = {}
    for epsilon, kind in itertools.product((1, 3), KINDS.values()):
        chosen = [r for r in rows_of("robustness") if _kind(r) == kind]
        chosen = [r for r in chosen if r["config"]["epsilon"] == epsilon]
        pairs = ((r["config"]["options"]["learning_rate"], r["accuracy"]) for r in chosen)
        curves[epsilon, kind] = series(pairs)
        assert len(curves[epsilon, kind]) == len(RATES) == 7  # "best of seven rates"
    return curves


def claims_about_rates(number):
    yield rf"Over the whole range of {number}", (f"{RATES[-1] / RATES[0]:g}",)
    folds = defaultdict(set)
    for record in rate_records(rows_of("robustness")):
        folds[record["epsilon"]].add(f"{record['fold']:g}")
    yield (
        rf"stays over a factor of {number} at epsilon 1, and of {number} at epsilon 3",
        (*folds[1], *folds[3]),
    )
    curves = rate_curves()
    lost = {k: max(p.mean for p in c) - min(p.mean for p in c) for k, c in curves.items()}
    every, plain, decaying = (KINDS[k] for k in list(KINDS) if k != "Algorithm 1, proven")
    # "loses less than DP-SGD with a constant rate does; a decaying rate does as well"
    assert all(lost[e, every] < lost[e, plain] for e in (1, 3))
    assert lost[1, every] < lost[1, decaying] < lost[1, every] + 2.5
    assert lost[3, decaying] < lost[3, every]
    peaks = {place: max(curve, key=lambda p: p.mean).value for place, curve in curves.items()}
    # "two and four times that of DP-SGD"
    assert [peaks[e, every] / peaks[e, plain] for e in (1, 3)] == [2, 4]


def test_the_best_and_the_worst_of_the_rates_are_those_of_the_rows():
    curves = rate_curves()
    for name, kind in KINDS.items():
        found = [extreme(p.mean for p in curves[e, kind]) for extreme in (max, min) for e in (1, 3)]
        assert f"| {name} | {' | '.join(shown('.2f', found))} |" in TABLE


def _kind(row):
    return row["config"]["arm"], row["config"]["options"]["schedule"]


def claims_about_curves(number):
    found = {(r["what"], r["epsilon"]): r for r in curve_records(rows_of("convergence"))}
    ours, plain = (
        [record for (what, _), record in found.items() if what == LOOKS[arm].label]
        for arm in ("proven", "dpsgd-hf")
    )

    def at(records, epsilon):
        return next(r["accuracy"] for r in records if r["epsilon"] == epsilon)

    yield (
        rf"DP-SGD has {number} when {number} is spent and Algorithm 1 has {number}; at {number} it "
        rf"is {number} against {number}, at the end {number} against {number} \(",
        (
            *(f"{at(plain, 1.0):.2f}", "1.0", f"{at(ours, 1.0):.2f}"),
            *("2.0", f"{at(plain, 2.0):.2f}", f"{at(ours, 2.0):.2f}"),
            *shown(".2f", (plain[-1]["accuracy"], ours[-1]["accuracy"])),
        ),
    )
    kept = ours[-1]["updates"]
    accuracy, loss = (
        np.mean([np.interp(kept, c["updates"], c[name]) for c in curves_of_plain()])
        for name in ("accuracy", "loss")
    )
    yield (
        rf"after {number} updates Algorithm 1 has {number} and a loss of {number}, DP-SGD {number} "
        rf"and {number}\.",
        (
            f"{kept:.0f}",
            *(f"{ours[-1]['accuracy']:.2f}", f"{ours[-1]['loss']:.3f}"),
            *(f"{100 * accuracy:.2f}", f"{loss:.3f}"),
        ),
    )


def curves_of_plain():
    return curves_of(rows_of("convergence"), "dpsgd-hf")


def claims_about_attacks(number):
    both = ("shadow", "white-box")
    for task, name in (("fmnist", "Fashion-MNIST"), ("cifar10", "CIFAR-10")):
        found = [attacked(task, attack) for attack in both]
        yield (
            rf"{number} and {number} on {name} \(paper {number} and {number}\)",
            shown(".3f", [*(r["accuracy"] for r in found), *(r["paper"] for r in found)]),
        )
    gap = [attacked(task, "gap")["accuracy"] for task in ("fmnist", "cifar10")]
    yield rf"is a member reaches {number} and {number}", shown(".3f", gap)
    lots = range_of_attacks(private=False, names=[f"{name}, shuffled" for name in both])
    yield rf"drawn by lot they stay between {number} and {number}", shown(".3f", lots)
    private = range_of_attacks(private=True, names=both)
    yield rf"On private targets they stay between {number} and {number}", shown(".3f", private)
    better = better_attacks()
    areas = {place: figures["auc"] for place, figures in better.items()}
    above = sum(area["low"] > 0.5 for area in areas.values())
    yield rf"on one seed of all {number} private targets but those on pixels", (str(len(better)),)
    yield rf"than its interval on {number} of the {number}", (str(above), str(len(better)))
    most = max(better, key=lambda place: areas[place]["value"])
    assert most == ("cifar10", "dpsur", 4)
    figures = [better[most][name][k] for name in ("balanced_accuracy", "auc") for k in INTERVAL]
    yield (
        rf"an accuracy of {number} \({number} to {number}\), and an area of "
        rf"{number} \({number} to {number}\)",
        shown(".3f", figures),
    )
    learned = [
        extreme(r["test"] for r in private_targets() if r["task"] == task)
        for task in ("fmnist", "cifar10")
        for extreme in (min, max)
    ]
    yield (
        rf"classify {number} to {number} correctly on Fashion-MNIST and {number} to {number} on",
        shown(".3f", learned),
    )
    grid = [cell for cell in MEMBERSHIP.cells(Options()) if cell["config"]["method"] != PIXELS]
    made = {MEMBERSHIP.key(row) for row in rows_of("membership")}
    assert {MEMBERSHIP.key(cell) for cell in grid} <= made


def test_figures_are_those_of_the_rows():
    for pattern, figures in claims():
        found = re.findall(pattern, PROSE)
        assert len(found) == 1, f"{pattern} should be said once"
        said = (found[0],) if isinstance(found[0], str) else found[0]
        assert said == figures, pattern


def unchecked(prose):
    for pattern in (*(pattern for pattern, _ in claims()), *NOT_FINDINGS):
        prose = re.sub(pattern, "", prose)
    return re.findall(r"[^ ]*\d[^ ]*", prose)


def test_no_figure_is_left_unchecked():
    assert unchecked(PROSE) == []
    assert unchecked(PROSE + " It gains 3.1 points.") == ["3.1"]


def test_every_experiment_has_rows():
    assert "Every experiment has rows:" in PROSE
    # drawings have none; heads is no experiment of the paper
    without = {"schematics", "heads"}
    assert all(rows_of(name) for name in EXPERIMENTS if name not in without)
    features = (ROOT / "docs" / "features.md").read_text()
    assert rows_of("heads") or "they are not made yet" in features
    for complete in ("robustness", "convergence"):
        experiment = experiment_named(complete)
        made = {experiment.key(row) for row in rows_of(complete)}
        assert made >= {experiment.key(cell) for cell in experiment.cells(Options())}


def test_what_moves_the_reviews_is_that_of_the_rows():
    records = [r for r in iterate_records(rows_of("iterates")) if r["task"] == "imdb"]
    found = {r["changed"]: r["last"] for r in records if r["epsilon"] == 4}
    for said, change in (
        ("twice the learning rate", "learning_rate 0.04"),
        ("half of it", "learning_rate 0.01"),
        ("a quarter of it", "learning_rate 0.005"),
        ("a linear decay", "schedule linear"),
        ("twice the validation batch", "val_batch_size 256"),
    ):
        assert f"| {said} | {found[change] - found['']:+.2f} |" in TABLE
    assert preset_named("paper", "dpsur", "imdb", 4).options["learning_rate"] == 0.02


def test_other_tables_are_those_of_the_rows():
    for task, name in DATA_SETS.items():
        budgets = [FOUND[task, "dpagd-adaptive", e] for e in BUDGETS]
        ours = " | ".join(shown(".2f", (r["mean"] for r in budgets)))
        paper = ", ".join(shown(".2f", (r["paper"] for r in budgets)))
        assert f"| {name} | {ours} | {paper} |" in TABLE
        sound = [FOUND.get((task, "dpagd", e)) for e in BUDGETS]
        figures = " | ".join(f"{r['mean']:.2f}" if r else "–" for r in sound)
        assert f"| {name} | {figures} | {paper} |" in TABLE
        if task == "mnist":  # "without it every mean is a little higher"
            gains = [r["mean"] - b["mean"] for r, b in zip(sound, budgets, strict=True)]
            assert all(-0.25 < gain < 0 for gain in gains)
        if task == "fmnist":
            continue
        for arm, records in (
            ("Algorithm 1", [FOUND[task, "proven", e] for e in BUDGETS]),
            ("DP-SGD", plain_on(task)),
        ):
            figures = " | ".join(shown(".2f", (r["mean"] for r in records)))
            assert f"| {name} | {arm} | {figures} |" in TABLE


def test_the_seeds_of_dpagd_are_told():
    three = {("fmnist", e) for e in BUDGETS} | {("imdb", 1), ("imdb", 2), ("imdb", 4)}
    seeds = {(task, e): r["seeds"] for (task, arm, e), r in FOUND.items() if arm == "dpagd"}
    assert {place for place, count in seeds.items() if count == 3} == three
    assert {count for place, count in seeds.items() if place not in three} == {1}
    few = {place for place, r in FOUND.items() if r["seeds"] < 3 and place[1] != "dpagd"}
    assert few == {
        *(("cifar10", arm, e) for arm in ("dpsgd-ts", "dpsgd-ts-fixed") for e in BUDGETS),
        *(("cifar10", arm, 1) for arm in ("released-dpagd", "dpsgd-published")),
        *(("imdb", "released-dpagd", e) for e in BUDGETS),
        *(("mnist", "released-dpagd", e) for e in (2, 3, 4)),
        ("fmnist", "released-dpagd", 4),
        ("imdb", "released-network", 2),
        *(("imdb", "released-commands", e) for e in (1, 3)),
    }
    assert "One seed each have DPAGD on CIFAR-10 and MNIST and on IMDb at epsilon 3" in PROSE


def test_dpsgd_ts_on_photographs_is_that_of_the_rows():
    lines = {
        "the paper": [paper_accuracy()["cifar10", "dpsgd-ts", e] for e in BUDGETS],
        **{
            said: [FOUND["cifar10", arm, e]["mean"] for e in BUDGETS]
            for said, arm in (
                ("the released commands, at a proven epsilon", "dpsgd-ts"),
                ("what its authors tuned, their noise at every budget", "dpsgd-ts-fixed"),
                ("what its authors tuned, their number of updates", "dpsgd-ts-authors"),
            )
        },
    }
    for said, figures in lines.items():
        assert f"| {said} | {' | '.join(shown('.2f', figures))} |" in TABLE


def test_the_comparison_at_a_proven_epsilon_is_that_of_the_rows():
    ahead = gaps("proven", "dpsgd-hf")
    lines = [
        f"| {budget} | {_measured(one)} | {_measured(plain)} | {gap:.2f} |"
        for budget, one, plain, gap in zip(
            BUDGETS, fmnist("proven"), fmnist("dpsgd-hf"), ahead, strict=True
        )
    ]
    assert [line for line in TABLE if re.match(r"\| \d \|", line)] == lines
    assert min(ahead) > 0


def test_the_controls_are_those_of_the_rows():
    arms = ("released-code", "kept-momentum", "random-kept", "published", "random")
    lines = [line for line in TABLE if "| kept |" in line or "| restored |" in line]
    found = {task: [FOUND[task, arm, 1] for arm in arms] for task in ("fmnist", "mnist", "cifar10")}
    figures = [" | ".join(map(_plain, line)) + " |" for line in zip(*found.values(), strict=True)]
    assert [line.split(" | ", 3)[-1] for line in lines] == figures
    for task, records in found.items():
        means = [record["mean"] for record in records]
        spread = max(record["spread"] for record in records)
        kept, restored = means[:3], means[3:]
        assert restored[0] < restored[1] + spread  # "no better than the lot, on any of the three"
        assert min(kept) - max(restored) > spread
        if task != "cifar10":  # "that of the paper even if acceptance is drawn by lot"
            assert max(kept) - min(kept) < spread
            assert abs(records[2]["difference"]) < 0.7


def test_dpis_stands_beside_dpsgd():
    lines = []
    for task, name in DATA_SETS.items():
        plain = FOUND[task, "dpsgd" if task == "imdb" else "dpsgd-hf", 3]
        dpis, paper = FOUND[task, "dpis", 3], paper_accuracy()[task, "dpis", 3]
        lines.append(f"| {name} | {_plain(dpis)} | {_plain(plain)} | {paper:.2f} |")
        assert dpis["mean"] > plain["mean"] or task == "cifar10"
    assert [line for line in TABLE if line in lines] == lines
    assert {arm: r["seeds"] for (_, arm, _), r in FOUND.items() if arm == "dpis"} == {"dpis": 3}


def _plain(record):
    return f"{record['mean']:.2f} ± {record['spread']:.2f}"


def _measured(record):
    return f"{record['mean']:.2f} ± {record['spread']:.2f} | {record['updates']:.0f}"


def test_what_is_said_in_words_holds():
    others = released_at_four()[1:]
    assert abs(sum(others) / len(others) - FOUND["fmnist", "released-code", 4]["paper"]) < 0.1
    assert {r["seeds"] for arm in MAIN_ARMS for r in fmnist(arm)} == {5}
    best = best_summary(rows_of("best"))
    assert all(record["proven"] <= record["epsilon"] for record in best)
    above = [best_of("fmnist", "dpsgd", budget)["difference"] for budget in BUDGETS]
    assert [0 < gap < 0.2 for gap in above] == [True, False, True, False]
    assert [-0.3 < gap < 0 for gap in above] == [False, True, False, True]


@pytest.mark.parametrize("name", ["accuracy", "ablation", "iterates", "convergence", "superseded"])
def test_what_is_no_method_has_no_proven_figure(name):
    faulty = [row for row in rows_of(name) if not ARMS[row["config"]["arm"]].sound]
    assert faulty
    for row in faulty:
        claimed = {key for key, figure in row["epsilon"].items() if figure is not None}
        assert claimed == {"published"}


def test_where_rows_were_made_is_told():
    places = defaultdict(set)
    for row in ROWS:
        places[row["config"]["task"], row["config"]["arm"]].add(row["device"])
    whole = {place for place, devices in places.items() if devices == {"cpu"}}
    part = {place for place, devices in places.items() if devices == {"cpu", "NVIDIA H200"}}
    assert whole == {
        ("fmnist", "dpagd-adaptive"),
        ("mnist", "dpagd-adaptive"),
        ("fmnist", "every-trial"),
        ("fmnist", "kept-momentum"),
        ("fmnist", "nonprivate"),
        *(("fmnist", arm.name) for arm in FAULT_ARMS),
    }
    controls = {"every-trial", "kept-momentum", "random", "random-kept"}
    assert part == {
        ("fmnist", "random"),
        ("fmnist", "random-kept"),
        *(("mnist", control) for control in controls),
        ("mnist", "dpsgd-hf"),
        ("mnist", "dpsgd"),
        ("imdb", "dpsgd"),
        ("imdb", "dpsgd-ts"),
        ("imdb", "dpsgd-network"),
        ("imdb", "dpsgd-ts-network"),
        ("imdb", "released-network"),
    }
    for row in rows_of("best"):
        photographs = row["config"]["task"] == "cifar10"
        assert row["device"] == ("NVIDIA H200" if photographs else "cpu")
    assert {row["device"] for row in rows_of("robustness")} == {"cpu", "NVIDIA H200"}
