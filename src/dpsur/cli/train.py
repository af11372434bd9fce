"""`dpsur train`: train a private model, show progress, and survive interruptions."""

import argparse
import json
import math
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpsur.cli.evaluate import describe_guarantee
from dpsur.cli.parser import finite_number
from dpsur.cli.report import REPORT, write_report
from dpsur.cli.run_options import (
    ALL_GROUPS,
    add_method_options,
    add_run_options,
    agreed_config,
    join_ranks,
)
from dpsur.cli.terminal import Stop, stop_on_signal
from dpsur.config import RunConfig, data_facts
from dpsur.distributed import Ranks
from dpsur.errors import FileError, InterruptedRunError, InvalidInputError, describe_os_error
from dpsur.functional.persons import DEFAULT_RECORDS
from dpsur.options import flag
from dpsur.presets import AUTO, explain_auto
from dpsur.privacy.events import Ledger, LossTest
from dpsur.privacy.plan import NOT_HIDDEN
from dpsur.privacy.statement import PERSON, RECORD, format_epsilon, metric_text
from dpsur.reports.html import LivePage
from dpsur.runs.evaluation import doubts, objection, shown_scores
from dpsur.runs.files import RunFolder, finite, resume_command
from dpsur.runs.fit import execute
from dpsur.runs.input_features import InputFeatures
from dpsur.runs.observers import TRACKERS, Observer, ProgressBar, check_track, tracked
from dpsur.runs.planning import prospect
from dpsur.runs.result import Run
from dpsur.runs.schema_learning import learn_schema
from dpsur.runs.session import Session, drawing_records
from dpsur.runs.tasks import build_task_session, features_of, load_records, note_privately, task_of
from dpsur.status import is_silenced, notes, silenced, status
from dpsur.tasks.base import named_file
from dpsur.tasks.schema import Schema

DESCRIPTION = """\
Train a model under a privacy budget.

  dpsur train --out run                                      embedded digits, epsilon 3
  dpsur train --task mnist-5k --epsilon 1 --delta 1e-5 --out f
  dpsur train --task npz:own.npz --classes 10 --out own      your arrays
  dpsur train --task images:scans --dry-run                  your images; what it would cost
  dpsur train --task csv:people.csv --schema people.json     your table
  dpsur train --task jsonl:notes.jsonl --labels no,yes       your texts
  dpsur train --resume run                                   after an interruption

The folder of the run gets release/ (weights, PRIVACY.md, privacy.json), written only at the end and
meant to be published, and private/ (checkpoints, metrics), which must stay with you.
An interrupted run resumes with --resume, without spending more than its budget.
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.usage = "dpsur train [--out DIR] [options]\n       dpsur train --resume DIR"
    add_run_options(parser, ALL_GROUPS)
    more = parser.add_argument_group("resuming and output")
    more.add_argument("--resume", metavar="DIR", help="resume the run in this folder")
    more.add_argument(
        "--show-private",
        action="store_true",
        help="show rejections, loss differences and timings on the terminal; do not share them",
    )
    more.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would be done and what it would cost; train nothing and spend nothing",
    )
    more.add_argument(
        "--report",
        action="store_true",
        help="write DIR/report.html, which follows the run and ends as its report",
    )
    more.add_argument(
        "--track",
        choices=tuple(TRACKERS),
        help="log public figures of the run there, and no others",
    )
    more.add_argument(
        "--schema-epsilon",
        metavar="E",
        type=finite_number,
        help="learn the schema of csv:FILE or parquet:FILE privately, as a part of --epsilon, and "
        "keep it in --schema (default: FILE.schema.json beside the table); needs --target",
    )
    more.add_argument(
        "--target", metavar="COLUMN", action="append", help="the target of that schema"
    )
    more.add_argument("--quiet", action="store_true", help="no progress, only the result")
    more.add_argument("--json", action="store_true", help="print the result as JSON")
    add_method_options(parser)


def run(options: argparse.Namespace) -> int:
    ranks = join_ranks(options)
    quiet = options.quiet or options.json or not ranks.is_main
    with ranks.ends_together(), silenced(quiet):
        return _run(options, ranks)


def _run(options: argparse.Namespace, ranks: Ranks) -> int:
    if options.schema_epsilon is not None:
        _learn_schema(options, ranks)
    elif options.target is not None:
        raise InvalidInputError("--target is for --schema-epsilon; a schema names its target")
    config, folder = agreed_config(options, ranks)
    if options.dry_run:
        return _dry_run(config, options) if ranks.is_main else 0
    if options.show_private and config.hide_rejections != NOT_HIDDEN:
        raise InvalidInputError(
            f"--show-private shows what --hide-rejections {config.hide_rejections} hides; "
            "leave out one of them"
        )
    if options.track is not None:
        check_track(options.track)

    def and_now(what: str) -> str:
        """What to do about a run that has stopped before its end."""
        if folder.finished:
            return f"{what}; the release is complete: {folder.release}"
        if folder.checkpoint.exists():
            return f"{what}; resume with: {resume_command(folder.root)}"
        return f"{what}; nothing was trained, so run the same command again"

    with stop_on_signal() as stop:
        try:
            result = _train(config, folder, options, stop, ranks)
        except InterruptedRunError as error:
            raise InterruptedRunError(and_now(str(error))) from None
        except KeyboardInterrupt:
            raise InterruptedRunError(and_now("stopped")) from None
        except OSError as error:
            raise FileError(and_now(describe_os_error(error))) from error
    if ranks.is_main:
        if options.report:
            write_report(folder.root, folder.root / REPORT)
        _print_result(result, folder, note_privately(task_of(config), folder), options)
    return 0


def _learn_schema(options: argparse.Namespace, ranks: Ranks) -> None:
    """Learn the schema into its file, unless the same command has done so before."""
    if options.resume is not None:
        raise InvalidInputError("--resume has its schema; leave out --schema-epsilon")
    if ranks.size > 1:
        raise InvalidInputError(
            "one process learns a schema: first run dpsur data schema FILE --schema-epsilon E"
        )
    if options.target is None or options.task is None:
        raise InvalidInputError(
            "--schema-epsilon needs --task csv:FILE or parquet:FILE, and --target COLUMN"
        )
    for name in ("holdout", "group_by"):
        if getattr(options, name) is not None:
            raise InvalidInputError(
                f"{flag(name)} is not for a schema that is learned from all records, one by one; "
                "leave it out, or declare a schema"
            )
    table, epsilon = named_file(options.task), options.schema_epsilon
    whole = RunConfig().budget.epsilon if options.epsilon is None else options.epsilon
    if not epsilon < whole:
        raise InvalidInputError(
            f"--schema-epsilon {epsilon:g} leaves nothing of epsilon {whole:g} to train with; "
            "a tenth is usual"
        )
    delta = RunConfig().budget.delta if options.delta is None else options.delta
    file = (
        table.with_name(f"{table.name}.schema.json") if options.schema is None else options.schema
    )
    if not file.exists():
        if options.dry_run:
            raise InvalidInputError(
                "--dry-run spends nothing, and learning the schema would; first run dpsur data "
                "schema FILE --schema-epsilon E"
            )
        schema = learn_schema(table, options.target, epsilon, delta)
        schema.save(file)
        used = len(schema.columns) + len(schema.target)
        text = f"{file}: learned {used} columns at epsilon {epsilon:g}, a part of the run's"
        print(f"dpsur: {text}", file=sys.stderr)
    learned = Schema.load(file)
    asked = (epsilon, delta, options.target)
    if learned.learned is None or asked != (
        learned.learned.epsilon, learned.learned.delta, list(learned.target)
    ):  # fmt: skip
        raise InvalidInputError(
            f"{file} exists and is no schema that was learned with these options; name another "
            "file with --schema, or leave out --schema-epsilon to use it"
        )
    options.schema = file


def _explain(config: RunConfig) -> None:
    """Say what the preset auto has chosen and why. Options that were given take precedence."""
    task = task_of(config)
    facts = data_facts(task, vars(config))
    budget = config.budget.epsilon, config.budget.delta
    options = asdict(config.method)
    notes(explain_auto(facts, config.features, config.normalisation, options, budget))
    notes(["override any of these by its option; naming a method turns auto off"])


def _announce(session: Session) -> None:
    """Say what is charged before training, and how candidates are tested. All of it is public."""
    plan, test, lines = session.plan, session.plan.typical.gate, []
    if plan.setup:
        spent = format_epsilon(plan.spent(Ledger(setup=plan.setup)))
        lines.append(f"private statistics of the features are charged first: epsilon {spent} alone")
    if test is not None:
        size = round(test.sample_rate * session.problem.size)
        margin = ""
        if isinstance(test, LossTest):
            margin = f" by C_v = {getattr(session.method, 'loss_clip', math.nan):g} or more"
        lines.append(
            f"every candidate is tested on about {size} fresh records: one that is better{margin} "
            + session.method.acceptance_in_words(test)
        )
        lines.append(
            "every trial is charged, so how many are rejected is public"
            if not plan.charges_accepted
            else f"the run may take up to {plan.trials} trials; how many are rejected stays "
            "private (--show-private shows it to you alone)"
        )
    notes(lines)


def _dry_run(config: RunConfig, options: argparse.Namespace) -> int:
    """Print the plan of a run: its records count and have a shape, but nothing is computed of them.

    Whether the model takes its inputs is checked by the run itself.
    """
    task, features = task_of(config), features_of(config)
    facts, method = data_facts(task, vars(config)), config.method
    records = facts.records or len(load_records(config).train)
    if config.sampling == RECORD:
        method = drawing_records(config, config.records_per_person or DEFAULT_RECORDS)
    asked = InputFeatures(features, config.normalisation, config.budget, table=task.table)
    with status("choosing the noise"):
        found = prospect(method, records, config.budget, config.charged_by, asked.charges)
    if options.json:
        print(json.dumps({"records": records, **asdict(found)}))
        return 0
    if config.preset == AUTO:
        _explain(config)
    print(f"{records} {facts.unit}s, {found.run}")
    if found.right_guesses is not None:
        person = RECORD if config.declared.group_by is None else PERSON
        print(
            f"epsilon {config.budget.epsilon:g} at delta {config.budget.delta:g}: someone who "
            f"guesses whether a given {person} was used, at even odds, is right in at most "
            f"{found.right_guesses:.0%} of the cases"
        )
    print("nothing was trained and nothing is spent; leave out --dry-run to train")
    return 0


def _train(
    config: RunConfig,
    folder: RunFolder,
    options: argparse.Namespace,
    stop: Stop,
    ranks: Ranks,
) -> Run:
    # A run that was killed before its first checkpoint has trained nothing and starts again.
    resume = ranks.decided(lambda: options.resume is not None and folder.checkpoint.exists())
    session = build_task_session(config, resumed=folder if resume else None)
    if config.preset == AUTO and not (is_silenced() or options.resume):
        _explain(config)
    _announce(session)
    if ranks.is_main:
        folder.create()
    if not (options.json or options.resume):
        for text in task_of(config).warnings:
            print(f"dpsur: warning: {text}", file=sys.stderr)
    if not (options.resume or options.out):
        notes([f"writing the run to {folder.root}"])
    observers: list[Observer] = [stop]
    with ExitStack() as open_until_the_end:
        if options.track is not None and ranks.is_main:
            following = tracked(options.track, session.plan, session.method.label, folder.root)
            observers.append(open_until_the_end.enter_context(following))
        if options.report and ranks.is_main:
            live = LivePage(folder.root / REPORT, folder.root.name)
            observers.append(open_until_the_end.enter_context(live))
        bar = ProgressBar(quiet=is_silenced(), show_private=options.show_private)
        return execute(
            session,
            folder=folder,
            resume=resume,
            observers=[open_until_the_end.enter_context(bar), *observers],
            stop_requested=lambda: stop.asked,
            store_config=True,
        )


def _print_result(
    run: Run, folder: RunFolder, noted: list[Path], options: argparse.Namespace
) -> None:
    guarantee, release = run.statement["guarantee"], folder.release
    if options.json:
        result: dict[str, Any] = {
            "scores": run.scores,
            "guarantee": guarantee,
            "epsilon": run.epsilon,
            "release": str(release),
        }
        for name in ("metrics", "holdout"):
            if name in run.statement:
                result[name] = run.statement[name]
        print(json.dumps(finite(result), allow_nan=False))
        return
    if run.scores is not None:
        (released,) = run.statement["released"]
        (name, score), *others = shown_scores(run.scores)
        count = run.statement["test"]["records"]
        print(f"test {name}: {score} ({released}, {count:,} public test records)")
        if others:
            print(f"  {', '.join(f'{other} {figure}' for other, figure in others)}")
        if (text := objection(run.scores)) is not None:
            print(f"warning: {text}")
    if "holdout" in run.statement:
        held = run.statement["holdout"]
        shown = ", ".join(metric_text(row) for row in held["figures"])
        print(f"held-out records ({held['records']:,}, noisy): {shown}")
        for text in doubts(held["figures"]):
            print(f"warning: {text}")
    metrics = run.statement.get("metrics", [])
    for row in (row for row in metrics if row["after"] == metrics[-1]["after"]):
        rate = (
            "" if row["learning_rate"] is None else f" at learning rate {row['learning_rate']:.3g}"
        )
        print(f"after {row['after']}{rate}: {metric_text(row)} (noisy, paid)")
    print(describe_guarantee(run.statement))
    public = not run.plan.charges_accepted
    if run.plan.typical.gate is not None and (public or options.show_private):
        ledger = run.private.ledger
        rejected = ledger.trials - ledger.updates
        print(
            f"{ledger.trials} trials: {ledger.updates} accepted, {rejected} rejected "
            f"({'public' if public else 'private: do not share'})"
        )
    kept = "".join(f"; values that the {path.stem} does not declare: {path}" for path in noted)
    private = math.isfinite(math.inf if guarantee["epsilon"] is None else guarantee["epsilon"])
    use = "to publish" if private else "not private: do not publish"
    print(f"release: {release} ({use}); private: {folder.private} (keep{kept})")
