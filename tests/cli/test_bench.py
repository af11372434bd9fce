"""`dpsur bench`: what a private step of a user's model costs."""

import json

import pytest
import torch
from torch import nn

from tests.cli.test_commands import dpsur

MODEL = "tests.cli.test_bench:make"
SHORT = ("--repetitions", "1", "--device", "cpu")
not_a_function = 3


def make(batch_size):
    model = nn.Sequential(nn.Linear(2, 3))
    return model, torch.randn(batch_size, 2), torch.randint(3, (batch_size,))


def make_wrong(batch_size):
    return make(batch_size)[:2]


def make_short(batch_size):
    return make(batch_size - 1 if batch_size > 1 else 2)


def test_a_model_is_timed_plain_and_private(capsys):
    given = ("bench", "--model", MODEL, "--batch-size", "8", "4", *SHORT)
    status, out, _ = dpsur(*given, "--json", capsys=capsys)
    assert status == 0
    rows = [json.loads(line) for line in out.splitlines()]
    kinds = ("plain", "private")
    assert [(row["batch_size"], row["step"]) for row in rows] == [
        (size, kind) for size in (4, 8) for kind in kinds
    ]
    for row in rows:
        assert row["seconds"] > 0
        assert row["peak_memory_bytes"] is None
    assert [row["time_over_plain"] for row in rows[::2]] == [1.0, 1.0]
    status, out, _ = dpsur(*given, capsys=capsys)
    assert status == 0
    assert out.count("x plain") == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "nowhere"), "must have the form module:function"),
        (("--model", "no.such:make"), "model no.such:make cannot be imported"),
        (("--model", "tests.cli.test_bench:nothing"), "cannot be imported"),
        (("--model", "tests.cli.test_bench:not_a_function"), "is not a function"),
        (("--model", "tests.cli.test_bench:make_wrong"), "returns (model, inputs, labels)"),
        (("--model", "tests.cli.test_bench:make_short"), "asked for a batch of 1 and made 2"),
        (("--batch-size", "0"), "batch size must be"),
        (("--repetitions", "0"), "repetitions must be"),
        (("--device", "abacus"), "unknown device 'abacus'"),
    ],
)
def test_bad_input_is_one_line_and_status_two(arguments, words, capsys):
    usual = ("bench", "--model", MODEL, "--batch-size", "4")
    status, _, err = dpsur(*usual, *arguments, capsys=capsys)
    assert status == 2
    assert words in err
    assert err.startswith("dpsur: error: ")
    assert err.count("\n") == 1
