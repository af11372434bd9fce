"""The paper's sixteen cells of DPSUR as one table, with intervals and tests of what is ahead."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Row
from reproduction.differences import MARGIN, difference, in_words
from reproduction.experiments.accuracy_pages import DATA_SETS, NAME, Figures
from reproduction.presets.settings import EPSILONS
from reproduction.rows import read_rows

RESULTS = Path(__file__).parents[2] / "results"
PAGE, TITLE = "accuracy_sixteen", "DPSUR's sixteen cells, side by side"
COINS, COINS_TITLE = "accuracy_coin", "The test against a coin"
LEVEL = 0.05
# by data set, arm and epsilon
Groups = Mapping[tuple[str, str, int], Sequence[float]]
COLUMNS = (
    Column("data set", "data"),
    Column("epsilon", "epsilon"),
    Column("paper", "paper", ".2f"),
    Column("released code, claimed", "released-code"),
    Column("Algorithm 1, published", "published"),
    Column("Algorithm 1, proven", "proven"),
    Column("Algorithm 1, proven-pld", "proven-pld"),
    Column("DP-SGD", "plain"),
    Column("DP-SGD minus Algorithm 1", "gap"),
    Column("against", "against"),
    Column("p", "p", ".2g"),
    Column("auto", "auto"),
)
SHORT_COLUMNS = (
    Column("data set", "data"),
    Column("epsilon", "epsilon"),
    Column("paper", "paper", ".2f"),
    Column("Algorithm 1, proven", "best"),
    Column("DP-SGD", "plain"),
    Column("DP-SGD minus Algorithm 1", "gap"),
    Column("p", "p", ".2g"),
    Column("auto", "auto"),
)
COIN_COLUMNS = (
    Column("data set", "data"),
    Column("epsilon", "epsilon"),
    Column("momentum of rejected steps", "momentum"),
    Column("coin minus test", "gap"),
    Column("seeds", "seeds"),
    Column("p of equivalence", "equivalence", ".2g"),
)


def grouped(rows: Sequence[Row]) -> Groups:
    """Accuracies in percent over seeds, by data set, arm and epsilon."""
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for row in rows:
        config = row["config"]
        if not config["hold_out"]:
            key = (config["task"], config["arm"], int(config["epsilon"]))
            groups[key].append(100 * row["accuracy"])
    return groups


def plain_arm(task: str) -> str:
    """DP-SGD on the features of DPSUR."""
    return "dpsgd" if task == "imdb" else "dpsgd-hf"


def compared(groups: Groups, paper: Figures) -> list[dict[str, Any]]:
    """A record for each of the sixteen cells that has rows."""
    found = []
    for task, data in DATA_SETS.items():
        for epsilon in EPSILONS:
            values = {
                arm: groups.get((task, arm, epsilon), ())
                for arm in ("released-code", "published", "proven", "proven-pld")
            }
            plain = groups.get((task, plain_arm(task), epsilon), ())
            words = "imdb-hashed" if task == "imdb" else task  # which assumes nothing
            record: dict[str, Any] = {arm: _shown(some) for arm, some in values.items()}
            record |= {"data": data, "epsilon": epsilon, "paper": paper[task, "dpsur", epsilon]}
            record |= {"plain": _shown(plain), "auto": _shown(groups.get((words, "auto", epsilon)))}
            # Algorithm 1 with its best accountant, where that was run
            against = "proven-pld" if len(values["proven-pld"]) > 1 else "proven"
            if min(len(plain), len(values[against])) < 2:
                continue
            gap = difference(plain, values[against])
            record |= {"gap": in_words(gap), "against": against, "p": gap.p, "value": gap.value}
            record["best"] = _shown(values[against])
            found.append(record)
    return found


def _shown(values: Sequence[float] | None) -> str:
    """Mean, half the width of its 95% interval, and the number of seeds."""
    if not values:
        return ""
    mean, count = sum(values) / len(values), len(values)
    if count == 1:
        return f"{mean:.2f} (1)"
    spread = (sum((value - mean) ** 2 for value in values) / (count - 1)) ** 0.5
    half = float(stats.t.ppf(0.975, count - 1)) * spread / count**0.5
    return f"{mean:.2f} ± {half:.2f} ({count})"


def counts(cells: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
    """Cells in which DP-SGD is ahead (Welch), is so after Bonferroni, and is behind."""
    ahead = [cell for cell in cells if cell["value"] > 0]
    behind = [cell for cell in cells if cell["value"] < 0 and cell["p"] < LEVEL]
    return (
        sum(cell["p"] < LEVEL for cell in ahead),
        sum(cell["p"] < LEVEL / len(cells) for cell in ahead),
        len(behind),
    )


def _lacking(cells: Sequence[Mapping[str, Any]]) -> str:
    """Which cells still compare by the looser accounting."""
    by_data: dict[str, list[str]] = {}
    for cell in cells:
        if cell["against"] != "proven-pld":
            by_data.setdefault(cell["data"], []).append(str(cell["epsilon"]))
    named = "; ".join(f"{data} at {', '.join(some)}" for data, some in by_data.items())
    return f" Not yet run by proven-pld: {named}." if named else ""


def coins(groups: Groups) -> list[dict[str, Any]]:
    """Acceptance by a coin that ignores the model, minus acceptance by the test."""
    found = []
    for task, data in DATA_SETS.items():
        for epsilon in EPSILONS:
            for momentum, coin, test in (
                ("kept", "random-kept", "kept-momentum"),
                ("restored", "random", "published"),
            ):
                one, other = (groups.get((task, arm, epsilon), ()) for arm in (coin, test))
                if min(len(one), len(other)) < 2:
                    continue
                gap = difference(one, other)
                found.append(
                    {
                        "data": data,
                        "epsilon": epsilon,
                        "momentum": momentum,
                        **gap._asdict(),
                        "gap": in_words(gap),
                        "seeds": f"{len(one)} and {len(other)}",
                    }
                )
    return found


def short_table(rows: Sequence[Row], paper: Figures) -> str:
    """The sixteen cells in a table that fits beside text, and the sentence that follows."""
    cells = compared(grouped([*rows, *read_rows(RESULTS / "heads.jsonl")]), paper)
    return f"{Table(SHORT_COLUMNS, cells).markdown()}\n\n{verdict(cells)}"


def verdict(cells: Sequence[Mapping[str, Any]]) -> str:
    """What the cells say of DP-SGD against Algorithm 1, both at the same proven epsilon."""
    ahead, corrected, behind = counts(cells)
    best = [cell for cell in cells if cell["against"] == "proven-pld"]
    fair = counts(best)
    text = (
        f"DP-SGD is significantly ahead of Algorithm 1 in {ahead} of {len(cells)} cells (p < "
        f"{LEVEL}), in {corrected} after Bonferroni's correction, and significantly behind in "
        f"{behind}. "
    )
    if len(best) == len(cells):
        return text + "In all of them both sides have their best accountant."
    return (
        f"{text}{len(best)} of {len(cells)} cells compare by proven-pld, both sides with their "
        f"best accountant: there DP-SGD is significantly ahead in {fair[0]} ({fair[1]} after the "
        f"correction for {len(best)} tests) and significantly behind in {fair[2]}."
        f"{_lacking(cells)}"
    )


def sixteen_pages(rows: Sequence[Row], paper: Figures) -> list[Artifact]:
    """Both tables, from these rows and those of the preset auto."""
    groups = grouped([*rows, *read_rows(RESULTS / "heads.jsonl")])
    cells, tossed = compared(groups, paper), coins(groups)
    text = (
        "Accuracy in percent, mean, half the width of its 95% interval, and seeds in brackets, "
        "with the paper's settings. *Released code* works as the authors' code does, at an epsilon "
        "that is claimed; *published* is Algorithm 1 by the paper's accounting; *proven* and "
        "*proven-pld* are Algorithm 1 at a proven epsilon, by Rényi divergences and by privacy "
        "loss distributions, which afford more updates. *DP-SGD* has the same features, batch, "
        "noise and rate, and is accounted by privacy loss distributions. *DP-SGD minus Algorithm "
        "1* is against proven-pld where that was run, else against proven, which understates "
        "Algorithm 1; with a 95% interval and a p-value by Welch's test. *auto* is what the "
        "library does by default ([results](../results.md)), on IMDb with hashed words. The "
        "other columns take the ranks of words on IMDb as public, as the paper does, although they "
        "were counted on these reviews: epsilon does not cover that.\n\n"
        f"{verdict(cells)}"
    )
    coin_text = (
        "Difference in accuracy between arms that accept by a coin which ignores the model, at the "
        "rate of the test, and arms that accept by the paper's test, with a 95% interval (Welch). "
        f"*p of equivalence*: two one-sided tests against a difference of {MARGIN} points or more; "
        f"below {LEVEL} the two are equivalent to within {MARGIN} points. "
        f"{sum(cell['equivalence'] < LEVEL for cell in tossed)} of {len(tossed)} are, with three "
        "to "
        "five seeds; the others are not known to differ, and not shown to be equal."
    )
    return [
        *table_page(PAGE, TITLE, text, Table(COLUMNS, cells), experiment=NAME),
        *table_page(COINS, COINS_TITLE, coin_text, Table(COIN_COLUMNS, tossed), experiment=NAME),
    ]
