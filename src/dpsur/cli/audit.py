"""`dpsur audit`: lower bounds on epsilon, held against what is claimed."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dpsur import checks
from dpsur.attacks.targets import as_seen_by
from dpsur.audits.bounds import CONTRADICTED, Finding
from dpsur.audits.canaries import Planter, gradient_canaries, input_canaries
from dpsur.audits.findings import ceiling, draw_findings, is_idle
from dpsur.audits.mechanism import audit_mechanisms
from dpsur.audits.negative_controls import FAULTS, SOUND
from dpsur.audits.repeated import PLACES, TINY, audit_repeated
from dpsur.audits.training import audit_training
from dpsur.cli.parser import figure_path
from dpsur.cli.run_options import add_method_options, build_method
from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from dpsur.mechanism.streams import INIT, SETUP, Streams
from dpsur.methods import METHODS, Method, method_named
from dpsur.networks import build_network
from dpsur.privacy.accounting import ACCOUNTINGS, DEFAULT_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.privacy.statement import format_epsilon
from dpsur.runs.build_session import choose_device
from dpsur.tasks import DEFAULT_TASK, Task, task_named

DESCRIPTION = """\
Try to contradict a claimed epsilon.

  dpsur audit                                  tiny problems under every accounting
  dpsur audit --against broken                 tiny trainings with faults put in on purpose
  dpsur audit --against training --epsilon 4   one training of a task, with canaries in it

A lower bound above the claimed epsilon contradicts the claim at the stated confidence. One below it
proves nothing. The exit status is 1 where a sound training under a proved accounting is
contradicted. docs/auditing.md says how to read the result.
"""
TARGETS = ("mechanism", "broken", "training")


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.usage = "dpsur audit [--against WHAT] [options]"
    parser.add_argument(
        "--against", choices=TARGETS, default="mechanism", help="what to audit (default: mechanism)"
    )
    parser.add_argument(
        "--confidence",
        type=float,
        help="of the bounds (default: 0.999, for a training 0.95)",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        help="runs with and without the record (default: 50000; in the loop, for broken, 1500)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of draws and coins (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per finding")
    parser.add_argument(
        "--plot", type=figure_path, metavar="FILE", help="draw claims and bounds (PNG, SVG or PDF)"
    )
    one = parser.add_argument_group("one training (--against training)")
    one.add_argument("--task", default=DEFAULT_TASK, help=f"default: {DEFAULT_TASK}")
    one.add_argument("--classes", type=int, metavar="K", help="number of classes of npz:FILE")
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
        "--fault",
        choices=(SOUND.name, *FAULTS),
        default=SOUND.name,
        metavar="FAULT",
        help=f"break it on purpose: {', '.join(FAULTS)}",
    )
    one.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    add_method_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Audit and print what was found."""
    _check(options)
    audits = {"mechanism": _mechanisms, "broken": _broken, "training": _training}
    findings = []
    for finding in audits[options.against](options):
        findings.append(finding)
        if options.json:
            print(json.dumps(finding.row()), flush=True)
        else:
            print(_text(finding), flush=True)
    if options.plot is not None:
        _plot(options.plot, findings)
    alarms = [f for f in findings if f.verdict == CONTRADICTED and _is_sound(f)]
    return 1 if alarms else 0


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers that no audit can be made with."""
    checks.non_negative("seed", options.seed)
    checks.at_least_one("count", options.count)
    if options.repetitions is not None:
        checks.at_least_one("repetitions", options.repetitions)
    if options.confidence is not None:
        checks.probability("confidence", options.confidence)


def _is_sound(finding: Finding) -> bool:
    proved = ACCOUNTINGS[finding.accounting].proved
    return proved and finding.details.get("fault", SOUND.name) == SOUND.name


def _text(finding: Finding) -> str:
    """Three lines a finding."""
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


def _mechanisms(options: argparse.Namespace) -> Iterator[Finding]:
    known: dict[str, Any] = {"seed": options.seed}
    if options.repetitions is not None:
        known["repetitions"] = options.repetitions
    if options.confidence is not None:
        known["confidence"] = options.confidence
    return audit_mechanisms(**known)


def _broken(options: argparse.Namespace) -> Iterator[Finding]:
    repetitions = options.repetitions or 1500
    confidence = options.confidence or 0.999
    for name, tiny in TINY.items():
        faults = [SOUND, *(FAULTS[fault] for fault, place in PLACES.items() if place == name)]
        for fault in faults:
            yield audit_repeated(tiny, fault, repetitions, confidence, options.seed)


def _training(options: argparse.Namespace) -> Iterator[Finding]:
    task, kind = task_named(options.task, options.classes), method_named(options.method)
    method = build_method(kind.name, options, dict(task.settings.get(kind.name, {})))
    device = choose_device(options.device)
    network, train, test = as_seen_by(method, task)
    with Streams(options.seed, device).at(SETUP).global_randomness(INIT):
        model = build_network(network)
    fault = SOUND if options.fault == SOUND.name else FAULTS[options.fault]
    yield audit_training(
        model,
        train,
        loss=task.loss,
        method=method,
        budget=Budget(options.epsilon, options.delta),
        accounting=options.accounting,
        planter=_planter(options, task, method, test),
        subject=f"{kind.name} on {task.name}, fault: {fault.name}",
        confidence=options.confidence or 0.95,
        seed=options.seed,
        device=device,
        fault=fault,
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


def _plot(path: Path, findings: list[Finding]) -> None:
    from dpsur import figure_style as style

    with style.common():
        draw_findings([finding.row() for finding in findings]).savefig(path, dpi=200)
