"""Small seeded runs of every method, gate, accounting and kind of network, and a digest of each.

`python -m tests.digests` prints the table; `tests/test_digests.py` holds it against
`tests/digests.json`. A change that is meant to keep behaviour keeps every digest.
"""

import hashlib
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import dpsur
from reproduction import methods

TABLE = Path(__file__).with_name("digests.json")
RECORDS, UPDATES = 192, 6


def environment() -> str:
    """What the bytes of a result depend on besides the code."""
    return (
        f"torch {torch.__version__}, {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )


def _vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 12, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def _images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(RECORDS, 1, 16, 16, generator=generator)
    return x, (x.mean((1, 2, 3)) > 0.5).long()


def _tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 30, (RECORDS, 9), generator=generator)
    return x, (x.sum(1) > 130).long()


def _scattering_size() -> tuple[Tensor, Tensor]:
    return _images()


class _Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(30, 6), nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))
        return self.head(outputs[:, -1])


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(4 * 36, 2),
    )


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(30, 6), layer, nn.Flatten(), nn.Linear(54, 2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": (_mlp, _vectors),
    "dropout": (_dropout, _vectors),
    "cnn": (_cnn, _images),
    "lstm": (_Last, _tokens),
    "attention": (_attention, _tokens),
    "scattering": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), _scattering_size),
}


def cases() -> Iterator[tuple[str, str, dpsur.methods.Method, dict[str, object]]]:
    """Name, network, method and further arguments of `fit`."""
    small = {"batch_size": 48, "updates": UPDATES}
    coin = {"gate": "coin"}
    yield "dpsur default", "mlp", dpsur.Dpsur(**small), {}
    yield "dpsur default coin", "mlp", dpsur.Dpsur(**small, **coin), {}
    for network in ("mlp", "dropout", "cnn", "lstm", "attention"):
        yield f"dpsgd {network}", network, dpsur.Dpsgd(**small), {}
        coins = dpsur.Dpsur(**small, **coin, accept_ratio=1.5, val_batch_size=24)
        yield f"dpsur coin {network}", network, coins, {}
    test = {"gate": "loss", "val_noise_multiplier": 2.0, "val_batch_size": 24}
    loss = {**test, "accept_threshold": 0.0}
    yield "dpsur loss proven", "mlp", dpsur.Dpsur(**small, **loss), {}
    published = dpsur.Dpsur(**small, **test)
    yield "dpsur loss published", "mlp", published, {"accounting": "published"}
    trials = {"batch_size": 48, "trials": UPDATES + 4, **loss}
    yield "dpsur every-trial", "mlp", dpsur.Dpsur(**trials), {"accounting": "every-trial"}
    keep = dpsur.Dpsur(**trials, on_reject="keep-momentum")
    yield "dpsur keep-momentum", "cnn", keep, {"accounting": "every-trial"}
    adam = dpsur.Dpsur(**small, **coin, optimizer="adam", learning_rate=0.05, average_decay=0.9)
    yield "dpsur adam average", "lstm", adam, {}
    constant = {"hide_rejections": "constant"}
    yield "dpsur constant trials", "mlp", dpsur.Dpsur(**small, **coin), constant
    yield "dpsgd cosine", "mlp", dpsur.Dpsgd(**small, schedule="cosine"), {}
    yield "dpsgd cut short", "mlp", dpsur.Dpsgd(**small), {"max_updates": 3}
    yield "dpsgd-ts", "mlp", methods.DpsgdTs(**small), {}
    yield "dpsgd-hf", "scattering", dpsur.DpsgdHf(**small), {}
    private = {"normalisation": "private", "features": "scattering"}
    yield "dpsgd private statistics", "scattering", dpsur.Dpsgd(**small), private
    yield "dpis", "mlp", methods.Dpis(**small), {}
    yield "dpis coin", "mlp", methods.Dpis(**small, gate="coin", accept_ratio=1.5), {}
    yield "dpis cnn", "cnn", methods.Dpis(**small), {}
    yield "dpagd", "mlp", methods.Dpagd(updates=UPDATES), {}
    yield "nonprivate", "cnn", dpsur.Nonprivate(batch_size=48, updates=UPDATES), {}


def digest(
    network: str, method: dpsur.methods.Method, arguments: dict[str, object]
) -> dict[str, object]:
    """Train and condense the released weights and the statement's epsilon."""
    torch.manual_seed(7)
    build, data = NETWORKS[network]
    model, records = build(), data()
    if network == "scattering":
        model = nn.Sequential(nn.Flatten(), nn.Linear(81 * 4 * 4, 2))
    budget = dpsur.Budget(epsilon=4.0, delta=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = dpsur.fit(
            model,
            records,
            method=method,
            budget=budget,
            seed=11,
            device="cpu",
            **{"accounting": "proven", **arguments},
        )
    content, total = hashlib.sha256(), 0.0
    for name, value in sorted(run.model.state_dict().items()):
        content.update(f"{name}{tuple(value.shape)}".encode())
        content.update(value.detach().contiguous().numpy().tobytes())
        if value.is_floating_point():
            total += float(value.double().abs().sum())
    epsilon = run.statement["guarantee"]["epsilon"]
    return {"sha256": content.hexdigest()[:16], "weights": round(total, 6), "epsilon": epsilon}


def table() -> dict[str, dict[str, object]]:
    """All digests by name."""
    return {name: digest(network, method, rest) for name, network, method, rest in cases()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {"environment": environment(), "digests": table()}
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if "--write" in sys.argv:
        TABLE.write_text(text, encoding="utf-8")
    print(text)
