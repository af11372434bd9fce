"""`dpsur train`: train a private model, show progress, and survive interruptions."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from dpsur.cli.evaluate import describe_guarantee
from dpsur.cli.options import add_method_options
from dpsur.cli.progress import ProgressBar
from dpsur.cli.run_settings import RUNS, Settings, new_settings, stored_settings, task_run
from dpsur.cli.signals import Stop, stop_on_signal
from dpsur.errors import FileError, InterruptedRunError, InvalidInputError, describe_os_error
from dpsur.features import FEATURES
from dpsur.methods import METHODS
from dpsur.presets import PRESETS
from dpsur.privacy.accounting import ACCOUNTINGS
from dpsur.privacy.plans.rejections import NOT_HIDDEN, WAYS_TO_HIDE
from dpsur.runs.checkpoint import load_statistics
from dpsur.runs.files import RunFolder, finite, resume_command
from dpsur.runs.fit import execute
from dpsur.runs.input_features import NORMALISATIONS
from dpsur.runs.release import as_published
from dpsur.runs.result import Run
from dpsur.runs.tasks import prepare_task
from dpsur.runs.validation import check_single_process
from dpsur.status import silenced
from dpsur.tasks import TASKS

DESCRIPTION = """\
Train a model under a privacy budget.

The folder of the run gets release/ (weights, PRIVACY.md, privacy.json), written only at the end and
meant to be published, and private/ (checkpoints, metrics, curves), which must stay with you.
An interrupted run continues with --resume, without spending more than its budget.
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.usage = "dpsur train [--out DIR] [options]\n       dpsur train --resume DIR"
    defaults = Settings()
    _add_what(parser, defaults)
    privacy = parser.add_argument_group("privacy")
    privacy.add_argument(
        "--epsilon",
        type=float,
        help=f"budget for adding or removing one record (default: {defaults.epsilon})",
    )
    privacy.add_argument(
        "--delta",
        type=float,
        help=f"of (epsilon, delta); should be well below 1/N (default: {defaults.delta})",
    )
    privacy.add_argument(
        "--accounting",
        help=f"one of: {', '.join(ACCOUNTINGS)} (default: {defaults.accounting}); "
        "published is the paper's analysis, which is not proved",
    )
    privacy.add_argument(
        "--hide-rejections",
        metavar="WAY",
        help=f"one of: {', '.join(WAYS_TO_HIDE)} (default: {defaults.hide_rejections}), for runs "
        "that can be watched: constant makes a number of trials that is fixed in advance, dropping "
        "those after the last update, so that time tells nothing of rejections; delay is the "
        "paper's random waiting after accepted updates, which only blurs it",
    )
    run_group = parser.add_argument_group("run")
    run_group.add_argument(
        "--out",
        metavar="DIR",
        help=f"new folder for the run (default: {RUNS}/TASK-METHOD, numbered where that is taken)",
    )
    run_group.add_argument("--resume", metavar="DIR", help="resume the run in this folder")
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
        "--bf16",
        action=argparse.BooleanOptionalAction,
        help="compute layers in bfloat16, but norms, sums, noise and tests in float32; the "
        "statement records it (default: no)",
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


def _add_what(parser: argparse.ArgumentParser, defaults: Settings) -> None:
    """The options that say what is trained on what."""
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--task",
        help=f"one of: {', '.join(TASKS)}, or npz:FILE for records of your own "
        f"(default: {defaults.task})",
    )
    what.add_argument("--method", help=f"one of: {', '.join(METHODS)} (default: {defaults.method})")
    what.add_argument(
        "--preset",
        help=f"one of: {', '.join(PRESETS)}; settings for the method, the task and epsilon 1, 2, 3 "
        "or 4: the paper's, or (dpsgd, dpsur) the best known here; options that are given beside "
        "it take precedence",
    )
    what.add_argument(
        "--features",
        help=f"one of: {', '.join(FEATURES)} (default: the method's, else the task's)",
    )
    what.add_argument(
        "--normalisation",
        help=f"of the features, one of: {', '.join(NORMALISATIONS)}; private statistics are "
        "charged (default: group for scattering, else none)",
    )
    what.add_argument("--activation", help="of the task's network: tanh or relu (default: tanh)")
    what.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function of your own, without arguments, that builds the network; its module must "
        "be on PYTHONPATH (default: the task's network)",
    )
    what.add_argument(
        "--data-dir",
        metavar="DIR",
        help="folder of the data (default: $DPSUR_DATA, or the downloads in the cache)",
    )
    what.add_argument(
        "--classes",
        type=int,
        metavar="K",
        help="number of classes of npz:FILE, which becomes public (default: the array classes of "
        "the file)",
    )
    what.add_argument(
        "--keep-fraction",
        type=float,
        metavar="F",
        help="train on about this fraction of the records, each kept or left out by a draw of its "
        "own; the fraction is public, and epsilon is that of the records that are kept",
    )
    what.add_argument(
        "--max-updates",
        type=int,
        metavar="N",
        help="end the planned run after so many updates, to try things out; noise stays as planned",
    )


def run(options: argparse.Namespace) -> int:
    """Start or resume a run and print its result."""
    check_single_process()
    if options.resume is not None:
        settings, folder = stored_settings(options)
    else:
        settings, folder = new_settings(options)
    if options.show_private and settings.hide_rejections != NOT_HIDDEN:
        raise InvalidInputError(
            f"--show-private shows what --hide-rejections {settings.hide_rejections} hides; "
            "leave out one of them"
        )
    with stop_on_signal() as stop:
        try:
            result = _train(settings, folder, options, stop)
        except InterruptedRunError as error:
            raise InterruptedRunError(f"{error}; {_next_command(folder)}") from None
        except KeyboardInterrupt:
            raise InterruptedRunError(f"stopped; {_next_command(folder)}") from None
        except OSError as error:
            raise FileError(f"{describe_os_error(error)}; {_next_command(folder)}") from error
    _print_result(result, folder, as_json=options.json)
    return 0


def _train(
    settings: Settings,
    folder: RunFolder,
    options: argparse.Namespace,
    stop: Stop,
) -> Run:
    # A run that was killed before its first checkpoint has trained nothing and starts again.
    resume = options.resume is not None and folder.checkpoint.exists()
    released = load_statistics(folder.checkpoint) if resume else None
    with silenced(options.quiet or options.json):
        session, origin = prepare_task(task_run(settings), released=released)
    folder.create()
    quiet = options.quiet or options.json
    if not (quiet or options.resume or options.out):
        print(f"dpsur: the run goes to {folder.root}", file=sys.stderr)
    with ProgressBar(quiet=quiet, show_private=options.show_private) as bar:
        return execute(
            session,
            folder=folder,
            resume=resume,
            observers=[bar, stop],
            stop_requested=lambda: stop.asked,
            origin=origin,
            config=asdict(settings),
        )


def _next_command(folder: RunFolder) -> str:
    """What to do about a run that has stopped before its end."""
    if folder.finished:
        return f"the release is complete: {folder.release}"
    if folder.checkpoint.exists():
        return f"resume with: {resume_command(folder.root)}"
    return "nothing was trained, so run the same command again"


def _print_result(run: Run, folder: RunFolder, *, as_json: bool) -> None:
    guarantee = as_published(run.statement)["guarantee"]
    release: Path = folder.release
    if as_json:
        result = {
            "scores": run.scores,
            "guarantee": guarantee,
            "epsilon": run.epsilon,
            "release": str(release),
        }
        print(json.dumps(finite(result), allow_nan=False))
        return
    if run.scores is not None and "accuracy" in run.scores:
        (released,) = run.statement["released"]
        print(f"test accuracy: {run.scores['accuracy']:.2%} ({released}, public test set)")
    print(describe_guarantee(run.statement))
    print(f"release: {release} (to publish); private: {folder.private} (keep)")
