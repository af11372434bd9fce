"""`dpsur audit`: one training with canaries, and a lower bound on its epsilon."""

import argparse
import json

import torch

from dpsur import checks
from dpsur.attacks.targets import as_seen_by
from dpsur.audits.bounds import CONTRADICTED, Finding
from dpsur.audits.canaries import Planter, gradient_canaries, input_canaries
from dpsur.audits.neighbour import neighbour_test
from dpsur.audits.training import audit_training, ceiling, is_idle
from dpsur.cli.run_options import (
    add_data_options,
    add_method_options,
    build_method,
    config_of,
    declared_data,
)
from dpsur.errors import InvalidInputError
from dpsur.functional.persons import DEFAULT_RECORDS
from dpsur.functional.records import Examples
from dpsur.mechanism.streams import INIT, SETUP, Streams
from dpsur.methods import METHODS, Method, method_named
from dpsur.networks import build_network
from dpsur.privacy.accounting import ACCOUNTINGS, DEFAULT_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.privacy.statement import format_epsilon
from dpsur.runs.build_session import choose_device
from dpsur.runs.observers import ProgressBar
from dpsur.runs.tasks import build_task_session
from dpsur.status import status
from dpsur.tasks import Task, task_named

DESCRIPTION = """\
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
nothing else may differ.
docs/auditing.md says how to read the result.
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.usage = "dpsur audit [options]"
    parser.add_argument(
        "--confidence", type=float, default=0.95, help="of the bound (default: 0.95)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of draws and coins (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    one = parser.add_argument_group("the training")
    add_data_options(one, persons=True)
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
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
    session, _ = build_task_session(config_of(options))
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
        f"what is charged, {held}"
    )
    print("sound" if sound else "NOT SOUND: one record does more than is charged")
    return 0 if sound else 1


def _text(finding: Finding) -> str:
    figures = f"claimed {format_epsilon(finding.claimed)}, lower bound {finding.lower:.3f}"
    if finding.confidence < 1:
        figures += f" at {finding.confidence:.4g}"
    row = finding.row()
    most = ceiling(row)
    if most is not None:
        figures += f" (of at most {most:.3f} that could be shown)"
    if finding.exact is not None:
        figures += f", exact {finding.exact:.3f}"
    if finding.p_value is not None:
        figures += f", p-value of the claim {finding.p_value:.2g}"
    return (
        f"{finding.audit}: {finding.subject} ({finding.accounting})\n"
        f"  epsilon at delta {finding.delta:g}: {figures}\n"
        f"  {finding.verdict}"
        f"{'; the claim is beyond what so many runs can show' if is_idle(row) else ''}"
    )


def _audit(options: argparse.Namespace) -> Finding:
    task = task_named(options.task, declared=declared_data(options))
    kind = method_named(options.method)
    method = build_method(kind.name, options, dict(task.settings.get(kind.name, {})))
    device = choose_device(options.device)
    network, train, test = as_seen_by(method, task)
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
            planter=_planter(options, task, method, test),
            subject=f"{kind.name} on {task.name}",
            confidence=options.confidence,
            seed=options.seed,
            device=device,
            records_per_person=options.records_per_person,
            persons=task.persons,
            observers=[bar],
        )


def _planter(
    options: argparse.Namespace, task: Task, method: Method, test: Examples | None
) -> Planter:
    if options.canaries == "gradient":
        clip = getattr(method, "max_grad_norm", None)
        if clip is None:
            raise InvalidInputError(
                f"gradient canaries are made for a clip norm, which the method {method.name} does "
                "not have; use --canaries input"
            )
        return gradient_canaries(options.count, clip)
    if test is None or len(test) < options.count:
        raise InvalidInputError(
            f"--count {options.count} input canaries are taken from the test records of "
            f"{task.name}, which are {0 if test is None else len(test)}"
        )
    return input_canaries(test.select(torch.arange(options.count)), int(test.targets.max()) + 1)
