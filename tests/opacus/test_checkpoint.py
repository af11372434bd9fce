"""Weights and histories of checkpoints that Opacus wrote."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur

opacus = pytest.importorskip("opacus", reason="needs the extra dev: opacus")
from opacus.layers import DPLSTM, DPMultiheadAttention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    def __init__(self, recurrent, attention):
        super().__init__()
        self.lstm = recurrent(4, 4, batch_first=True)
        self.attend = attention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.lstm(x)[0]
        return self.head(self.attend(x, x, x)[0].mean(1))


def trained(accountant="prv"):
    model = Model(DPLSTM, DPMultiheadAttention)
    engine = opacus.PrivacyEngine(accountant=accountant)
    data = TensorDataset(torch.randn(20, 5, 4), torch.randint(0, 3, (20,)))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(data, batch_size=5),
        noise_multiplier=1.3,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, engine


def test_weights_are_read_and_the_history_is_only_claimed(tmp_path):
    theirs, engine = trained()
    engine.save_checkpoint(path=tmp_path / "checkpoint.pt", module=theirs)
    model = Model(nn.LSTM, nn.MultiheadAttention)
    found = dpsur.from_opacus(tmp_path / "checkpoint.pt", model, history=True)
    x, there = torch.randn(6, 5, 4), theirs._module
    assert torch.allclose(model.lstm(x)[0], there.lstm(x)[0], atol=1e-5)
    assert torch.equal(model.head.weight, there.head.weight)
    # with batch_first=True Opacus 1.6 computes something else than torch.nn
    parts = (there.attend.qlinear, there.attend.klinear, there.attend.vlinear)
    assert torch.equal(model.attend.in_proj_weight, torch.cat([one.weight for one in parts]))
    assert torch.equal(model.attend.in_proj_bias, torch.cat([one.bias for one in parts]))
    assert found.model is model
    assert str(found.claimed) == (
        "claimed by Opacus, not verified: 4 steps with sample rate 0.25 and noise multiplier 1.3"
    )
    assert found.claimed.epsilon(1e-3) <= 1.01 * engine.get_epsilon(1e-3)


def test_a_state_dict_with_the_prefix_of_the_wrapper(tmp_path):
    layer = nn.Linear(4, 3)
    wrapped = {f"_module.{name}": value for name, value in layer.state_dict().items()}
    torch.save(wrapped, tmp_path / "weights.pt")
    found = dpsur.from_opacus(tmp_path / "weights.pt", nn.Linear(4, 3))
    assert torch.equal(found.model.weight, layer.weight)
    assert found.claimed is None
    with pytest.raises(dpsur.CheckpointError, match="no accountant's history"):
        dpsur.from_opacus(tmp_path / "weights.pt", nn.Linear(4, 3), history=True)
    with pytest.raises(dpsur.CheckpointError, match="on one side only"):
        dpsur.from_opacus(wrapped, nn.Linear(4, 3, bias=False))


def test_histories_of_the_gdp_accountant_are_refused(tmp_path):
    theirs, engine = trained("gdp")
    engine.save_checkpoint(path=tmp_path / "checkpoint.pt", module=theirs)
    model = Model(nn.LSTM, nn.MultiheadAttention)
    with pytest.raises(dpsur.InvalidInputError, match="GDP accountant"):
        dpsur.from_opacus(tmp_path / "checkpoint.pt", model, history=True)


class Evil:
    def __reduce__(self):
        return (print, ("code was run",))


def test_a_file_with_code_in_it_is_not_run(tmp_path, capsys):
    torch.save({"weight": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(dpsur.CheckpointError, match="cannot be read as weights"):
        dpsur.from_opacus(tmp_path / "evil.pt", nn.Linear(1, 1))
    assert "code was run" not in capsys.readouterr().out


@pytest.mark.parametrize("steps", [[(0.0, 0.1, 3)], [(1.0, 1.5, 3)], [(1.0,)], "nothing"])
def test_a_damaged_history_is_refused(steps):
    held = {
        "module_state_dict": nn.Linear(1, 1).state_dict(),
        "privacy_accountant_state_dict": {"history": steps, "mechanism": "prv"},
    }
    with pytest.raises(dpsur.CheckpointError, match="damaged"):
        dpsur.from_opacus(held, nn.Linear(1, 1), history=True)
