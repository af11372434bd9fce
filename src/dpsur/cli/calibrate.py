"""`dpsur calibrate`: what to use for a budget."""

import argparse
import json

from dpsur import checks
from dpsur.cli.account import add_mechanism_options, described_test, rate, setup_events
from dpsur.errors import InvalidInputError
from dpsur.privacy.accounting import ACCOUNTINGS, DEFAULT_ACCOUNTING, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.calibrate import design_gate
from dpsur.privacy.events import SampledGaussian, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import Request, make_plan
from dpsur.privacy.statement import format_epsilon
from dpsur.status import status

DESCRIPTION = """\
Print what to use for a budget.

Given --updates (or --trials under every-trial), the noise multiplier; given --noise-multiplier, how
many updates fit; given both, whether they fit. With --test-share, the strongest test that this
share of the budget buys, and the noise multiplier beside it.

  dpsur calibrate --dataset-size 60000 --batch-size 2048 --updates 600 --epsilon 3 --delta 1e-5 \\
      --val-batch-size 256 --accept-ratio 2

Without --batch-size, or without any of --updates, --trials and --noise-multiplier, what is missing
is what `dpsur train` takes by itself (preset auto, for a model whose learning rate is not known):

  dpsur calibrate --dataset-size 20000 --epsilon 3 --delta 1e-5

With --blocks, noise of updates and of tests for the gate block, whose search comes on top of
--updates:

  dpsur calibrate --dataset-size 60000 --batch-size 2048 --updates 600 --blocks 4 --epsilon 3 \\
      --delta 1e-5
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    add_mechanism_options(parser, noise_required=False)
    parser.add_argument("--updates", type=int, metavar="T", help="accepted updates")
    parser.add_argument("--trials", type=int, metavar="M", help="trials (accounting every-trial)")
    parser.add_argument("--blocks", type=int, metavar="M", help="short blocks of the gate block")
    parser.add_argument(
        "--block-updates", type=int, metavar="n", help="updates in each of them (default: by rule)"
    )
    parser.add_argument("--epsilon", type=float, required=True, help="the budget")
    parser.add_argument("--delta", type=float, required=True, help="of (epsilon, delta)")
    parser.add_argument(
        "--accounting",
        default=DEFAULT_ACCOUNTING,
        help=f"one of: {', '.join(ACCOUNTINGS)} (default: {DEFAULT_ACCOUNTING})",
    )
    parser.add_argument(
        "--test-share",
        type=float,
        metavar="SHARE",
        help="share of epsilon, in (0, 1), to spend on a test; needs --updates and "
        "--val-batch-size. Under proven the answer is --accept-ratio, elsewhere "
        "--val-noise-multiplier (at --accept-threshold, default 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    budget = Budget(options.epsilon, options.delta)
    accounting = accounting_named(options.accounting)
    blocks = options.blocks is not None or options.block_updates is not None
    if blocks or _leaves_to_auto(options):
        with status(f"choosing noise of updates and tests for epsilon {budget.epsilon:g}"):
            return _print(_blocks(options, budget), as_json=options.json)
    sample_rate = rate("batch_size", options.batch_size, options.dataset_size)
    count = _count(options, accounting.charges)
    if options.test_share is not None:
        with status(f"choosing a test and the noise for epsilon {budget.epsilon:g}"):
            answer = _designed(options, budget, sample_rate, count)
    else:
        test = described_test(options)
        request = Request(
            trial_with=lambda noise: Trial(SampledGaussian(sample_rate, noise), test),
            noise_multiplier=options.noise_multiplier,
            count=count,
            default_count=0,
            setup=setup_events(options),
        )
        if options.noise_multiplier is None and count is None:
            raise InvalidInputError(
                "give --noise-multiplier, --updates or --trials, or two of them"
            )
        with status(f"choosing noise or count for epsilon {budget.epsilon:g}"):
            answer = _answer(make_plan(request, budget, accounting.name))
    return _print(answer, as_json=options.json)


def _leaves_to_auto(options: argparse.Namespace) -> bool:
    """Whether a batch size or a length is missing that the preset auto has."""
    others = ("val_batch_size", "accept_ratio", "accept_threshold", "test_share", "trials")
    if any(getattr(options, name) is not None for name in others):
        if options.batch_size is None:
            raise InvalidInputError("a test of candidates needs --batch-size; give it")
        return False
    return options.batch_size is None or (
        options.updates is None and options.noise_multiplier is None
    )


def _print(answer: dict[str, float | int | None], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(answer))
        return 0
    for key, value in answer.items():
        if value is not None:
            shown = format_epsilon(value) if key == "epsilon" else f"{value:g}"
            print(f"{key.replace('_', ' '):<22} {shown}")
    return 0


def _count(options: argparse.Namespace, charges: str) -> int | None:
    tested = options.val_batch_size is not None
    fixed, random = ("trials", "updates") if charges == "trials" else ("updates", "trials")
    if not tested:
        both = {options.trials, options.updates} - {None}
        if len(both) > 1:
            raise InvalidInputError("without a test every trial is an update; give one of the two")
        found: int | None = both.pop() if both else None
    else:
        if getattr(options, random) is not None:
            raise InvalidInputError(
                f"the {options.accounting} accounting fixes {fixed}; give --{fixed}, not --{random}"
            )
        found = getattr(options, fixed)
    if found is not None:
        checks.at_least_one(fixed, found)
    return found


def _answer(plan: Plan) -> dict[str, float | int | None]:
    assert isinstance(plan.typical.update, SampledGaussian)
    return {
        "noise_multiplier": plan.typical.update.noise_multiplier,
        "updates": plan.updates,
        "trials": plan.trials if plan.updates is None else None,
        "trial_cap": None if plan.updates is None else plan.trials,
        "epsilon": plan.epsilon(),
    }


def _blocks(options: argparse.Namespace, budget: Budget) -> dict[str, float | int | None]:
    """What the gate block settles to for a run of so many updates."""
    from dpsur.methods import Dpsgd  # with it torch, which the other answers do not need

    given = (options.trials, options.accept_ratio, options.accept_threshold, options.test_share)
    if given != (None,) * 4:
        raise InvalidInputError(
            "--blocks takes none of --trials, --accept-ratio, --accept-threshold and --test-share"
        )
    noise = ("noise_multiplier", "val_noise_multiplier")
    names = ("batch_size", "val_batch_size", "updates", "blocks", "block_updates", *noise)
    method = Dpsgd(gate="block", **{name: getattr(options, name) for name in names})
    size, setup = options.dataset_size, setup_events(options)
    settled, plan = method.resolve(size, budget, options.accounting, setup)
    assert plan.tests > 0
    return {
        "batch_size": settled.batch_size,
        "noise_multiplier": plan.update.noise_multiplier,
        "val_noise_multiplier": plan.test.noise_multiplier,
        "updates": settled.updates,
        "blocks": settled.blocks,
        "block_updates": settled.block_updates,
        "tests": len(plan.blocks),
        "epsilon": plan.epsilon(),
    }


def _designed(
    options: argparse.Namespace, budget: Budget, sample_rate: float, count: int | None
) -> dict[str, float | int | None]:
    given = (options.accept_ratio, options.val_noise_multiplier, options.noise_multiplier)
    if count is None or options.val_batch_size is None or given != (None, None, None):
        raise InvalidInputError(
            "--test-share needs --val-batch-size and a count, and chooses the noise multiplier and "
            "the test by itself"
        )
    val_rate = rate("val_batch_size", options.val_batch_size, options.dataset_size)
    plan = design_gate(
        budget,
        options.accounting,
        sample_rate=sample_rate,
        val_sample_rate=val_rate,
        count=count,
        share=options.test_share,
        accept_threshold=options.accept_threshold or 0.0,
        setup=setup_events(options),
    )
    assert plan.typical.gate is not None
    test = plan.typical.gate
    return {
        **_answer(plan),
        "accept_ratio": test.accept_max / test.accept_min,
        "val_noise_multiplier": getattr(test, "noise_multiplier", None),
        "accept_threshold": getattr(test, "accept_threshold", None),
    }
