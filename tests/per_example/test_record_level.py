"""The record level: clipped sums are those of one record at a time, whatever the network is.

Everything is in float64, the loss too, so that agreement to 1e-9 leaves no room for a wrong norm, a
missing cross term or a value of another record. Each law has a mutant that breaks it.
"""

import gc
import math
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrizations

from dpsur.errors import DpsurError
from dpsur.per_example.contributions import clip_factors, row_norms
from dpsur.per_example.record_function import RecordFunction, Way
from dpsur.per_example.record_level import RecordLevel, is_of_a_library
from dpsur.per_example.rules import RULES, kind_of
from dpsur.per_example.rules.linear import linear_map
from dpsur.per_example.tape import Tape
from tests.mutants import Mutant, law_tests

RECORDS, CLASSES, WORDS, LENGTH = 5, 4, 11, 7
CLIP = 0.5
EXACT = 1e-9

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:There is a performance drop",
    "ignore:fan_in_fan_out",
)


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --- the two sides --------------------------------------------------------------------------------


@dataclass
class Sum:
    """A clipped sum of gradients, with the losses of the records and the way that it was found."""

    gradients: dict[str, torch.Tensor]
    losses: torch.Tensor
    way: Way | None = None


def trained(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def by_level(function, model, batch):
    """By the record level: `function(model, *batch)`, where each tensor has a row per record."""
    weights = trained(model)
    records = RecordFunction((model,), weights)
    tape, losses, _ = records.tape(
        lambda one: function(model, *one), tuple(b.unsqueeze(1) for b in batch), len(batch[0])
    )
    factors = clip_factors(tape.norms(), CLIP, None)
    sums = {name: tape.weighted_sum(name, factors) for name in weights}
    return Sum(sums, losses, next(iter(records.ways.values())))


def one_at_a_time(function, model, batch):
    """By autograd, with a batch of one record at a time."""
    weights = trained(model)
    sums = {name: torch.zeros_like(value) for name, value in weights.items()}
    losses = []
    for row in range(len(batch[0])):
        model.zero_grad()
        loss = function(model, *(values[row : row + 1] for values in batch))
        loss.backward()
        losses.append(loss.detach())
        found = {n: v.grad for n, v in weights.items() if v.grad is not None}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in found.values()))
        if math.isnan(float(losses[-1])) or not math.isfinite(norm):
            continue  # counts for nothing
        for name, grad in found.items():
            sums[name] += min(1.0, CLIP / norm if norm else 1.0) * grad
    model.zero_grad()
    return Sum(sums, torch.stack(losses))


def check_equal(found, wanted):
    scale = max(1.0, *(float(value.abs().max()) for value in wanted.gradients.values()))
    for name, value in wanted.gradients.items():
        error = float((found.gradients[name] - value).abs().max())
        assert error <= EXACT * scale, f"{name}: {error:.1e}"
    assert torch.allclose(found.losses, wanted.losses, rtol=EXACT, atol=EXACT, equal_nan=True)


# --- networks -------------------------------------------------------------------------------------


def draws():
    return torch.Generator().manual_seed(5)


def images():
    return torch.randn(RECORDS, 3, 8, 8, generator=draws(), dtype=torch.float64)


def sequences():
    return torch.randn(RECORDS, LENGTH, 16, generator=draws(), dtype=torch.float64)


def texts():
    return torch.randint(0, WORDS, (RECORDS, LENGTH), generator=draws())


def labels():
    return torch.arange(RECORDS) % CLASSES


def classify(model, x, y):
    return F.cross_entropy(model(x).flatten(1)[:, :CLASSES], y)


@dataclass
class Network:
    """A network, its inputs and the loss; `way` is how the level has to run it."""

    make: Any
    inputs: Any = images
    loss: Any = classify
    way: Way = Way.LEVEL


def layers(*each):
    return lambda: nn.Sequential(*[make() for make in each])


class Words(nn.Module):
    """Tied embeddings, a class token, positions, a layer scale and weight norm in one network."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8, padding_idx=0), nn.Embedding(LENGTH + 1, 8)
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.rand(8))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.mix = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, text):
        h = torch.cat([self.token.expand(len(text), -1, -1), self.words(text)], 1)
        h = h + self.places(torch.arange(h.shape[1]))
        return self.mix(self.norm(h) * self.scale)[:, 1:] @ self.words.weight.t()


class Attention(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x):
        if self.batch_first:
            return self.layer(x).mean(1)
        return self.layer(x.transpose(0, 1)).mean(0)


class Fused(nn.Module):
    """`scaled_dot_product_attention` with a mask of each record and a trained bias."""

    def __init__(self):
        super().__init__()
        self.project, self.bias = nn.Linear(16, 48), nn.Parameter(0.1 * torch.randn(LENGTH, LENGTH))

    def forward(self, x):
        q, k, v = self.project(x).unflatten(2, (2, 24)).transpose(1, 2).chunk(3, 3)
        mask = self.bias.masked_fill((x[..., 0] > 1)[:, None, None], -1e4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).flatten(1)


class OverTime(nn.Module):
    """A recurrent layer in one of the layouts that torch knows."""

    def __init__(self, kind, layout):
        super().__init__()
        self.layer = kind(16, 8, 1 if layout == "alone" else 2, batch_first=layout == "batch first",
                          bidirectional=layout != "alone")  # fmt: skip
        self.layout = layout

    def forward(self, x):
        if self.layout == "alone":
            return self.layer(x[0])[0].mean(0)[None]
        if self.layout == "batch first":
            return self.layer(x)[0].mean(1)
        return self.layer(x.transpose(0, 1))[0].mean(0)


class Shared(nn.Module):
    """One layer used three times: norms need the products of its uses."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = (
            nn.Linear(16, 16),
            nn.LayerNorm(16),
            nn.Linear(16, CLASSES),
        )

    def forward(self, x):
        for _ in range(3):
            x = x + self.norm(self.body(x)).tanh()
        return self.head(x.mean(1))


WIDE = 37  # no other tensor has this width


class Checkpointed(nn.Module):
    """Layers under checkpointing, some of them under two, and one that is called twice."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.head = nn.Linear(192, 16), nn.Linear(16, CLASSES)
        self.body = nn.Sequential(nn.Linear(16, WIDE), nn.GELU(), nn.Linear(WIDE, 16))
        self.norm = nn.LayerNorm(16)
        self.reentrant = reentrant

    def again(self, function, x):
        return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=self.reentrant)

    def block(self, x):
        body = self.body if self.reentrant else partial(self.again, self.body)
        return x + body(self.norm(x))

    def forward(self, x):
        h = self.first(x.flatten(1))
        return self.head(self.again(self.block, h) + self.again(self.body, self.norm(h)))


class WritesIntoZeros(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(192, CLASSES)

    def forward(self, x):
        out = torch.zeros(len(x), CLASSES)
        out[:, :2] = self.body(x.flatten(1))[:, :2]
        return out


class DecidesByARecord(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(192, CLASSES)

    def forward(self, x):
        h = self.body(x.flatten(1))
        return 2 * h if x.mean() > 0 else h


def next_words(model, text, y):
    return F.cross_entropy(model(text).flatten(0, 1), text.flatten())


def with_penalty(model, x, y):
    return classify(model, x, y) + 0.1 * sum(value.square().sum() for value in model.parameters())


def of_two_calls(model, x, y):
    return F.mse_loss(model(x), model(x.flip(-1))) + classify(model, x, y)


def of_slopes(model, x, y):
    slope = torch.func.jacrev(lambda point: model(point).sum(0))(x)
    return classify(model, x, y) + 0.01 * slope.square().sum()


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(True), nn.Linear(16, CLASSES))


NETWORKS = {
    "perceptron": Network(perceptron),
    "convolutions, in-place ReLU, groups": Network(
        layers(
            lambda: nn.Conv2d(3, 8, 3),
            lambda: nn.GroupNorm(2, 8),
            lambda: nn.ReLU(True),
            lambda: nn.Conv2d(8, 8, 3, groups=2, padding=1, stride=2),
            lambda: nn.MaxPool2d(2),
            nn.Flatten,
            lambda: nn.Linear(8, CLASSES),
        )
    ),
    "transposed convolution, instance norm": Network(
        layers(
            lambda: nn.ConvTranspose2d(3, 4, 3),
            lambda: nn.InstanceNorm2d(4, affine=True),
            lambda: nn.AdaptiveAvgPool2d(2),
        )
    ),
    "attention, batch first": Network(lambda: Attention(True), sequences),
    "attention, time first": Network(lambda: Attention(False), sequences),
    "fused attention, mask and bias": Network(Fused, sequences),
    **{
        f"{kind.__name__}, {layout}": Network(
            lambda kind=kind, layout=layout: OverTime(kind, layout), sequences
        )
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for layout in ("batch first", "time first", "alone")
    },
    "one layer three times": Network(Shared, sequences),
    "tied words, class token, layer scale, weight norm": Network(Words, texts, next_words),
    "embedding bag": Network(
        layers(lambda: nn.EmbeddingBag(WORDS, 8), lambda: nn.Linear(8, CLASSES)), texts
    ),
    "penalty on weights": Network(perceptron, loss=with_penalty),
    "two calls in one loss": Network(perceptron, loss=of_two_calls),
    "slopes by torch.func": Network(perceptron, loss=of_slopes),
    "checkpoint": Network(lambda: Checkpointed(False)),
    "checkpoint, reentrant": Network(lambda: Checkpointed(True)),
    "writes into zeros": Network(WritesIntoZeros, way=Way.OWN_TENSORS),
    "decides by a record": Network(DecidesByARecord, way=Way.ALONE),
    "frozen layer": Network(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(192, 8).requires_grad_(False), nn.Linear(8, CLASSES)
        )
    ),
}


def check_network(network):
    torch.manual_seed(0)
    model = network.make().train()
    batch = (network.inputs(), labels())
    found = by_level(network.loss, model, batch)
    check_equal(found, one_at_a_time(network.loss, model, batch))
    assert found.way is network.way


@pytest.mark.parametrize("name", NETWORKS)
def test_clipped_sums_are_those_of_one_record_at_a_time(name):
    check_network(NETWORKS[name])


# --- Hugging Face ---------------------------------------------------------------------------------

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 32, "vocab_size": 50}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _families():
    import transformers as hf

    gpt2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}  # fmt: skip
    t5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
          "dropout_rate": 0.0, "decoder_start_token_id": 0}  # fmt: skip
    bart = {"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32, "dropout": 0.0, "max_position_embeddings": 32}  # fmt: skip
    distilbert = {"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32,
                  "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}  # fmt: skip
    opt = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
           "ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 16}  # fmt: skip
    deberta = {**SMALL, **STILL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
               "pooler_dropout": 0}  # fmt: skip
    few = {"num_key_value_heads": 1}
    return {
        "BERT": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SMALL, **STILL)),
        "BERT words": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL, **STILL)),
        "RoBERTa": lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**SMALL, **STILL)),
        "ALBERT": lambda: hf.AlbertForSequenceClassification(
            hf.AlbertConfig(embedding_size=8, classifier_dropout_prob=0.0, **SMALL, **STILL)
        ),
        "ELECTRA": lambda: hf.ElectraForSequenceClassification(
            hf.ElectraConfig(embedding_size=8, **SMALL, **STILL)
        ),
        "DistilBERT": lambda: hf.DistilBertForSequenceClassification(
            hf.DistilBertConfig(**distilbert)
        ),
        "DeBERTa": lambda: hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**deberta)),
        "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "GPT-NeoX": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL)),
        "OPT": lambda: hf.OPTForCausalLM(hf.OPTConfig(**opt)),
        "LLaMA": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)),
        "Mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, **few)),
        "Qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL, **few)),
        "Gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, **few, head_dim=8)),
        "Phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**SMALL, resid_pdrop=0.0, embd_pdrop=0.0)),
        "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5)),
        "BART": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**bart)),
    }


CLASSIFIERS = ("BERT", "RoBERTa", "ALBERT", "ELECTRA", "DistilBERT", "DeBERTa")
NAMES = [*CLASSIFIERS, "BERT words", "GPT-2", "GPT-NeoX", "OPT", "LLaMA", "Mistral", "Qwen2",
         "Gemma2", "Phi", "T5", "BART"]  # fmt: skip
IN_SHORT = ("BERT", "GPT-2", "LLaMA")


def slow_unless(short):
    return [name if name in short else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def with_labels(model, words, mask, labels):
    """The model's own loss, in float64: some cast their outputs to float32 for it."""
    found = model(input_ids=words, attention_mask=mask, labels=labels)
    if found.loss.dtype == torch.float64:
        return found.loss
    if labels.dim() == 1:
        return F.cross_entropy(found.logits, labels)
    return F.cross_entropy(found.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def tokens(name):
    words = torch.randint(2, 50, (RECORDS, 9), generator=draws())
    mask = torch.ones_like(words)
    mask[0, 5:] = 0
    targets = labels() % 2 if name in CLASSIFIERS else torch.where(mask == 0, -100, words)
    return words, mask, targets


@pytest.mark.parametrize("name", slow_unless(IN_SHORT))
def test_families_of_hugging_face(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = _families()[name]().double().train()
    batch = tokens(name)
    check_equal(by_level(with_labels, model, batch), one_at_a_time(with_labels, model, batch))


@pytest.mark.parametrize(
    "name", ["LLaMA", *(pytest.param(n, marks=pytest.mark.slow) for n in ("BERT", "GPT-2"))]
)
def test_adapters_of_peft(name):
    """With B of each adapter away from zero: at zero A has no gradient, and nothing is tested."""
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0)
    model = peft.get_peft_model(_families()[name](), options).double().train()
    for key, value in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(value, std=0.1)
    batch = tokens(name)
    check_equal(by_level(with_labels, model, batch), one_at_a_time(with_labels, model, batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "LLaMA"])
def test_gradient_checkpointing_of_hugging_face(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = _families()[name]().double().train()
    batch = tokens(name)
    wanted = one_at_a_time(with_labels, model, batch)
    model.gradient_checkpointing_enable()
    check_equal(by_level(with_labels, model, batch), wanted)


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


def test_a_rule_for_a_subclass_of_a_layer(monkeypatch):
    """A layer has the rule of its nearest class, and none where its own class changes it."""
    called = []

    def doubled(module, tape, x):
        called.append(module)
        return linear_map(tape, 2 * x, module.weight, module.bias)

    model = nn.Sequential(nn.Flatten(), Doubled(192, CLASSES))
    batch = images(), labels()
    wanted = one_at_a_time(classify, model, batch)
    check_equal(by_level(classify, model, batch), wanted)
    assert kind_of(model[1]) is None
    assert not called
    monkeypatch.setitem(RULES, Doubled, doubled)
    check_equal(by_level(classify, model, batch), wanted)
    assert kind_of(model[1]) is Doubled
    assert called


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_no_inputs_of_layers(reentrant):
    model = Checkpointed(reentrant).train()
    function = RecordFunction((model,), trained(model))
    given = images().repeat(3, 1, 1, 1).unsqueeze(1)  # a number of records of no other test
    wide = len(given), WIDE

    def alive():
        gc.collect()
        return [v for v in gc.get_objects() if isinstance(v, torch.Tensor) and v.shape == wide]

    tape, scores = function.run(lambda x: model(x), given, len(given))
    assert not alive()
    torch.autograd.grad(scores.sum(), tape.leaves, allow_unused=True)
    assert {slot.split(".")[0] for slot in tape.contributions} == {"first", "norm", "body", "head"}


def test_vision_transformer():
    hf = pytest.importorskip("transformers")
    options = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    torch.manual_seed(0)
    model = hf.ViTForImageClassification(
        hf.ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **options, **STILL)
    )

    def loss(model, x, y):
        return model(pixel_values=x, labels=y).loss

    batch = (images(), labels())
    model = model.double().train()
    check_equal(by_level(loss, model, batch), one_at_a_time(loss, model, batch))


# --- laws and mutants -----------------------------------------------------------------------------


def norms_are_of_the_whole_gradient():
    check_network(NETWORKS["one layer three times"])


def in_double_precision(law):
    """Mutants run laws without the fixtures of a test."""

    def checked():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            law()
        finally:
            torch.set_default_dtype(before)

    checked.__name__ = law.__name__
    return checked


def keeps_its_inputs():
    kept = []

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(192, CLASSES)

        def forward(self, x):
            out = self.body(x.flatten(1))
            kept[:] = [out.detach()]
            return out

    return Keeps()


def survivors_are_refused_by_name():
    message = ""
    try:
        by_level(classify, keeps_its_inputs(), (images(), labels()))
    except DpsurError as error:
        message = str(error)
    assert "outlives its step" in message


def records_do_not_meet():
    """A loss that is coupled in a batch; alone its target is zero."""

    def centred(model, x, y):
        target = y.double()
        return (model(x)[:, 0] - (target - target.mean())).square().mean()

    torch.manual_seed(0)
    model, batch = perceptron(), (images(), labels())
    check_equal(by_level(centred, model, batch), one_at_a_time(centred, model, batch))


def models_do_not_mix():
    """A model that normalises over records; alone each record is its own mean."""

    class Centres(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(192, 8), nn.Linear(8, CLASSES)

        def forward(self, x):
            h = self.body(x.flatten(1)).tanh()
            return self.head(h - 0.5 * h.mean(0))

    torch.manual_seed(0)
    model, batch = Centres(), (images(), labels())
    check_equal(by_level(classify, model, batch), one_at_a_time(classify, model, batch))


def records_without_a_loss_count_for_nothing():
    x = images()
    x[2] = math.nan
    torch.manual_seed(0)
    model, batch = perceptron(), (x, labels())
    check_equal(by_level(classify, model, batch), one_at_a_time(classify, model, batch))


def no_cross_terms(monkeypatch):
    """Norms of the uses of a weight one by one."""

    class Apart(NamedTuple):
        uses: list

        def measure(self):
            return torch.stack([row_norms(use.per_example()) for use in self.uses]).norm(dim=0)

    monkeypatch.setattr("dpsur.per_example.tape.combine", Apart)


def survivors_not_looked_for(monkeypatch):
    monkeypatch.setattr(RecordLevel, "check_survivors", lambda self: None)


def targets_stay_outside_of_the_level(monkeypatch):
    """Labels are seen by all: the level is left before the loss."""
    hide = RecordLevel.hide

    def some(self, values, axis=0):
        return hide(self, values, axis) if values.is_floating_point() else values

    monkeypatch.setattr(RecordLevel, "hide", some)


def outputs_of_layers_shared(monkeypatch):
    """Layers return what a neighbour computed."""
    hide = RecordLevel.hide

    def rolled(self, values, axis=0):
        return hide(self, values.roll(1, axis) if values.requires_grad else values, axis)

    monkeypatch.setattr(RecordLevel, "hide", rolled)


def losses_that_are_nan_count(monkeypatch):
    norms = Tape.norms

    def all_count(self):
        self.spoiled = None
        return norms(self).nan_to_num(1.0, 1.0)

    monkeypatch.setattr(Tape, "norms", all_count)


test_law_holds, test_mutant_is_killed = law_tests(
    [
        Mutant(in_double_precision(law), mutant)
        for law, mutant in (
            (norms_are_of_the_whole_gradient, no_cross_terms),
            (survivors_are_refused_by_name, survivors_not_looked_for),
            (records_do_not_meet, targets_stay_outside_of_the_level),
            (models_do_not_mix, outputs_of_layers_shared),
            (records_without_a_loss_count_for_nothing, losses_that_are_nan_count),
        )
    ]
)


def test_new_memory_holds_nothing_of_other_records():
    torch.full((RECORDS, 4096), 7.0)  # whose memory is the next to be lent
    holder = nn.Linear(1, 1)
    records = RecordFunction((holder,), dict(holder.named_parameters()))
    _, found = records.run(lambda one: torch.empty(4096) + 0 * one, torch.ones(RECORDS, 1), RECORDS)
    assert records.by_construction
    assert not found.any()


def test_new_memory_may_want_a_gradient():
    """As `torch.utils.checkpoint` makes it in some versions of PyTorch."""
    holder = nn.Linear(1, 1)
    records = RecordFunction((holder,), dict(holder.named_parameters()))

    def function(one):
        return one + torch.empty(3, requires_grad=True).detach()

    records.run(function, torch.ones(RECORDS, 3), RECORDS)
    assert records.by_construction


def test_whose_lines_a_function_has():
    library = torch.nn.functional.softmax
    folder = Path(torch.__file__).parent

    def lines_in(file):
        made = {}
        exec(compile("def vmap(info, dims, x): pass", str(file), "exec"), made)
        return made["vmap"]

    assert is_of_a_library(library)
    assert is_of_a_library(lines_in(folder / "own.py"))
    assert not is_of_a_library(lines_in(folder.with_name("torch_own") / "own.py"))
    assert not is_of_a_library(wraps(library)(lambda *_: None))
    assert not is_of_a_library(torch.no_grad()(lambda *_: None))
    assert not is_of_a_library(partial(library))
