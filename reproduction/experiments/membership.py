"""Membership inference on targets with and without privacy: the paper's two tables, and more."""

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from dpsur.attacks.metrics import (
    CONFIDENCE,
    LEAST,
    LOW_RATES,
    Array,
    Curve,
    Estimate,
    Scores,
    draw_roc,
    measure,
    ranks_around,
    roc_curve,
    share_between,
)
from dpsur.attacks.suite import RunTrainer, Trainer, attacked_pool, split_pool
from dpsur.config import Intervals, Performance, RunConfig
from dpsur.features import NONE, compute, features_named
from dpsur.functional.records import Examples
from dpsur.methods import method_named
from dpsur.presets import Preset, preset_named
from dpsur.privacy.accounting import DEFAULT_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.runs.session import choose_device
from dpsur.tasks import task_named
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.learned_attacks import ATTACKS, attack_target
from reproduction.plain_targets import Recipe, plain_trainer, target_network
from reproduction.presets.settings import DELTA, EPSILONS
from reproduction.training import BLOCK, NEVER, WITH_TF32, device_name, limit_gpu_share

TASKS = ("fmnist", "cifar10")
# DPSUR on the scattering features that the paper trains it with, and on pixels: the attack code
# released with it has no scattering networks.
DPSUR, PIXELS = "dpsur", "dpsur on pixels"
NONPRIVATE, PRIVATE = "nonprivate", (DPSUR, PIXELS, "dpsgd")
SEEDS = (0, 1, 2)
# Likelihood ratios need many models, which only one seed has: so many without privacy, and so many
# of each private target, by task.
SHADOW_MODELS = {"fmnist": 32, "cifar10": 4}
PRIVATE_SHADOW_MODELS = {"fmnist": 8, "cifar10": 4}
PLAIN_ATTACKS = ("gap", "shadow", "white-box")
TITLE = "Membership inference"
TEXT = f"""
Balanced accuracy of each attack, on as many members as others, averaged over seeds, each with its
own random split 2:1:2:1 of training and test records, target and shadow models. *gap* guesses that
a record is a member if it is classified correctly. *shuffled* is the control: the same attack on
records whose membership was drawn by lot. Intervals hold 95% for the sampled records of one seed,
the widest over the seeds. The paper's value stands beside ours where it has one. The ROC curves are
of the first seed alone; all shuffled controls are drawn alike.

The second table has areas under ROC curves and true positive rates at low false positive rates. The
intervals of these rates count that the threshold is estimated too, from few others. They are
derived from the points of the curve that a row holds, and may be wider than those of the scores
themselves, never narrower. The gap attack has a single threshold, far from these rates: its
interval there says nothing.

Targets without privacy are the paper's pixel CNNs, with ReLU as DPSGD's have: 100 epochs of SGD at
0.01, momentum 0.9, weight decay 5e-4, batch 128, every pixel standardised over all records. Private
targets have the paper's settings; of DPSUR there are two, on the scattering features that the paper
trains it with and on pixels, since the attack code that was released with it has no scattering
networks (no line: no rows yet). Their length is what the budget allows under the proven accounting
at the size of the target's part; shadow models are trained by the same method. LiRA and RMIA need
many more shadow models, and are made of the first seed alone: on targets without privacy with
{SHADOW_MODELS["fmnist"]} models on Fashion-MNIST and {SHADOW_MODELS["cifar10"]} on CIFAR-10, on
private targets with {PRIVATE_SHADOW_MODELS["fmnist"]} and {PRIVATE_SHADOW_MODELS["cifar10"]}. Rows
that were made before these attacks had shuffled controls lack them.

An accuracy near one half on a private target says little by itself: a weak attack gives the same.
What it is worth is seen on the targets without privacy, and in the [audits](audit.md).
"""
RATE_FIELDS = ("tpr_at_1_percent", "tpr_at_01_percent")
# names in the paper's table
PAPER_NAMES = {"shadow": "black-box-shadow", "white-box": "white-box-partial"}
_TARGET = (Column("data", "task"), Column("target", "target"))
ACCURACIES = (
    *_TARGET,
    Column("train accuracy", "train", ".3f"),
    Column("test accuracy", "test", ".3f"),
    Column("attack", "attack"),
    Column("accuracy", "accuracy", ".3f"),
    Column("from", "low", ".3f"),
    Column("to", "high", ".3f"),
    Column("paper", "paper", ".3f"),
    Column("seeds", "seeds"),
)
RATES = (
    *_TARGET,
    Column("attack", "attack"),
    Column("AUC", "auc", ".3f"),
    Column("from", "auc_low", ".3f"),
    Column("to", "auc_high", ".3f"),
    Column("TPR at FPR 1%", "tpr_1", ".4f"),
    Column("from", "tpr_1_low", ".4f"),
    Column("to", "tpr_1_high", ".4f"),
    Column("TPR at FPR 0.1%", "tpr_01", ".4f"),
    Column("from", "tpr_01_low", ".4f"),
    Column("to", "tpr_01_high", ".4f"),
)


class Membership(OneByOne):
    """One row per target and seed, with the figures of every attack on it."""

    name = "membership"
    identity = ("config", "seed")
    partial = True
    shared = True

    def cells(self, options: Options) -> Iterator[Cell]:
        """Task by task, targets without privacy first; these have no epsilon to be asked for."""
        for task in TASKS:
            for method in (NONPRIVATE, *PRIVATE):
                for epsilon in (None,) if method == NONPRIVATE else EPSILONS:
                    if options.ask_for(task, method, epsilon):
                        for seed in options.seeds or SEEDS:
                            yield {"config": _config(task, method, epsilon, seed), "seed": seed}

    def make(self, cells: Sequence[Cell], options: Options) -> Iterator[Row]:
        """Fill this process's share of the grid and of the GPU."""
        limit_gpu_share(options)
        yield from super().make(cells, options)

    def measure(self, cell: Cell, options: Options) -> Row:
        """Train one target and attack it."""
        config, seed = cell["config"], cell["seed"]
        device = choose_device(options.device or "auto")
        split = split_pool(pool_on(device, config["task"], config.get("features")), seed)
        trainer = _trainer(config, device)
        found = attack_target(split, trainer, config["attacks"], seed, config["shadow_models"])
        return {
            "train_accuracy": found.train_accuracy,
            "test_accuracy": found.test_accuracy,
            "attacks": {name: _rounded(asdict(measure(s))) for name, s in found.scores.items()},
            "gains": {name: gains_of(hits_of(s)) for name, s in found.scores.items()},
            "device": device_name(device),
        }

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """All targets and attacks in two tables, and ROC curves of targets without privacy."""
        records = list(summary(rows))
        # one seed of every task, the first that there is
        open_targets = [row for row in rows if row["config"]["method"] == NONPRIVATE]
        firsts = {
            row["config"]["task"]: _curves(row)
            for row in sorted(open_targets, key=lambda row: row["seed"], reverse=True)
        }
        panels = {f"{task}, without privacy": firsts[task] for task in TASKS if task in firsts}
        picture = Picture(self.name, lambda: draw_roc(panels)) if panels else None
        whole = Table([*ACCURACIES, *(c for c in RATES if c not in ACCURACIES)], records)
        parts = (Table(ACCURACIES, records), Table(RATES, records))
        return table_page(self.name, TITLE, TEXT, whole, picture, shown=parts)


EXPERIMENT = Membership()


# Points of a curve that a row holds, and the rounding of rates that are fractions.
POINTS, ROUNDING = 200, 1e-12


def hits_of(scores: Scores) -> list[int]:
    """How many members are found at this many false positive rates: all that a curve needs."""
    false, true = roc_curve(scores)
    # the highest point that keeps to the rate, never one between two thresholds
    place = np.searchsorted(false, rates_of(len(scores.others)) * (1 + ROUNDING), "right") - 1
    return [round(float(y) * len(scores.members)) for y in true[place]]


def curve_of(hits: Sequence[int], members: int, others: int) -> Curve:
    """A curve in this many points, evenly spaced in the logarithm of the false positive rate."""
    return [float(x) for x in rates_of(others)], [found / members for found in hits]


def rates_of(others: int) -> Array:
    """The false positive rates of the points of a curve."""
    return np.geomspace(max(LEAST, 1 / others), 1.0, POINTS)


def gains_of(hits: Sequence[int]) -> list[int]:
    """How many more are found at a rate than at the one before: shorter numbers for a row."""
    return [here - before for before, here in pairwise([0, *hits])]


def hits_from(gains: Sequence[int]) -> list[int]:
    """What `gains_of` was given."""
    return list(accumulate(gains))


def low_rate_interval(
    hits: Sequence[int], members: int, others: int, rate: float, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """The interval of the true positive rate at a low false positive rate, from points of a curve.

    Formal guarantee: it holds the interval that `measure` gives for the scores themselves. The hits
    of a point are known, and so is the most others that pass its threshold. At the lower end, a
    point that not more pass than `measure` allows has not more hits. At the upper end, a point that
    may be passed by as many has no fewer, unless others of equal scores kept its threshold above
    them; the next point with more hits is then below these.
    """
    passed = np.floor(rates_of(others) * (1 + ROUNDING) * others)
    counted = np.array(hits)
    strict, loose = ranks_around(rate, others, confidence)
    within, beyond = counted[passed < strict], counted[passed > loose]
    more = beyond[beyond > beyond.min(initial=members)]
    low = int(within.max(initial=0))
    return share_between(low, int(more.min(initial=members)), members, confidence)


@lru_cache(maxsize=1)
def pool_on(device: torch.device, task: str, features: str | None) -> Examples:
    """All records of a task on a device, with features or without, for the next target as well."""
    pool = attacked_pool(task_named(task)).to(device)
    if features is None:
        return pool
    found = compute(features_named(features), pool.inputs, device=device, cached=False)
    return Examples(found, pool.targets)


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures in millionths: of some ten thousand records, more would mean nothing."""
    return {
        name: {part: round(value, 6) for part, value in figure.items()}
        if isinstance(figure, dict)
        else figure
        for name, figure in figures.items()
    }


def _curves(row: Row) -> dict[str, Curve]:
    sizes = {name: (found["members"], found["others"]) for name, found in row["attacks"].items()}
    return {name: curve_of(hits_from(gains), *sizes[name]) for name, gains in row["gains"].items()}


def _config(task: str, method: str, epsilon: int | None, seed: int) -> dict[str, Any]:
    """Everything that a row depends on: the target, how it is trained, and the attacks on it."""
    config: dict[str, Any] = {"task": task, "method": method, "epsilon": epsilon}
    if epsilon is None:
        models = SHADOW_MODELS[task]
        config |= {"recipe": asdict(Recipe()), "network": target_network(task_named(task))}
    else:
        models = PRIVATE_SHADOW_MODELS[task]
        config |= {"delta": DELTA, "accounting": DEFAULT_ACCOUNTING, "tf32": task in WITH_TF32}
        config["features"] = _preset(method, task, epsilon).features
    if seed != SEEDS[0] or method == PIXELS:
        return {**config, "attacks": list(PLAIN_ATTACKS), "shadow_models": 0}
    return {**config, "attacks": list(ATTACKS), "shadow_models": models}


def _preset(method: str, task: str, epsilon: int) -> Preset:
    """The paper's settings of a private target; on pixels those of DPSUR hold as well."""
    if method != PIXELS:
        return preset_named("paper", method, task, epsilon)
    settings = preset_named("paper", DPSUR, task, epsilon)
    return replace(settings, features="pixels", normalisation=NONE)


def _trainer(config: dict[str, Any], device: torch.device) -> Trainer:
    task = task_named(config["task"])
    if config["method"] == NONPRIVATE:
        return plain_trainer(task, Recipe(**config["recipe"]), device)
    preset = _preset(config["method"], task.name, config["epsilon"])
    method = DPSUR if config["method"] == PIXELS else config["method"]
    run = RunConfig(
        task.name,
        method_named(method)(**preset.options),
        Budget(config["epsilon"], config["delta"]),
        config["accounting"],
        features=preset.features,
        normalisation=preset.normalisation,
        network=preset.network,
        performance=Performance(tf32=config["tf32"], repeatable=False),
        intervals=Intervals(checkpoint_every=BLOCK, evaluate_every=NEVER),
    )
    return RunTrainer(run, device, featured=True)


def summary(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The figures of every attack on every kind of target, over its seeds."""
    known = _paper()
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        config = row["config"]
        key = (config["task"], config["method"], str(config["epsilon"] or ""))
        groups.setdefault(key, []).append(row)
    for (task, method, epsilon), mine in groups.items():
        for attack in dict.fromkeys(name for row in mine for name in row["attacks"]):
            found = [row["attacks"][attack] for row in mine if attack in row["attacks"]]
            hits = [hits_from(row["gains"][attack]) for row in mine if attack in row["attacks"]]
            yield {
                "task": task,
                "target": f"{method}, ε {epsilon}" if epsilon else method,
                "train": statistics.mean(row["train_accuracy"] for row in mine),
                "test": statistics.mean(row["test_accuracy"] for row in mine),
                "attack": attack,
                **_over_seeds("accuracy", "", [Estimate(**f["balanced_accuracy"]) for f in found]),
                "paper": known.get((task, PAPER_NAMES.get(attack, ""), _in_paper(method), epsilon)),
                **_over_seeds("auc", "auc_", [Estimate(**f["auc"]) for f in found]),
                **_low_rates(found, hits),
                "seeds": len(found),
            }


def _in_paper(method: str) -> str:
    return DPSUR if method == PIXELS else method


def _low_rates(found: Sequence[dict[str, Any]], hits: Sequence[list[int]]) -> dict[str, float]:
    """Rates as they were stored, their intervals by points of the curves.

    Stored intervals of rows that were made before these counted the threshold are too narrow.
    """
    records: dict[str, float] = {}
    for name, field, rate in zip(("tpr_1", "tpr_01"), RATE_FIELDS, LOW_RATES, strict=True):
        figures = []
        for stored, counts in zip(found, hits, strict=True):
            ends = low_rate_interval(counts, stored["members"], stored["others"], rate)
            figures.append(Estimate(stored[field]["value"], *ends))
        records |= _over_seeds(name, f"{name}_", figures)
    return records


def _over_seeds(name: str, prefix: str, figures: Sequence[Estimate]) -> dict[str, float]:
    """The mean, and the widest interval."""
    return {
        name: float(statistics.mean(figure.value for figure in figures)),
        f"{prefix}low": min(figure.low for figure in figures),
        f"{prefix}high": max(figure.high for figure in figures),
    }


def _paper() -> dict[tuple[str, str, str, str], float]:
    """The paper's values by data set, attack, target and budget."""
    text = (files("reproduction.experiments") / "paper_membership.csv").read_text(encoding="utf-8")
    values = {}
    for row in csv.DictReader(text.splitlines()):
        for epsilon in EPSILONS:
            key = (row["dataset"], row["attack"], row["target"], str(epsilon))
            values[key] = float(row[f"eps{epsilon}"])
        values[row["dataset"], row["attack"], NONPRIVATE, ""] = float(row["nonprivate"])
    return values
