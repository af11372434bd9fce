"""`dpsur attack`: membership inference on targets that it trains, or on a release.

`dpsur audit`: one training with canaries, and a lower bound on its epsilon.
"""

import argparse
import json
from dataclasses import asdict, replace

import torch

from dpsur import checks, figure_style
from dpsur.attacks.metrics import draw_roc, measure, roc_curve
from dpsur.attacks.suite import (
    ATTACKS,
    AttackScores,
    Models,
    RunTrainer,
    as_seen_by,
    attack_answers,
    attack_trained,
    attacked_pool,
    check_attacks,
    count_persons,
    on_persons,
    plain_features,
    split_pool,
    whole_persons,
)
from dpsur.audits.bounds import CONTRADICTED, Finding
from dpsur.audits.neighbour import neighbour_test
from dpsur.audits.training import (
    Planter,
    audit_training,
    ceiling,
    gradient_canaries,
    input_canaries,
)
from dpsur.cli.parser import figure_path
from dpsur.cli.run_options import (
    add_data_options,
    add_method_options,
    build_method,
    config_of,
)
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.functional.persons import DEFAULT_RECORDS
from dpsur.mechanism.streams import INIT, SETUP, Streams
from dpsur.methods import METHODS, Nonprivate
from dpsur.networks import build_network
from dpsur.privacy.accounting import ACCOUNTINGS, DEFAULT_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.privacy.statement import format_epsilon
from dpsur.runs.evaluation import check_fits, split_off
from dpsur.runs.observers import ProgressBar
from dpsur.runs.release import read_release
from dpsur.runs.session import choose_device
from dpsur.runs.tasks import build_task_session, subset
from dpsur.status import silenced, status
from dpsur.tasks import OWN, TASKS, Declared, Task, task_named
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
    add_data_options(parser)
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
    parser.add_argument("--accounting", choices=ACCOUNTINGS)
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


def run(options: argparse.Namespace) -> int:
    names = _names(options)
    checks.non_negative("seed", options.seed)
    device = choose_device(options.device)
    of_release = options.release is not None
    with silenced(options.json):
        found = (_release if of_release else _target)(options, names, device)
    metrics = {name: measure(scores) for name, scores in found.scores.items()}
    if options.roc is not None:
        curves = {name: roc_curve(part) for name, part in found.scores.items()}
        with figure_style.common():
            draw_roc({"": curves}).savefig(options.roc, dpi=200)
    if options.json:
        accuracies = {n: getattr(found, n) for n in ("train_accuracy", "test_accuracy")}
        attacks = {name: asdict(figures) for name, figures in metrics.items()}
        print(json.dumps({**accuracies, "attacks": attacks}))
        return 0
    if options.group_by is not None:
        print("attacks on persons, by the mean score of each one's records")
    print(f"target: accuracy {found.train_accuracy:.2%} on its training records, ", end="")
    print(f"{found.test_accuracy:.2%} on others")
    print(f"{'attack':<24}{'accuracy':<24}{'AUC':<24}{'TPR at FPR 1%':<24}TPR at FPR 0.1%")
    for name, found_by in metrics.items():
        rates = found_by.tpr_at_1_percent, found_by.tpr_at_01_percent
        cells = (found_by.balanced_accuracy, found_by.auc, *rates)
        print(f"{name:<24}" + "".join(f"{cell!s:<24}" for cell in cells).rstrip())
    print("accuracy: on as many members as others; in brackets, 95% intervals")
    return 0


def _names(options: argparse.Namespace) -> list[str]:
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
    declared = Declared.among(vars(options))
    task = task_named(options.task, declared=declared)
    method, persons = build_method(options, task), task.persons
    if persons is not None and options.max_records is not None:
        raise InvalidInputError("max_records parts the records of a person; leave it out")
    # whose test records are whose is not known
    pool = attacked_pool(task, options.max_records) if persons is None else task.load(None)[0]
    split = split_pool(pool, options.seed, persons)
    if isinstance(method, Nonprivate):  # long enough to learn records by heart, and no unit
        checks.at_least_one("epochs", options.epochs)
        if method.updates is None:
            method = method.of_epochs(options.epochs, len(split.target_train))
        declared, persons = replace(declared, group_by=None), None
    config = RunConfig(
        *(task.name, method, Budget(options.epsilon, options.delta), options.accounting),
        options.features or method.features or plain_features(task),
        declared=declared,
        records_per_person=options.records_per_person,
    )
    trainer = RunTrainer(config, device, persons=persons)
    with status("training the target"):
        target = trainer(split.pool, [split.target_train], options.seed)
    return attack_trained(target, split, trainer, names, options.seed, options.shadow_models)


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
        rest = other_persons(options.task, Declared.among(vars(options)))
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
    target = Models([model])
    scores = attack_answers(target, members, others, names)
    if task.persons is not None:
        scores = on_persons(scores, train_of[chosen], test_of[rest_of])
    return AttackScores.of(target, members, others, scores, options.seed)


def _task_of_release(options: argparse.Namespace, name: str | None) -> Task:
    """The records of a release: of a public data set by name, else of the file that is given."""
    if name in TASKS:
        return task_named(name)
    if not options.task.startswith(OWN):
        raise InvalidInputError(
            f"{options.release} does not say where its records are; name them with --task, such as "
            "--task csv:FILE --schema FILE"
        )
    task = task_named(options.task, declared=Declared.among(vars(options)))
    if task.classes is None:
        raise InvalidInputError(
            "the attacks are on classes, and this table predicts something else"
        )
    return task


AUDIT_TEXT = """\
Try to contradict a claimed epsilon: train once on a task with canaries planted by fair coins, and
guess from the weights which of them were in.

  dpsur audit --epsilon 4
  dpsur audit --task npz:my.npz --method dpsur --canaries input
  dpsur audit --task csv:people.csv --schema people.json
  dpsur audit --task csv:visits.csv --schema visits.json --group-by patient
  dpsur audit --task npz:my.npz --model my:network --neighbour 20

A lower bound above the claimed epsilon contradicts the claim at the stated confidence. One below it
proves nothing. The exit status is 1 where a training under a proved accounting is contradicted.

With --neighbour there are no canaries: N updates of the training are made with and without a record
of their batch and otherwise the same random numbers. Sums must move by at most the clip norm, and
nothing else may differ. How far they moved is private.
docs/auditing.md says how to read the result.
"""


def set_up_audit(parser: argparse.ArgumentParser) -> None:
    parser.description = AUDIT_TEXT
    parser.usage = "dpsur audit [options]"
    parser.add_argument(
        "--confidence", type=float, default=0.95, help="of the bound (default: 0.95)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of draws and coins (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    one = parser.add_argument_group("the training")
    add_data_options(one)
    one.add_argument("--method", default="dpsgd", help=f"one of: {', '.join(METHODS)}")
    one.add_argument("--epsilon", type=float, default=4.0, help="claimed (default: 4)")
    one.add_argument("--delta", type=float, default=1e-5, help="default: 1e-5")
    one.add_argument(
        "--accounting", default=DEFAULT_ACCOUNTING, choices=ACCOUNTINGS, help="of the claim"
    )
    one.add_argument(
        "--canaries",
        choices=("gradient", "input"),
        default="gradient",
        help="records with a gradient of their own, or test records with random labels",
    )
    one.add_argument("--count", type=int, default=2000, help="canaries (default: 2000)")
    one.add_argument(
        "--records-per-person",
        type=int,
        metavar="K",
        help="make every canary a person who has it K times, of whom K records are used (default: "
        f"{DEFAULT_RECORDS} with --group-by, else 1, and every record as well)",
    )
    one.add_argument(
        "--neighbour", type=int, metavar="N", help="make N updates with and without one record"
    )
    one.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="with --neighbour, your network, as for train"
    )
    one.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    add_method_options(parser)


def run_audit(options: argparse.Namespace) -> int:
    checks.non_negative("seed", options.seed)
    checks.at_least_one("count", options.count)
    if options.neighbour is not None:
        return _neighbours(options)
    if options.model is not None:
        raise InvalidInputError(
            f"canaries are planted in the task's network; use --model {options.model} with "
            "--neighbour, or leave it out"
        )
    if options.records_per_person is None:
        options.records_per_person = 1 if options.group_by is None else DEFAULT_RECORDS
    checks.at_least_one("records_per_person", options.records_per_person)
    checks.probability("confidence", options.confidence)
    finding = _audit(options)
    print(json.dumps(finding.row()) if options.json else _text(finding), flush=True)
    proved = ACCOUNTINGS[finding.accounting].proved
    return 1 if proved and finding.verdict == CONTRADICTED else 0


def _neighbours(options: argparse.Namespace) -> int:
    session = build_task_session(config_of(options))
    with status(f"training, and making {options.neighbour} updates twice"):
        pairs = neighbour_test(session, options.neighbour)
    most, others = max(pair.moved for pair in pairs), [pair.same_otherwise for pair in pairs]
    sound = all(pair.sound for pair in pairs)
    row = {"updates": len(pairs), "moved": most, "same_otherwise": all(others), "sound": sound}
    if options.json:
        print(json.dumps(row))
        return 0 if sound else 1
    held = "nothing else differed" if all(others) else f"in {others.count(False)} more differed"
    print(
        f"{len(pairs)} updates with and without one record: sums moved by at most {most:.4f} of "
        f"what is charged (private: this follows from records), {held}"
    )
    print("sound" if sound else "NOT SOUND: one record does more than is charged")
    return 0 if sound else 1


def _text(finding: Finding) -> str:
    return (
        f"{finding.audit}: {finding.subject} ({finding.accounting})\n"
        f"  epsilon at delta {finding.delta:g}: claimed {format_epsilon(finding.claimed)}, lower "
        f"bound {finding.lower:.3f} at {finding.confidence:.4g} (of at most "
        f"{ceiling(finding.row()):.3f} that could be shown), p-value of the claim "
        f"{finding.p_value:.2g}\n"
        f"  {finding.verdict}"
    )


def _audit(options: argparse.Namespace) -> Finding:
    task = task_named(options.task, declared=Declared.among(vars(options)))
    method = build_method(options, task)
    device = choose_device(options.device)
    network, train, test = as_seen_by(method, task)
    planter: Planter
    if options.canaries == "gradient":
        clip = getattr(method, "max_grad_norm", None)
        if clip is None:
            raise InvalidInputError(
                f"gradient canaries are made for a clip norm, which the method {method.name} does "
                "not have; use --canaries input"
            )
        planter = gradient_canaries(options.count, clip)
    elif test is None or len(test) < options.count:
        raise InvalidInputError(
            f"--count {options.count} input canaries are taken from the test records of "
            f"{task.name}, which are {0 if test is None else len(test)}"
        )
    else:
        some = test.select(torch.arange(options.count))
        planter = input_canaries(some, int(test.targets.max()) + 1)
    with Streams(options.seed, device).at(SETUP).global_randomness(INIT):
        model = build_network(network)
    with ProgressBar(quiet=options.json) as bar:
        return audit_training(
            model,
            train,
            loss=task.loss,
            method=method,
            budget=Budget(options.epsilon, options.delta),
            accounting=options.accounting,
            planter=planter,
            subject=f"{method.name} on {task.name}",
            confidence=options.confidence,
            seed=options.seed,
            device=device,
            records_per_person=options.records_per_person,
            persons=task.persons,
            observers=[bar],
        )
