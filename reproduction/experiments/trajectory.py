"""DPSGD against DPSUR on a linear regression of two parameters, step by step."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dpsur import figure_style as style
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.state import Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import Progress
from dpsur.methods import Dpsgd, Dpsur, Method
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import SampledGaussian
from dpsur.privacy.plan import Plan
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.loops import train

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEEDS = range(20)
SETTINGS: dict[str, Any] = {
    "records": 2000,
    "data_seed": 1,
    "start": [-1.0, 3.5],
    "updates": 50,
    "learning_rate": 0.2,
    "batch_size": 16,
    "max_grad_norm": 4.0,
    "noise_multiplier": 3.0,
    "val_batch_size": 32,
    "val_noise_multiplier": 1.0,
    "loss_clip": 0.001,
    "accept_threshold": -1.0,
    "delta": 1e-5,
}
ARMS = ("DPSGD", "DPSUR", "DPSGD, same epsilon")
# Parameters of the update, of its optimizer and of the gate.
PLAIN = ("learning_rate", "batch_size", "max_grad_norm", "updates")
STEADY: dict[str, Any] = {"schedule": "constant", "momentum": 0.0}
GATE = ("val_batch_size", "val_noise_multiplier", "loss_clip", "accept_threshold")
# The lengths are fixed here; what they cost is a result.
AMPLE_EPSILON = 20.0
TITLE = "Trajectories on a linear regression"
TEXT = """
(a) The weights of a linear regression y = w x + b under DPSGD and DPSUR, from the same start and at
the same noise, on the contours of the mean squared error; the cross is the least-squares solution.
Seed {seed}, the first of {seeds}. (b) The loss above its minimum after each update, averaged over
the seeds, with the middle half of them shaded. {records:,} records, {updates} updates (for DPSUR:
accepted ones), learning rate {learning_rate}, batches of {batch_size}, gradients clipped to
{max_grad_norm:g}, noise multiplier {noise_multiplier:g}. The gate of DPSUR: sigma_v =
{val_noise_multiplier:g}, beta = {accept_threshold:g}, C_v = {loss_clip}, batches of
{val_batch_size}.

At the same noise and the same number of updates, DPSUR stays closer to the minimum over the last
half of the run. This comparison, the paper's, leaves out what the tests cost: DPSUR makes
{trials:.1f} trials for every update that it keeps, and its proven epsilon is {factor:.0f} times
that of DPSGD. The third arm is DPSGD with that epsilon, which it spends on less noise; it comes
closer still.
"""
COLUMNS = (
    Column("arm", "arm"),
    Column("noise multiplier", "noise_multiplier", ".2f"),
    Column("updates", "updates"),
    Column("trials, mean", "trials", ".0f"),
    Column("proven epsilon (delta 1e-5)", "epsilon", ".3f"),
    Column("loss above its minimum, last half", "last_half", ".4f"),
    Column("its standard deviation", "deviation", ".4f"),
    Column("at the end", "end", ".4f"),
    Column("seeds", "seeds"),
)


class Trajectory(OneByOne):
    """One row per arm and seed."""

    name = "trajectory"

    def cells(self, options: Options) -> Iterator[Cell]:
        """Every arm with every seed."""
        for arm in ARMS:
            for seed in options.seeds or SEEDS:
                yield {"config": {"arm": arm, "seed": seed, **SETTINGS}}

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """One run, with the weights after every update that was kept."""
        return _run(cell["config"])

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """Both panels, and where each arm ends."""
        groups = {arm: [row for row in rows if row["config"]["arm"] == arm] for arm in ARMS}
        records = [_record(arm, mine) for arm, mine in groups.items()]
        picture = Picture(self.name, lambda: draw(groups))
        text = TEXT.format(**_facts(rows, records))
        return table_page(self.name, TITLE, text, Table(COLUMNS, records), picture)


EXPERIMENT = Trajectory()


def _run(config: dict[str, Any]) -> Row:
    records = make_records(config["records"], config["data_seed"])
    method, plan = _settled(config)
    problem = Problem(_model(config["start"]), F.mse_loss, records)
    procedure = method.build(problem, plan)
    path = [config["start"]]

    def follow(progress: Progress, verdicts: Sequence[Verdict]) -> None:
        if verdicts[-1].accept:  # a block on the host is one trial
            weights = progress.state.params
            path.append([round(weights[name].item(), 4) for name in ("weight", "bias")])

    streams = Streams(config["seed"], torch.device("cpu"))
    end = train(procedure, plan, streams, on_block=follow)
    return {
        "noise_multiplier": _noise(plan),
        "epsilon": plan.epsilon(),
        "updates": end.ledger.updates,
        "trials": end.ledger.trials,
        "loss": quadratic(records),
        "path": path,
    }


def _noise(plan: Plan) -> float:
    assert isinstance(plan.typical.update, SampledGaussian)
    return plan.typical.update.noise_multiplier


def make_records(count: int, seed: int) -> Examples:
    """Points around the line y = 2 x + 1, x between -0.5 and 1.5."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(count, 1, generator=generator) - 0.5
    return Examples(x, 2 * x + 1 + 0.3 * torch.randn(count, 1, generator=generator))


def quadratic(records: Examples) -> dict[str, Any]:
    """The mean squared error as a function of (w, b): least + (p - best)^T curvature (p - best)."""
    x, y = records.inputs.double(), records.targets.double()
    design = torch.cat([x, torch.ones_like(x)], dim=1)
    best: Tensor = torch.linalg.lstsq(design, y).solution
    curvature = design.T @ design / len(records)
    return {
        "least": (design @ best - y).square().mean().item(),
        "best": best.flatten().tolist(),
        "curvature": curvature.tolist(),
    }


def _model(weights: Sequence[float]) -> nn.Module:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(weights[0])
        model.bias.fill_(weights[1])
    return model


def _settled(config: dict[str, Any]) -> tuple[Method, Plan]:
    """The arm's method with its plan; the third arm is calibrated to the second one's epsilon."""
    arm, size, delta = config["arm"], config["records"], config["delta"]
    plain = {key: config[key] for key in PLAIN}
    noise = {"noise_multiplier": config["noise_multiplier"]}
    ample = Budget(AMPLE_EPSILON, delta)
    if arm == "DPSGD":
        return _settle(Dpsgd(**STEADY, **plain, **noise), size, ample)
    gate = {key: config[key] for key in GATE}
    selective, plan = _settle(Dpsur(**STEADY, **plain, **noise, gate="loss", **gate), size, ample)
    if arm == "DPSUR":
        return selective, plan
    return _settle(Dpsgd(**STEADY, **plain), size, Budget(plan.epsilon(), delta))


@cache
def _settle(method: Method, size: int, budget: Budget) -> tuple[Method, Plan]:
    settled, plan = method.resolve(size, budget, "proven")
    return settled, plan


def _record(arm: str, rows: Sequence[Row]) -> dict[str, Any]:
    losses = [excess_losses(row) for row in rows]
    halves = [float(along[len(along) // 2 :].mean()) for along in losses]
    return {
        "arm": arm,
        "noise_multiplier": rows[0]["noise_multiplier"],
        "updates": rows[0]["updates"],
        "trials": statistics.mean(row["trials"] for row in rows),
        "epsilon": rows[0]["epsilon"],
        "last_half": statistics.mean(halves),
        "deviation": statistics.stdev(halves) if len(halves) > 1 else None,
        "end": statistics.mean(float(along[-1]) for along in losses),
        "seeds": len(rows),
    }


def _facts(rows: Sequence[Row], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    plain, selective, _ = records
    return {
        **rows[0]["config"],
        "seeds": plain["seeds"],
        "trials": selective["trials"] / selective["updates"],
        "factor": selective["epsilon"] / plain["epsilon"],
    }


COLOURS = (style.BLUE, style.ORANGE, style.GREY)
LEVELS = (0.02, 0.1, 0.3, 0.7, 1.3, 2.2, 3.5, 5.0)
MARGIN = 0.35


def excess_losses(row: Row) -> NDArray[np.float64]:
    """The loss above its minimum at every point of a row's path."""
    away = np.array(row["path"]) - np.array(row["loss"]["best"])
    found: NDArray[np.float64] = _above(away, row)
    return found


def _above(away: NDArray[np.float64], row: Row) -> Any:
    return np.einsum("...i,ij,...j->...", away, np.array(row["loss"]["curvature"]), away)


def draw(groups: Mapping[str, Sequence[Row]]) -> "Figure":
    """Both panels."""
    figure = style.new_figure(style.PAGE, 2.9)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    colours = dict(zip(groups, COLOURS, strict=True))
    shown = {arm: rows[0] for arm, rows in list(groups.items())[:2]}
    _contours(left, list(shown.values()))
    for arm, row in shown.items():
        _path(left, row, colours[arm], arm)
    left.legend(loc="upper right", bbox_to_anchor=(1.0, 1.0))
    for arm, rows in groups.items():
        _losses(right, rows, colours[arm], arm)
    right.set(yscale="log", xlabel="updates", ylabel="loss above its minimum")
    right.legend(loc="upper right")
    style.label_panel(left, "a", "weights")
    style.label_panel(right, "b", "mean over seeds")
    return figure


def _contours(axes: "Axes", rows: Sequence[Row]) -> None:
    points = np.concatenate([row["path"] for row in rows])
    low, high = points.min(axis=0) - MARGIN, points.max(axis=0) + MARGIN
    slope, intercept = np.meshgrid(*(np.linspace(a, b, 80) for a, b in zip(low, high, strict=True)))
    best = np.array(rows[0]["loss"]["best"])
    heights = _above(np.stack([slope, intercept], axis=-1) - best, rows[0])
    axes.contour(slope, intercept, heights, levels=LEVELS, colors=style.PALE, linewidths=0.7)
    axes.plot(*best, "+", color=style.INK, markersize=9, markeredgewidth=1.4, zorder=5)
    axes.plot(*rows[0]["path"][0], "o", color=style.INK, markersize=4, zorder=5)
    axes.annotate(
        "start", rows[0]["path"][0], (6, 2), textcoords="offset points", ha="left", va="bottom"
    )
    axes.set(xlabel="slope $w$", ylabel="intercept $b$")


def _path(axes: "Axes", row: Row, colour: str, arm: str) -> None:
    slopes, intercepts = zip(*row["path"], strict=True)
    axes.plot(
        slopes, intercepts, "-o", color=colour, linewidth=0.9, markersize=1.8, label=arm, zorder=4
    )


def _losses(axes: "Axes", rows: Sequence[Row], colour: str, arm: str) -> None:
    losses = np.stack([excess_losses(row) for row in rows])
    updates = np.arange(losses.shape[1])
    low, high = np.quantile(losses, (0.25, 0.75), axis=0)
    axes.fill_between(updates, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(updates, losses.mean(axis=0), color=colour, label=arm)
