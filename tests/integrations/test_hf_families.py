"""Families of Hugging Face models: `PrivateTrainer` has the losses of `Trainer`."""

import tempfile

import pytest
import torch

from tests.integrations.test_hugging_face import SMALL, WORDS, arguments
from tests.mutants import Mutant, law_tests

transformers = pytest.importorskip("transformers", reason="needs the extra dev: transformers")
peft = pytest.importorskip("peft", reason="needs the extra dev: peft")
import dpsur  # noqa: E402
from dpsur.engine.loader import records_in  # noqa: E402
from dpsur.integrations.transformers import PrivateTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of these packages, about each other

RECORDS, LENGTH, CLASSES = 8, 6, 3
SIZES = SMALL | {"intermediate_size": 16}
SPECIAL = {"vocab_size": WORDS, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ = {
    **{"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_start_token_id": 2},
}
DECODER = SIZES | {"num_key_value_heads": 1, "max_position_embeddings": 16, **SPECIAL}
SMALL_IMAGES = {"image_size": 8, "patch_size": 2, "num_labels": CLASSES}


def built(name, config, **options):
    """A model of a class with a configuration of a class."""
    return getattr(transformers, name)(getattr(transformers, f"{config}Config")(**options))


def encoder(name, config, **options):
    return built(
        name,
        config,
        **{**SIZES, **STILL, "num_labels": CLASSES, "max_position_embeddings": 16, **SPECIAL},
        **options,
    )


def resnet():
    made = built("ResNetForImageClassification", "ResNet", embedding_size=8, hidden_sizes=[8, 16],
                 depths=[1, 1], num_labels=CLASSES)  # fmt: skip
    return dpsur.fix(made).model


def wav2vec2():
    made = built("Wav2Vec2ForSequenceClassification", "Wav2Vec2", **SIZES, num_labels=CLASSES,
                 conv_dim=[8, 8], conv_stride=[2, 2], conv_kernel=[3, 3], apply_spec_augment=False,
                 num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0,
                 attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0,
                 classifier_proj_size=8)  # fmt: skip
    made.wav2vec2.masked_spec_embed.requires_grad_(False)  # without SpecAugment it is not used
    return made


def adapted(model, **options):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.0, **options))


def prompted(model):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(model, config)


def llama(name="LlamaForCausalLM", **options):
    return built(name, "Llama", **DECODER, **options)


# name -> (what its records are, the model)
FAMILIES = {
    "bert": ("classes", lambda: encoder("BertForSequenceClassification", "Bert")),
    "bert-masked": ("tokens", lambda: encoder("BertForMaskedLM", "Bert")),
    "bert-named-entities": ("tags", lambda: encoder("BertForTokenClassification", "Bert")),
    "bert-lora": (
        "classes",
        lambda: adapted(
            encoder("BertForSequenceClassification", "Bert"),
            target_modules=["query", "value"],
            modules_to_save=["classifier"],
        ),
    ),
    "roberta": ("classes", lambda: encoder("RobertaForSequenceClassification", "Roberta")),
    "distilbert": (
        "classes",
        lambda: built("DistilBertForSequenceClassification", "DistilBert", dim=8, n_layers=1,
                      n_heads=2, hidden_dim=16, max_position_embeddings=16, num_labels=CLASSES,
                      dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, **SPECIAL),
    ),
    "deberta-v2": (
        "classes",
        lambda: encoder("DebertaV2ForSequenceClassification", "DebertaV2", relative_attention=True,
                        pos_att_type=["c2p", "p2c"], position_buckets=4, share_att_key=True,
                        norm_rel_ebd="layer_norm"),
    ),
    "electra": ("classes", lambda: encoder("ElectraForSequenceClassification", "Electra")),
    "albert": (
        "classes",
        lambda: encoder("AlbertForSequenceClassification", "Albert", embedding_size=8,
                        classifier_dropout_prob=0.0),
    ),
    "gpt2": (
        "tokens",
        lambda: built("GPT2LMHeadModel", "GPT2", n_positions=16, n_embd=8, n_layer=1, n_head=2,
                      resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SPECIAL),
    ),
    "gpt2-classes": (
        "classes",
        lambda: built("GPT2ForSequenceClassification", "GPT2", n_positions=16, n_embd=8, n_layer=1,
                      n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                      num_labels=CLASSES, **SPECIAL),
    ),
    "llama": ("tokens", llama),
    "llama-classes": (
        "classes", lambda: llama("LlamaForSequenceClassification", num_labels=CLASSES)
    ),
    "llama-lora": ("tokens", lambda: adapted(llama(), target_modules="all-linear")),
    "llama-prompt": ("tokens", lambda: prompted(llama())),
    "qwen2": ("tokens", lambda: built("Qwen2ForCausalLM", "Qwen2", **DECODER)),
    "qwen3": ("tokens", lambda: built("Qwen3ForCausalLM", "Qwen3", head_dim=4, **DECODER)),
    "gemma2": ("tokens", lambda: built("Gemma2ForCausalLM", "Gemma2", head_dim=4, **DECODER)),
    "mistral": ("tokens", lambda: built("MistralForCausalLM", "Mistral", **DECODER)),
    "mixtral": (
        "tokens",
        lambda: built("MixtralForCausalLM", "Mixtral", num_local_experts=2, num_experts_per_tok=2,
                      **DECODER),
    ),
    "t5": (
        "translations",
        lambda: built("T5ForConditionalGeneration", "T5", vocab_size=WORDS, d_model=8, d_kv=4,
                      d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, pad_token_id=1,
                      decoder_start_token_id=0),
    ),
    "bart": (
        "translations",
        lambda: built("BartForConditionalGeneration", "Bart", max_position_embeddings=16,
                      forced_eos_token_id=2, **SEQ2SEQ, **SPECIAL),
    ),
    "mbart": (
        "translations",
        lambda: built("MBartForConditionalGeneration", "MBart", max_position_embeddings=16,
                      **SEQ2SEQ, **SPECIAL),
    ),
    "whisper": (
        "speech",
        lambda: built("WhisperForConditionalGeneration", "Whisper", num_mel_bins=4,
                      max_source_positions=8, max_target_positions=16, suppress_tokens=None,
                      begin_suppress_tokens=None, **SEQ2SEQ, **SPECIAL),
    ),
    "vit": (
        "images",
        lambda: built("ViTForImageClassification", "ViT", **SIZES, **STILL, **SMALL_IMAGES),
    ),
    "convnext": (
        "images",
        lambda: built("ConvNextForImageClassification", "ConvNext", hidden_sizes=[8, 16],
                      depths=[1, 1], num_stages=2, **SMALL_IMAGES),
    ),
    "swin": (
        "images",
        lambda: built("SwinForImageClassification", "Swin", embed_dim=8, depths=[1, 1],
                      num_heads=[2, 2], window_size=2, drop_path_rate=0.0, **STILL, **SMALL_IMAGES),
    ),
    "resnet": ("images", resnet),
    "wav2vec2": ("sounds", wav2vec2),
}  # fmt: skip


def records(kind):
    """Records of one length, so that a mean over tokens is a mean over records."""
    generator = torch.Generator().manual_seed(0)

    def tokens(length=LENGTH, most=WORDS):
        return torch.randint(3 if most == WORDS else 0, most, (length,), generator=generator)

    found = []
    for row in range(RECORDS):
        text = {"input_ids": tokens(), "attention_mask": torch.ones(LENGTH, dtype=torch.int64)}
        image = torch.randn(3, 8, 8, generator=generator)
        label = torch.tensor(row % CLASSES)
        found.append(
            {
                "classes": text | {"labels": label},
                "tokens": text | {"labels": text["input_ids"]},
                "tags": text | {"labels": tokens(most=CLASSES)},
                "translations": text | {"labels": tokens(4)},
                "speech": {
                    "input_features": torch.randn(4, 16, generator=generator),
                    "labels": tokens(),
                },
                "images": {"pixel_values": image, "labels": label},
                "sounds": {"input_values": torch.randn(64, generator=generator), "labels": label},
            }[kind]
        )
    return found


def made(name):
    torch.manual_seed(0)
    kind, model = FAMILIES[name]
    return model().train(), records(kind)


def private_loss(trainer):
    """The loss of a step with all records, whose sampling rate is one."""
    (batch,) = trainer.get_train_dataloader()
    assert records_in(batch) == RECORDS
    return float(trainer._step.accumulate(batch)["loss"])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_losses_are_those_of_the_trainer(name, tmp_path):
    model, data = made(name)
    options = {"per_device_train_batch_size": RECORDS, "max_steps": 1}
    plain = transformers.Trainer(model, arguments(tmp_path, **options), eval_dataset=data)
    whole = transformers.default_data_collator(data)
    wanted = float(plain.compute_loss(model, dict(whole)))
    evaluated = plain.evaluate()["eval_loss"]
    trainer = PrivateTrainer(
        model,
        arguments(tmp_path, **options),
        train_dataset=data,
        eval_dataset=data,
        noise_multiplier=1.0,
    )
    assert private_loss(trainer) == pytest.approx(wanted, rel=1e-4)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated, rel=1e-5)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer.train()
    assert trainer.engine.accountant.steps == 1
    for key, value in model.named_parameters():
        assert torch.equal(value, before[key]) is not value.requires_grad, key


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_a_decoder_reads_the_labels_where_the_loss_takes_them(name, tmp_path):
    """Label smoothing and custom losses keep labels from the model."""
    model, data = made(name)
    whole = transformers.default_data_collator(data)
    own = float(model(**whole).loss)

    def loss(outputs, labels):
        return torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels)

    options = {"per_device_train_batch_size": RECORDS, "max_steps": 1}
    trainer = PrivateTrainer(
        model,
        arguments(tmp_path, **options),
        train_dataset=data,
        eval_dataset=data,
        noise_multiplier=1.0,
        criterion=loss,
    )
    assert private_loss(trainer) == pytest.approx(own, rel=1e-4)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(model(**whole).loss), rel=1e-4)
    smoothed = PrivateTrainer(
        made(name)[0],
        arguments(tmp_path, label_smoothing_factor=0.5, **options),
        train_dataset=data,
        noise_multiplier=1.0,
    )
    logits = made(name)[0](**whole).logits.log_softmax(-1)
    wanted = 0.5 * own - 0.5 * float(logits.mean())
    assert private_loss(smoothed) == pytest.approx(wanted, rel=1e-4)


def test_accumulated_batches_are_one_logical_batch(tmp_path):
    def weights(**options):
        model, data = made("bert")
        args = arguments(tmp_path, max_steps=2, **options)
        trainer = PrivateTrainer(model, args, train_dataset=data, noise_multiplier=1.0, seed=0)
        trainer.train()
        assert trainer.engine.expected_batch_size == 4
        assert trainer.engine.accountant.steps == trainer.state.global_step == 2
        assert args.gradient_accumulation_steps == options.get("gradient_accumulation_steps", 1)
        return torch.cat([value.detach().flatten() for value in model.parameters()])

    whole = weights(per_device_train_batch_size=4)
    parts = weights(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert torch.allclose(whole, parts, atol=1e-6)


def nothing_private_is_logged():
    """Whatever a subclass logs of private records is dropped before any callback hears of it."""
    heard = []

    class Listens(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            heard.append(dict(logs))

    class Logs(transformers.Trainer):
        def log(self, logs, *args, **kwargs):
            super().log(logs | {"mean_token_accuracy": 0.5, "num_tokens": 7}, *args, **kwargs)

    class Both(PrivateTrainer, Logs):
        pass

    model, data = made("bert")
    options = {"per_device_train_batch_size": 4, "max_steps": 2, "eval_strategy": "epoch"}
    trainer = Both(
        model,
        arguments(tempfile.mkdtemp(), **options),
        train_dataset=data,
        eval_dataset=data,
        noise_multiplier=1.0,
        callbacks=[Listens()],
    )
    output = trainer.train()
    keys = {key for row in (*heard, *trainer.state.log_history) for key in row}
    assert {"epsilon", "learning_rate", "eval_loss"} <= keys
    assert not keys & {"loss", "train_loss", "grad_norm", "mean_token_accuracy", "num_tokens"}
    assert "train_loss" not in output.metrics
    assert f"{output.training_loss} {output.training_loss:.3f}" == "private private"
    assert "nan" not in repr(output)


def everything_is_public(patch):
    patch.setattr("dpsur.integrations.transformers._is_public", lambda _: True)


def what_is_known_to_be_private_is_dropped(patch):
    """A list of private names instead of one of public names."""
    private = ("loss", "train_loss", "grad_norm")
    patch.setattr("dpsur.integrations.transformers._is_public", lambda name: name not in private)


test_law, test_mutant = law_tests(
    [
        Mutant(nothing_private_is_logged, everything_is_public),
        Mutant(nothing_private_is_logged, what_is_known_to_be_private_is_dropped),
    ]
)
