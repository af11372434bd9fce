"""Make the shipped encoder: procedural images, two contrastive trainings, whitening, one file.

    python -m reproduction encoder --out encoder.safetensors --compile     one GPU, eight minutes
    python -m reproduction encoder --out small.safetensors --device cpu --steps 2 --images 64 \\
        --batch 32                                                         to try it out
    python -m reproduction encoder --sheets docs/figures                   pictures for the docs

Two random views of every image should be close to each other and far from the views of all other
images of the batch (Chen et al., "A simple framework for contrastive learning", 2020). Views are
crops, mirror images and changes of colour. Besides the last map, the two maps before it take part
in the loss: the features use them too. Only procedural images are used.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.features import Encoder
from dpsur.features.encoder import SIZE, Whitening, pooled_maps, rotate
from dpsur.runs.session import choose_device
from reproduction import procedural
from reproduction.encoder_network import WideResNet, frozen
from reproduction.procedural import families
from reproduction.procedural.drawing import Random

# Cells per side that the three maps are averaged over.
GRIDS = (4, 4, 2)


@dataclass(frozen=True)
class Recipe:
    """Everything the weights depend on, besides the versions of the software and the device."""

    seed: int
    temperature: float
    images: int = 300_000
    image_size: int = 48
    shares: Mapping[str, float] = field(default_factory=lambda: dict(procedural.SHARES))
    corpus_version: int = procedural.CORPUS_VERSION
    depth: int = 16
    width: int = 4
    steps: int = 7_200
    batch: int = 1024
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    warmup: int = 300
    # The area of the smallest crop, the largest rotation (radians), the share of blurred views.
    smallest_crop: float = 0.10
    turn: float = 0.0
    blur: float = 0.0
    # The weight of the loss behind the first two groups of layers; behind the last it is 1.
    middle_loss: float = 0.3


#: Two encoders that differ in what they ignore add more than one that is trained twice as long.
RECIPES = (
    Recipe(
        seed=1,
        temperature=0.2,
        shares={
            "leaves": 0.44,
            "networks": 0.26,
            "strokes": 0.12,
            "objects": 0.08,
            "noise": 0.07,
            "patterns": 0.03,
        },
    ),
    Recipe(seed=2, temperature=0.1, turn=0.25, blur=0.2),
)


@dataclass(frozen=True)
class Statistics:
    """How the whitening is fitted (`whitening_of`)."""

    images: int = 16_384
    seed: int = 99
    views_seed: int = 5
    smallest_crop: float = 0.5
    power: float = 0.33
    shrinkage: float = 0.03
    consistency: float = 0.5


def views(images: Tensor, generator: torch.Generator, recipe: Recipe) -> Tensor:
    """One random view of every image: (N, 3, 32, 32) in [0, 1], from uint8."""
    n, device = len(images), images.device

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(n, generator=generator, device=device) * (high - low) + low

    side = uniform(recipe.smallest_crop, 1.0).sqrt()
    aspect = uniform(math.log(3 / 4), math.log(4 / 3)).exp().sqrt()
    wide, high = (side * aspect).clamp(max=1), (side / aspect).clamp(max=1)
    mirror = torch.where(uniform(0, 1) < 0.5, 1.0, -1.0)
    angle = uniform(-recipe.turn, recipe.turn)
    x, y = (1 - wide) * uniform(-1, 1), (1 - high) * uniform(-1, 1)
    cosine, sine = angle.cos(), angle.sin()
    crop = torch.stack(
        [
            torch.stack([wide * mirror * cosine, -wide * sine, x], 1),
            torch.stack([high * mirror * sine, high * cosine, y], 1),
        ],
        1,
    )
    grid = F.affine_grid(crop, [n, 3, SIZE, SIZE], align_corners=False)
    values = F.grid_sample(
        images.float() / 255, grid, padding_mode="reflection", align_corners=False
    )
    if recipe.blur:
        soft = F.avg_pool2d(values, 3, 1, 1, count_include_pad=False)
        values = torch.where((uniform(0, 1) < recipe.blur)[:, None, None, None], soft, values)
    return _recoloured(values, uniform)


def _recoloured(values: Tensor, uniform: Callable[[float, float], Tensor]) -> Tensor:
    """Change brightness, contrast, saturation and hue; make every fifth image grey.

    In luminance and chrominance coordinates all of it is one 3 x 3 matrix per image.
    """
    n, device = len(values), values.device
    to_yiq = torch.tensor(
        [[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]], device=device
    )
    applied = uniform(0, 1) < 0.8
    one = torch.ones(n, device=device)
    brightness = torch.where(applied, uniform(0.6, 1.4), one)
    contrast = torch.where(applied, uniform(0.6, 1.4), one)
    saturation = torch.where(applied, uniform(0.6, 1.4), one)
    hue = torch.where(applied, uniform(-0.1, 0.1), 0 * one) * 2 * math.pi
    saturation = torch.where(uniform(0, 1) < 0.2, 0 * one, saturation)
    zero = 0 * one
    change = torch.stack(
        [
            torch.stack([one, zero, zero], 1),
            torch.stack([zero, saturation * hue.cos(), -saturation * hue.sin()], 1),
            torch.stack([zero, saturation * hue.sin(), saturation * hue.cos()], 1),
        ],
        1,
    )
    matrix = torch.linalg.inv(to_yiq) @ change @ to_yiq * (brightness * contrast)[:, None, None]
    mean = (values.mean((2, 3)) @ to_yiq[0])[:, None, None, None]
    level = (brightness * (1 - contrast))[:, None, None, None] * mean
    return (torch.einsum("nchw,nkc->nkhw", values, matrix) + level).clamp(0, 1)


class _Projections(nn.Module):
    """The network with a small projection behind each map, which only the training needs."""

    def __init__(self, network: WideResNet, middle: bool) -> None:
        super().__init__()
        self.network = network
        self.grids = (2, 2, 1)
        self.used = (0, 1, 2) if middle else (2,)
        sizes = [network.channels[i] * self.grids[i] ** 2 for i in self.used]
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128))
            for size in sizes
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        """One (N, 128) projection per used map."""
        maps = self.network(images)
        projections = []
        for i, head in zip(self.used, self.heads, strict=True):
            n, channels, size, _ = maps[i].shape
            grid = self.grids[i]
            cells = maps[i].reshape(n, channels, grid, size // grid, grid, size // grid)
            projections.append(head(cells.mean((3, 5)).flatten(1)))
        return projections


def contrastive_loss(projections: Tensor, temperature: float) -> Tensor:
    """Cross entropy of finding the other view among all; rows i and i + N/2 belong together."""
    directions = F.normalize(projections.float(), dim=1)
    n = len(directions)
    similar = directions @ directions.T / temperature
    similar = similar.masked_fill(torch.eye(n, dtype=torch.bool, device=similar.device), -1e4)
    partner = torch.arange(n, device=similar.device).roll(n // 2)
    return F.cross_entropy(similar, partner)


def train(
    recipe: Recipe,
    corpus: Tensor,
    *,
    compiled: bool = False,
    report: Callable[[str], None] = print,
) -> WideResNet:
    """Train a network on the corpus and return it in evaluation mode."""
    device = corpus.device
    network = WideResNet(recipe.depth, recipe.width)
    network.reset(recipe.seed)
    torch.manual_seed(recipe.seed)
    model = _Projections(network, recipe.middle_loss > 0).to(device)
    model = model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    forward = torch.compile(model) if compiled else model
    weights = [recipe.middle_loss, recipe.middle_loss, 1.0][-len(model.used) :]
    balance = torch.tensor(weights, device=device)
    optimizer = torch.optim.AdamW(
        list(model.parameters()),
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        fused=device.type == "cuda",
    )

    def rate(step: int) -> float:
        rising = min(1.0, (step + 1) / recipe.warmup)
        return rising * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator(device).manual_seed(recipe.seed)
    started = time.time()
    order, place = torch.empty(0, dtype=torch.long, device=device), 0
    for step in range(recipe.steps):
        if place + recipe.batch > len(order):
            order, place = torch.randperm(len(corpus), generator=generator, device=device), 0
        picked = corpus[order[place : place + recipe.batch]]
        place += recipe.batch
        with torch.no_grad():
            both = torch.cat([views(picked, generator, recipe) for _ in range(2)])
            both = both.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            projections = forward(both)
        losses = [contrastive_loss(values, recipe.temperature) for values in projections]
        loss = torch.stack(losses) @ balance
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 500 == 0 or step == recipe.steps - 1:
            report(f"step {step} loss {float(loss.detach()):.4f} {time.time() - started:.1f} s")
    return network.eval()


def fit_whitening(
    networks: Sequence[WideResNet], statistics: Statistics, device: torch.device
) -> Whitening:
    """Fit the whitening of trained networks on new procedural images and views of them."""
    ready = [frozen(network).to(device) for network in networks]

    @torch.no_grad()
    def blocks(images: Tensor) -> list[Tensor]:
        parts = [pooled_maps(ready, some, GRIDS) for some in torch.split(images, 2048)]
        return [torch.cat(block) for block in zip(*parts, strict=True)]

    images = procedural.generate(statistics.images, seed=statistics.seed, device=device)
    generator = torch.Generator(device).manual_seed(statistics.views_seed)
    mild = replace(RECIPES[0], smallest_crop=statistics.smallest_crop)
    first, second = (blocks(views(images, generator, mild)) for _ in range(2))
    return whitening_of(
        blocks(images),
        (first, second),
        power=statistics.power,
        shrinkage=statistics.shrinkage,
        consistency=statistics.consistency,
    )


def whitening_of(
    blocks: Sequence[Tensor],
    views: tuple[Sequence[Tensor], Sequence[Tensor]],
    *,
    power: float,
    shrinkage: float,
    consistency: float,
) -> Whitening:
    """Fit on (N, channels, cells) blocks of procedural images.

    Directions of variance v are multiplied by ((1 - shrinkage) v + shrinkage)^-power, and by the
    power `consistency` of their correlation between two random views of the same image.
    """
    named = {"root": torch.tensor(1.0), "by_scale": torch.tensor(True)}
    for i, block in enumerate(blocks):
        named[f"mean.{i}"] = block.float().mean((0, 2))
        named[f"deviation.{i}"] = block.float().std((0, 2)) + 1e-3 * block.float().std()
    plain = Whitening(named)
    seen = [plain.split(view) for view in views]
    for number, values in enumerate(plain.split(blocks)):
        n, channels, cells = values.shape
        over_channels = torch.einsum("ncs,nds->cd", values, values) / (n * cells)
        over_cells = torch.einsum("ncs,nct->st", values, values) / (n * channels)
        a, rotation = torch.linalg.eigh(over_channels)
        b, turn = torch.linalg.eigh(over_cells)
        variance = a[:, None].clamp(min=0) * b.clamp(min=0) / b.mean()
        factors = ((1 - shrinkage) * variance + shrinkage) ** -power
        one, two = (rotate(view[number], rotation, turn) for view in seen)
        factors = factors * _correlation(one, two).clamp(min=0.02) ** consistency
        named |= {f"channels.{number}": rotation, f"cells.{number}": turn}
        named[f"factors.{number}"] = factors
    return Whitening(named)


def _correlation(one: Tensor, two: Tensor) -> Tensor:
    one, two = one - one.mean(0), two - two.mean(0)
    spread = one.square().mean(0) * two.square().mean(0)
    return (one * two).mean(0) / (spread.sqrt() + 1e-9)


def whitening_tensors(whitening: Whitening) -> dict[str, Tensor]:
    """Everything as named tensors, 16 bit where the size matters."""
    named = {"root": torch.tensor(whitening.root), "by_scale": torch.tensor(whitening.by_scale)}
    for name, values in whitening.named_buffers():
        small = name.startswith(("channels_", "factors_"))
        named[name.replace("_", ".")] = values.half() if small else values
    return {name: values.contiguous().cpu() for name, values in named.items()}


def save(
    path: Path, networks: Sequence[WideResNet], whitening: Whitening, recipe: Mapping[str, Any]
) -> str:
    """Write weights (convolutions in 16 bit), whitening and recipe; return the SHA-256."""
    named = {f"whitening.{k}": v for k, v in whitening_tensors(whitening).items()}
    for number, network in enumerate(networks):
        for name, tensor in network.state_dict().items():
            if not name.endswith("num_batches_tracked"):
                values = tensor.half() if tensor.dim() == 4 else tensor.float()
                named[f"networks.{number}.{name}"] = values.contiguous().cpu()
    shape = [[network.depth, network.width] for network in networks]
    about = {"grids": list(GRIDS), "networks": shape, "recipe": dict(recipe)}
    save_file(named, path, {"encoder": json.dumps(about, sort_keys=True)})
    return hashlib.sha256(path.read_bytes()).hexdigest()


def corpus_sheet(size: int = 48, columns: int = 12) -> Tensor:
    """One row each of leaves, objects, networks, patterns, noise, strokes and glyphs."""
    random = Random(7, 0, torch.device("cpu"))
    kinds = (families.networks, families.patterns, families.noise)
    textures = [family(random, columns, size) for family in kinds]
    pool = torch.cat(textures)
    painted = [
        family(random, columns, size, pool) for family in (families.leaves, families.objects)
    ]
    drawn = [family(random, columns, size, pool) for family in (families.strokes, families.glyphs)]
    return _tiled(torch.cat([*painted, *textures, *drawn]), columns, 1)


def filter_sheet() -> Tensor:
    """The 3 x 3 filters of the first layers, two rows per network, each scaled to its range."""
    rows = torch.cat([network.get_buffer("stem") for network in Encoder().networks])
    largest = rows.abs().amax((1, 2, 3), keepdim=True)
    return _tiled(F.interpolate(rows / largest / 2 + 0.5, 90), 8, 5)


def _tiled(images: Tensor, columns: int, border: int) -> Tensor:
    """Join images row by row, with white lines between them."""
    images = F.pad(images, (border,) * 4, value=1.0)
    n, channels, height, width = images.shape
    grid = images.reshape(n // columns, columns, channels, height, width)
    return grid.permute(0, 3, 1, 4, 2).reshape(n // columns * height, columns * width, channels)


def draw_sheets(folder: Path) -> None:
    """Write corpus.png and filters.png."""
    from PIL import Image

    for name, picture in (("corpus", corpus_sheet()), ("filters", filter_sheet())):
        image = Image.fromarray((picture * 255).round().byte().numpy())
        # 128 colours are enough to see what is drawn, in a third of the space.
        image.quantize(128).save(folder / f"{name}.png", optimize=True)


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the trained encoder")
    parser.add_argument("--sheets", type=Path, metavar="DIR", help="draw pictures of the corpus")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--compile", action="store_true", help="compile the network first")
    for name in ("images", "steps", "batch"):
        parser.add_argument(f"--{name}", type=int, help="a smaller training, for trying it out")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train both encoders, fit the whitening, write the file and print its digest."""
    if options.out is None and options.sheets is None:
        raise InvalidInputError("give --out FILE to train an encoder, or --sheets DIR")
    if options.sheets is not None:
        draw_sheets(options.sheets)
    if options.out is None:
        return 0
    device = choose_device(options.device)
    changes = {
        name: getattr(options, name)
        for name in ("images", "steps", "batch")
        if getattr(options, name) is not None
    }
    networks, recipes = [], [replace(recipe, **changes) for recipe in RECIPES]
    for recipe in recipes:
        corpus = procedural.generate(
            recipe.images,
            seed=recipe.seed,
            size=recipe.image_size,
            shares=recipe.shares,
            device=device,
        )
        networks.append(train(recipe, corpus, compiled=options.compile))
    statistics = Statistics()
    statistics = replace(statistics, images=min(statistics.images, recipes[0].images))
    whitening = fit_whitening(networks, statistics, device)
    about = {
        "corpus": procedural.CORPUS_VERSION,
        "encoders": [asdict(recipe) for recipe in recipes],
        "statistics": asdict(statistics),
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    print(save(options.out, networks, whitening, about))
    return 0
