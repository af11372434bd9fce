"""Stock models of Hugging Face with labels and masks, as a batch of theirs is written."""

import importlib.util

import torch

from tests.oracle.harness import Setup
from tests.oracle.programs import add
from tests.oracle.records import (
    CLASSES,
    CLASSIFIED,
    IMAGES,
    LANGUAGE,
    RAGGED_LANGUAGE,
    WORDS,
)

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": WORDS,
}


def loss(model, batch):
    return model(**batch).loss


def _models(dropout):
    """How the models are made; transformers is imported when one is."""
    import transformers as hf

    gpt2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": WORDS, "n_positions": 64,
            "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout,
            "bos_token_id": 1, "eos_token_id": 1}  # fmt: skip
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
          "vocab_size": WORDS, "dropout_rate": dropout, "decoder_start_token_id": 0}  # fmt: skip
    vit = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    bert = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    classes = {"num_labels": CLASSES, "max_position_embeddings": 64, **bert}
    few = {"num_key_value_heads": 1, "attention_dropout": dropout}
    return {
        "BERT, classes": lambda: hf.BertForSequenceClassification(
            hf.BertConfig(**SMALL, **classes)
        ),
        "BERT, masked words": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL, **bert)),
        "RoBERTa, classes": lambda: hf.RobertaForSequenceClassification(
            hf.RobertaConfig(**SMALL, **classes)
        ),
        "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "LLaMA": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **few)),
        "Qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL, **few)),
        "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5)),
        "ViT": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **vit, **bert)
        ),
    }


KINDS = dict.fromkeys(("BERT, masked words", "GPT-2", "LLaMA", "Qwen2", "T5"), LANGUAGE)
KINDS |= dict.fromkeys(("BERT, classes", "RoBERTa, classes"), CLASSIFIED)


def stock(name, dropout=0.0):
    return lambda: _models(dropout)[name]()


def _with_lora(make):
    import peft

    def made():
        model = peft.get_peft_model(
            make(), peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0)
        )
        for name, value in model.named_parameters():
            if "lora_B" in name:  # which starts at zero, where A would have no gradient
                torch.nn.init.normal_(value, std=0.1)
        return model

    return made


def _padded(records):
    """Right padding of all fields to the longest record, as a data collator of theirs does."""
    longest = max(len(record["input_ids"]) for record in records)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.stack(
            [
                torch.nn.functional.pad(r[name], (0, longest - len(r[name])), value=value)
                for r in records
            ]
        )
        for name, value in fill.items()
    }


def program(name, kind, model, loss=loss, collate=None, **options):
    add(
        kind,
        lambda: Setup(model(), loss, collate=collate),
        family="Hugging Face",
        name=name,
        legitimate=True,
        opacus=None,
        **options,
    )


if importlib.util.find_spec("transformers"):
    for name, kind in KINDS.items():
        program(name, kind, stock(name))
    for name in ("BERT, classes", "GPT-2", "T5"):
        program(f"{name}, dropout", KINDS[name], stock(name, 0.1), draws=True)
    program("GPT-2, texts of different lengths", RAGGED_LANGUAGE, stock("GPT-2"), collate=_padded)
    program("ViT", IMAGES, stock("ViT"), lambda m, b: m(pixel_values=b[0], labels=b[1]).loss)
    if importlib.util.find_spec("peft"):
        program("LLaMA, LoRA", LANGUAGE, _with_lora(stock("LLaMA")))
