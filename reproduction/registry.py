"""The experiments, by name. An experiment is registered by being listed here."""

from importlib import import_module
from typing import Final

from dpsur.errors import InvalidInputError
from reproduction.base import Experiment

# name -> module that has it as EXPERIMENT, and what it shows. A module is imported when it is asked
# for, since some need torch and some do not.
EXPERIMENTS: Final[dict[str, tuple[str, str]]] = {
    "acceptance": (
        "reproduction.experiments.acceptance",
        "acceptance probability of the gate against beta, and its best beta (seconds)",
    ),
    "gate-density": (
        "reproduction.experiments.gate_density",
        "the noisy loss difference and what three thresholds accept (seconds)",
    ),
    "truncation": (
        "reproduction.experiments.truncation",
        "a Gaussian before and after selective release (seconds)",
    ),
    "trajectory": (
        "reproduction.experiments.trajectory",
        "DPSGD against DPSUR on a linear regression (seconds)",
    ),
    "schematics": (
        "reproduction.experiments.schematics",
        "drawings of the algorithm (seconds)",
    ),
    "sigma-v": (
        "reproduction.experiments.sigma_v",
        "the paper's sixteen settings of the test: updates, cost, acceptance (seconds)",
    ),
    "accounting": (
        "reproduction.experiments.accounting",
        "the paper's sixteen settings under each accounting (seconds)",
    ),
    "certificate": (
        "reproduction.experiments.certificate",
        "three proven figures checked in interval arithmetic (minutes)",
    ),
    "accuracy": (
        "reproduction.experiments.accuracy",
        "the paper's table of accuracies, and the arms that explain it (GPU, an hour)",
    ),
    "best": (
        "reproduction.experiments.best",
        "DP-SGD and DPSUR with the preset tuned, beside the paper's figures (GPU minutes)",
    ),
    "heads": (
        "reproduction.experiments.heads",
        "what the preset auto reaches, beside all it can be compared with (GPU minutes)",
    ),
    "unseen": (
        "reproduction.experiments.unseen",
        "the preset auto on data that it was not made for, against DP-SGD with a grid (minutes)",
    ),
    "tables": (
        "reproduction.experiments.tables",
        "the default on real tables, beside other private models (CPU, an hour)",
    ),
    "persons": (
        "reproduction.experiments.persons",
        "persons as the unit, by both samplers, against records (CPU, half an hour)",
    ),
    "tables-rule": (
        "reproduction.experiments.tables_rule",
        "settings of the default for tables, one changed at a time (CPU, minutes)",
    ),
    "rate-search": (
        "reproduction.experiments.rate_search",
        "the gate block where its search used to fail, before and now (CPU, minutes)",
    ),
    "planning": (
        "reproduction.experiments.planning",
        "what dpsur plan says, against what training then gives (CPU, an hour)",
    ),
    "tuning": (
        "reproduction.experiments.tuning",
        "settings that the paper does not give, chosen on held-out records (GPU minutes)",
    ),
    "ablation": (
        "reproduction.experiments.ablation",
        "one hyper-parameter of DPSUR at a time, on CIFAR-10 (GPU, half an hour)",
    ),
    "ts-noise": (
        "reproduction.experiments.ts_noise",
        "DPSGD-TS on CIFAR-10 at epsilon 1 and 2, over the noise (GPU minutes)",
    ),
    "robustness": (
        "reproduction.experiments.robustness",
        "accuracy against the learning rate, selective and plain (GPU minutes)",
    ),
    "selection-tuning": (
        "reproduction.experiments.selection_tuning",
        "learning rates on held-out records, which selection-grid is centred on (GPU minutes)",
    ),
    "selection-grid": (
        "reproduction.experiments.selection_grid",
        "accuracy against starting rate and clipping norm, gate block and others (GPU minutes)",
    ),
    "selection-rule": (
        "reproduction.experiments.selection_rule",
        "the gate block with parts of its rule changed, on held-out records (GPU minutes)",
    ),
    "convergence": (
        "reproduction.experiments.convergence",
        "loss and accuracy against the budget spent (GPU minutes)",
    ),
    "iterates": (
        "reproduction.experiments.iterates",
        "the last iterate and the best on the test set, where the paper is not met (GPU minutes)",
    ),
    "membership": (
        "reproduction.experiments.membership",
        "the paper's attack tables, and likelihood ratios, over seeds (GPU, an hour)",
    ),
    "rejections": (
        "reproduction.experiments.rejections",
        "what the number of rejected trials tells by itself (a minute)",
    ),
    "audit": (
        "reproduction.experiments.audit",
        "what audits find, of sound and of broken mechanisms (a quarter of an hour)",
    ),
    "replay": (
        "reproduction.experiments.replay",
        "frauds that were planted in runs, and how often a replay finds them (minutes)",
    ),
    "noise-accuracy": (
        "reproduction.experiments.noise_accuracy",
        "accuracy with integer noise and with floating-point noise (minutes)",
    ),
    "noise-attacks": (
        "reproduction.experiments.noise_attacks",
        "attacks on the bits of noise, as it is usually computed and as it is here (a minute)",
    ),
    "demo": (
        "reproduction.experiments.demo",
        "what `make demo` reaches, over seeds and against its peers (minutes)",
    ),
}


def experiment_named(name: str) -> Experiment:
    """Look an experiment up by name."""
    try:
        module, _ = EXPERIMENTS[name]
    except KeyError:
        known = ", ".join(EXPERIMENTS)
        raise InvalidInputError(f"unknown experiment {name!r}; choose one of {known}") from None
    found: Experiment = import_module(module).EXPERIMENT
    return found
