"""How many files one update runs through, and that docs/architecture.md shows all of them."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.mechanism.trial import EagerLoop
from tests.conftest import blobs, small_model

ROOT = Path(dpsur.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
MOST = {"fit": 19, "private step": 20, "backward": 23}
UPDATE = 3  # the first ones find out how a model is run


@contextmanager
def traced(files):
    """Notes in which files functions are called meanwhile."""

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            files.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def update_of_fit(files, monkeypatch):
    real, made = EagerLoop.collect, []

    def collect(loop):
        made.append(1)
        if len(made) != UPDATE:
            return real(loop)
        with traced(files):
            return real(loop)

    monkeypatch.setattr(EagerLoop, "collect", collect)
    data = blobs(60)
    method = dpsur.Dpsgd(batch_size=20, updates=UPDATE)
    dpsur.fit(
        small_model(), (data.inputs, data.targets), budget=dpsur.Budget(3.0, 1e-3), method=method
    )


def update_of_a_loop(files, *, private):
    model, data = small_model(), blobs(60)
    engine = dpsur.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data.inputs, data.targets), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        steps=UPDATE,
    )

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    step = engine.private_step(loss) if private else None
    batches = iter(loader)

    def update():
        batch = next(batches)
        if step is not None:
            step(batch)
            return
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    for _ in range(UPDATE - 1):
        update()
    with traced(files):
        update()


@pytest.mark.parametrize("driver", MOST)
def test_an_update_runs_through_few_files_and_the_page_shows_them(driver, monkeypatch):
    files = set()
    if driver == "fit":
        update_of_fit(files, monkeypatch)
    else:
        update_of_a_loop(files, private=driver == "private step")
    assert len(files) <= MOST[driver], sorted(files)
    page = PAGE.read_text(encoding="utf-8")
    assert not [name for name in files if name not in page]
