"""Sentences about DPAGD and DPIS, with the figures of the rows."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from dpsur.methods import METHODS
from dpsur.presets import preset_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.planning import filtered_plan
from dpsur.runs.input_features import InputFeatures
from reproduction.arms import CHOICE_NOISE
from reproduction.experiments.accuracy import paper_accuracy
from reproduction.experiments.accuracy_pages import DATA_SETS
from reproduction.experiments.paper_figures import committed_runs, equal_cells
from reproduction.page_figures.records import (
    BUDGETS,
    FOUND,
    FOUR,
    MEASURED,
    NUMBER,
    ROWS,
    THREE,
    Claim,
    Row,
    fmnist,
    mean_accuracy,
    place_of,
    rate_curves,
    rows_of,
    shown,
)
from reproduction.presets.settings import (
    DATASET_SIZES,
    paper_setting,
    tuned_setting,
    tuned_settings,
)
from reproduction.released_dpagd import COUNT, LARGEST


@cache
def noise_of_dpis() -> tuple[float, float]:
    """Noise of DPIS on CIFAR-10 over that of DP-SGD at the same batch and length.

    By a menu, as it is now, and by a filter, as it was in the rows.
    """
    dpis = preset_named("paper", "dpis", "cifar10", 3)
    setup = InputFeatures(dpis.features, dpis.normalisation).setup
    batch, updates = dpis.options["batch_size"], dpis.options["updates"]
    size, budget = DATASET_SIZES["cifar10"], Budget(3, 1e-5)
    plan: Any = METHODS["dpis"](**dpis.options).resolve(size, budget, "proven", setup)[1]
    plain = METHODS["dpsgd"](batch_size=batch, learning_rate=1.0, updates=updates)
    settled: Any
    typical: Any
    settled, typical = plain.resolve(size, budget, "proven", setup)
    kept: Any = filtered_plan(budget, "proven", typical.typical, updates=updates, setup=setup)
    # Releases of the norms take 2% of the allowance.
    price = (kept.left_after_setup() - 0.02 * kept.filter.allowance) / updates
    menu = plan.menu.nearest(batch / size).noise_multiplier
    filtered = kept.noise_for(batch / size, price)
    return menu / settled.noise_multiplier, filtered / settled.noise_multiplier


def _about_dpagd() -> Iterator[Claim]:
    yield (
        rf"moves {NUMBER} noisy gradients whatever is chosen, and the choice adds {NUMBER} at most",
        (f"{LARGEST / 2 * COUNT:g}", f"{LARGEST:g}"),
    )
    again = [FOUND["fmnist", "released-dpagd", e] for e in (1, 2, 3)]
    assert {record["seeds"] for record in again} == {3}
    yield (
        rf"same has {MEASURED}, {MEASURED} and {MEASURED} on Fashion-MNIST at epsilon 1, 2 and 3, "
        rf"which is what this code claims; the paper has {NUMBER}, {NUMBER} and {NUMBER}\.",
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
    photographs = [FOUND["cifar10", "released-dpagd", e] for e in BUDGETS]
    yield (
        rf"At epsilon 4 it has {NUMBER} \(the paper {NUMBER}\), on MNIST {THREE} at (2), (3) and "
        rf"(4) \({THREE}\), and on CIFAR-10 {FOUR} at (1), (2), (3) and (4) \({FOUR}\), most",
        (
            *shown(".2f", (clothes["mean"], clothes["paper"])),
            *shown(".2f", (r["mean"] for r in digits)),
            *("2", "3", "4"),
            *shown(".2f", (r["paper"] for r in digits)),
            *shown(".2f", (r["mean"] for r in photographs)),
            *("1", "2", "3", "4"),
            *shown(".2f", (r["paper"] for r in photographs)),
        ),
    )
    sound, early = fmnist("dpagd"), fmnist("dpagd-adaptive")
    assert {record["seeds"] for record in sound} == {3}
    yield (
        rf"on MNIST it is off by {FOUR} at epsilon 1, 2, 3 and 4 \(",
        shown("+.2f", (FOUND["mnist", "dpagd", e]["difference"] for e in BUDGETS)),
    )
    yield (
        rf"Without both it has {FOUR} on Fashion-MNIST, and {NUMBER} on CIFAR-10 at epsilon 3\.",
        shown(".2f", (*(r["mean"] for r in early), FOUND["cifar10", "dpagd-adaptive", 3]["mean"])),
    )
    yield (
        rf"it now makes {NUMBER} of them, and made {NUMBER} before",
        shown(".0f", (sound[2]["updates"], early[2]["updates"])),
    )
    # "above the paper's figures on Fashion-MNIST, CIFAR-10 and IMDb, and level with them on MNIST"
    for task in DATA_SETS:
        least = -0.3 if task == "mnist" else 0
        assert all(FOUND[task, "dpagd", e]["difference"] > least for e in BUDGETS)
    runs = [
        equal_cells(paper_accuracy())["Fashion-MNIST", "dpagd", epsilon] for epsilon in (1, 2, 3)
    ]
    yield (
        rf"makes {NUMBER}, {NUMBER} and {NUMBER} iterations on Fashion-MNIST at epsilon 1, 2 and "
        rf"3; the authors' committed runs whose figures are the paper's made {NUMBER}, {NUMBER} "
        rf"and {NUMBER}\.",
        shown(".0f", [*(r["updates"] for r in again), *(one["iterations"] for (one,) in runs)]),
    )
    wanted = [("fmnist", "released-dpagd", epsilon) for epsilon in (1, 2, 3)]
    seeds = [[100 * r["accuracy"] for r in ROWS if place_of(r) == place] for place in wanted]
    yield (
        rf"so seeds differ: by {NUMBER}, {NUMBER} and {NUMBER} points",
        shown(".2f", (max(found) - min(found) for found in seeds)),
    )
    first = FOUND["mnist", "released-dpagd", 1]
    yield (
        rf"On MNIST at epsilon 1 it has {MEASURED}, the paper {NUMBER}\.",
        shown(".2f", (first["mean"], first["spread"], first["paper"])),
    )
    planned = [tuned_setting("dpagd", "cifar10", e)["updates"] for e in BUDGETS]
    assert planned[1] == planned[2]
    yield (
        rf"were chosen so at (1), and the planned updates, {NUMBER} at (2) and (3) and {NUMBER} at "
        r"(4),",
        ("1", str(planned[1]), "2", "3", str(planned[3]), "4"),
    )
    tuned_at = {(t, e) for arm, t, e in tuned_settings() if arm == "dpagd"}
    assert {(t, e) for t in ("fmnist", "imdb") for e in BUDGETS} <= tuned_at  # "at every budget"
    swinging = FOUND["cifar10", "released-dpagd", 1]
    (run,) = committed_runs("dpagd", "cifar10", 1)
    yield (
        rf"On CIFAR-10 at epsilon 1 it ends at {NUMBER} after {NUMBER} iterations\. The "
        rf"authors' run with these settings ends at {NUMBER} after {NUMBER}, and had {NUMBER} at "
        rf"its best; the paper says {NUMBER}\.",
        (
            *(f"{swinging['mean']:.2f}", f"{swinging['updates']:.0f}", run["last"]),
            *(str(int(run["last_iteration"]) - 1), run["best"], f"{swinging['paper']:.2f}"),
        ),
    )
    reviews = [FOUND["imdb", "released-dpagd", e] for e in BUDGETS]
    yield (
        rf"On IMDb it has {FOUR}, and the paper {FOUR}\. Its figures at (1) and (2) are",
        (*shown(".2f", (r[key] for key in ("mean", "paper") for r in reviews)), "1", "2"),
    )
    for epsilon in (1, 2):  # "the noise of epsilon 3 and twice the noise of a choice"
        (own,) = equal_cells(paper_accuracy())["IMDb", "dpagd", epsilon]
        assert own["sigma_t"] == paper_setting("imdb", 3).noise_multiplier
        assert own["sigma_v"] == 2 * CHOICE_NOISE["imdb"]
    yield r"after the test accuracy at (2) with fewer had been seen\.", ("2",)
    yield r"every budget takes the settings of (1)\.", ("1",)
    settings = {e: tuned_setting("dpagd", "mnist", e) for e in BUDGETS}
    assert all(setting == settings[1] for setting in settings.values())
    longer = ("cifar10", "imdb", "fmnist")
    short = [
        mean_accuracy([r for r in rows_of("superseded") if _is_short(r, task)]) for task in longer
    ]
    long = [FOUND[task, "dpagd", 2]["mean"] for task in longer]
    yield (
        rf"it had {NUMBER} on CIFAR-10, {NUMBER} on IMDb and {NUMBER} on Fashion-MNIST at epsilon "
        rf"2, and has {NUMBER}, {NUMBER} and {NUMBER} with its own\.",
        shown(".2f", [*short, *long]),
    )
    accuracies = [100 * r["accuracy"] for r in ROWS if place_of(r) == ("imdb", "dpagd", 4)]
    yield (
        rf"one seed of three falls to {NUMBER}; the longest step was {NUMBER} there",
        (f"{min(accuracies):.2f}", f"{tuned_setting('dpagd', 'imdb', 4)['largest_step']:g}"),
    )


def _is_short(row: Row, task: str) -> bool:
    """Rows of DPAGD at epsilon 2 that were made with the settings of epsilon 1."""
    return "another budget" in row["superseded"] and place_of(row) == (task, "dpagd", 2)


def earlier_dpis(word: str) -> float:
    """The mean accuracy of DPIS on CIFAR-10 in rows that were set aside for a reason."""
    rows = [r for r in rows_of("superseded") if word in r["superseded"]]
    rows = [r for r in rows if r["experiment"] == "accuracy" and r["config"]["task"] == "cifar10"]
    rows = [r for r in rows if r["config"]["options"]["updates"] != 1000]
    assert {(r["config"]["arm"], r["config"]["epsilon"]) for r in rows} == {("dpis", 3)}
    assert [row["seed"] for row in rows] == [0, 1, 2]
    return mean_accuracy(rows)


def longer_dpis(batch: int) -> list[dict[str, Any]]:
    """Rows of DPIS on CIFAR-10 with 1,000 updates, which were set aside."""
    rows = [r for r in rows_of("superseded") if r["config"]["arm"] == "dpis"]
    rows = [r for r in rows if (r["config"]["task"], r["config"]["epsilon"]) == ("cifar10", 3)]
    wanted = {"batch_size": batch, "updates": 1000}
    rows = [r for r in rows if wanted.items() <= r["config"]["options"].items()]
    return [r for r in rows if "floored" not in r["superseded"]]  # of a fault that was mended


def _about_dpis() -> Iterator[Claim]:
    plain, dpis = (FOUND["cifar10", arm, 3] for arm in ("dpsgd-hf", "dpis"))
    gap = plain["mean"] - dpis["mean"]
    assert 0 < gap < plain["spread"]  # "less than the spread of DP-SGD"
    yield rf"On CIFAR-10 at epsilon 3 it is {NUMBER} behind", shown(".2f", [gap])
    reasons = ("larger clip norms", "a filter of one", "before longer runs", "before averages")
    earlier = [earlier_dpis(reason) for reason in reasons]
    longer = [mean_accuracy(longer_dpis(batch)) for batch in (4096, 8192)]
    assert max(earlier + longer) < plain["mean"]  # "it was behind with every setting"
    yield (
        rf"{NUMBER} with the paper's clip norm, {NUMBER} with a larger one, {NUMBER} with that and "
        rf"less noise, {NUMBER} and {NUMBER} with 1,000 updates of either, {NUMBER} with more and "
        rf"shorter steps, and {NUMBER} with an average",
        shown(".2f", [*earlier[:3], *longer, earlier[3], dpis["mean"]]),
    )
    by_menu, by_filter = noise_of_dpis()
    yield rf"asked for {NUMBER} times the noise", shown(".2f", [by_filter])
    yield rf"asks for {NUMBER} times the noise", shown(".2f", [by_menu])
    assert "average_decay" in tuned_setting("dpis", "cifar10", 3)  # "the best on held-out records"
    shorter = (("cifar10", 1), ("cifar10", 2), ("mnist", 1))
    bold = [r for r in rows_of("superseded") if "too bold" in r["superseded"]]
    before = [
        mean_accuracy([r for r in bold if (r["config"]["task"], r["config"]["epsilon"]) == place])
        for place in shorter
    ]
    yield (
        rf"it had {NUMBER} and {NUMBER} on CIFAR-10 at epsilon 1 and 2, and {NUMBER} on "
        r"MNIST(?= at)",
        shown(".2f", before),
    )
    yield (
        rf"give {NUMBER}, {NUMBER} and {NUMBER}, where DP-SGD, whose settings were not tuned here, "
        rf"has {NUMBER}, {NUMBER} and {NUMBER}\.",
        shown(
            ".2f", (FOUND[t, arm, e]["mean"] for arm in ("dpis", "dpsgd-hf") for t, e in shorter)
        ),
    )
    yield (
        rf"At epsilon 4 it has {NUMBER} on CIFAR-10 and DP-SGD {NUMBER}\.",
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
    yield rf"DPIS has the higher mean in {NUMBER} of {NUMBER} cells", ("15", "16")
    rated = [
        max(p.mean for p in curve)
        for (_, kind), curve in rate_curves().items()
        if kind == ("dpsgd-hf", "constant")
    ]
    yield (
        rf"it has {NUMBER} and {NUMBER} at epsilon 1 and 3, DPIS {NUMBER} and {NUMBER}\.",
        shown(".2f", (*rated, *(FOUND["fmnist", "dpis", e]["mean"] for e in (1, 3)))),
    )


def claims() -> Iterator[Claim]:
    """All of them."""
    yield from _about_dpagd()
    yield from _about_dpis()
