"""The command explains itself."""

import json

import pytest

from dpsur.cli import COMMANDS, main


def help_of(capsys, *words, flag="--help"):
    with pytest.raises(SystemExit) as stop:
        main([*words, flag])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example(name, capsys):
    assert f"\n  dpsur {name}" in help_of(capsys, name)


def test_the_command_alone_prints_its_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert printed == help_of(capsys)
    assert len(printed.splitlines()) <= 50


def test_the_short_help_of_train_has_the_common_options_and_the_full_one_all(capsys):
    short, full = (help_of(capsys, "train", flag=flag) for flag in ("--help", "--help-all"))
    assert len(short.splitlines()) < 130 < len(full.splitlines())
    for flag in ("--epsilon", "--task", "--out", "--learning-rate"):
        assert f"\n  {flag} " in short
    for flag in ("--adam-eps", "--rank-timeout", "--block-updates"):
        assert f"\n  {flag} " in full
        assert flag not in short
    assert "more options: dpsur train --help-all" in short


def test_options_of_one_method(capsys):
    assert main(["methods", "dpis"]) == 0
    printed = capsys.readouterr().out
    assert "\ngate block:\n" in printed
    assert "--refresh-every" in printed
    assert main(["methods", "dpis", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["dpis"]
    assert main(["methods", "sgd"]) == 2
    assert "unknown method 'sgd'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["methods", "tasks"])
def test_lists_are_there_for_programs(name, capsys):
    assert main([name, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) > 5


def test_completion_knows_commands_and_options(capsys):
    pytest.importorskip("shtab", reason="completion needs shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "report" in script
    assert "--noise-multiplier" in script
