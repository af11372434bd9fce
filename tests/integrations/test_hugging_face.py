"""Stock models of transformers, with and without adapters: fit, engine, Trainer, Accelerate."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import dpsur

transformers = pytest.importorskip("transformers", reason="needs the extra dev: transformers")
peft = pytest.importorskip("peft", reason="needs the extra dev: peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of these packages, about each other

RECORDS, LENGTH, WORDS = 24, 6, 30
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}


def bert():
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            **SMALL, intermediate_size=16, max_position_embeddings=8, vocab_size=WORDS, num_labels=3
        )
    )


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_positions=8, n_embd=8, n_layer=1, n_head=2, **TEXT)
    )


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **SMALL, intermediate_size=16, image_size=8, patch_size=4, num_labels=3
        )
    )


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL,
            **TEXT,
            num_key_value_heads=1,
            intermediate_size=16,
            max_position_embeddings=8,
            pad_token_id=0,
        )
    )


MODELS = {"bert": bert, "gpt2": gpt2, "vit": vit, "llama": llama}
LANGUAGE = ("gpt2", "llama")


def columns(name):
    """Records of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (RECORDS,), generator=generator)
    if name == "vit":
        return {
            "pixel_values": torch.randn(RECORDS, 3, 8, 8, generator=generator),
            "labels": labels,
        }
    tokens = torch.randint(1, WORDS, (RECORDS, LENGTH), generator=generator)
    lengths = torch.arange(RECORDS) % (LENGTH - 1) + 2
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    if name in LANGUAGE:
        labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


class Records(Dataset):
    def __init__(self, name):
        self.columns = columns(name)

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return {key: value[index] for key, value in self.columns.items()}


def made(name, lora=False):
    torch.manual_seed(0)
    model = MODELS[name]()
    if not lora:
        return model
    heads = None if name in LANGUAGE else ["classifier"]
    config = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=heads)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_no_slow_path(name, lora):
    inputs = {key: value for key, value in columns(name).items() if key != "labels"}
    report = dpsur.explain(made(name, lora), inputs)
    assert report.name == "one-pass"
    assert report.reason is None
    assert not report.copies


@pytest.mark.parametrize("name", MODELS)
def test_a_record_has_the_loss_that_the_model_gives_it_alone(name):
    model, data = made(name).eval(), columns(name)
    for row in range(4):
        record = {key: value[[row]] for key, value in data.items()}
        own = model(**record).loss
        labels = record.pop("labels")
        assert torch.allclose(dpsur.model_loss(model)(model(**record), labels), own, atol=1e-6)


@pytest.mark.parametrize("name", LANGUAGE)
def test_gradients_are_those_of_each_record_alone_and_not_of_the_batch(name):
    model, data = made(name).double(), columns(name)
    inputs = {key: value for key, value in data.items() if key != "labels"}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    rows = dpsur.per_example_gradients(model, dpsur.model_loss(model), inputs, data["labels"])
    weight, parameter = next(
        (n, p)
        for n, p in model.named_parameters()
        if n.endswith("norm.weight") or "ln_f.weight" in n
    )
    for row in (0, 4):
        record = {key: value[[row]] for key, value in data.items()}
        (alone,) = torch.autograd.grad(model(**record).loss, parameter)
        assert torch.allclose(rows[weight][row], alone, rtol=1e-3, atol=1e-7)  # some is float32
    # the mutant: normalised over the tokens of the batch, a short text counts for less
    coupled = (
        F.cross_entropy(
            model(**inputs).logits[:, :-1].transpose(1, 2), data["labels"][:, 1:], reduction="none"
        ).sum(1)
        / (data["labels"][:, 1:] != -100).sum()
        * RECORDS
    )
    (wrong,) = torch.autograd.grad(coupled[0], parameter)
    assert not torch.allclose(rows[weight][0], wrong, rtol=1e-2)


@pytest.mark.parametrize(
    ("name", "lora"),
    [("bert", False), ("gpt2", False), ("vit", False), ("llama", True)],
)
def test_stock_models_train_through_fit(name, lora):
    model = made(name, lora)
    run = dpsur.fit(
        model,
        columns(name) if name != "bert" else Records(name),
        test_set=columns(name),
        budget=dpsur.Budget(epsilon=4.0, delta=1e-3),
        method=dpsur.Dpsgd(),
        max_updates=2,
        seed=0,
    )
    assert run.engine.name == "one-pass"
    assert run.engine.reason is None
    assert ("accuracy" in run.scores) is (name not in LANGUAGE)
    assert set(run.model.state_dict()) == set(model.state_dict())
    before = dict(model.named_parameters())
    for key, value in run.model.named_parameters():
        assert torch.equal(value, before[key]) is not before[key].requires_grad


@pytest.mark.parametrize(
    ("name", "lora"),
    [("bert", False), ("gpt2", True), ("vit", True), ("llama", False)],
)
def test_stock_models_train_through_the_engine(name, lora):
    model, engine = made(name, lora), dpsur.PrivacyEngine()
    criterion = dpsur.model_loss(model) if name in LANGUAGE else None
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    model.train()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(trained, lr=1e-2),
        data_loader=DataLoader(Records(name), batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=1,
        criterion=criterion,
        seed=0,
    )
    for batch in loader:
        optimizer.zero_grad()
        if name in LANGUAGE:
            labels = batch.pop("labels")
            loss = engine.criterion(model(**batch), labels)
        else:
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    assert engine.accountant.steps == 2
    assert all(not torch.equal(p, old) for p, old in zip(trained, before, strict=True))
    assert engine._watcher.records.by_construction  # and not one record at a time


def test_a_language_models_own_loss_counts_for_each_record_alone():
    def trained(own):
        model, engine = made("gpt2"), dpsur.PrivacyEngine()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model, optimizer, loader = engine.make_private(
            module=model.train(),
            optimizer=torch.optim.SGD(model.parameters(), 1.0),
            data_loader=DataLoader(Records("gpt2"), batch_size=12),
            noise_multiplier=1e-3,
            max_grad_norm=1.0,
            epochs=1,
            criterion=None if own else dpsur.model_loss(model),
            seed=0,
        )
        for batch in loader:
            optimizer.zero_grad()
            labels = batch["labels"] if own else batch.pop("labels")
            loss = model(**batch).loss if own else engine.criterion(model(**batch), labels)
            loss.backward()
            optimizer.step()
        return model.transformer.wte.weight

    start, own, criterion = made("gpt2").transformer.wte.weight, trained(True), trained(False)
    assert float((own - criterion).norm()) <= 1e-3 * float((own - start).norm())


def arguments(folder, **options):
    usual = {"per_device_train_batch_size": 8, "num_train_epochs": 2, "save_strategy": "no"}
    return transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        **usual | options,
    )


def private_trainer(folder, name="gpt2", **options):
    from dpsur.integrations.transformers import PrivateTrainer

    settings = {"save_strategy": options.pop("save_strategy", "no")}
    settings |= {key: options.pop(key) for key in ("save_steps", "max_steps") if key in options}
    return PrivateTrainer(
        made(name),
        arguments(folder, **settings),
        train_dataset=Records(name),
        target_epsilon=6.0,
        target_delta=1e-3,
        seed=0,
        **options,
    )


def test_the_trainer_charges_every_step_and_logs_nothing_private(tmp_path):
    trainer = private_trainer(tmp_path, max_physical_batch_size=4)
    result = trainer.train()
    ledger = trainer.engine.accountant
    assert ledger.steps == trainer.state.global_step == 2 * 3
    assert trainer.engine.guarantee() <= 6.0
    logged = {key for row in trainer.state.log_history for key in row}
    assert "epsilon" in logged
    assert not logged & {"loss", "train_loss", "grad_norm"}
    assert "train_loss" not in result.metrics
    assert not result.metrics.get("total_flos")  # would tell how many tokens the batches had
    assert not trainer.state.total_flos
    figures = [row["epsilon"] for row in trainer.state.log_history if "epsilon" in row]
    assert figures == sorted(figures)


def test_the_trainer_smooths_labels_in_the_loss_of_each_record(tmp_path):
    """The trainer's own loss is what is trained."""
    from dpsur.integrations.transformers import PrivateTrainer

    found = []
    for factor in (0.0, 0.5):
        trainer = PrivateTrainer(
            made("bert"),
            arguments(tmp_path, label_smoothing_factor=factor, max_steps=1),
            train_dataset=Records("bert"),
            noise_multiplier=1e-6,
            seed=0,
        )
        trainer.train()
        found.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert not torch.allclose(*found, atol=1e-5)


def test_the_trainer_resumes_with_its_ledger(tmp_path):
    first = private_trainer(tmp_path, save_strategy="steps", save_steps=4)
    first.train()
    spent = first.engine.get_epsilon(1e-3)
    second = private_trainer(tmp_path, save_strategy="steps", save_steps=4)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert second.engine.accountant.steps == first.engine.accountant.steps
    assert second.engine.get_epsilon(1e-3) == spent


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"auto_find_batch_size": True}, "sample rate"),
        ({"include_num_input_tokens_seen": "all"}, "log_private"),
    ],
)
def test_the_trainer_refuses_what_breaks_the_accounting(tmp_path, options, words):
    from dpsur.integrations.transformers import PrivateTrainer

    with pytest.raises(dpsur.InvalidInputError, match=words):
        PrivateTrainer(
            made("bert"),
            arguments(tmp_path, **options),
            train_dataset=Records("bert"),
            noise_multiplier=1.0,
        )


def test_accelerate():
    accelerate = pytest.importorskip("accelerate", reason="needs the extra dev: accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, engine = made("bert").to(accelerator.device).train(), dpsur.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        data_loader=DataLoader(Records("bert"), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=1,
    )
    # model and optimizer may be prepared; the loader stays as it is, and draws Poisson batches
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        optimizer.zero_grad()
        batch = {key: value.to(accelerator.device) for key, value in batch.items()}
        accelerator.backward(model(**batch).loss)
        optimizer.step()
    assert engine.accountant.steps == len(loader) == 3
