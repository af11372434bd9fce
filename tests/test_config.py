"""Options of a run: declared once, and the same from Python, the command line and a stored run."""

import argparse
import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

import dpsur
from dpsur.cli.run_options import ALL_GROUPS, add_run_options, config_of, given_method_options
from dpsur.config import Intervals, Performance, RunConfig
from dpsur.methods import METHODS
from dpsur.options import declared, option
from dpsur.privacy.budget import Budget
from reproduction import methods

CONFIGS = [
    RunConfig(),
    RunConfig("fmnist", dpsur.Dpsgd(batch_size=7), Budget(1.5, 1e-6), "every-trial"),
    RunConfig(
        method=methods.Dpis(momentum=0.5),
        network={"activation": "relu"},
        data_dir=Path("somewhere"),
        keep_fraction=0.5,
        hide_rejections="constant",
        seed=3,
        network_seed=4,
        intervals=Intervals(checkpoint_every=3, evaluate_every=9),
        performance=Performance(capture=False, tf32=True, data_bytes=100),
    ),
    *(RunConfig(method=method()) for method in METHODS.values()),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_stored_config_is_the_same(config):
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_where_a_run_is_written_is_not_stored():
    config = RunConfig(out="folder")
    assert RunConfig.from_json(config.to_json()) == replace(config, out=None)
    with pytest.raises(dpsur.InvalidInputError, match="no option 'out'"):
        RunConfig.from_json({"out": "folder"})


def test_all_stored_options_are_in_the_json():
    """So that a resumed run is told all that the first one was."""
    stored = RunConfig().to_json()
    for name, found in declared(RunConfig).items():
        assert (name in stored) == (name != "out"), name
        assert found.help or name == "method", name
    assert set(stored["options"]) == set(declared(dpsur.Dpsur))


ODD = {str: 7, int: "7", float: "7", bool: 1, Path: 7}


@pytest.mark.parametrize(
    "name", [n for n in RunConfig().to_json() if n not in ("method", "options")]
)
def test_a_stored_value_of_another_type_is_refused_by_name(name):
    kind = declared(RunConfig)[name].kind
    with pytest.raises(dpsur.InvalidInputError, match=f"{name} cannot be"):
        RunConfig.from_json({name: ODD.get(kind, [1])})


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([], "must hold a JSON object"),
        ({"speling": 1}, "no option 'speling'"),
        ({"method": "magic"}, "no method 'magic'"),
        ({"method": 7}, "no method 7"),
        ({"method": ["dpsur"]}, "no method"),
        ({"options": []}, r"options cannot be \[\]"),
        ({"options": {"speling": 1}}, "no option 'speling'"),
        ({"options": {"batch_size": "7"}}, "batch_size cannot be '7'"),
        ({"options": {"batch_size": True}}, "batch_size cannot be True"),
        ({"options": {"batch_size": 0}}, "batch_size must be a whole number of at least 1"),
        ({"epsilon": -1.0}, "epsilon must be above 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number of at least 1"),
        ({"task": "x" * 1000, "seed": "y" * 1000}, r"seed cannot be 'y{39}\.\.\.$"),
    ],
)
def test_a_stored_config_that_is_none_is_refused(stored, message):
    with pytest.raises(dpsur.InvalidInputError, match=message):
        RunConfig.from_json(stored)


def parse(*words):
    parser = argparse.ArgumentParser()
    add_run_options(parser, ALL_GROUPS)
    options = parser.parse_args(words)
    for name in {name for method in METHODS.values() for name in declared(method)}:
        setattr(options, name, getattr(options, name, None))
    return options


BAD = [
    ("accounting", "sums", "unknown accounting 'sums'"),
    ("features", "wavelets", "unknown features 'wavelets'"),
    ("normalisation", "batch", "normalisation must be one of none, group, private"),
    ("hide_rejections", "well", "hide_rejections must be one of no, delay, constant"),
    ("keep_fraction", 1.5, r"keep_fraction must be in \(0, 1\]"),
    ("max_updates", 0, "max_updates must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_bad_value_is_refused_alike_wherever_it_comes_from(name, value, message):
    flag = declared(RunConfig)[name].flag
    for build in (
        lambda: RunConfig(**{name: value}),
        lambda: RunConfig.from_json({name: value}),
        lambda: config_of(parse(flag, str(value))),
    ):
        with pytest.raises(dpsur.InvalidInputError, match=message):
            build()


def test_the_command_line_sets_options_of_the_parts():
    words = ["--epsilon", "2", "--checkpoint-every", "5", "--tf32", "--no-capture", "--seed", "1"]
    config = config_of(parse("--method", "dpsgd", *words))
    assert config.budget == Budget(2.0, 1e-5)
    assert config.intervals == Intervals(checkpoint_every=5)
    assert config.performance == Performance(tf32=True, capture=False)
    assert (config.seed, config.method.name) == (1, "dpsgd")
    assert given_method_options(parse()) == {}


def test_every_option_for_the_command_line_is_on_it():
    parser = argparse.ArgumentParser()
    add_run_options(parser, ALL_GROUPS)
    found = {action.dest for action in parser._actions} - {"help"}
    wanted = {n for n, each in declared(RunConfig).items() if each.command_line}
    assert found == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 3.0}, "budget must be a dpsur.Budget, got 3.0; write dpsur.Budget"),
        (
            {"intervals": 3},
            r"intervals must be a dpsur.Intervals, got 3; write dpsur.Intervals\(\)",
        ),
        (
            {"performance": Performance},
            "performance must be a dpsur.Performance, got the class Performance",
        ),
        ({"method": "dpsur"}, "method must be an instance of a method, got 'dpsur'"),
        ({"seed": 1.5}, "seed must be a whole number or None, got 1.5"),
        ({"seed": True}, "seed must be a whole number or None, got True"),
        ({"task": 3}, "task must be a string or None, got 3"),
        ({"budget": Budget(math.inf, 1e-5)}, "epsilon must be finite for method dpsur, got inf"),
        ({"sede": 3}, "unknown argument sede of RunConfig; did you mean seed"),
    ],
)
def test_a_config_of_other_types_is_refused(changes, message):
    with pytest.raises(dpsur.InvalidInputError, match=message):
        RunConfig(**changes)


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        RunConfig().seed = 1


def test_an_option_needs_no_default():
    assert option(help="text").metadata["option"].help == "text"
