"""Stock language models with a loss of their own, on sequences of unequal lengths."""

import copy

import pytest
import torch
from torch.utils.data import Dataset

from tests.engine.helpers import private, without_noise

transformers = pytest.importorskip("transformers", reason="needs the extra hf: transformers")

CLIP, LENGTH = 0.5, 8
SMALL = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}


def gpt2():
    config = transformers.GPT2Config(
        n_positions=LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        loss_type="ForCausalLM",
        **SMALL,
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


class Texts(Dataset):
    """Two to eight tokens each; what is padded has no label."""

    def __init__(self, causal):
        self.causal = causal

    def __len__(self):
        return 30

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 20, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < 2 + index % 7).long()
        labels = tokens.masked_fill(mask == 0, -100) if self.causal else torch.tensor(index % 2)
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


def alone(model, batch):
    """The clipped sum of each record's own gradient, by plain autograd on one record at a time."""
    total = [torch.zeros_like(value) for value in model.parameters()]
    for row in range(len(batch["labels"])):
        loss = model(**{name: value[row : row + 1] for name, value in batch.items()}).loss
        found = torch.autograd.grad(loss, list(model.parameters()))
        norm = float(torch.stack([value.norm() for value in found]).norm())
        for place, value in zip(total, found, strict=True):
            place += value * min(1.0, CLIP / norm)
    return total


@pytest.mark.parametrize("build", [gpt2, bert])
def test_each_record_has_the_mean_over_its_own_tokens(build, monkeypatch):
    without_noise(monkeypatch)
    torch.manual_seed(0)
    model, data = build().train(), Texts(build is gpt2)
    plain = copy.deepcopy(model)
    engine, model, optimizer, loader = private(
        model, data, batch_size=10, seed=1, max_grad_norm=CLIP
    )
    batch = next(iter(loader))
    assert len(batch["attention_mask"].sum(1).unique()) > 2
    model(**batch).loss.backward()
    optimizer.step()
    expected = torch.cat([value.flatten() for value in alone(plain, batch)])
    found = torch.cat([10 * value.grad.flatten() for value in model.parameters()])
    assert float((found - expected).norm()) <= 1e-3 * float(expected.norm())
    assert engine._watcher.records.by_construction  # and not one record at a time
