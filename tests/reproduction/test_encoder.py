"""The training of the encoder, and the page about it."""

from pathlib import Path

import torch

from dpsur.features import Encoder
from dpsur.features.encoder import Whitening
from reproduction import encoder, procedural, simulated_heads
from reproduction.command import main
from reproduction.encoder_network import WideResNet, frozen
from reproduction.rows import read_rows

PAGE = Path(__file__).parents[2] / "docs" / "results.md"


def test_the_frozen_network_is_the_trained_one():
    network = WideResNet(depth=10, width=1)
    network.reset(3)
    images = procedural.generate(6, size=32, shares={"noise": 1}).float() / 255
    network.train()
    with torch.no_grad():
        for _ in range(3):
            network(images)  # batch statistics that are not those of a fresh network
        for name, values in network.named_parameters():
            if "norm" in name:
                values.add_(0.1 * torch.randn(values.shape))
        expected = network.eval()(images)
        found = frozen(network)(images)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_tiny_encoder_is_trained_written_and_read(tmp_path, monkeypatch, capsys):
    small = [
        encoder.Recipe(seed=seed, temperature=0.2, depth=10, width=1, shares={"noise": 1.0})
        for seed in (1, 2)
    ]
    monkeypatch.setattr(encoder, "RECIPES", small)
    path = tmp_path / "small.safetensors"
    sizes = ("--steps", "2", "--images", "16", "--batch", "8", "--device", "cpu")
    assert main(["encoder", "--out", str(path), *sizes]) == 0
    digest = capsys.readouterr().out.split()[-1]
    monkeypatch.setattr("dpsur.features.encoder._shipped", lambda _: path)
    made = Encoder(digest=digest)
    assert str(made.asset) == digest
    rows = made(procedural.generate(3, size=16, shares={"noise": 1}))
    assert rows.shape == (3, 2 * (16 * 16 + 32 * 16 + 64 * 4))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(3), atol=1e-2, rtol=0)


def test_whitening_evens_out_variances_and_survives_its_file():
    drawn = torch.Generator().manual_seed(0)
    blocks = [torch.randn(400, 4, 4, generator=drawn) * torch.tensor([9.0, 3, 1, 0.3])[:, None]]
    mixed = [torch.einsum("ncs,cd->nds", blocks[0], torch.randn(4, 4, generator=drawn))]
    fitted = encoder.whitening_of(mixed, (mixed, mixed), power=0.5, shrinkage=0.0, consistency=0.0)
    rows = fitted(mixed)
    variances = rows.var(0)
    assert variances.max() / variances.min() < 2
    again = Whitening(encoder.whitening_tensors(fitted))
    torch.testing.assert_close(again(mixed), rows, atol=2e-2, rtol=0)
    assert list(fitted.state_dict()) == []


def test_a_file_must_be_named(capsys):
    assert main(["encoder"]) == 2
    assert "give --out FILE" in capsys.readouterr().err


def test_the_page_names_the_shipped_file():
    assert Encoder().asset is not None
    assert str(Encoder().asset) in PAGE.read_text(encoding="utf-8")


def test_every_row_says_that_a_simulator_made_it():
    rows = read_rows(simulated_heads.ROWS)
    assert {row["made_by"] for row in rows} == {"simulator"}
    assert simulated_heads.ROWS.stat().st_size < 300_000
