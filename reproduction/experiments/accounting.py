"""The paper's sixteen settings under each accounting, side by side."""

from collections.abc import Iterator, Sequence

from dpsur.presets.settings import DELTA, PaperSetting, paper_setting, paper_settings
from dpsur.privacy.accounting import figures
from dpsur.privacy.budget import Budget
from dpsur.privacy.plans.fixed import Request, make_plan
from reproduction.artifacts import Artifact, Page
from reproduction.base import Cell, OneByOne, Options, Row

TITLE = "# What the paper's settings cost"
NOTE = """\
T is the number of accepted updates that the published accounting allows at the target epsilon
(delta = 1e-5; feature statistics with noise 8 charged for MNIST and CIFAR-10). *Published* is the
paper's figure, which is not proved. *Proven* is the certified one, with the lower value that an
adversary attains at the same orders. *By distributions* is the same guarantee composed by privacy
loss distributions (accounting `proven-pld`). *Every trial* charges all M trials that are expected if half of the candidates
are improvements: M = T / ((a_min + a_max) / 2).
"""


# What the privacy of a setting depends on; how it is trained otherwise plays no part here.
ACCOUNTED = (
    "dataset",
    "epsilon",
    "batch_size",
    "noise_multiplier",
    "val_batch_size",
    "val_noise_multiplier",
    "accept_threshold",
    "private_statistics",
)


class Accounting(OneByOne):
    """One row per setting, one page."""

    name = "accounting"
    partial = True

    def cells(self, options: Options) -> Iterator[Cell]:  # noqa: ARG002
        """The paper's settings."""
        yield from setting_cells()

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """What the setting costs."""
        return costs(setting_of(cell), "proven-pld")

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The table as a page."""
        return [Page("accounting_table.md", _page(rows))]


EXPERIMENT = Accounting()


def setting_cells() -> Iterator[Cell]:
    """A cell for each of the paper's settings."""
    for setting in paper_settings():
        yield {"config": {name: getattr(setting, name) for name in ACCOUNTED}}


def setting_of(cell: Cell) -> PaperSetting:
    """The setting that a cell stands for."""
    return paper_setting(cell["config"]["dataset"], cell["config"]["epsilon"])


def costs(setting: PaperSetting, requested: str | None = None) -> Row:
    """The updates that the published accounting allows, and their epsilon under each accounting."""
    request = Request(
        trial_with=lambda _: setting.trial,
        noise_multiplier=setting.noise_multiplier,
        count=None,
        default_count=1,
        setup=setting.setup,
    )
    updates = make_plan(request, Budget(setting.epsilon, DELTA), "published").length
    assert setting.trial.gate is not None
    acceptance = (setting.trial.gate.accept_min + setting.trial.gate.accept_max) / 2
    trials = round(updates / acceptance)
    found = figures(
        setting.setup, setting.trial, DELTA, updates=updates, trials=trials, requested=requested
    )
    return {
        "dataset_size": setting.dataset_size,
        "delta": DELTA,
        "updates": updates,
        "trials": trials,
        "epsilon": found,
    }


def _page(rows: Sequence[Row]) -> str:
    lines = [
        TITLE,
        "",
        NOTE,
        "| data set | target | sigma_t | sigma_v | T | published | proven (lower) "
        "| by distributions | M | every trial |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        config, epsilon = row["config"], row["epsilon"]
        lines.append(
            f"| {config['dataset']} | {config['epsilon']} | {config['noise_multiplier']:g} | "
            f"{config['val_noise_multiplier']:g} | {row['updates']} | {epsilon['published']:.3f} | "
            f"**{epsilon['proven']:.3f}** ({epsilon['proven_lower']:.3f}) | "
            f"{_refined(epsilon)} | {row['trials']} | {epsilon['every_trial']:.3f} |"
        )
    return "\n".join(
        [*lines, "", "Rendered by `python -m reproduction accounting` from its rows.", ""]
    )


def _refined(epsilon: Row) -> str:
    """The figure by distributions, and how much smaller it is."""
    saved = 1 - epsilon["proven_pld"] / epsilon["proven"]
    return f"**{epsilon['proven_pld']:.3f}** (-{100 * saved:.1f}%)"
