"""Fine-tune a causal language model on private texts with LoRA: from a text file to an adapter.

    python examples/lora_language_model.py                          # made-up notes, a tiny model
    python examples/lora_language_model.py notes.txt --model FOLDER --epsilon 3 --epochs 5 --lr 2e-4

Each line of the file is one record. The base model and its tokenizer come from a folder that
`save_pretrained` wrote; without one, a tiny model with random weights shows the path.
"""

import argparse
import random
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from dpsur.integrations.transformers import PrivateTrainer

parser = argparse.ArgumentParser()
parser.add_argument("texts", nargs="?", type=Path, help="a text file, one record a line")
parser.add_argument("--model", help="folder of the base model; default: a tiny one")
parser.add_argument("--out", type=Path, help="folder for the release; default: a new one")
parser.add_argument("--epsilon", type=float, default=8.0)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--tokens", type=int, default=512, help="longer texts are cut")


def made_up_notes(count: int, seed: int) -> list[str]:
    """Notes of a ward: what a model can learn from them is how such a note goes on."""
    draw = random.Random(seed)
    who, what = ("Patient", "She", "He"), ("fever", "a cough", "pain", "no complaint")
    return [
        f"{draw.choice(who)} has {draw.choice(what)}, given {draw.randint(1, 9)} mg."
        for _ in range(count)
    ]


class Texts(Dataset):
    """One text is one record: tokens of its own length, which the trainer pads alone."""

    def __init__(self, lines: list[str], tokenizer, tokens: int) -> None:
        self.encoded = [tokenizer(line, truncation=True, max_length=tokens) for line in lines]

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int):
        return self.encoded[index]


def base_model(folder: str | None):
    if folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tokenizer
    tokenizer = ByT5Tokenizer(extra_ids=0)  # bytes: a vocabulary that no private text has made
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def loss_on(model, texts: Texts, collate) -> float:
    """The loss on public texts: looking at private ones would cost privacy."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        batch = collate([texts[index] for index in range(len(texts))])
        return float(model(**{name: value.to(device) for name, value in batch.items()}).loss)


options = parser.parse_args()
lines = (
    [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if options.texts
    else made_up_notes(2000, seed=1)
)
folder = options.out or Path(tempfile.mkdtemp()) / "release"
base, tokenizer = base_model(options.model)
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
texts = Texts(lines, tokenizer, options.tokens)

model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
for value in model.parameters():
    if value.requires_grad:
        value.data = value.data.float()  # adapters in float32 on a base in bfloat16
print(
    f"training {model.num_parameters(only_trainable=True):,} of {model.num_parameters():,} weights"
)

public = Texts(made_up_notes(50, seed=2), tokenizer, options.tokens)  # of the same kind
before = loss_on(model, public, collate)
trainer = PrivateTrainer(
    model,
    TrainingArguments(
        output_dir=str(folder.with_name(f"{folder.name}-checkpoints")),
        per_device_train_batch_size=options.batch_size,
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=torch.cuda.is_available(),
    ),
    train_dataset=texts,
    data_collator=collate,
    target_epsilon=options.epsilon,
    target_delta=1 / (10 * len(texts)),
)
trainer.train()
print(
    f"epsilon {trainer.engine.guarantee():.2f}; loss on public notes "
    f"{before:.2f} before, {loss_on(model, public, collate):.2f} now"
)

# the adapters with privacy.json, which `dpsur verify` recomputes, and as peft loads them
trainer.engine.save(folder, trained_only=True)
model.save_pretrained(folder / "adapter")
again = PeftModel.from_pretrained(base_model(options.model)[0], folder / "adapter")
print(
    f"saved {folder}: {sorted(path.name for path in folder.iterdir())}; loaded again, the loss is "
    f"{loss_on(again.to(model.device), public, collate):.2f}"
)
