"""`python -m reproduction bench-loops`: a user's own training loop on stock networks.

Networks of torchvision and Hugging Face, as they come, in a loop of a few lines. All arms of a
network see the same batch of synthetic records (ours at sample rate 1), one arm after the other,
each with the device to itself. `plain` and `plain-captured` are PyTorch without privacy,
`private-step` and `opacus-form` are the two loops of `dpsur.PrivacyEngine`, `opacus-hooks` is
Opacus. `poisson` is the private step as training makes it: batches of that size on average, each a
Poisson sample at rate 1/8; its row also says how long the first steps took beyond later ones, while
graphs for the sizes of batches were captured. A network is measured in a process of its own, so
that one that fails takes no other along; the next process imports its libraries meanwhile and waits
for the device. The first step of a process includes the compilation of kernels; later settings of
the same network find them compiled.
"""

import argparse
import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpsur
from dpsur import checks
from reproduction.rows import provenance
from reproduction.training import device_name

EXPERIMENT = "bench-loops"
ARMS = ("plain", "plain-captured", "private-step", "poisson", "opacus-form", "opacus-hooks")
SECONDS, MOST_STEPS, WARM_UP = 0.8, 40, 4
LEAST_TOGETHER, MOST_TOGETHER, LEAST_SECONDS = 4, 8, 0.1  # between two looks at the clock
# Of Poisson batches: the data set over the batch, and steps until most sizes have been seen.
DATA_OVER_BATCH, WARM_UP_OF_SIZES = 8, 40
LONGEST = 4096  # texts that a network has positions for
LEARNING_RATE, MOMENTUM, NOISE, CLIP = 0.01, 0.9, 1.0, 1.0
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Loop:
    """A network, its records, and the batch size on a GPU."""

    make: Callable[[bool], nn.Module]  # with the randomness of its layers, or without
    records: Callable[[int, int], Batch]  # so many records, of so many tokens
    batch_size: int
    tokens: int = 0  # of a text; 0: not texts
    draws: bool = True  # has dropout or stochastic depth by default
    adam: bool = False  # AdamW, else SGD with momentum


def _images(count: int, _: int, side: int = 64) -> Batch:
    return {"x": torch.randn(count, 3, side, side), "labels": torch.randint(0, 10, (count,))}


def _words(count: int, tokens: int, vocabulary: int, classes: int | None = None) -> Batch:
    ids = torch.randint(5, vocabulary, (count, tokens))
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
    found: nn.Module = GPT2LMHeadModel(GPT2Config(n_positions=LONGEST, **off))
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
            max_position_embeddings=LONGEST,
        )
    )
    lora = LoraConfig(
        r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.05 if random else 0.0
    )
    found: nn.Module = get_peft_model(model, lora)
    return found


def _llama_of(random: bool, *, layers: int, width: int, inner: int, lora: bool) -> nn.Module:
    """A Llama: frozen in bfloat16 with LoRA in float32, or all of it trained in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=LONGEST,
        use_cache=False,
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if lora else torch.float32)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(usual)
    if not lora:
        return model  # type: ignore[no-any-return]
    options = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.05 if random else 0.0)
    found: Any = get_peft_model(model, options)
    for value in found.parameters():
        if value.requires_grad:
            value.data = value.data.float()
    return found  # type: ignore[no-any-return]


def _with_checkpoints(make: Callable[[bool], nn.Module], random: bool) -> nn.Module:
    found: Any = make(random)
    found.enable_input_require_grads()
    found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return found  # type: ignore[no-any-return]


_1B = partial(_llama_of, layers=16, width=2048, inner=8192)
_8B = partial(_llama_of, layers=32, width=4096, inner=14336, lora=True)


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


def _lstm_records(count: int, tokens: int) -> Batch:
    words = torch.randint(0, 10_000, (count, tokens))
    return {"x": words, "labels": torch.randint(0, 2, (count,))}


def _large(make: Callable[[bool], nn.Module], batch_size: int, tokens: int) -> Loop:
    return Loop(make, partial(_words, vocabulary=128_000), batch_size, tokens, adam=True)


LOOPS: Mapping[str, Loop] = {
    "resnet18": Loop(
        lambda random: _torchvision("resnet18", random, norm_layer=_group_norm),
        _images,
        256,
        draws=False,
    ),
    "resnet50": Loop(
        lambda random: _torchvision("resnet50", random, norm_layer=_group_norm),
        _images,
        128,
        draws=False,
    ),
    "convnext-tiny": Loop(partial(_torchvision, "convnext_tiny"), _images, 128),
    "vit-b-16": Loop(
        # dropout is 0 by default in torchvision's ViT
        lambda random: _torchvision("vit_b_16", random, image_size=64, dropout=0.1),
        _images,
        128,
    ),
    "densenet121": Loop(partial(_torchvision, "densenet121"), _images, 64, draws=False),
    "efficientnet-b0": Loop(partial(_torchvision, "efficientnet_b0"), _images, 128),
    "lstm": Loop(lambda _: Lstm(), _lstm_records, 256, 128, draws=False),
    "bert-base": Loop(_bert, partial(_words, vocabulary=30_000, classes=2), 32, 128),
    "gpt2": Loop(_gpt2, partial(_words, vocabulary=50_000), 16, 256),
    "llama-lora": Loop(_llama, partial(_words, vocabulary=32_000), 16, 256),
    "llama-1b-lora": _large(partial(_1B, lora=True), 8, 512),
    "llama-1b-lora-checkpoints": _large(
        partial(_with_checkpoints, partial(_1B, lora=True)), 8, 512
    ),
    "llama-8b-lora-checkpoints": _large(partial(_with_checkpoints, _8B), 4, 2048),
    "llama-1b-full": _large(partial(_1B, lora=False), 8, 512),
}


class Records(Dataset[Batch]):
    """Texts that are on the device already."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch["labels"])

    def __getitem__(self, row: int) -> Batch:
        return {name: value[row] for name, value in self._batch.items()}


def _data_set(batch: Batch, times: int) -> Dataset[Any]:
    """Each record so many times, on the device."""
    values = {name: torch.cat([value] * times) for name, value in batch.items()}
    return TensorDataset(values["x"], values["labels"]) if "x" in values else Records(values)


def loss_of(model: nn.Module, batch: Any, bf16: bool) -> Tensor:
    """The loss as users write it."""
    if not isinstance(batch, dict):
        batch = {"x": batch[0], "labels": batch[1]}
    device = batch["labels"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        if "x" not in batch:
            found: Tensor = model(**batch).loss
            return found
        scores = model(batch["x"])
    return F.cross_entropy(scores.float(), batch["labels"])


def _optimizer(model: nn.Module, adam: bool) -> torch.optim.Optimizer:
    trained = [value for value in model.parameters() if value.requires_grad]
    if adam:
        return torch.optim.AdamW(trained, LEARNING_RATE / 100)
    return torch.optim.SGD(trained, LEARNING_RATE, momentum=MOMENTUM)


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


Start = Callable[[nn.Module, torch.optim.Optimizer, Batch, bool], Callable[[], None]]
Optimizer = torch.optim.Optimizer


def _plain(model: nn.Module, optimizer: Optimizer, batch: Batch, bf16: bool) -> Callable[[], None]:

    def step() -> None:
        optimizer.zero_grad()
        _backward(loss_of(model, batch, bf16))
        optimizer.step()

    return step


def _plain_captured(
    model: nn.Module, optimizer: Optimizer, batch: Batch, bf16: bool
) -> Callable[[], None]:
    from dpsur.mechanism.cuda_graphs import capture_graph

    if not torch.cuda.is_available():
        raise RuntimeError("CUDA graphs need a GPU")
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        _backward(loss_of(model, batch, bf16))
        optimizer.step()

    return capture_graph(step, batch["labels"].device, warm_up=3)


def _private(
    model: nn.Module, optimizer: Optimizer, batch: Batch, times: int = 1
) -> tuple[Any, nn.Module, Any, Iterator[Any]]:
    engine = dpsur.PrivacyEngine()
    size = len(batch["labels"])
    model, made, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(_data_set(batch, times), batch_size=size),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        steps=1_000_000,
    )

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    return engine, model, made, batches()


def _private_step(
    model: nn.Module, optimizer: Optimizer, batch: Batch, bf16: bool, times: int = 1
) -> Callable[[], None]:
    engine, _, _, batches = _private(model, optimizer, batch, times)
    step = engine.private_step(lambda model, batch: loss_of(model, batch, bf16))
    return lambda: step(next(batches))


def _opacus_form(
    model: nn.Module, optimizer: Optimizer, batch: Batch, bf16: bool
) -> Callable[[], None]:
    _, model, made, batches = _private(model, optimizer, batch)

    def step() -> None:
        some = next(batches)
        made.zero_grad()
        _backward(loss_of(model, some, bf16))
        made.step()

    return step


def _opacus_hooks(
    model: nn.Module, optimizer: Optimizer, batch: Batch, bf16: bool
) -> Callable[[], None]:
    from opacus import PrivacyEngine

    for module in model.modules():  # Opacus takes no in-place activations
        if getattr(module, "inplace", False):
            vars(module)["inplace"] = False
    size = len(batch["labels"])
    model, made, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(_data_set(batch, 1), batch_size=size),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        poisson_sampling=False,
    )

    def step() -> None:
        made.zero_grad()
        _backward(loss_of(model, batch, bf16))
        made.step()

    return step


_STEPS: Mapping[str, Start] = {
    "plain": _plain,
    "plain-captured": _plain_captured,
    "private-step": _private_step,
    "poisson": partial(_private_step, times=DATA_OVER_BATCH),
    "opacus-form": _opacus_form,
    "opacus-hooks": _opacus_hooks,
}


@dataclass(frozen=True)
class Cell:
    """What one process measures: a network in some settings, all arms of each."""

    network: str
    batch_size: int
    tokens: int
    settings: tuple[tuple[bool, bool], ...]  # bfloat16, dropout
    device: str
    arms: tuple[str, ...]

    def rows(self) -> Iterator[dict[str, Any]]:
        """What tells the rows apart, in the order in which they are measured."""
        for (bf16, dropout), arm in itertools.product(self.settings, self.arms):
            yield {
                "experiment": EXPERIMENT,
                "network": self.network,
                "batch_size": self.batch_size,
                "tokens": self.tokens,
                "bf16": bf16,
                "dropout": dropout,
                "device": self.device,
                "arm": arm,
            }


def measure(cell: Cell) -> Iterator[dict[str, Any]]:
    """A row for each arm: milliseconds of a step, peak memory, and the time to the first step."""
    loop, cuda = LOOPS[cell.network], cell.device == "cuda"
    torch.manual_seed(0)
    made = loop.records(cell.batch_size, cell.tokens)
    batch = {name: value.to(cell.device) for name, value in made.items()}
    for key in cell.rows():
        row: dict[str, Any] = {**key, "outcome": "ok"}
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        try:
            torch.manual_seed(0)
            with torch.device(cell.device):
                model = loop.make(key["dropout"]).to(cell.device).train()
            optimizer = _optimizer(model, loop.adam)
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = partial(_STEPS[key["arm"]], model, optimizer, batch, key["bf16"])
            poisson = key["arm"] == "poisson"
            row |= _timed(start, cuda, WARM_UP_OF_SIZES if poisson else WARM_UP)
            if poisson and cuda:  # without the data set
                size = sum(value.numel() * value.element_size() for value in batch.values())
                row["peak_gib"] -= DATA_OVER_BATCH * size / 2**30
        except Exception as error:
            row["outcome"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        model = optimizer = start = None  # type: ignore[assignment]
        yield row | {"machine": device_name(torch.device(cell.device)), **provenance()}


def _timed(start: Callable[[], Callable[[], None]], cuda: bool, warm_up: int) -> dict[str, Any]:
    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    begun = time.perf_counter()
    step = start()
    step()
    wait()
    first = time.perf_counter() - begun
    for _ in range(warm_up):
        step()
    wait()
    warm, steps = time.perf_counter() - begun, 0
    step()
    wait()
    last = time.perf_counter() - begun - warm  # without what is compiled and captured once
    times: list[float] = []
    # As in a loop that looks at its loss now and then: the host works ahead of the device.
    together = max(LEAST_TOGETHER, min(MOST_TOGETHER, int(LEAST_SECONDS / last)))
    while steps < MOST_STEPS and sum(times) * together < SECONDS:
        begun = time.perf_counter()
        for _ in range(together):
            step()
        wait()
        times.append((time.perf_counter() - begun) / together)
        steps += together
    usual = statistics.median(times)  # a size of batch that comes for the first time takes longer
    found = {"ms": 1e3 * usual, "steps": steps, "first_step_s": first}
    if warm_up == WARM_UP_OF_SIZES:
        found["start_up_s"] = warm - warm_up * usual
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
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=("float32", "bf16"),
        default=["float32"],
        help="bf16: autocast to bfloat16",
    )
    parser.add_argument(
        "--dropout",
        nargs="+",
        choices=("off", "on"),
        default=["off"],
        help="on: each network's default dropout; networks without any have no such rows",
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of texts; default: its own")
    parser.add_argument("--batch-size", type=int, help="default: each network's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--seconds", type=float, default=200.0, help="limit for a network")
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)  # one process at a time
    parser.add_argument("--out", type=Path, help="add the rows to this file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # of the process for a network
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure networks one after the other, each in a process of its own."""
    if arguments.cell is not None:
        return _one_process(arguments.cell, arguments.lock)
    if arguments.batch_size is not None:
        checks.at_least_one("--batch-size", arguments.batch_size)
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(2) as pool:
        waiting = partial(_in_a_process, seconds=arguments.seconds, lock=Path(lock.name))
        for rows in pool.map(waiting, _cells(arguments)):
            for row in rows:
                print(_line(row), flush=True)
                if arguments.out is not None:
                    with arguments.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    return 0


def _cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    asked = [
        (precision == "bf16", dropout == "on")
        for dropout in arguments.dropout
        for precision in arguments.precision
    ]
    for name in arguments.networks:
        loop = LOOPS[name]
        settings = tuple(found for found in asked if loop.draws or not found[1])
        size, arms = arguments.batch_size or loop.batch_size, tuple(arguments.arms)
        for tokens in arguments.tokens if loop.tokens and arguments.tokens else [loop.tokens]:
            if settings:
                yield Cell(name, size, tokens, settings, device, arms)


def _one_process(text: str, lock: Path) -> int:
    warnings.filterwarnings("ignore")
    given = json.loads(text)
    settings = tuple((bf16, dropout) for bf16, dropout in given["settings"])
    cell = Cell(**{**given, "settings": settings, "arms": tuple(given["arms"])})
    for name in ("torchvision", "transformers", "peft", "opacus"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        print(json.dumps({"began": time.time()}), flush=True)
        for row in measure(cell):
            print(json.dumps(row), flush=True)
    return 0


def _in_a_process(cell: Cell, *, seconds: float, lock: Path) -> Sequence[dict[str, Any]]:
    """The rows of a network; where its process dies, what is missing says so."""
    command = [sys.executable, "-m", "reproduction", EXPERIMENT, "--lock", str(lock)]
    command += ["--cell", json.dumps(asdict(cell))]
    died = "the process died"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has the device
        try:
            text, errors = process.communicate(timeout=seconds)
            died += f": {(errors.strip().splitlines() or [''])[-1][:200]}"
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            died = f"not done within {seconds:g} s"
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    rest = list(cell.rows())[len(rows) :]
    return rows + [{**key, "outcome": died} for key in rest]


def _line(row: Mapping[str, Any]) -> str:
    setting = f"{'bf16' if row['bf16'] else 'float32'}{' dropout' if row['dropout'] else ''}"
    text = f" {row['tokens']}" if row["tokens"] else ""
    name = f"{row['network'] + text:<28}{setting:<16}{row['arm']:<16}"
    if row["outcome"] != "ok":
        return f"{name}{row['outcome']}"
    memory = f"{row['peak_gib']:8.2f} GiB" if "peak_gib" in row else ""
    return f"{name}{row['ms']:9.2f} ms{memory}   first step {row['first_step_s']:.1f} s"


Key = tuple[str, int, int, bool, bool]


# A row, and the plain step of the same run.
Pair = tuple[Mapping[str, Any], Mapping[str, Any]]


def _newest(rows: Sequence[Mapping[str, Any]]) -> dict[Key, dict[str, Pair]]:
    """Of every network and setting, each arm's newest row: a run measures the plain step first."""
    found: dict[Key, dict[str, Pair]] = {}
    plain: dict[Key, Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: str(row.get("made_at", ""))):
        name, batch_size, tokens = row["network"], row["batch_size"], row["tokens"]
        key = (name, batch_size, tokens, row["bf16"], row["dropout"])
        if row["arm"] == "plain":
            plain[key] = row
        if key in plain and (row["outcome"] == "ok" or row["arm"] == "opacus-hooks"):
            found.setdefault(key, {})[row["arm"]] = row, plain[key]
    return found


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of all networks and settings: every arm over the plain step."""
    order = list(LOOPS)
    lines = [
        "| network | batch | setting | plain, ms | captured | private step | Poisson | Opacus form "
        "| Opacus | memory | start, s |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    found = _newest(rows)
    for key in sorted(found, key=lambda key: (order.index(key[0]), key[1:])):
        name, size, tokens, bf16, dropout = key
        arms = found[key]
        if "private-step" not in arms:
            continue
        step, plain = arms["private-step"]
        shown = [
            name,
            f"{size} x {tokens}" if tokens else f"{size}",
            ("bf16" if bf16 else "float32") + (", dropout" if dropout else ""),
            f"{plain['ms']:.1f}",
            *(_over(arms.get(arm)) for arm in ARMS[1:]),
            f"{step['peak_gib'] / plain['peak_gib']:.2f}",
            f"{step['first_step_s']:.1f}"
            + (f" + {arms['poisson'][0]['start_up_s']:.1f}" if "poisson" in arms else "")
            + f" ({plain['first_step_s']:.1f})",
        ]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _over(pair: Pair | None) -> str:
    if pair is None:
        return ""
    row, plain = pair
    return f"{row['ms'] / plain['ms']:.2f}" if row["outcome"] == "ok" else "fails"
