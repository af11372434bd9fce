"""The command explains itself."""

import json

import pytest

from dpsur.cli import COMMANDS, main


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
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
    assert len(printed.splitlines()) <= 48


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
