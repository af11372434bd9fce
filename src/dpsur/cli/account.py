"""`dpsur account` and `dpsur calibrate`: what a run costs, and what a budget affords."""

import argparse
import json
import sys
from collections.abc import Mapping

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.options import flag
from dpsur.privacy.accountants.noise_tail import check_tail
from dpsur.privacy.accounting import (
    ACCOUNTINGS,
    DEFAULT_ACCOUNTING,
    FIGURES,
    Charges,
    accounting_named,
    figures,
    planned_charges,
)
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    CoinTest,
    Event,
    Gaussian,
    LossTest,
    SampledGaussian,
    Test,
    Trial,
    feature_mean,
    feature_statistics,
)
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import Request, block_plan, design_gate, make_plan
from dpsur.privacy.second_opinion import Opinion, opinions
from dpsur.privacy.statement import format_epsilon
from dpsur.status import status

DESCRIPTION = """\
Print epsilon under each accounting.

  dpsur account --dataset-size 60000 --batch-size 2048 --noise-multiplier 4 \\
      --val-batch-size 256 --val-noise-multiplier 1.3 --accept-threshold -1 \\
      --updates 651 --delta 1e-5

proven       certified for selective release, the number of accepted updates fixed in advance
proven_lower what an adversary attains at the same orders: no analysis of this kind gives less
proven_pld   the same guarantee by privacy loss distributions: tighter (accounting proven-pld)
every_trial  every trial charged, their number fixed in advance by --trials
published    the paper's analysis: a claim that is not proved for selective release

Below them stands what dp-accounting, an independent library, finds for the same mechanisms. It does
not know selective release, so proven is held against the same updates without selection. A figure
that is lower than that of dp-accounting is an error (exit status 1).

The gate block charges every update and every test; give the updates before each test:

  dpsur account --dataset-size 60000 --batch-size 2048 --noise-multiplier 8 \\
      --block-sizes 0,0,40,40,40,600 --val-noise-multiplier 60 --delta 1e-5
"""
LABELS = {
    "proven": "proven",
    "proven_lower": "proven, lower value",
    "proven_pld": "proven, by loss distributions",
    "every_trial": "every trial charged",
    "published": "published (a claim, not proved)",
}


def set_up(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add_mechanism_options(parser, noise_required=True)
    parser.add_argument("--updates", type=int, metavar="T", help="accepted updates")
    parser.add_argument("--trials", type=int, metavar="M", help="trials, for every_trial")
    parser.add_argument(
        "--block-sizes",
        metavar="SIZES",
        help="updates before each test of the gate block, such as 0,0,40,40,40,600",
    )
    parser.add_argument("--delta", type=float, required=True, help="of (epsilon, delta)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="hold the figures against dp-accounting, in about a second (default: unless --json)",
    )
    parser.set_defaults(run=run)


def add_mechanism_options(parser: argparse.ArgumentParser, *, noise_required: bool) -> None:
    group = parser.add_argument_group("the mechanism")
    group.add_argument("--dataset-size", type=int, required=True, metavar="N", help="records")
    group.add_argument(
        "--batch-size", type=int, required=noise_required, metavar="B", help="expected batch"
    )
    group.add_argument(
        "--noise-multiplier",
        type=float,
        required=noise_required,
        metavar="S",
        help="training noise relative to the clip norm",
    )
    group.add_argument("--val-batch-size", type=int, metavar="BV", help="expected test batch")
    group.add_argument(
        "--val-noise-multiplier", type=float, metavar="SV", help="noise of the paper's gate"
    )
    group.add_argument(
        "--accept-threshold", type=float, metavar="BETA", help="threshold of the paper's gate"
    )
    group.add_argument(
        "--accept-ratio",
        type=float,
        metavar="R",
        help="largest over smallest acceptance probability of any other test, as the coin gate",
    )
    group.add_argument(
        "--feature-statistics",
        type=float,
        metavar="SIGMA",
        help="noise multiplier of private feature statistics, released before training (a run with "
        "normalisation private uses 8); their clip bounds are charged with them",
    )
    group.add_argument(
        "--feature-mean",
        type=float,
        metavar="SIGMA",
        help="noise multiplier of a private mean of features of norm 1, released before training "
        "(normalisation mean)",
    )


def rate(name: str, size: int, dataset_size: int) -> float:
    checks.at_least_one("dataset_size", dataset_size)
    checks.at_least_one(name, size)
    if size > dataset_size:
        raise InvalidInputError(
            f"{name} {size} is larger than the data set of {dataset_size} records",
            code="batch-too-large",
        )
    return size / dataset_size


def described_test(options: argparse.Namespace) -> Test | None:
    """The test that the options describe; half a description is an error."""
    loss = (options.val_noise_multiplier, options.accept_threshold)
    if options.val_batch_size is None:
        if options.accept_ratio is not None or loss != (None, None):
            raise InvalidInputError("a test needs --val-batch-size")
        return None
    sample_rate = rate("val_batch_size", options.val_batch_size, options.dataset_size)
    if options.accept_ratio is not None and loss == (None, None):
        return CoinTest(sample_rate, options.accept_ratio)
    if options.accept_ratio is None and None not in loss:
        return LossTest(sample_rate, *loss)
    raise InvalidInputError(
        "a test needs either --val-noise-multiplier and --accept-threshold, or --accept-ratio"
    )


def setup_events(options: argparse.Namespace) -> tuple[Event, ...]:
    """What statistics or a mean of features cost, as a run with them is charged."""
    statistics, mean = options.feature_statistics, options.feature_mean
    charged = () if statistics is None else feature_statistics(statistics)
    return charged if mean is None else (*charged, *feature_mean(mean))


def run(options: argparse.Namespace) -> int:
    if not 0 < options.delta < 1:
        raise InvalidInputError(f"delta must be in (0, 1), got {options.delta}")
    if options.block_sizes is not None:
        return _print_figures(*_block_figures(options), options)
    if options.updates is None and options.trials is None:
        raise InvalidInputError("give --updates T, --trials M or both")
    for name in ("updates", "trials"):
        if getattr(options, name) is not None:
            checks.at_least_one(name, getattr(options, name))
    sample_rate = rate("batch_size", options.batch_size, options.dataset_size)
    test = described_test(options)
    trial = Trial(SampledGaussian(sample_rate, options.noise_multiplier), test)
    setup = setup_events(options)
    updates, trials = options.updates, options.trials
    if test is None:
        if None not in (updates, trials) and updates != trials:
            raise InvalidInputError("without a test every trial is an update; give one of the two")
        updates = trials = updates or trials
    with status("computing epsilon under each accounting"):
        found = figures(
            setup, trial, options.delta, updates=updates, trials=trials, requested="proven-pld"
        )
    # the missing tail of the noise may spend delta alone, and then figures are infinite
    count = updates or trials or 1
    tail = accounting_named("proven").noise_tail(planned_charges(setup, trial, count))
    try:
        check_tail(tail, options.noise_multiplier, count, options.delta)
    except BudgetError as refusal:
        print(f"dpsur: warning: {refusal}", file=sys.stderr)
    charges = {
        key: planned_charges(setup, trial, made)
        for key in found
        if (made := trials if key == "every_trial" else updates) is not None
    }
    return _print_figures(found, charges, options)


def _print_figures(
    found: dict[str, float | None], charges: Mapping[str, Charges], options: argparse.Namespace
) -> int:
    """Print the figures and what dp-accounting says of them; status 1 where it refutes one."""
    said: list[Opinion] = []
    if options.check or (options.check is None and not options.json):
        with status("asking dp-accounting for a second opinion"):
            known = {
                key: (value, charges[key]) for key, value in found.items() if value is not None
            }
            said = opinions(known, options.delta)
    if options.json:
        independent = {"independent": [opinion.to_json() for opinion in said]}
        print(json.dumps({**found, **(independent if options.check else {})}))
    else:
        for key, label in LABELS.items():
            value = found.get(key)
            print(f"{label:<34} {'does not apply' if value is None else format_epsilon(value)}")
        for opinion in said:
            print(f"{'FAULT: ' if opinion.refuted else ''}{opinion.describe()}")
    return 1 if any(opinion.refuted for opinion in said) else 0


def _block_figures(
    options: argparse.Namespace,
) -> tuple[dict[str, float | None], dict[str, Charges]]:
    """Epsilon of blocks of updates with a test after each, under the accountings that cover it."""
    refused = ("updates", "trials", "accept_threshold", "accept_ratio")
    for name in refused:
        if getattr(options, name) is not None:
            raise InvalidInputError(f"{flag(name)} has no meaning with --block-sizes; leave it out")
    if options.val_noise_multiplier is None:
        raise InvalidInputError("tests of blocks need --val-noise-multiplier")
    try:
        sizes = tuple(int(size) for size in options.block_sizes.split(","))
    except ValueError:
        raise InvalidInputError(
            f"--block-sizes must be whole numbers with commas, got {options.block_sizes!r}"
        ) from None
    update = SampledGaussian(
        rate("batch_size", options.batch_size, options.dataset_size), options.noise_multiplier
    )
    test: Gaussian | SampledGaussian = Gaussian(options.val_noise_multiplier)
    if options.val_batch_size is not None:
        test_rate = rate("val_batch_size", options.val_batch_size, options.dataset_size)
        test = SampledGaussian(test_rate, options.val_noise_multiplier)
    found: dict[str, float | None] = dict.fromkeys(FIGURES)
    charges: dict[str, Charges] = {}
    with status("computing epsilon of blocks and tests"):
        for name in ("proven", "every-trial"):
            # the budget is not part of the figure
            plan = block_plan(
                Budget(1.0, options.delta), name, Trial(update), test, sizes, setup_events(options)
            )
            found[name.replace("-", "_")] = plan.epsilon()
            charges[name.replace("-", "_")] = plan.charges()
    return found, charges


CALIBRATE = """\
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


def set_up_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.description = CALIBRATE
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
    parser.set_defaults(run=calibrated)


def calibrated(options: argparse.Namespace) -> int:
    budget = Budget(options.epsilon, options.delta)
    accounting = accounting_named(options.accounting)
    blocks = options.blocks is not None or options.block_updates is not None
    # a batch size or a length that is missing is that of the preset auto
    others = ("val_batch_size", "accept_ratio", "accept_threshold", "test_share", "trials")
    tested = any(getattr(options, name) is not None for name in others)
    if tested and not blocks and options.batch_size is None:
        raise InvalidInputError("a test of candidates needs --batch-size; give it")
    short = options.updates is None and options.noise_multiplier is None
    if blocks or (not tested and (options.batch_size is None or short)):
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
            setup=setup_events(options),
        )
        if options.noise_multiplier is None and count is None:
            raise InvalidInputError(
                "give --noise-multiplier, --updates or --trials, or two of them"
            )
        with status(f"choosing noise or count for epsilon {budget.epsilon:g}"):
            answer = _answer(make_plan(request, budget, accounting.name))
    return _print(answer, as_json=options.json)


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
