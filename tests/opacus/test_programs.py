"""Programs for Opacus, reduced: what has to be changed in them, and what they say unchanged.

The files of `programs/` are programs for Opacus. `# instead: new` stands before a line that is
replaced here, `# added: new` where a line is added; nothing after `instead:` leaves the line out.
Beside those, only the imports are changed.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dpsur
from dpsur.errors import DpsurError

FOLDER = Path(__file__).parent / "programs"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
MARK = re.compile(r"( *)# (instead|added):(?: (.*))?")
MOST = 3  # changed lines of a program that counts as running in the form of Opacus

pytest.importorskip("opacus", reason="needs the extra dev: opacus")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and Opacus, about many things


def changed(text: str) -> Iterator[str]:
    """The lines of a program as they are written here."""
    skip = False
    for line in text.splitlines():
        found = MARK.fullmatch(line)
        if found is not None:
            if found[3]:
                yield found[1] + found[3]
            skip = skip or found[2] == "instead"
        elif skip:
            skip = False
        else:
            yield line


def imported_here(text: str) -> str:
    return re.sub(r"\bfrom opacus\b", "from dpsur.opacus", text)


def unchanged(name: str) -> str:
    text = (FOLDER / f"{name}.py").read_text()
    return "\n".join(line for line in text.splitlines() if MARK.fullmatch(line) is None)


def lines_changed(name: str) -> int:
    text = (FOLDER / f"{name}.py").read_text().splitlines()
    return sum(MARK.fullmatch(line) is not None for line in text)


def run(text: str) -> dict:
    torch.manual_seed(0)
    names: dict = {"__name__": "program"}
    exec(compile(text, "program.py", "exec"), names)
    return names


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_with_the_changes_that_it_states(name):
    text = imported_here("\n".join(changed((FOLDER / f"{name}.py").read_text())))
    found = run(text)
    engine = found["privacy_engine"]
    assert isinstance(engine, dpsur.PrivacyEngine)
    assert engine.accountant.steps >= 2
    assert found["epsilon"] > 0


# What a program says here with only the imports changed: the line that leads on.
SAYS = {
    "class_weights": r"engine\.criterion\(outputs, targets\)",
    "ctgan": r"poisson_sampling=False .* leave it out",
    "dcgan": r"another number of rows .* generator\(torch.randn\(64",
    "dense_gcn": r"DPOptimizer has no counterpart: .* call make_private",
    "fedguard": r"pass seed=",
    "fedprox": r"weight_decay, or write the loss as a private step(.|\n)*step\(batch\)",
    "fedsecure": r"clip_grad_norm_.* remove that",
    "imdb": r"poisson_sampling=False .* leave it out",
    "pathmnist": r"GradSampleModule has no counterpart: .* the model itself",
    "reads_ahead": r"read the next batch after the step",
    "unet_dice": r"say how long: epochs=",
    "vertical": r"poisson_sampling=False .* leave it out",
}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if lines_changed(name)])
def test_unchanged_it_is_refused_with_what_to_write(name):
    with pytest.raises(DpsurError) as caught:
        run(imported_here(unchanged(name)))
    assert re.search(SAYS[name], str(caught.value)), str(caught.value)
