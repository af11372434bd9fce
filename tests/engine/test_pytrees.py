"""Batches and outputs of any structure, in a custom loop and in `fit`."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped
from torch.utils.data import Dataset

import dpsur
from tests.engine.helpers import private, without_noise

CLIP = 0.2


@dataclass
class Outputs:
    logits: Tensor
    score: Tensor
    loss: Tensor | None = None


class Reader(nn.Module):
    """Tokens with a mask and a vector of facts; two outputs, and perhaps a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.facts = nn.Embedding(12, 6), nn.Linear(3, 6)
        self.classify, self.rate = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, tokens, mask, facts, label=None, score=None):
        words = self.table(tokens) * mask[..., None]
        hidden = torch.tanh(words.sum(1) / mask.sum(1, keepdim=True) + self.facts(facts))
        outputs = Outputs(self.classify(hidden), self.rate(hidden).squeeze(1))
        if label is not None:
            outputs.loss = both(outputs, label, score)
        return outputs


def both(outputs, label, score):
    """Two losses."""
    return F.cross_entropy(outputs.logits, label) + 0.5 * F.mse_loss(outputs.score, score)


class Records(Dataset):
    """Dicts; sequences of one to five tokens, padded."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = index % 5 + 1
        return {
            "tokens": torch.randint(0, 12, (5,), generator=generator),
            "mask": (torch.arange(5) < length).float(),
            "facts": torch.randn(3, generator=generator),
            "label": index % 3,
            "score": float(index) / 30,
        }


def as_tuples(records):
    return tuple(
        torch.stack([torch.as_tensor(one[name], dtype=kind) for one in records])
        for name, kind in (
            ("tokens", torch.int64),
            ("mask", torch.float32),
            ("facts", torch.float32),
            ("label", torch.int64),
            ("score", torch.float32),
        )
    )


def as_dict(records):
    names = ("tokens", "mask", "facts", "label", "score")
    return dict(zip(names, as_tuples(records), strict=True))


def alone(model, batch):
    """Every record's own gradient, clipped, by plain autograd."""
    total = [torch.zeros_like(value) for value in model.parameters()]
    for row in range(len(batch["label"])):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        found = torch.autograd.grad(model(**one).loss, list(model.parameters()))
        norm = float(torch.stack([value.norm() for value in found]).norm())
        for place, value in zip(total, found, strict=True):
            place += value * min(1.0, CLIP / norm)
    return total


@pytest.mark.parametrize("way", ["loss of the model", "dict", "tuple", "criterion", "dataclass"])
def test_a_loop_takes_batches_of_any_structure(way, monkeypatch):
    without_noise(monkeypatch)
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    model = Reader()
    engine = dpsur.PrivacyEngine()
    loader = DataLoader(
        Records(), batch_size=10, collate_fn=as_tuples if way == "tuple" else as_dict
    )
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
        criterion=both,
        seed=1,
    )
    plain = copy.deepcopy(model)
    batch = next(iter(loader))
    if way == "tuple":
        *inputs, label, score = batch
        loss = both(model(*inputs), label, score)
        batch = dict(zip(("tokens", "mask", "facts", "label", "score"), batch, strict=True))
    elif way == "loss of the model":
        loss = model(**batch).loss
    else:
        inputs = {name: batch[name] for name in ("tokens", "mask", "facts")}
        loss_of = engine.criterion if way == "criterion" else both
        loss = loss_of(model(**inputs), batch["label"], batch["score"])
    loss.backward()
    optimizer.step()
    for value, parameter in zip(alone(plain, batch), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad * 10, value, rtol=1e-4, atol=1e-6)


def test_fit_takes_dicts_and_targets_of_any_structure():
    batch = as_dict([Records()[index] for index in range(30)])
    inputs = {name: batch[name] for name in ("tokens", "mask", "facts")}
    targets = {name: batch[name] for name in ("label", "score")}
    run = dpsur.fit(
        Reader(),
        (inputs, targets),
        loss=lambda outputs, target: both(outputs, target["label"], target["score"]),
        budget=dpsur.Budget(8.0, 1e-3),
        method=dpsur.Dpsgd(updates=2, batch_size=10),
        device="cpu",
    )
    assert run.engine.name == "one-pass"
    assert run.statement["guarantee"]["epsilon"] <= 8.0


SEEN = []  # not an attribute of the model, which a step would put back


class Watchful(Reader):
    """Notes the tokens that it is called on, and how often."""

    def forward(self, tokens, **others):
        level = torch._C._functorch.is_batchedtensor(tokens)
        SEEN.append(get_unwrapped(tokens) if level else tokens)
        return super().forward(tokens, **others)


def test_texts_of_many_lengths_need_no_probes(monkeypatch):
    """A call of the loop is one call of the model, on its own tokens and nothing made up."""
    without_noise(monkeypatch)
    engine, model, optimizer, loader = private(
        Watchful(), Records(), batch_size=5, seed=1, max_grad_norm=CLIP
    )
    for extra, batch in enumerate(loader):  # padded to another length every time
        batch = {
            name: F.pad(value, (0, extra)) if name in ("tokens", "mask") else value
            for name, value in {**batch, "score": batch["score"].float()}.items()
        }
        plain = copy.deepcopy(model)
        SEEN.clear()
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        (seen,) = SEEN
        assert torch.equal(seen.flatten(0, -2), batch["tokens"])
        if batch["mask"].any():  # a batch was drawn
            for value, parameter in zip(alone(plain, batch), model.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad * 5, value, rtol=1e-4, atol=1e-6)
    assert len(engine._watcher.records.ways) > 2
    assert engine._watcher.records.by_construction


def test_an_argument_without_a_row_per_record_is_refused():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x, shift):
            return self.head(x + shift)

    _, model, _, loader = private(Shifted(), seed=1)
    x, _ = next(iter(loader))
    with pytest.raises(dpsur.UnsupportedModelError, match="row per record"):
        model(x, torch.ones(1, 6))


def test_adapters_of_peft_are_trained(monkeypatch):
    peft = pytest.importorskip("peft", reason="needs the extra hf: peft")
    without_noise(monkeypatch)
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=[])
    model = peft.get_peft_model(base, config)
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    _, model, optimizer, loader = private(model, seed=1)
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert names
    assert all("lora" in name for name in names)
    kept = [p for p in model.parameters() if not p.requires_grad]
    assert all(torch.equal(one, other) for one, other in zip(frozen, kept, strict=True))
