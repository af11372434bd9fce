"""Odd values in every option of every command: one line, status 2, and nothing else happens.

The options are read from the parsers, so a new option is covered without a line here.
"""

import argparse
import math
from pathlib import Path

import pytest

from dpsur import checks
from dpsur.cli import COMMANDS, build_parser, main
from dpsur.errors import InvalidInputError
from reproduction.command import main as reproduce

NUMBERS = ("9" * 400, "-" + "9" * 400, "9" * 5000, "nan", "inf", "-inf", "1e400", "\u00b2", "")
TEXTS = ("a" * 300, "a/" + "b" * 300, "\u00e9" * 200, "a/" * 3000, "a\nb", "a\x00b", "a\x1b[2J")


def options_of(parser, words):
    """Every option and positional argument that takes a value, with the words before it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from options_of(child, [*words, name])
        elif action.nargs != 0:
            yield words, action


def all_options():
    for name in COMMANDS:
        parser = build_parser([name])
        commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        yield from options_of(commands.choices[name], [name])


OPTIONS = list(all_options())


def label(value):
    if isinstance(value, argparse.Action):
        return value.option_strings[0] if value.option_strings else value.dest
    return " ".join(value)


def odd_values(action):
    if action.type in (int, float):
        return NUMBERS
    if action.type in (None, str, Path) or action.choices:
        return TEXTS
    return (*TEXTS, *NUMBERS)  # a reader of the command's own


def test_every_command_is_covered():
    assert {words[0] for words, _ in OPTIONS} | {"proof", "methods", "tasks", "doctor"} == set(
        COMMANDS
    )
    assert len(OPTIONS) > 150


@pytest.mark.parametrize(("words", "action"), OPTIONS, ids=label)
def test_odd_values_are_refused_in_one_line(words, action, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in odd_values(action):
        given = [f"{action.option_strings[0]}={value}"] if action.option_strings else [value]
        if not action.option_strings and value.startswith("-"):
            continue  # an option, not a value
        with pytest.raises(SystemExit) as stopped:
            main([*words, *given])
        shown = capsys.readouterr()
        assert stopped.value.code == 2, value[:20]
        assert shown.out == ""
        assert len(shown.err.splitlines()) == 1, shown.err
        assert len(shown.err) < 500, "the value is shown in full"
        assert "\x1b" not in shown.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), 10**5000, math.nan, math.inf],
    ids=["400", "minus", "5000", "nan", "inf"],
)
@pytest.mark.parametrize(
    "check",
    [
        checks.positive, checks.non_negative, checks.finite, checks.at_least_one,
        checks.sample_rate, checks.fraction_below_one, checks.probability,
    ],
)  # fmt: skip
def test_checks_refuse_huge_and_non_finite_numbers(check, value):
    with pytest.raises(InvalidInputError, match="^noise must be") as refused:
        check("noise", value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("option", "value"),
    [("--seeds", "0-99999999999"), ("--jobs", "1001"), ("--shard", "0/1001"), ("--seeds", "-")],
)
def test_lists_and_parts_have_a_limit(option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        reproduce([f"{option}={value}"])
    assert stopped.value.code == 2
    assert f"argument {option}: '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--updates", "--adam-beta2", "--task", "--out"])
def test_two_dashes_are_no_value(option, capsys):
    """argparse takes them for an empty list, whatever the type of the option."""
    with pytest.raises(SystemExit) as stop:
        main(["train", f"{option}=--"])
    assert stop.value.code == 2
    assert f"argument {option}: expected a value, got '--'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["account", "calibrate"])
@pytest.mark.parametrize(
    "changes",
    [
        {"--dataset-size": str(2**62)}, {"--batch-size": str(2**62)}, {"--updates": str(2**62)},
        {"--noise-multiplier": "1e308"}, {"--noise-multiplier": "1e-308"}, {"--delta": "1e-308"},
        {"--accept-ratio": "1e308"},
        {"--val-noise-multiplier": "1e308", "--accept-threshold": "1e308"},
        {"--val-noise-multiplier": "1e-308", "--accept-threshold": "-1e308"},
        {"--feature-statistics": "1e308"}, {"--feature-statistics": "1e-308"},
        {"--epsilon": "1e308"}, {"--epsilon": "1e-308"},
    ],
    ids=lambda changes: "-".join(f"{k[2:]}={v}" for k, v in changes.items()),
)  # fmt: skip
def test_extreme_numbers_give_an_answer_or_one_line(command, changes, capsys):
    usual = {"--dataset-size": "60000", "--batch-size": "2048", "--noise-multiplier": "4",
             "--updates": "50", "--delta": "1e-5", "--val-batch-size": "256"}  # fmt: skip
    if not {"--val-noise-multiplier", "--accept-ratio"} & changes.keys():
        usual["--accept-ratio"] = "2"
    if command == "calibrate":
        usual["--epsilon"] = "3"
    elif "--epsilon" in changes:
        return
    given = [word for option in (usual | changes).items() for word in ("=".join(option),)]
    status = main([command, *given])
    shown = capsys.readouterr()
    errors = [line for line in shown.err.splitlines() if "dpsur: warning: " not in line]
    assert status in (0, 2)
    assert len(shown.err.splitlines()) <= 1
    assert (len(errors), shown.out == "") == ((1, True) if status else (0, False))
