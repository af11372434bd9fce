"""Sentences about single settings, curves and the rows themselves."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isclose
from typing import Any

import numpy as np

from dpsur.presets import preset_named
from reproduction.base import Options
from reproduction.experiments.ablation import (
    ARMS_SHOWN,
    BATCH,
    DEFAULT_BASE,
    FACTORS,
    OTHER_BASE,
    measured,
)
from reproduction.experiments.ablation import EXPERIMENT as ABLATION
from reproduction.experiments.accuracy import paper_accuracy
from reproduction.experiments.accuracy_pages import RELEASED
from reproduction.experiments.best import summary as best_summary
from reproduction.experiments.convergence import LOOKS, curves_of
from reproduction.experiments.convergence import records as curve_records
from reproduction.experiments.iterates import records as iterate_records
from reproduction.experiments.robustness import RATES
from reproduction.experiments.robustness import records as rate_records
from reproduction.page_figures.records import (
    BUDGETS,
    FOUND,
    FOUR,
    KINDS,
    NUMBER,
    Claim,
    Row,
    best_of,
    rate_curves,
    rows_of,
    shown,
)
from reproduction.training import mean_and_spread


def _about_time() -> Iterator[Claim]:
    (part,) = rows_of("grid_part")
    assert part["config"] == {"part": "0/10", "jobs": 4}  # "every tenth", "four processes"
    assert part["device"] == "NVIDIA H200"
    whole = shown(".0f", [part["minutes_of_all"]])
    yield rf"all rows of accuracies takes about {NUMBER} minutes of one GPU", whole
    yield rf"So the whole takes {NUMBER} minutes, by this estimate", whole
    yield (
        rf"{NUMBER} of {NUMBER} runs in {NUMBER} minutes",
        (str(part["runs"]), str(part["runs_of_all"]), *shown(".1f", [part["seconds"] / 60])),
    )
    yield rf"that is {NUMBER} percent of the work", shown(".1f", [100 * part["share"]])
    alone = sum(row["seconds"] for row in rows_of("grid_time")) / 60
    assert isclose(alone, part["seconds_alone_of_all"] / 60, abs_tol=0.01)
    assert part["multi_process_service"]
    yield (
        rf"after the other it would take {NUMBER} \(",
        shown(".0f", [part["seconds_alone_of_all"] / 60]),
    )
    moved = part["points_moved"]
    same, near = (sum(abs(m) <= most for m in moved) for most in (0.0, 0.5))
    yield (
        rf"Of the {NUMBER} accuracies {NUMBER} came out within {NUMBER} points of the rows, "
        rf"{NUMBER} within half a point, and the others within {NUMBER}; on average they moved by "
        rf"{NUMBER} points",
        (
            *map(str, (len(moved), same, 0.005, near)),
            f"{max(map(abs, moved)):.1f}",
            f"{sum(moved) / len(moved):+.2f}",
        ),
    )


def _about_the_ablation_grid() -> Iterator[Claim]:
    """Which values have rows, in words."""
    grid = ABLATION.cells(Options())
    made = [row["config"]["tried"] for row in rows_of("ablation")]
    lacking = {
        json.dumps(cell["config"]["tried"]) for cell in grid if cell["config"]["tried"] not in made
    }
    # "but for the lowest threshold around 128"
    assert lacking <= {json.dumps({"val_batch_size": 128, "accept_threshold": -3.0})}
    yield r"around (128)\. The values that the text names have three seeds", ("128",)
    yield (
        rf"batch of {NUMBER} in its settings and of {NUMBER} in its section on the ablation\. "
        rf"Around {NUMBER} the",
        (str(DEFAULT_BASE), str(OTHER_BASE), str(OTHER_BASE)),
    )
    apart = [
        abs(one.mean - other.mean)
        for factor in FACTORS
        if factor.name != BATCH
        for one in measured(rows_of("ablation"), RELEASED, factor)
        for other in measured(rows_of("ablation"), RELEASED, factor, OTHER_BASE)
        if one.value == other.value
    ]
    yield rf"the same: they differ by {NUMBER} points on average", (f"{np.mean(apart):.2f}",)


def _about_superseded() -> Iterator[Claim]:
    reasons = [row["superseded"] for row in rows_of("superseded")]
    faults = sum("floored" in r or "recurrent" in r for r in reasons)
    looser = sum("a filter of one" in r for r in reasons)
    grouped = sum("by group" in r for r in reasons)
    others = len(reasons) - faults - looser - grouped
    yield rf"{NUMBER} earlier rows", (str(len(reasons)),)
    yield rf"{NUMBER} were made before two faults", (str(faults),)
    yield rf"{NUMBER} with settings of DPIS and DPAGD", (str(others),)
    yield rf"{NUMBER} are of CIFAR-10 with features normalised by group", (str(grouped),)
    yield rf"{NUMBER} when the cost of DPIS", (str(looser),)


def _about_the_best() -> Iterator[Claim]:
    words, selective = (
        [best_of("imdb-words", method, budget) for budget in BUDGETS]
        for method in ("dpsgd", "dpsur")
    )
    clothes = [best_of("fmnist", "dpsgd", budget) for budget in BUDGETS]
    yield (
        rf"Reviews reach {NUMBER} at a proven epsilon of 1, the paper's DPSUR {NUMBER} at its own",
        shown(".2f", (words[0]["mean"], words[0]["paper"])),
    )
    hashed = [
        100 * row["accuracy"]
        for row in rows_of("heads")
        if (row["config"]["task"], row["config"]["epsilon"]) == ("imdb-hashed", 1)
    ]
    yield (
        rf"With hashed words, which assume nothing, the default reaches {NUMBER} there",
        shown(".2f", [sum(hashed) / len(hashed)]),
    )
    yield (
        rf"the same linear model reaches {FOUR}",
        shown(".2f", (record["mean"] for record in selective)),
    )
    yield (
        rf"reaches {FOUR} at a proven epsilon of 1, 2, 3 and 4",
        shown(".2f", (record["mean"] for record in clothes)),
    )
    yield (
        rf"where the paper has {FOUR} at its own: a little more at 1 and 3, a little less at 2 "
        r"and 4",
        shown(".2f", (record["paper"] for record in clothes)),
    )
    yield (
        rf"reaches {FOUR} at epsilon 1, 2, 3 and 4, all",
        shown(".2f", (record["mean"] for record in words)),
    )
    yield (
        rf"reports {FOUR} for DPSUR at its own",
        shown(".2f", (record["paper"] for record in words)),
    )
    digits = [best_of("mnist", "dpsgd", budget) for budget in BUDGETS]
    assert [record["difference"] > 0 for record in digits] == [True, False, False, False]
    yield (
        rf"On MNIST it reaches {FOUR}; the paper has {FOUR}, more at all but the smallest",
        shown(".2f", (record[key] for key in ("mean", "paper") for record in digits)),
    )
    photographs = [best_of("cifar10", "dpsgd", budget) for budget in (1, 3)]
    proven = [r for r in FOUND.values() if (r["task"], r["accounting"]) == ("cifar10", "proven")]
    assert {"dpis", "dpsgd-hf", "proven"} <= {r["arm"] for r in proven}
    wanted = {budget: paper_accuracy()["cifar10", "dpsur", budget] for budget in BUDGETS}
    ahead = [r for r in [*proven, *photographs] if r["mean"] > wanted[r["epsilon"]]]
    assert [(r["arm"], r["epsilon"]) for r in ahead] == [("dpis", 1)]
    yield rf"only those of DPIS at 1, with {NUMBER}, are", shown(".2f", [ahead[0]["mean"]])
    made = {r["epsilon"] for r in best_summary(rows_of("best")) if r["task"] == "cifar10"}
    assert made == {1, 3}  # "none there at the other two budgets"
    yield (
        rf"reaches {NUMBER} and {NUMBER} at 1 and 3, where the paper has {NUMBER} and {NUMBER}\.",
        shown(".2f", (r[key] for key in ("mean", "paper") for r in photographs)),
    )
    plain = paper_accuracy()["imdb", "nonprivate", 0]
    yield rf"{NUMBER} for that network without privacy", shown(".2f", [plain])


def _about_reviews() -> Iterator[Claim]:
    records = [r for r in iterate_records(rows_of("iterates")) if r["task"] == "imdb"]
    found = {(r["epsilon"], r["changed"]): r for r in records}
    plain = [found[epsilon, ""] for epsilon in (2, 4)]
    yield (
        rf"other rounding errors, come to {NUMBER} and {NUMBER} at epsilon 2 and 4",
        shown(".2f", (record["last"] for record in plain)),
    )
    assert min(100 * row["accuracy"] for row in rows_of("iterates") if _as_printed(row, 4)) > 68
    yield (
        rf"one now falls to {NUMBER}, and the mean to {NUMBER} below the paper",
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
        rf"Twice the rate ends {NUMBER} above the paper, and at epsilon 2 {NUMBER} above it",
        shown(".2f", (twice["last_difference"] for twice in doubled)),
    )
    yield (
        rf"the figures at epsilon 2 and 4 would be {NUMBER} and {NUMBER}\.",
        shown(".2f", (record["best"] for record in plain)),
    )
    yield (
        rf"within {NUMBER} of the paper at epsilon 2, and leaves {NUMBER} at epsilon 4",
        shown(".2f", (-record["best_difference"] for record in plain)),
    )


def ablated_seeds(arm: str, **change: float) -> list[float]:
    """Accuracies of an arm with one setting changed, or none."""
    rows = [r for r in rows_of("ablation") if r["config"]["arm"] == arm]
    return [100 * row["accuracy"] for row in rows if row["config"]["tried"] == change]


def ablated(arm: str, **change: float) -> float:
    """Their mean."""
    return mean_and_spread(ablated_seeds(arm, **change))[0]


def _about_single_settings() -> Iterator[Claim]:
    curves = [r for r in iterate_records(rows_of("iterates")) if r["arm"] == RELEASED]
    again, halved = (r for r in curves if r["task"] == "cifar10")
    yield rf"again when it is repeated, by {NUMBER}\.", shown(".2f", [again["last_difference"]])
    yield rf"figure after {NUMBER} of their updates", shown(".2f", [again["reached"]])
    usual = preset_named("paper", "dpsur", "cifar10", 4).options["learning_rate"]
    assert halved["changed"] == f"learning_rate {usual / 2}"
    yield (
        rf"that was tried there, costs {NUMBER} points and ends {NUMBER} below the paper",
        shown(".2f", (again["last"] - halved["last"], -halved["last_difference"])),
    )
    preset = ablated("released-code")
    costs = {
        json.dumps(change): preset - ablated("released-code", **change)
        for change in (row["config"]["tried"] for row in rows_of("ablation"))
        if len(change) == 1
    }
    large = [
        costs.pop(json.dumps(change))
        for change in (
            {"learning_rate": 2.0},
            {"learning_rate": 1.0},
            {"val_batch_size": 1024},
            {"val_noise_multiplier": 0.8},
            {"learning_rate": 3.0},
        )
    ]
    yield (
        rf"has half of the rate at {NUMBER} points less, a quarter at {NUMBER}, the largest "
        rf"validation batch at {NUMBER} and the least noise in the test at {NUMBER}\. Three "
        rf"quarters of the rate costs {NUMBER}; no other change costs more than {NUMBER}\.",
        shown(".2f", (*large, max(costs.values()))),
    )
    code, printed_arm = "released-code", "published"
    clip = preset_named("paper", "dpsur", "cifar10", 3).options["loss_clip"]
    usual, spread = mean_and_spread(ablated_seeds(printed_arm))
    blind = mean_and_spread(ablated_seeds(printed_arm, loss_clip=10.0))
    yield rf"With a loss clip of {NUMBER} instead of {NUMBER} the test", ("10", f"{clip:g}")
    yield (
        rf"Algorithm 1 then has {NUMBER} ± {NUMBER}, and {NUMBER} ± {NUMBER} with the paper's clip",
        shown(".2f", (*blind, usual, spread)),
    )
    yield (
        rf"With a loss clip of 10 the released code has {NUMBER} ± {NUMBER} on CIFAR-10 at epsilon "
        rf"3, and {NUMBER} ± {NUMBER} with the paper's;",
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
        rf"batch of 1024 is found \({NUMBER}\), but it is that of {NUMBER} updates instead of "
        rf"{NUMBER},",
        (f"{ablated(printed_arm, val_batch_size=1024):.2f}", *(str(min(u)) for u in afforded)),
    )
    yield (
        rf"With a validation batch of 1024 it has {NUMBER}\.",
        shown(".2f", [ablated(code, val_batch_size=1024)]),
    )
    yield (
        rf"32 is worse than one of 256 is not found \({NUMBER} for Algorithm 1, {NUMBER} for the "
        r"released code\)",
        shown(".2f", (ablated(arm, val_batch_size=32) for arm in ARMS_SHOWN)),
    )
    faster = [ablated(code, learning_rate=rate) for rate in (5.0, 6.0, 7.0)]
    assert min(faster) > preset
    yield (
        rf"a learning rate of 4 is the best for the released code, which has {NUMBER}, {NUMBER} "
        rf"and {NUMBER} with 5, 6 and 7;",
        shown(".2f", faster),
    )
    steady = [usual, *(ablated(printed_arm, val_noise_multiplier=v) for v in (0.8, 1.3))]
    yield (
        rf"is found for Algorithm 1 \({NUMBER} to {NUMBER} over",
        shown(".2f", (min(steady), max(steady))),
    )
    quiet = mean_and_spread(ablated_seeds(code, val_noise_multiplier=0.8))
    yield rf"the released code falls to {NUMBER} ± {NUMBER} where", shown(".2f", quiet)
    thresholds = next(factor.values for factor in FACTORS if factor.name == "accept_threshold")
    for arm, pattern in (
        (printed_arm, rf"from (-3) to (1) Algorithm 1 has {NUMBER} to {NUMBER}, without a trend"),
        (code, rf"is not found: the released code has {NUMBER} to {NUMBER} from (-3) to (1)\."),
    ):
        line = next(f for f in FACTORS if f.values == thresholds)
        means = [point.mean for point in measured(rows_of("ablation"), arm, line)]
        assert len(means) == len(thresholds)
        ends, range_ = ("-3", "1"), shown(".2f", (min(means), max(means)))
        yield pattern, (*ends, *range_) if arm == printed_arm else (*range_, *ends)
    assert (min(thresholds), max(thresholds)) == (-3, 1)
    rates = [ablated(printed_arm, learning_rate=rate) for rate in (1.0, 2.0, 7.0)]
    assert max(rates) < usual  # "for Algorithm 1 it is"


def _changed(row: Row, arm: str) -> Any:
    return row["config"]["tried"] if row["config"]["arm"] == arm else None


def _as_printed(row: Row, epsilon: int) -> bool:
    config = row["config"]
    return not config["tried"] and (config["task"], config["epsilon"]) == ("imdb", epsilon)


def _about_rates() -> Iterator[Claim]:
    yield rf"Over the whole range of {NUMBER}", (f"{RATES[-1] / RATES[0]:g}",)
    folds = defaultdict(set)
    for record in rate_records(rows_of("robustness")):
        folds[record["epsilon"]].add(f"{record['fold']:g}")
    yield (
        rf"stays over a factor of {NUMBER} at epsilon 1, and of {NUMBER} at epsilon 3",
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


def _about_curves() -> Iterator[Claim]:
    found = {(r["what"], r["epsilon"]): r for r in curve_records(rows_of("convergence"))}
    ours, plain = (
        [record for (what, _), record in found.items() if what == LOOKS[arm].label]
        for arm in ("proven", "dpsgd-hf")
    )

    def at(records: Sequence[Row], epsilon: float) -> float:
        return float(next(r["accuracy"] for r in records if r["epsilon"] == epsilon))

    yield (
        rf"DP-SGD has {NUMBER} when {NUMBER} is spent and Algorithm 1 has {NUMBER}; at {NUMBER} it "
        rf"is {NUMBER} against {NUMBER}, at the end {NUMBER} against {NUMBER} \(",
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
        rf"after {NUMBER} updates Algorithm 1 has {NUMBER} and a loss of {NUMBER}, DP-SGD {NUMBER} "
        rf"and {NUMBER}\.",
        (
            f"{kept:.0f}",
            *(f"{ours[-1]['accuracy']:.2f}", f"{ours[-1]['loss']:.3f}"),
            *(f"{100 * accuracy:.2f}", f"{loss:.3f}"),
        ),
    )


def curves_of_plain() -> list[dict[str, Any]]:
    """Curves of DP-SGD on the features of DPSUR."""
    return curves_of(rows_of("convergence"), "dpsgd-hf")


def claims() -> Iterator[Claim]:
    """All of them."""
    yield from _about_time()
    yield from _about_the_ablation_grid()
    yield from _about_superseded()
    yield from _about_the_best()
    yield from _about_reviews()
    yield from _about_single_settings()
    yield from _about_rates()
    yield from _about_curves()
