"""`dpsur attack`: membership inference on targets that it trains, or on a release."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from dpsur import checks
from dpsur.attacks.metrics import AttackMetrics, Scores, measure
from dpsur.attacks.suite import (
    ATTACKS,
    AttackScores,
    attack_answers,
    attack_target,
    check_attacks,
    on_persons,
)
from dpsur.attacks.targets import (
    PrivateTarget,
    Recipe,
    SeparateModels,
    Trainer,
    attacked_pool,
    count_persons,
    plain_features,
    plain_trainer,
    split_pool,
    whole_persons,
)
from dpsur.cli.parser import figure_path
from dpsur.cli.run_options import (
    add_data_options,
    add_method_options,
    build_method,
    declared_data,
    given_method_options,
)
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.methods import METHODS, Nonprivate, method_named
from dpsur.privacy.accounting import ACCOUNTINGS, DEFAULT_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.runs.build_session import choose_device
from dpsur.runs.evaluation import check_fits, split_off
from dpsur.runs.release import read_release
from dpsur.runs.tasks import subset
from dpsur.status import silenced
from dpsur.tasks import OWN, TASKS, Task, task_named
from dpsur.tasks.tables import other_persons

DESCRIPTION = """\
Who was in the training set?

  dpsur attack                                     a target without privacy
  dpsur attack --method dpsgd --epsilon 3
  dpsur attack --release run                       what `dpsur train` released
  dpsur attack --release run --task csv:people.csv --schema people.json
  dpsur attack --task csv:visits.csv --schema visits.json --group-by patient --method dpsgd

The records are split at random 2:1:2:1: the target is trained on the first part, the second are
non-members, and shadow models are trained on random parts of all. Lines marked "shuffled" are
controls: the same attack on random membership labels, which must find nothing. For a release the
training records are members and the test records are not; only gap and confidence, which train no
model, are run on it. With --group-by the attacks are on persons, by the mean score of each one's
records: a person is in one part with all of them, and private targets protect persons.
"""
WITHOUT_TRAINING = ("gap", "confidence")
ALL = "all"


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    listing = "\n".join(f"  {name:<13} {text}" for name, text in ATTACKS.items())
    parser.description = DESCRIPTION
    parser.epilog = f"attacks:\n{listing}"
    parser.usage = "dpsur attack [--task TASK] [--method METHOD] [options]"
    parser.add_argument(
        "--attacks",
        metavar="LIST",
        help=f"names separated by commas, or all (default: {','.join(WITHOUT_TRAINING)})",
    )
    parser.add_argument("--release", metavar="DIR", help="attack a release instead of a new target")
    add_data_options(parser, persons=True)
    parser.add_argument(
        "--records-per-person", type=int, metavar="K", help="of private targets (default: 16)"
    )
    parser.add_argument(
        "--method",
        default=Nonprivate.name,
        help=f"of target and shadow models, one of: {', '.join(METHODS)} (default: nonprivate)",
    )
    parser.add_argument("--epsilon", type=float, default=3.0, help="of private targets (3)")
    parser.add_argument("--delta", type=float, default=1e-5, help="of private targets (1e-5)")
    parser.add_argument("--accounting", default=DEFAULT_ACCOUNTING, choices=ACCOUNTINGS)
    parser.add_argument("--features", help="of private targets (default: inputs as they are)")
    parser.add_argument("--epochs", type=int, default=100, help="of targets without privacy (100)")
    parser.add_argument(
        "--shadow-models", type=int, default=16, metavar="N", help="for lira and rmia (16)"
    )
    parser.add_argument("--max-records", type=int, metavar="N", help="use only N records")
    parser.add_argument("--seed", type=int, default=0, help="of split and training (default: 0)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    parser.add_argument(
        "--roc", type=figure_path, metavar="FILE", help="draw ROC curves (PNG, SVG or PDF)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_method_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Attack and print how far that came."""
    names = _names(options)
    checks.non_negative("seed", options.seed)
    device = choose_device(options.device)
    of_release = options.release is not None
    with silenced(options.json):
        found = (_release if of_release else _target)(options, names, device)
    metrics = {name: measure(scores) for name, scores in found.scores.items()}
    if options.roc is not None:
        _draw(options.roc, found.scores)
    if options.json:
        print(json.dumps(_values(found, metrics)))
        return 0
    if options.group_by is not None:
        print("attacks on persons, by the mean score of each one's records")
    print(f"target: accuracy {found.train_accuracy:.2%} on its training records, ", end="")
    print(f"{found.test_accuracy:.2%} on others")
    print(f"{'attack':<24}{'accuracy':<24}{'AUC':<24}{'TPR at FPR 1%':<24}TPR at FPR 0.1%")
    for name, figures in metrics.items():
        cells = (
            figures.balanced_accuracy,
            figures.auc,
            figures.tpr_at_1_percent,
            figures.tpr_at_01_percent,
        )
        print(f"{name:<24}" + "".join(f"{cell!s:<24}" for cell in cells).rstrip())
    print("accuracy: on as many members as others; in brackets, 95% intervals")
    return 0


def _values(found: AttackScores, metrics: dict[str, AttackMetrics]) -> dict[str, Any]:
    return {
        "train_accuracy": found.train_accuracy,
        "test_accuracy": found.test_accuracy,
        "attacks": {name: figures.to_json() for name, figures in metrics.items()},
    }


def _names(options: argparse.Namespace) -> list[str]:
    """The attacks that were asked for, all of them possible."""
    trains = options.release is None and options.group_by is None
    possible = list(ATTACKS if trains else WITHOUT_TRAINING)
    if options.attacks is None:
        return list(WITHOUT_TRAINING)
    if options.attacks == ALL:
        return possible
    names: list[str] = options.attacks.split(",")
    check_attacks(names)
    for name in names:
        if name not in possible:
            why, remedy = ", which a release does not say how to do", "attack a new target"
            if options.group_by is not None:
                why, remedy = " on parts of the records, not of the persons", "leave out --group-by"
            raise InvalidInputError(
                f"the attack {name} trains models{why}; choose among {', '.join(possible)}, or "
                f"{remedy}"
            )
    return names


def _target(options: argparse.Namespace, names: list[str], device: torch.device) -> AttackScores:
    declared = declared_data(options)
    task = task_named(options.task, declared=declared)
    kind = method_named(options.method)
    usual = dict(task.settings.get(kind.name, {}))
    if task.persons is not None and options.max_records is not None:
        raise InvalidInputError("max_records parts the records of a person; leave it out")
    trainer: Trainer
    if kind is Nonprivate:
        if usual or given_method_options(options):
            raise InvalidInputError(
                "targets without privacy are trained as in the paper; of their settings only "
                "--epochs can be chosen"
            )
        trainer = plain_trainer(task, Recipe(epochs=options.epochs), device)
    else:
        method = build_method(kind.name, options, usual)
        budget = Budget(options.epsilon, options.delta)
        features = options.features or method.features or plain_features(task)
        config = RunConfig(
            *(task.name, method, budget, options.accounting, features),
            declared=declared,
            records_per_person=options.records_per_person,
        )
        trainer = PrivateTarget(config, device, persons=task.persons)
    # whose test records are whose is not known
    pool = attacked_pool(task, options.max_records) if task.persons is None else task.load(None)[0]
    split = split_pool(pool, options.seed, task.persons)
    return attack_target(split, trainer, names, options.seed, options.shadow_models)


def _release(options: argparse.Namespace, names: list[str], device: torch.device) -> AttackScores:
    model, statement, origin = read_release(options.release)
    task = _task_of_release(options, origin.task)
    train, test = task.load(None)
    if test is None:
        raise InvalidInputError(
            f"{task.name} has no test records to use as non-members; name public ones with --test, "
            "or in the schema"
        )
    train_of, test_of = torch.arange(len(train)), torch.arange(len(test))  # whose records they are
    if task.persons is not None:
        if "holdout" in statement or "keep_fraction" in statement["public"]:
            raise InvalidInputError(
                "the release left out records of persons at random; attack records, without "
                "--group-by"
            )
        rest = other_persons(options.task, declared_data(options))
        assert rest.persons is not None
        (test, _), train_of, test_of = rest.load(None), task.persons, rest.persons
    else:
        # those that it was trained on
        train = subset(train, statement["public"].get("keep_fraction"))
        if "holdout" in statement:
            train, _ = split_off(train, statement["holdout"]["fraction"])
        train_of = torch.arange(len(train))
    count = min(count_persons(train_of), count_persons(test_of))
    chosen, rest_of = (whole_persons(part, count, options.seed) for part in (train_of, test_of))
    members, others = train.select(chosen), test.select(rest_of)
    model = model.to(device).eval()
    for part in (members, others):
        check_fits(model, part, task.loss, task.name)
    target = SeparateModels([model])
    scores = attack_answers(target, members, others, names, options.seed)
    if task.persons is not None:
        scores = on_persons(scores, train_of[chosen], test_of[rest_of], options.seed)
    return AttackScores.of(target, members, others, scores)


def _task_of_release(options: argparse.Namespace, name: str | None) -> Task:
    """The records of a release: of a public data set by name, else of the file that is given."""
    if name in TASKS:
        return task_named(name)
    if not options.task.startswith(OWN):
        raise InvalidInputError(
            f"{options.release} does not say where its records are; name them with --task, such as "
            "--task csv:FILE --schema FILE"
        )
    task = task_named(options.task, declared=declared_data(options))
    if task.classes is None:
        raise InvalidInputError(
            "the attacks are on classes, and this table predicts something else"
        )
    return task


def _draw(path: Path, scores: dict[str, Scores]) -> None:
    from dpsur import figure_style as style
    from dpsur.attacks.metrics import curve_of, draw_roc, hits_of

    curves = {
        name: curve_of(hits_of(part), len(part.members), len(part.others))
        for name, part in scores.items()
    }
    with style.common():
        draw_roc({"": curves}).savefig(path, dpi=200)
