"""Usage patterns of Opacus's documentation, run with Opacus and with only the import changed."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpsur

pytest.importorskip("opacus", reason="needs the extra dev: opacus")
PACKAGES = ("opacus", "dpsur.opacus")
DELTA = 1e-3
pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus and what it calls warn of many things


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(count, classes=3):
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(1))


def image_classifier(package):
    """CNN with BatchNorm: fix, validate, make_private, BatchMemoryManager."""
    engine_module = import_module(package)
    validators = import_module(f"{package}.validators")
    memory = import_module(f"{package}.utils.batch_memory_manager")
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    model = validators.ModuleValidator.fix(model)
    assert validators.ModuleValidator.validate(model, strict=False) == []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_loader = DataLoader(TensorDataset(numbers(48, 1, 8, 8), labels(48)), batch_size=12)
    privacy_engine = engine_module.PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=1.1,
        max_grad_norm=1.0,
    )
    criterion = nn.CrossEntropyLoss()
    model.train()
    for _ in range(2):
        with memory.BatchMemoryManager(
            data_loader=train_loader, max_physical_batch_size=5, optimizer=optimizer
        ) as memory_safe_data_loader:
            for images, target in memory_safe_data_loader:
                optimizer.zero_grad()
                loss = criterion(model(images), target)
                loss.backward()
                optimizer.step()
    return model, privacy_engine.get_epsilon(DELTA)


class SampleConvText(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.fc = nn.Embedding(30, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.embedding(x).mean(1))


def text_classifier(package):
    """An embedding and a linear layer, with a target epsilon."""
    torch.manual_seed(0)
    model = SampleConvText()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    tokens = torch.randint(0, 30, (60, 7), generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(tokens, labels(60, 2)), batch_size=15)
    privacy_engine = import_module(package).PrivacyEngine(accountant="rdp", secure_mode=False)
    model, optimizer, loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_delta=DELTA,
        target_epsilon=4.0,
        epochs=2,
        max_grad_norm=1.0,
    )
    model.train()
    for _ in range(2):
        for data, label in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), label)
            loss.backward()
            optimizer.step()
    epsilon = privacy_engine.accountant.get_epsilon(delta=DELTA)
    assert epsilon <= 4.0 * 1.01
    return model, epsilon


class CharNNClassifier(nn.Module):
    def __init__(self, lstm):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = lstm(8, 6, num_layers=1, bidirectional=True, batch_first=True)
        self.out_layer = nn.Linear(12, 3)

    def forward(self, x):
        x, _ = self.lstm(self.embedding(x))
        return self.out_layer(x[:, -1])


def lstm(package):
    """DPLSTM and a learning-rate scheduler."""
    layers = import_module(f"{package}.layers")
    model = CharNNClassifier(layers.DPLSTM)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    names = torch.randint(0, 20, (40, 6), generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(names, labels(40)), batch_size=8)
    privacy_engine = import_module(package).PrivacyEngine()
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.5,
    )
    criterion = nn.CrossEntropyLoss()
    model.train()
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    return model, privacy_engine.get_epsilon(delta=DELTA)


class Sentences(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(4)
        self.tokens = torch.randint(1, 40, (32, 6), generator=generator)
        self.labels = labels(32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {
            "input_ids": self.tokens[index],
            "attention_mask": torch.ones(6, dtype=torch.int64),
            "labels": self.labels[index],
        }


def lora(package):
    """Fine-tuning with adapters: a Hugging Face model that computes its own loss."""
    transformers = pytest.importorskip("transformers", reason="needs the extra dev: transformers")
    peft = pytest.importorskip("peft", reason="needs the extra dev: peft")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)
    lora_config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS, r=2, lora_alpha=4, target_modules=["query", "value"]
    )
    model = peft.get_peft_model(model, lora_config)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    loader = DataLoader(Sentences(), batch_size=8)
    privacy_engine = import_module(package).PrivacyEngine(accountant="rdp")
    model.train()
    model, optimizer, loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_delta=DELTA,
        target_epsilon=7.5,
        epochs=1,
        max_grad_norm=0.1,
    )
    for batch in loader:
        optimizer.zero_grad()
        outputs = model(**batch)
        loss = outputs[0]
        loss.backward()
        optimizer.step()
    return model, privacy_engine.get_epsilon(DELTA)


@pytest.mark.parametrize("pattern", [image_classifier, text_classifier, lstm, lora])
def test_a_published_pattern_runs_with_only_the_import_changed(pattern):
    epsilons = {}
    for package in PACKAGES:
        torch.manual_seed(0)
        model, epsilons[package] = pattern(package)
        assert all(p.isfinite().all() for p in model.parameters())
    assert not any(name.startswith("_module.") for name in model.state_dict())
    assert epsilons["dpsur.opacus"] <= epsilons["opacus"] * 1.01


def test_checkpoints_of_the_engine(tmp_path):
    def train(steps, resume=None):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(TensorDataset(numbers(20, 4), labels(20)), batch_size=5)
        engine = import_module("dpsur.opacus").PrivacyEngine(accountant="rdp")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        if resume is not None:
            engine.load_checkpoint(path=resume, module=model, optimizer=optimizer)
        for (x, y), _ in zip(loader, range(steps), strict=False):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model, optimizer, engine

    path = tmp_path / "checkpoint.pt"
    model, optimizer, engine = train(2)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    spent = engine.get_epsilon(DELTA)
    _, _, again = train(0, path)
    assert again.get_epsilon(DELTA) == spent
    _, _, more = train(1, path)
    assert more.get_epsilon(DELTA) > spent


def test_ghost_clipping_returns_the_loss_too():
    engine = import_module("dpsur.opacus").PrivacyEngine()
    model = nn.Linear(4, 3)
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(TensorDataset(numbers(20, 4), labels(20)), batch_size=5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
        grad_sample_mode="ghost",
    )
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    assert engine.accountant.steps == len(loader)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda names: names.PrivacyEngine(accountant="gdp"), "too low an epsilon"),
        (lambda names: names.GradSampleModule(nn.Linear(1, 1)), "per_example_gradients"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(make, words):
    with pytest.raises(dpsur.InvalidInputError, match=words):
        make(import_module("dpsur.opacus"))


def test_noise_multiplier_is_at_most_that_of_opacus():
    settings = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.02, "epochs": 2}
    ours, theirs = (
        import_module(f"{package}.accountants.utils").get_noise_multiplier(
            **settings, accountant="rdp"
        )
        for package in reversed(PACKAGES)
    )
    assert 0.9 * theirs <= ours <= theirs
