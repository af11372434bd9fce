"""The tables of the pages of the reproduction."""

from collections.abc import Iterator

from dpsur.presets import preset_named
from reproduction.experiments.accuracy import paper_accuracy
from reproduction.experiments.accuracy_pages import DATA_SETS, TOLERANCE
from reproduction.experiments.iterates import records as iterate_records
from reproduction.page_figures.records import (
    BUDGETS,
    FOUND,
    KINDS,
    Row,
    fmnist,
    gaps,
    plain_on,
    rate_curves,
    rows_of,
    shown,
)


def tables() -> Iterator[tuple[str, list[str]]]:
    """The header of every table of the pages, and its lines."""
    yield (
        "| arm | momentum of rejected steps | accepted by | Fashion-MNIST | MNIST | CIFAR-10 |",
        list(_controls()),
    )
    ahead = gaps("proven", "dpsgd-hf")
    assert min(ahead) > 0  # "DP-SGD is ahead by"
    yield (
        "| epsilon | Algorithm 1 | updates | DP-SGD | updates | DP-SGD is ahead by |",
        [
            _line(
                budget, _measured(one), _count(one), _measured(plain), _count(plain), f"{gap:.2f}"
            )
            for budget, one, plain, gap in zip(
                BUDGETS, fmnist("proven"), fmnist("dpsgd-hf"), ahead, strict=True
            )
        ],
    )
    yield (
        "| best of seven rates, Fashion-MNIST | at epsilon 1 | at epsilon 3 | worst at epsilon 1 | "
        "worst at epsilon 3 |",
        list(_best_and_worst_of_rates()),
    )
    for header, arm in (("data set", "dpagd"), ("without momentum", "dpagd-adaptive")):
        yield f"| {header} | 1 | 2 | 3 | 4 | the paper, 1 to 4 |", list(_beside_the_paper(arm))
    yield "| data set | DPIS | DP-SGD | the paper's DPIS |", list(_dpis_at_three())
    yield "| changed, IMDb at epsilon 4 | points |", list(_what_moves_reviews())
    yield (
        "| data set | arm | 1 | 2 | 3 | 4 |",
        [
            _line(name, arm, *shown(".2f", (record["mean"] for record in records)))
            for task, name in DATA_SETS.items()
            if task != "fmnist"
            for arm, records in (
                ("Algorithm 1", [FOUND[task, "proven", e] for e in BUDGETS]),
                ("DP-SGD", plain_on(task)),
            )
        ],
    )
    yield "| DPSGD-TS on CIFAR-10 | 1 | 2 | 3 | 4 |", list(_tempered_on_photographs())


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _measured(record: Row) -> str:
    return f"{record['mean']:.2f} ± {record['spread']:.2f}"


def _count(record: Row) -> str:
    return f"{record['updates']:.0f}"


def _controls() -> Iterator[str]:
    """What is kept of rejected steps against how candidates are accepted, at epsilon 1."""
    arms = {
        "released-code": ("the released code", "kept", "the noisy test, with its faults"),
        "kept-momentum": ("kept momentum", "kept", "the noisy test as printed"),
        "random-kept": ("a coin, kept momentum", "kept", "a coin that ignores the model"),
        "published": ("Algorithm 1", "restored", "the noisy test as printed"),
        "random": ("a coin", "restored", "a coin that ignores the model"),
    }
    tasks = ("fmnist", "mnist", "cifar10")
    for task in tasks:
        records = [FOUND[task, arm, 1] for arm in arms]
        means = [record["mean"] for record in records]
        spread = max(record["spread"] for record in records)
        kept, restored = means[:3], means[3:]
        assert restored[0] < restored[1] + spread  # "the test does no better than the coin"
        assert min(kept) - max(restored) > spread
        if task != "cifar10":  # "With these gradients a coin does as well as the test"
            assert max(kept) - min(kept) < spread
            assert abs(records[2]["difference"]) < TOLERANCE
    for arm, words in arms.items():
        yield _line(*words, *(_measured(FOUND[task, arm, 1]) for task in tasks))


def _best_and_worst_of_rates() -> Iterator[str]:
    curves = rate_curves()
    for name, kind in KINDS.items():
        ends = [[point.mean for point in curves[e, kind]] for e in (1, 3)]
        yield _line(name, *shown(".2f", [*map(max, ends), *map(min, ends)]))


def _beside_the_paper(arm: str) -> Iterator[str]:
    for task, name in DATA_SETS.items():
        records = [FOUND[task, arm, e] for e in BUDGETS]
        paper = ", ".join(shown(".2f", (record["paper"] for record in records)))
        yield _line(name, *shown(".2f", (record["mean"] for record in records)), paper)


def _dpis_at_three() -> Iterator[str]:
    for task, name in DATA_SETS.items():
        plain, dpis = (
            FOUND[task, "dpsgd" if task == "imdb" else "dpsgd-hf", 3],
            FOUND[task, "dpis", 3],
        )
        yield _line(name, _measured(dpis), _measured(plain), f"{dpis['paper']:.2f}")


def _what_moves_reviews() -> Iterator[str]:
    records = [r for r in iterate_records(rows_of("iterates")) if r["task"] == "imdb"]
    found = {r["changed"]: r["last"] for r in records if r["epsilon"] == 4}
    assert preset_named("paper", "dpsur", "imdb", 4).options["learning_rate"] == 0.02
    for said, change in (
        ("twice the learning rate", "learning_rate 0.04"),
        ("half of it", "learning_rate 0.01"),
        ("a quarter of it", "learning_rate 0.005"),
        ("a linear decay", "schedule linear"),
        ("twice the validation batch", "val_batch_size 256"),
    ):
        yield _line(said, f"{found[change] - found['']:+.2f}")


def _tempered_on_photographs() -> Iterator[str]:
    paper = [paper_accuracy()["cifar10", "dpsgd-ts", e] for e in BUDGETS]
    yield _line("the paper", *shown(".2f", paper))
    for said, arm in (
        ("the released commands, at a proven epsilon", "dpsgd-ts"),
        ("Tramèr and Boneh's settings, their noise at every budget", "dpsgd-ts-fixed"),
        ("Tramèr and Boneh's settings, their number of updates", "dpsgd-ts-authors"),
    ):
        yield _line(said, *shown(".2f", (FOUND["cifar10", arm, e]["mean"] for e in BUDGETS)))
