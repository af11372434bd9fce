"""Every import path and name of Opacus works or is refused by name."""

import importlib
import pickle
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


def private(model=None, loader=None, accountant=None, noise_multiplier=1.5, **options):
    model = nn.Linear(4, 2) if model is None else model
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
    engine = PrivacyEngine()
    if accountant is not None:
        engine.accountant = accountant
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10) if loader is None else loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=0.7,
        **options,
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


def test_model_and_loader_of_another_engine_are_made_private_anew():
    first, model, _, loader = private()
    engine, model, optimizer, again = private(model, loader)
    for x, y in again:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.accountant.steps == 4
    assert first.accountant.steps == 0  # whose model is another engine's now
    assert again.sample_rate == loader.sample_rate
    assert again.plain is loader.plain


def test_the_inside_of_the_optimizer_is_refused_by_name():
    _, _, optimizer, _ = private()
    assert not hasattr(optimizer, "nonsense")
    assert not hasattr(optimizer, "grad_samples")
    with pytest.raises(dpsur.InvalidInputError, match=r"call loss.backward\(\)"):
        optimizer.attach_step_hook(print)


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


def test_compatible_modules_and_options_of_fix(caplog):
    from dpsur.opacus.validators import register_module_fixer, register_module_validator
    from dpsur.opacus.validators.module_validator import ModuleValidator

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with torch.no_grad():
        model[1].weight += 1
    assert isinstance(PrivacyEngine.get_compatible_module(model)[1], nn.GroupNorm)
    with caplog.at_level("INFO", logger="dpsur.opacus"):
        norm = ModuleValidator.fix(model, replace_bn_with_in=True)[1]
    assert isinstance(norm, nn.InstanceNorm2d)
    assert torch.equal(norm.weight, model[1].weight)
    assert "InstanceNorm2d" in caplog.text
    assert ModuleValidator.fix(model, num_groups=4)[1].num_groups == 4
    assert type(ModuleValidator.fix(model, batch_norm="frozen")[1]).__name__ == "FrozenNorm"
    for options in ({"other": 1}, {"num_groups": 3}, {"num_groups": 2, "replace_bn_with_in": True}):
        with pytest.raises(dpsur.InvalidInputError, match=r"option other|num_groups"):
            ModuleValidator.fix(model, **options)
    assert not ModuleValidator.is_valid(nn.Linear(2, 2).eval())

    class Own(nn.Linear):
        pass

    @register_module_validator(Own)
    def validate(module):
        return [dpsur.UnsupportedModelError("an own layer")]

    @register_module_fixer(Own)
    def fix(module):
        return nn.Linear(2, 2)

    assert str(ModuleValidator.validate(nn.Sequential(Own(2, 2)))[0]) == "an own layer"
    assert type(ModuleValidator.fix_and_validate(nn.Sequential(Own(2, 2)))[0]) is nn.Linear


def test_batch_norm_is_refused_before_training():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(dpsur.UnsupportedModelError, match=r'fix\(model, batch_norm="frozen"\)'):
        private(model)
    private(model.eval())  # whose statistics stay as they are


def test_arguments_of_opacus_that_change_nothing_here():
    _, model, _, _ = private(wrap_model=False, rand_on_empty=True, grad_sample_mode="functorch")
    with pytest.raises(dpsur.InvalidInputError, match="private loader"):
        model(torch.zeros(1, 4))
    model.cleanup()
    assert model(torch.zeros(1, 4)).shape == (1, 2)  # in training mode, and without the engine


def test_the_ledger_of_an_engine_is_read_as_an_accountant():
    assert PrivacyEngine().get_epsilon(1e-5) == 0
    assert len(PrivacyEngine().accountant) == 0
    engine, model, optimizer, loader = private()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    accountant = engine.accountant
    assert accountant.history == [(1.5, 0.25, 4)]
    assert accountant.state_dict() == {"history": [(1.5, 0.25, 4)], "mechanism": "prv"}
    spent = engine.get_epsilon(1e-5, alphas=[2.0])
    assert accountant.get_privacy_spent(delta=1e-5)[0] == spent > 0
    from dpsur.opacus.accountants import RDPAccountant

    total = RDPAccountant()
    total.history += accountant.history
    assert total.get_epsilon(1e-5) == spent
    for change in (
        lambda: setattr(engine, "accountant", total),
        lambda: accountant.step(noise_multiplier=1.0, sample_rate=0.1),
        lambda: accountant.load_state_dict(total.state_dict()),
    ):
        with pytest.raises(dpsur.InvalidInputError, match="ledger of an engine"):
            change()


def test_an_accountant_is_taken_over_before_make_private():
    from dpsur.opacus.accountants import PRVAccountant

    earlier, total = PRVAccountant(), PRVAccountant()
    earlier.history = [(1.5, 0.25, 6)]
    total.history = [(1.5, 0.25, 10)]
    engine, model, optimizer, loader = private(accountant=earlier, epochs=1)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        assert optimizer.pre_step()
        optimizer.original_optimizer.step()
    assert engine.get_epsilon(1e-5) == total.get_epsilon(1e-5)
    kept = pickle.loads(pickle.dumps(engine.accountant))
    assert kept.get_epsilon(1e-5) == total.get_epsilon(1e-5)
    assert len(kept) == 10
    assert total.get_epsilon(1e-5) < engine.guarantee(1e-5) < float("inf")  # two halves of delta


def test_histories_leave_nothing_out():
    debugging, model, optimizer, loader = private(noise_multiplier=0.0, epochs=1)
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert debugging.accountant.history == [(0.0, 1.0, 1)]
    gate = dpsur.LossGate(lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
    tested, model, optimizer, loader = private(gate=gate, epochs=1)
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(dpsur.InvalidInputError, match="no place for the tests of a gate"):
        tested.accountant.history  # noqa: B018


def test_checkpoints_take_files_and_options(tmp_path):
    engine, model, optimizer, loader = private()
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with (tmp_path / "file").open("wb") as file:
        engine.save_checkpoint(path=file, module=model, checkpoint_dict={"epoch": 1})
    other, copied, _, _ = private()
    with (tmp_path / "file").open("rb") as file:
        saved = other.load_checkpoint(
            path=file, module=copied, module_load_dict_kwargs={"strict": True}
        )
    assert saved["epoch"] == 1
    assert torch.equal(copied.weight, model.weight)
    assert other.accountant.history == engine.accountant.history
    with pytest.raises(dpsur.InvalidInputError, match="fixed in make_private"):
        engine.save_checkpoint(path=tmp_path / "file", module=model, noise_scheduler=object())


def test_attributes_of_names_without_a_counterpart_are_refused_by_name():
    from dpsur.opacus.data_loader import DPDataLoader

    with pytest.raises(dpsur.InvalidInputError, match=r"from_data_loader has no counterpart"):
        DPDataLoader.from_data_loader(None)
    assert not hasattr(DPDataLoader, "from_data_loader")


def test_gradients_of_records_are_held_against_single_ones():
    from dpsur.opacus.utils.per_sample_gradients_utils import (
        check_per_sample_gradients_are_correct as correct,
    )

    assert correct(torch.randn(3, 4), nn.Linear(4, 2))
    assert correct(torch.randn(5, 3, 4), nn.Linear(4, 2), batch_first=False)

    class Mixes(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    # what mixes records is seen one at a time in both ways
    assert correct(torch.randn(3, 4), Mixes(4, 2))
    with pytest.raises(RuntimeError, match="empty"):
        correct(torch.randn(0, 4), nn.Linear(4, 2))
