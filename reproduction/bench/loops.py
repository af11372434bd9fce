"""`python -m reproduction bench-loops`: a user's own training loop on stock networks.

Networks of torchvision and Hugging Face, as they come, in a loop of a few lines. All arms of a
network see the same batch of synthetic records (ours at sample rate 1), one arm after the other,
each with the device to itself. `plain` and `plain-captured` are PyTorch without privacy,
`private-step` and `opacus-form` are the two loops of `dpsur.PrivacyEngine`, `opacus-hooks` is
Opacus. A network is measured in a process of its own, so that one that fails takes no other along.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpsur
from dpsur import checks
from reproduction.rows import provenance
from reproduction.training import device_name

EXPERIMENT = "bench-loops"
ARMS = ("plain", "plain-captured", "private-step", "opacus-form", "opacus-hooks")
SECONDS, MOST_STEPS, WARM_UP = 3.0, 60, 4
LEARNING_RATE, MOMENTUM, NOISE, CLIP = 0.01, 0.9, 1.0, 1.0
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Loop:
    """A network, its records, and the batch size on a GPU."""

    make: Callable[[bool], nn.Module]  # with the randomness of its layers, or without
    records: Callable[[int], Batch]
    batch_size: int


def _images(count: int, side: int = 64) -> Batch:
    return {"x": torch.randn(count, 3, side, side), "labels": torch.randint(0, 10, (count,))}


def _words(count: int, length: int, vocabulary: int, classes: int | None = None) -> Batch:
    ids = torch.randint(5, vocabulary, (count, length))
    labels = ids.clone() if classes is None else torch.randint(0, classes, (count,))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _torchvision(name: str, random: bool, **options: Any) -> nn.Module:
    import torchvision

    torch.manual_seed(0)
    model: nn.Module = getattr(torchvision.models, name)(num_classes=10, **options)
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth") and not random:
            vars(module)["p"] = 0.0
    fixed: nn.Module = dpsur.fix(model).model
    return fixed


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32 if channels % 32 == 0 else 8, channels)


def _bert(random: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    off = {} if random else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    found: nn.Module = BertForSequenceClassification(BertConfig(num_labels=2, **off))
    return found


def _gpt2(random: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {} if random else {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    found: nn.Module = GPT2LMHeadModel(GPT2Config(**off))
    return found


def _llama(random: bool) -> nn.Module:
    """170 million frozen weights with LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32_000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=12,
            num_attention_heads=16,
        )
    )
    lora = LoraConfig(
        r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.05 if random else 0.0
    )
    found: nn.Module = get_peft_model(model, lora)
    return found


def _large_llama(random: bool, *, checkpoints: bool = False) -> nn.Module:
    """1.2 billion frozen weights in bfloat16, with LoRA on all linear layers in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(usual)
    lora = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.05 if random else 0.0)
    found: Any = get_peft_model(model, lora)
    for value in found.parameters():
        if value.requires_grad:
            value.data = value.data.float()
    if checkpoints:
        found.enable_input_require_grads()
        found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return found  # type: ignore[no-any-return]


class Lstm(nn.Module):
    """Mean of the states of an LSTM over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10_000, 128)
        self.lstm = nn.LSTM(128, 256, batch_first=True)
        self.head = nn.Linear(256, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(self.lstm(self.words(words))[0].mean(1))
        return scores


def _lstm_records(count: int) -> Batch:
    return {"x": torch.randint(0, 10_000, (count, 128)), "labels": torch.randint(0, 2, (count,))}


LOOPS: Mapping[str, Loop] = {
    "resnet18": Loop(
        lambda random: _torchvision("resnet18", random, norm_layer=_group_norm), _images, 256
    ),
    "resnet50": Loop(
        lambda random: _torchvision("resnet50", random, norm_layer=_group_norm), _images, 128
    ),
    "convnext-tiny": Loop(partial(_torchvision, "convnext_tiny"), _images, 128),
    "vit-b-16": Loop(lambda random: _torchvision("vit_b_16", random, image_size=64), _images, 128),
    "densenet121": Loop(partial(_torchvision, "densenet121"), _images, 64),
    "efficientnet-b0": Loop(partial(_torchvision, "efficientnet_b0"), _images, 128),
    "lstm": Loop(lambda _: Lstm(), _lstm_records, 256),
    "bert-base": Loop(_bert, lambda count: _words(count, 128, 30_000, classes=2), 32),
    "gpt2": Loop(_gpt2, lambda count: _words(count, 256, 50_000), 16),
    "llama-lora": Loop(_llama, lambda count: _words(count, 256, 32_000), 16),
    "llama-1b-lora": Loop(_large_llama, lambda count: _words(count, 512, 128_000), 8),
    "llama-1b-lora-checkpoints": Loop(
        partial(_large_llama, checkpoints=True), lambda count: _words(count, 512, 128_000), 8
    ),
}


class Records(Dataset[Batch]):
    """Records that are on the device already."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch["labels"])

    def __getitem__(self, row: int) -> Batch:
        return {name: value[row] for name, value in self._batch.items()}


def loss_of(model: nn.Module, batch: Batch, bf16: bool) -> Tensor:
    """The loss as users write it."""
    device = batch["labels"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        if "x" not in batch:
            found: Tensor = model(**batch).loss
            return found
        scores = model(batch["x"])
    return F.cross_entropy(scores.float(), batch["labels"])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [value for value in model.parameters() if value.requires_grad]
    return torch.optim.SGD(trained, LEARNING_RATE, momentum=MOMENTUM)


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _plain(model: nn.Module, batch: Batch, bf16: bool) -> Callable[[], None]:
    optimizer = _optimizer(model)

    def step() -> None:
        optimizer.zero_grad()
        _backward(loss_of(model, batch, bf16))
        optimizer.step()

    return step


def _plain_captured(model: nn.Module, batch: Batch, bf16: bool) -> Callable[[], None]:
    from dpsur.mechanism.cuda_graphs import capture_graph

    if not torch.cuda.is_available():
        raise RuntimeError("CUDA graphs need a GPU")
    optimizer = _optimizer(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        _backward(loss_of(model, batch, bf16))
        optimizer.step()

    return capture_graph(step, batch["labels"].device, warm_up=3)


def _private(model: nn.Module, batch: Batch) -> tuple[Any, nn.Module, Any, Iterator[Any]]:
    engine = dpsur.PrivacyEngine()
    size = len(batch["labels"])
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=_optimizer(model),
        data_loader=DataLoader(Records(batch), batch_size=size),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        steps=1_000_000,
    )

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    return engine, model, optimizer, batches()


def _private_step(model: nn.Module, batch: Batch, bf16: bool) -> Callable[[], None]:
    engine, _, _, batches = _private(model, batch)
    step = engine.private_step(lambda model, batch: loss_of(model, batch, bf16))
    return lambda: step(next(batches))


def _opacus_form(model: nn.Module, batch: Batch, bf16: bool) -> Callable[[], None]:
    _, model, optimizer, batches = _private(model, batch)

    def step() -> None:
        some = next(batches)
        optimizer.zero_grad()
        _backward(loss_of(model, some, bf16))
        optimizer.step()

    return step


def _opacus_hooks(model: nn.Module, batch: Batch, bf16: bool) -> Callable[[], None]:
    from opacus import PrivacyEngine

    for module in model.modules():  # Opacus takes no in-place activations
        if getattr(module, "inplace", False):
            vars(module)["inplace"] = False
    size = len(batch["labels"])
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=_optimizer(model),
        data_loader=DataLoader(Records(batch), batch_size=size),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        poisson_sampling=False,
    )

    def step() -> None:
        optimizer.zero_grad()
        _backward(loss_of(model, batch, bf16))
        optimizer.step()

    return step


_STEPS: Mapping[str, Callable[[nn.Module, Batch, bool], Callable[[], None]]] = {
    "plain": _plain,
    "plain-captured": _plain_captured,
    "private-step": _private_step,
    "opacus-form": _opacus_form,
    "opacus-hooks": _opacus_hooks,
}


@dataclass(frozen=True)
class Cell:
    """What one process measures: a network with all its arms."""

    network: str
    batch_size: int
    bf16: bool
    dropout: bool
    device: str
    arms: tuple[str, ...]


def measure(cell: Cell) -> Iterator[dict[str, Any]]:
    """A row for each arm: milliseconds of a step, peak memory, and the time to the first step."""
    loop, cuda = LOOPS[cell.network], cell.device == "cuda"
    torch.manual_seed(0)
    batch = {name: value.to(cell.device) for name, value in loop.records(cell.batch_size).items()}
    settings = {name: value for name, value in asdict(cell).items() if name != "arms"}
    for arm in cell.arms:
        row: dict[str, Any] = {"experiment": EXPERIMENT, **settings, "arm": arm, "outcome": "ok"}
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        try:
            torch.manual_seed(0)
            model = loop.make(cell.dropout).to(cell.device).train()
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            row |= _timed(lambda: _STEPS[arm](model, batch, cell.bf16), cuda)  # noqa: B023
        except Exception as error:
            row["outcome"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        model = None  # type: ignore[assignment]
        yield row | {"machine": device_name(torch.device(cell.device)), **provenance()}


def _timed(start: Callable[[], Callable[[], None]], cuda: bool) -> dict[str, Any]:
    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    begun = time.perf_counter()
    step = start()
    step()
    wait()
    first = time.perf_counter() - begun
    for _ in range(WARM_UP):
        step()
    wait()
    begun, steps = time.perf_counter(), 0
    while steps < MOST_STEPS and time.perf_counter() - begun < SECONDS:
        step()
        steps += 1
    wait()
    found = {
        "ms": 1e3 * (time.perf_counter() - begun) / steps,
        "steps": steps,
        "first_step_s": first,
    }
    if cuda:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = (
        "Measure a step of a user's own loop on stock networks: plain PyTorch, both loops of "
        f"PrivacyEngine, Opacus.\n\nnetworks: {', '.join(LOOPS)}\narms: {', '.join(ARMS)}"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--networks", nargs="+", choices=list(LOOPS), default=list(LOOPS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument(
        "--dropout", action="store_true", help="each network's default dropout, not none"
    )
    parser.add_argument("--batch-size", type=int, help="default: each network's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--seconds", type=float, default=150.0, help="limit for a network")
    parser.add_argument("--out", type=Path, help="add the rows to this file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # of the process for a network
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure networks one after the other, each in a process of its own."""
    if arguments.cell is not None:
        warnings.filterwarnings("ignore")
        given = json.loads(arguments.cell)
        for row in measure(Cell(**{**given, "arms": tuple(given["arms"])})):
            print(json.dumps(row), flush=True)
        return 0
    if arguments.batch_size is not None:
        checks.at_least_one("--batch-size", arguments.batch_size)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name in arguments.networks:
        cell = Cell(
            name,
            arguments.batch_size or LOOPS[name].batch_size,
            arguments.bf16,
            arguments.dropout,
            device,
            tuple(arguments.arms),
        )
        for row in _in_a_process(cell, arguments.seconds):
            print(_line(row), flush=True)
            if arguments.out is not None:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


def _in_a_process(cell: Cell, seconds: float) -> Sequence[dict[str, Any]]:
    """The rows of a network; where its process dies, what is missing says so."""
    command = [sys.executable, "-m", "reproduction", EXPERIMENT, "--cell", json.dumps(asdict(cell))]
    died = "the process died"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        text = done.stdout
        died += f": {(done.stderr.strip().splitlines() or [''])[-1][:200]}"
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else ""
        died = f"not done within {seconds:g} s"
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    settings = {name: value for name, value in asdict(cell).items() if name != "arms"}
    for arm in cell.arms[len(rows) :]:
        rows.append({"experiment": EXPERIMENT, **settings, "arm": arm, "outcome": died})
    return rows


def _line(row: Mapping[str, Any]) -> str:
    name = f"{row['network']:<16}{row['arm']:<16}{'bf16' if row['bf16'] else 'float32':<8}"
    if row["outcome"] != "ok":
        return f"{name}{row['outcome']}"
    memory = f"{row['peak_gib']:8.2f} GiB" if "peak_gib" in row else ""
    return f"{name}{row['ms']:9.2f} ms{memory}   first step {row['first_step_s']:.1f} s"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table: the loops of the first run and of the newest, each over a plain step.

    A run without a plain step is put beside that of the first; a star says so.
    """
    found = [row for row in rows if row["outcome"] == "ok"]
    names = [name for name in LOOPS if any(row["network"] == name for row in found)]
    lines = [
        "| network | batch | plain, ms | captured | private step | before | Opacus form | before "
        "| memory | first step, s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    first = min(row["run"] for row in found)
    for name in names:
        cells = {(row["run"], row["arm"]): row for row in found if row["network"] == name}
        newest = max(run for run, arm in cells if arm == "private-step")
        plain = cells.get((newest, "plain")) or cells[first, "plain"]
        star = "" if (newest, "plain") in cells else "*"
        step = cells[newest, "private-step"]
        before = cells.get((first, "plain"))
        shown = [
            name,
            f"{step['batch_size']}",
            f"{plain['ms']:.1f}",
            _over(cells.get((first, "plain-captured")), before),
            _over(step, plain) + star,
            _over(cells.get((first, "private-step")), before) if newest > first else "",
            _over(cells.get((newest, "opacus-form")), plain) if newest > first else "",
            _over(cells.get((first, "opacus-form")), before),
            f"{step['peak_gib'] / plain['peak_gib']:.2f}",
            f"{step['first_step_s']:.1f}",
        ]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _over(row: Mapping[str, Any] | None, plain: Mapping[str, Any] | None) -> str:
    return "" if row is None or plain is None else f"{row['ms'] / plain['ms']:.2f}"
