"""Every import path and name of Opacus works or is refused by name."""

import importlib
import pkgutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.opacus import PrivacyEngine, names

opacus = pytest.importorskip("opacus", reason="needs the extra dev: opacus")


def paths():
    found = pkgutil.walk_packages(opacus.__path__, "opacus.")
    return sorted(m.name for m in found if ".tests" not in m.name and ".scripts" not in m.name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", paths())
def test_every_path_and_name_can_be_imported(path):
    theirs = importlib.import_module(path)
    ours = importlib.import_module(path.replace("opacus", "dpsur.opacus", 1))
    wanted = [
        name
        for name, value in vars(theirs).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == path
    ]
    for name in wanted:
        if name == "T_state_dict":  # a variable of types
            continue
        value = getattr(ours, name)
        if isinstance(value, type) and issubclass(value, names.Refused):
            with pytest.raises(
                dpsur.InvalidInputError, match=f"{name} has no counterpart: .{{20}}"
            ):
                value()


def test_a_name_that_opacus_does_not_have_is_an_import_error():
    with pytest.raises(ImportError):
        from dpsur.opacus.optimizers import Nothing  # noqa: F401


def private():
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.5,
        max_grad_norm=0.7,
    )
    return engine, *made


def test_attributes_of_optimizer_and_model():
    _, model, optimizer, loader = private()
    assert optimizer.noise_multiplier == 1.5
    assert optimizer.max_grad_norm == 0.7
    assert optimizer.expected_batch_size == 10
    assert optimizer.original_optimizer is optimizer
    assert model._module is model
    assert set(model.state_dict()) == {"weight", "bias"}
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_a_private_loader_given_again_is_refused_by_name():
    _, _, _, loader = private()
    model = nn.Linear(4, 2)
    with pytest.raises(dpsur.InvalidInputError, match="private already"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_accountants_keep_a_history_and_count_as_the_ledger_does():
    from dpsur.opacus.accountants import RDPAccountant, create_accountant

    one = RDPAccountant()
    for _ in range(5):
        one.step(noise_multiplier=1.5, sample_rate=0.25)
    assert one.history == [(1.5, 0.25, 5)]
    assert len(one) == 5
    ledger = dpsur.Account.without_limit(1e-5)
    for _ in range(5):
        ledger.charge(dpsur.Trial(dpsur.SampledGaussian(0.25, 1.5)))
    assert one.get_epsilon(1e-5) == ledger.get_epsilon(1e-5)
    other = create_accountant("rdp")
    other.load_state_dict(one.state_dict())
    assert other.get_privacy_spent(delta=1e-5)[0] == one.get_epsilon(1e-5)
    with pytest.raises(dpsur.InvalidInputError, match="mechanism 'rdp'"):
        create_accountant("prv").load_state_dict(one.state_dict())


def test_compatible_modules_and_options_of_fix():
    from dpsur.opacus.validators.module_validator import ModuleValidator

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert isinstance(PrivacyEngine.get_compatible_module(model)[1], nn.GroupNorm)
    with pytest.raises(dpsur.InvalidInputError, match="replace_bn_with_in"):
        ModuleValidator.fix(model, replace_bn_with_in=True)
