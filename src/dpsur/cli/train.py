"""`dpsur train`: train a private model, show progress, and survive interruptions."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpsur import checks
from dpsur.cli.evaluate import describe_guarantee
from dpsur.cli.options import add_method_options, build_method
from dpsur.cli.progress import ProgressBar
from dpsur.cli.run_settings import Settings, new_settings, store_settings, stored_settings
from dpsur.core.streams import INIT, Streams
from dpsur.errors import InterruptedRunError
from dpsur.methods import METHODS
from dpsur.privacy.accounting import ACCOUNTINGS
from dpsur.privacy.plan import Budget
from dpsur.runs.files import RunFolder
from dpsur.runs.fit import Run, choose_device, execute, prepare
from dpsur.runs.release import Origin
from dpsur.runs.session import Pace, Session, Speed
from dpsur.tasks import TASKS, Task, task_named
from dpsur.tasks.networks import build_network

DESCRIPTION = """\
Train a model under a privacy budget.

The folder given by --out gets release/ (weights, PRIVACY.md, privacy.json), written only at the end
and meant to be published, and private/ (checkpoints, metrics, curves), which must stay with you.
An interrupted run goes on with --resume, without spending more than its budget.
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.usage = "dpsur train --out DIR [options]\n       dpsur train --resume DIR"
    defaults = Settings()
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--task", help=f"one of: {', '.join(TASKS)}, or npz:FILE (default: {defaults.task})"
    )
    what.add_argument("--method", help=f"one of: {', '.join(METHODS)} (default: {defaults.method})")
    privacy = parser.add_argument_group("privacy")
    privacy.add_argument(
        "--epsilon", type=float, help=f"budget for one record (default: {defaults.epsilon})"
    )
    privacy.add_argument(
        "--delta", type=float, help=f"should be below 1/N (default: {defaults.delta})"
    )
    privacy.add_argument(
        "--accounting",
        help=f"one of: {', '.join(ACCOUNTINGS)} (default: {defaults.accounting}); "
        "published is the paper's analysis, which is not proved",
    )
    run_group = parser.add_argument_group("run")
    run_group.add_argument("--out", metavar="DIR", help="new folder for the run")
    run_group.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    run_group.add_argument("--device", help="cpu, cuda or auto (default: auto)")
    run_group.add_argument(
        "--seed",
        type=int,
        help="make the run repeatable; whoever knows the seed can undo the privacy "
        "(default: seeded by the operating system)",
    )
    run_group.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="TRIALS",
        help=f"trials between checkpoints (default: {defaults.checkpoint_every})",
    )
    run_group.add_argument(
        "--evaluate-every",
        type=int,
        metavar="STEPS",
        help="steps between tests on the public test set (default: 20 tests in a run)",
    )
    run_group.add_argument(
        "--capture",
        action=argparse.BooleanOptionalAction,
        help="replay whole trials as a CUDA graph where possible (default: yes)",
    )
    run_group.add_argument(
        "--tf32",
        action=argparse.BooleanOptionalAction,
        help="let CUDA round products to TF32; the statement records it (default: no)",
    )
    run_group.add_argument(
        "--show-private",
        action="store_true",
        help="show rejections, loss differences and timings on the terminal; do not share them",
    )
    run_group.add_argument("--quiet", action="store_true", help="no progress, only the result")
    run_group.add_argument("--json", action="store_true", help="print the result as JSON")
    add_method_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Start or resume a run and print its result."""
    if options.resume is not None:
        settings, folder = stored_settings(options)
    else:
        settings, folder = new_settings(options)
    with _stop_on_signal() as stop_requested:
        try:
            result = _train(settings, folder, options, stop_requested)
        except InterruptedRunError as error:
            raise InterruptedRunError(
                f"{error}; go on with: dpsur train --resume {folder.root}"
            ) from None
    _print_result(result, folder, as_json=options.json)
    return 0


def _train(
    settings: Settings,
    folder: RunFolder,
    options: argparse.Namespace,
    stop_requested: Callable[[], bool],
) -> Run:
    task = task_named(settings.task)
    session = _prepare(settings, task)
    folder.create()
    store_settings(folder, settings)
    quiet = options.quiet or options.json
    with ProgressBar(quiet=quiet, show_private=options.show_private) as bar:
        return execute(
            session,
            folder=folder,
            resume=options.resume is not None,
            observers=[bar],
            stop_requested=stop_requested,
            origin=Origin(task.name, _network(task)),
        )


def _prepare(settings: Settings, task: Task) -> Session:
    checks.at_least_one("checkpoint_every", settings.checkpoint_every)
    if settings.evaluate_every is not None:
        checks.at_least_one("evaluate_every", settings.evaluate_every)
    budget = Budget(settings.epsilon, settings.delta)
    method = build_method(settings.method, settings.options)
    device = choose_device(settings.device)
    train_set, test_set = task.load(None)
    with Streams(settings.seed, device).global_randomness(INIT):
        model = build_network(_network(task))
    return prepare(
        model,
        train_set,
        loss=task.loss,
        budget=budget,
        method=method,
        test_set=test_set,
        accounting=settings.accounting,
        seed=settings.seed,
        device=device,
        pace=Pace(settings.checkpoint_every, settings.evaluate_every),
        speed=Speed(settings.capture, settings.tf32),
    )


def _network(task: Task) -> Mapping[str, Any]:
    return task.networks[task.default_features]


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a clean stop; a second one stops at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        del frame
        asked = True
        signal.signal(number, signal.default_int_handler)
        print("\ndpsur: stopping after this trial...", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_result(run: Run, folder: RunFolder, *, as_json: bool) -> None:
    guarantee = dict(run.statement["guarantee"])
    release: Path = folder.release
    if as_json:
        result = {
            "scores": run.scores,
            "guarantee": guarantee,
            "epsilon": run.epsilon,
            "release": str(release),
        }
        print(json.dumps(result))
        return
    if run.scores is not None:
        print(f"test accuracy: {run.scores['accuracy']:.2%} (last iterate, public test set)")
    print(describe_guarantee(run.statement))
    print(f"release: {release} (to publish); private: {folder.private} (keep)")
