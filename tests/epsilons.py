"""Epsilon of every plan that the results were made with, and of the published settings.

`python -m tests.epsilons` writes the table; `tests/privacy/test_epsilons.py` holds plans against
it. Plans may be restructured; what they promise may not change.

The table holds each plan whole, with the noise that was found for it, and its figures. So two
questions stay apart:

  * What does a plan cost? Figures of a stored plan agree to 1e-12 on processors that round alike.
    Others compute exponentials, transforms and sums with other instructions, or sum in several
    threads. A difference of 1e-16 grows to 1e-9 of epsilon: a run of thousands of steps is one
    transform raised to a power, and the chance that is left at the end is compared with a delta of
    1e-5.
  * Which plan fits a budget? A search ends anywhere within its tolerance of the least noise, and
    carries that 1e-9 into its answer.
"""

import hashlib
import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.fft import irfft, rfft
from scipy.special import ndtr

from dpsur.errors import DpsurError
from dpsur.methods import METHODS
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import feature_mean, feature_statistics
from dpsur.privacy.plan import Plan
from dpsur.privacy.search import NOISE_TOLERANCE
from reproduction.presets.settings import DATASET_SIZES, paper_settings

TABLE = Path(__file__).with_name("epsilons.json")
RESULTS = Path(__file__).parents[1] / "results"
SIZES = {**DATASET_SIZES, "imdb-words": 25_000, "imdb-hashed": 25_000}
SETUPS = {"private": feature_statistics(8.0), "mean": feature_mean(40.0)}
# Relative differences of figures, where rounding is alike and where it is not. Seen between SSE2,
# AVX2 and AVX-512, and between one and two threads: 3e-9, and 3e-7 where `proven-pld` composes
# blocks of selected updates.
ALIKE, ELSEWHERE = 1e-12, 1e-6
# A menu is the result of up to three searches, one after the other. Tests of blocks get what the
# updates leave of the budget; their noise follows that of the updates up to fifty times as steeply.
SEARCHED, SEARCHED_TESTS = 3 * NOISE_TOLERANCE, 50 * NOISE_TOLERANCE
# Settings that no guarantee depends on.
FREE = {
    *("learning_rate", "schedule", "optimizer", "momentum", "adam_beta1", "adam_beta2", "adam_eps"),
    *("average_decay", "loss_clip", "largest_step", "step_sizes", "max_grad_norm", "head_start"),
}


def configurations() -> Iterator[dict[str, Any]]:
    """What decides a plan, once each: of all rows of results, and of the published settings."""
    seen = set()
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            config = json.loads(line).get("config")
            if not isinstance(config, dict) or config.get("method") not in METHODS:
                continue
            if "options" not in config or "task" not in config:
                continue
            found = {
                "method": config["method"],
                "size": SIZES[config["task"]] - config.get("hold_out", 0),
                "budget": [config["epsilon"], config["delta"]],
                "accounting": config["accounting"],
                "setup": config.get("normalisation"),
                "options": {k: v for k, v in config["options"].items() if k not in FREE},
            }
            key = json.dumps(found, sort_keys=True)
            if key not in seen:
                seen.add(key)
                yield found
    for setting in paper_settings():
        for accounting in ("published", "proven", "every-trial"):
            yield {
                "method": "dpsur",
                "size": setting.dataset_size,
                "budget": [2 * setting.epsilon, 1e-5],
                "accounting": accounting,
                "setup": "private" if setting.private_statistics else None,
                "options": {
                    "batch_size": setting.batch_size,
                    "noise_multiplier": setting.noise_multiplier,
                    "val_batch_size": setting.val_batch_size,
                    "val_noise_multiplier": setting.val_noise_multiplier,
                    "accept_threshold": setting.accept_threshold,
                    "gate": "loss",
                },
            }


def settled(config: dict[str, Any]) -> Plan | None:
    """The plan that a configuration is settled to; None where it is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return METHODS[config["method"]](**config["options"]).resolve(
                config["size"],
                Budget(*config["budget"]),
                config["accounting"],
                SETUPS.get(config["setup"], ()),
            )[1]
    except DpsurError:
        return None


def promised(plan: Plan) -> dict[str, Any]:
    """What a plan promises, and how long it says it is."""
    return {
        "epsilon": plan.epsilon(),
        "figures": plan.figures(),
        "trials": plan.trials,
        "updates": plan.updates,
        "length": plan.length,
    }


def figure_gap(row: dict[str, Any]) -> float:
    """Largest relative difference between what a stored plan promised and what it promises now."""
    if row["plan"] is None:
        return 0.0
    now = promised(Plan.from_json(row["plan"]))
    return max(gap for _, _, gap in _gaps(now, row["promised"]))


def changes(row: dict[str, Any]) -> list[tuple[tuple[str, ...], Any, float]]:
    """Values of a stored plan that the same configuration is no longer settled to.

    Each with its place, what it is now and the relative difference. Only noise that was searched
    for may differ, by as much as searches leave open.
    """
    plan = settled(row)
    now = None if plan is None else plan.to_json()
    given = set(map(str, row["options"].values()))

    def allowed(place: tuple[str, ...], value: Any) -> float:
        if place[-1] != "noise_multiplier" or str(value) in given or "setup" in place:
            return ALIKE
        return SEARCHED_TESTS if "test" in place else SEARCHED

    return [found for found in _gaps(now, row["plan"]) if not found[2] <= allowed(*found[:2])]


def _gaps(
    now: Any, stored: Any, place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, float]]:
    """Relative differences of all numbers; infinite where something differs otherwise."""
    if isinstance(now, dict) and isinstance(stored, dict) and now.keys() == stored.keys():
        for key in now:
            yield from _gaps(now[key], stored[key], (*place, key))
    elif isinstance(now, list) and isinstance(stored, list) and len(now) == len(stored):
        for number, pair in enumerate(zip(now, stored, strict=True)):
            yield from _gaps(*pair, (*place, str(number)))
    elif isinstance(now, float) and isinstance(stored, float) and now != stored:
        yield place, now, abs(now - stored) / max(abs(now), abs(stored))
    else:
        yield place, now, 0.0 if now == stored else math.inf


def rounding() -> str:
    """A digest of how this processor rounds what accountants compute with."""
    values = np.linspace(0.001, 3.0, 50_000)
    computed = (np.exp(-values), np.log(values), np.expm1(values), np.log1p(values), ndtr(values))
    digest = hashlib.sha256(b"".join(array.tobytes() for array in computed))
    digest.update(irfft(rfft(values) ** 3).tobytes())
    digest.update(np.float64(values @ computed[0]).tobytes())
    return digest.hexdigest()


def compare() -> None:
    """Print the largest gap between the table and what its plans promise now."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]
    print(f"{len(rows)} plans, largest relative difference {max(map(figure_gap, rows)):.1e}")


def main() -> None:
    """Write the table."""
    rows = []
    for config in configurations():
        plan = settled(config)
        stored = {
            "plan": None if plan is None else plan.to_json(),
            "promised": None if plan is None else promised(plan),
        }
        rows.append(json.dumps({**config, **stored}))
        print(len(rows), end="\r", file=sys.stderr)
    body = ",\n".join(rows)
    TABLE.write_text(f'{{"rounding": "{rounding()}", "rows": [\n{body}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    compare() if "--compare" in sys.argv else main()
