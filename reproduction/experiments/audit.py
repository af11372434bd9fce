"""What audits find: tiny problems under every accounting, whole trainings, and broken ones."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dpsur import figure_style as style
from dpsur.attacks.suite import as_seen_by
from dpsur.audits.bounds import CONTRADICTED, Finding
from dpsur.audits.training import ONE_RUN, gradient_canaries
from dpsur.mechanism.streams import INIT, SETUP, Streams
from dpsur.methods import Dpsgd, DpsgdHf, Dpsur
from dpsur.methods.gradient_method import GradientMethod
from dpsur.networks import build_network
from dpsur.privacy.budget import Budget
from dpsur.runs.session import choose_device
from dpsur.tasks import task_named
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.audits.mechanism import EXACT_ONLY, UNITS, audit_exactly, audit_unit
from reproduction.audits.negative_controls import FAULTS, SOUND, Fault, audit_broken_training
from reproduction.audits.repeated import PLACES, TINY, audit_repeated
from reproduction.audits.repetitions import most_shown
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.methods import Dpagd, Dpis, DpsgdTs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPETITIONS = 100_000
CONFIDENCE = 0.999
LOOP_REPETITIONS = 6_000
# A run behind a gate takes many trials. A fault that is not gross needs more runs to show.
OWN_REPETITIONS = {
    "one accepted step with momentum": 2_500,
    "two accepted steps, an outlier": 4_000,
}
FAULT_REPETITIONS = {"noise-2/3": 40_000}
TASK = "mnist-5k"
CANARIES = 4000
EPSILON, DELTA = 4.0, 1e-5
ONE_RUN_CONFIDENCE = 0.95
_PLAIN: dict[str, Any] = {
    "momentum": 0.0,
    "schedule": "constant",
    "updates": 60,
    "batch_size": 2048,
}
_RATE = {"learning_rate": 1.0}
_LOSS = {"gate": "loss", "accept_threshold": 0.0}
_MANY_REJECTIONS = {"val_noise_multiplier": 10.0, "accept_threshold": -30.0}
_FEW_LENGTHS = {"updates": 60, "batch_size": 2048, "val_batch_size": 256, "step_sizes": 5}
# The clipping norm is given, so that canaries are as long as it.
_BLOCKS = {"gate": "block", "clip_norm": "given", "blocks": 3, "block_updates": 20}
# name -> method, its settings and the accounting
TRAININGS: dict[str, tuple[type[GradientMethod] | type[Dpagd], dict[str, Any], str]] = {
    "dpsgd": (Dpsgd, _PLAIN, "every-trial"),
    "dpsur, coin": (Dpsur, {**_PLAIN, **_RATE, "gate": "coin"}, "proven"),
    "dpsur, loss": (Dpsur, {**_PLAIN, **_RATE, **_LOSS}, "proven"),
    "dpsur, loss, as published": (Dpsur, {**_PLAIN, **_RATE, **_LOSS}, "published"),
    "dpsur with momentum, many rejections": (
        Dpsur,
        {**_PLAIN, **_RATE, **_MANY_REJECTIONS, "momentum": 0.9, "updates": 20, "batch_size": 1024},
        "proven",
    ),
    "dpsgd, gate block": (Dpsgd, {**_PLAIN, **_BLOCKS}, "proven"),
    "dpsgd-ts": (DpsgdTs, _PLAIN, "proven"),
    "dpsgd-hf": (DpsgdHf, _PLAIN, "proven"),
    "dpis": (Dpis, _PLAIN, "proven"),
    "dpagd": (Dpagd, _FEW_LENGTHS, "proven"),
}
TITLE = "What audits find"
TEXT = f"""
Each line holds a claim of (ε, δ)-DP against a lower bound on the true ε at the stated confidence. A
claim is contradicted by a bound above it, by an exact ε above it, or by a p-value below half of the
error that the confidence leaves; otherwise nothing is proved. The confidence is that of a line, not
of all lines together. *Of at most* is the bound that so many runs or guesses would give if all of
them spoke for it: where it is below the claim, the bound could not have contradicted that.

*mechanism*: {REPETITIONS:,} runs with and as many without one record, of tiny problems whose law is
known, drawn by the library's own gate and noise. *exact*: the same law, computed. *repeated*:
{LOOP_REPETITIONS:,} runs ({min(OWN_REPETITIONS.values()):,} or {max(OWN_REPETITIONS.values()):,}
behind a gate, {max(FAULT_REPETITIONS.values()):,} with two thirds of the noise) of tiny trainings
in the library's loop, sound and with faults put in on purpose. *one run*: a single training of
{TASK} at ε {EPSILON:g} with {CANARIES:,} gradient canaries, each included by a fair coin.

A fault that is not contradicted is one that this audit cannot see, not one that is harmless. A
stale loss shows where the losses of one record are beyond all others', and its batch is
remembered; canaries are not like that. Gradient canaries have weights of their own, which nothing
else in a model touches: methods that differ in the model alone, as dpsgd and dpsgd-ts, give the
same line.
"""


class Audit(OneByOne):
    """One row per problem and kind of output; a row holds one finding per accounting."""

    name = "audit"
    partial = True

    def cells(self, options: Options) -> Iterator[Cell]:  # noqa: ARG002
        """Tiny problems, exact laws, repeated trainings and trainings with canaries."""
        known = {"repetitions": REPETITIONS, "confidence": CONFIDENCE, "seed": 0}
        for unit in UNITS:
            for charges in ("updates", "trials"):
                if charges == "updates" or "coin" not in unit:
                    config = {"audit": "mechanism", "unit": unit, "charges": charges, **known}
                    yield {"config": config}
        for unit in EXACT_ONLY:
            yield {"config": {"audit": "exact", "unit": unit}}
        for tiny in TINY:
            for fault in (SOUND.name, *(name for name, place in PLACES.items() if place == tiny)):
                usual = OWN_REPETITIONS.get(tiny, LOOP_REPETITIONS)
                looped = {**known, "repetitions": FAULT_REPETITIONS.get(fault, usual)}
                config = {"audit": "repeated", "problem": tiny, "fault": fault, **looped}
                yield {"config": config}
        for name, (_, settings, accounting) in TRAININGS.items():
            for fault in (SOUND.name, *_visible_faults(name)):
                yield {
                    "config": {
                        "audit": ONE_RUN,
                        "task": TASK,
                        "training": name,
                        "settings": settings,
                        "accounting": accounting,
                        "fault": fault,
                        "epsilon": EPSILON,
                        "delta": DELTA,
                        "canaries": CANARIES,
                        "confidence": ONE_RUN_CONFIDENCE,
                        "seed": 0,
                    }
                }

    def measure(self, cell: Cell, options: Options) -> Row:
        """Make the findings of one cell."""
        config = cell["config"]
        kind = config["audit"]
        found: list[Finding]
        if kind == "mechanism":
            found = list(
                audit_unit(
                    config["unit"],
                    UNITS[config["unit"]](),
                    config["charges"],
                    config["repetitions"],
                    config["confidence"],
                    config["seed"],
                )
            )
        elif kind == "exact":
            found = list(audit_exactly(config["unit"], EXACT_ONLY[config["unit"]]()))
        elif kind == "repeated":
            tiny, fault = TINY[config["problem"]], _fault(config["fault"])
            found = [
                audit_repeated(
                    tiny, fault, config["repetitions"], config["confidence"], config["seed"]
                )
            ]
        else:
            found = [_one_run(config, options)]
        return {"findings": [finding.row() for finding in found]}

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """One table of all findings, and claims against bounds."""
        columns = [
            Column("audit", "audit"),
            Column("of", "subject"),
            Column("accounting", "accounting"),
            Column("claimed ε", "claimed", ".3f"),
            Column("lower bound", "lower", ".3f"),
            Column("of at most", "most", ".3f"),
            Column("confidence", "confidence", ".1%"),
            Column("exact ε", "exact", ".3f"),
            Column("p-value of the claim", "p_value", ".2g"),
            Column("δ", "delta", "g"),
            Column("verdict", "verdict"),
        ]
        records = [
            {**finding, "verdict": _marked(finding["verdict"]), "most": most_shown(finding)}
            for row in rows
            for finding in row["findings"]
        ]
        picture = Picture(self.name, lambda: draw_findings(records))
        return table_page(self.name, TITLE, TEXT, Table(columns, records), picture)


EXPERIMENT = Audit()


def _visible_faults(training: str) -> list[str]:
    """Faults that a training can have."""
    if training == "dpsgd":
        return [name for name, fault in FAULTS.items() if not fault.needs_test]
    if training == "dpsgd, gate block":
        return ["no-noise", "noise-1/4"]
    if "many rejections" in training:
        return [name for name, fault in FAULTS.items() if fault.needs_test]
    return []


def _fault(name: str) -> Fault:
    return SOUND if name == SOUND.name else FAULTS[name]


def _marked(verdict: str) -> str:
    return f"**{verdict}**" if verdict == CONTRADICTED else verdict


def _one_run(config: dict[str, Any], options: Options) -> Finding:
    task = task_named(config["task"])
    device = choose_device(options.device or "auto")
    kind, _, accounting = TRAININGS[config["training"]]
    method = kind(**{**task.settings.get(kind.name, {}), **config["settings"]})
    network, train, _ = as_seen_by(method, task)
    with Streams(config["seed"], torch.device("cpu")).at(SETUP).global_randomness(INIT):
        model = build_network(network)
    return audit_broken_training(
        model,
        train,
        loss=task.loss,
        method=method,
        budget=Budget(config["epsilon"], config["delta"]),
        accounting=accounting,
        planter=gradient_canaries(config["canaries"], method.max_grad_norm),
        subject=f"{config['training']}; fault: {config['fault']}",
        confidence=config["confidence"],
        seed=config["seed"],
        device=device,
        fault=_fault(config["fault"]),
    )


LABEL = "ε: bar, lower bound; dot, exact; tick, claimed"


def draw_findings(records: Sequence[dict[str, Any]]) -> "Figure":
    """Claims and bounds of the problems that tell something; the table has all of them.

    These are the tiny problems under the published and the proven accounting, and repeated
    trainings with a fault beside the same without it. What is contradicted is orange.
    """
    groups = {
        "tiny problems": [
            (f"{r['subject']}, {r['accounting']}", r)
            for r in records
            if r["audit"] in ("mechanism", "exact") and r["accounting"] in ("published", "proven")
        ],
        "trainings, broken on purpose": [
            (str(r["subject"]).replace("fault: none", "sound").replace("fault: ", ""), r)
            for r in records
            if r["audit"] == "repeated"
        ],
    }
    figure = style.new_figure(style.PAGE, 1.0 + 0.2 * sum(map(len, groups.values())))
    panels = figure.subplots(
        2, 1, sharex=True, height_ratios=[max(1, len(rows)) for rows in groups.values()]
    )
    for axes, (title, rows) in zip(panels, groups.items(), strict=True):
        for place, (_, record) in enumerate(reversed(rows)):
            broken = CONTRADICTED in record["verdict"] and "not" not in record["verdict"]
            colour = style.ORANGE if broken else style.BLUE
            axes.plot([0, record["lower"]], [place, place], color=colour, linewidth=3)
            claimed = [record["claimed"]] * 2
            axes.plot(claimed, [place - 0.35, place + 0.35], color=style.INK, linewidth=1.6)
            if record["exact"] is not None:
                axes.plot(record["exact"], place, "o", color=colour, markersize=4)
        axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
        axes.set_title(title, loc="left")
        axes.set(xlim=(0, None), ylim=(-0.7, max(len(rows), 1) - 0.3))
    panels[1].set_xlabel(LABEL)
    return figure
