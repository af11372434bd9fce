"""Every example runs as it stands, and says what it promises."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {
    "text_classification.py": ["transformers"],
    "lora_language_model.py": ["transformers", "peft"],
    "data_frame.py": ["pandas"],
    "lightning_task.py": ["lightning"],
}
SAYS = {
    "own_loop.py": ["guarantee: epsilon 2.00"],
    "text_classification.py": ["engine: one-pass", "test accuracy 9"],
    "lora_language_model.py": ["epsilon 8.00; loss on public notes", "loaded again, the loss is"],
    "augmented_images.py": ["replaced by GroupNorm", "epoch 3: epsilon"],
    "data_frame.py": ["test accuracy"],
    "lightning_task.py": ["epsilon", "accuracy"],
    "resume_after_kill.py": ["ended with -9", "finished: accuracy"],
}


def test_every_example_is_listed():
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == set(SAYS)
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"({name})" in page for name in files)


@pytest.mark.filterwarnings("ignore")  # of other packages, which an example does not silence
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "text_classification.py" else name
        for name in SAYS
    ],
)
def test_an_example_runs(name, capfd, monkeypatch):
    for package in NEEDS.get(name, []):
        pytest.importorskip(package, reason=f"needs the extra dev: {package}")
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capfd.readouterr().out
    assert all(text in said for text in SAYS[name]), said
