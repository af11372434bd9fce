"""Run all programs, and show how many move a sum by more than the bound.

  python -m tests.oracle                        all forms, all programs (a quarter of an hour)
  python -m tests.oracle --form private_step    one form; `persons`: worlds that differ by a person
  python -m tests.oracle --only siamese mixup   programs with these words in family or name
  python -m tests.oracle --each                 a line for each program
  python -m tests.oracle --short                one extreme record, added and replaced
  python -m tests.oracle --write-limits         measure the examples of limits anew (limits.json)

The exit status is 1 where a program came to something else than it states.
"""

import argparse
import gc
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable

import torch

from tests.oracle.harness import (
    FORMS,
    LIMITS_FILE,
    PERSONS,
    SHORT_EXTREME,
    SHORT_PAIRS,
    Verdict,
    gradient_error,
    judge,
)
from tests.oracle.programs import all_programs

COLUMNS = ("programs", "above C", "leaks", "stopped", "refused", "bounded")
# The first attack on custom loops and `fit` (commit 9f528a9), of 156 and 9 programs written for it.
# "above C" has the leaks; "stopped" are crashes.
BEFORE = {
    "opacus, before": (156, 56, "in these", 2, 55, 43),
    "fit, before": (9, 3, "in these", 0, 2, 4),
}
NAMES = {"above C": "above", "leaks": "leak"}


def table(verdicts: Iterable[Verdict]) -> str:
    """Outcomes by form, beside what was found before."""
    rows: dict[str, tuple[object, ...]] = {}
    verdicts = list(verdicts)
    for form in (*FORMS, PERSONS):
        found = Counter(each.outcome for each in verdicts if each.form == form)
        if found:
            counts = (found[NAMES.get(name, name)] for name in COLUMNS[1:])
            rows[form] = (found.total(), *counts)
    lines = ["| form | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in (rows | BEFORE).items():
        lines.append(f"| {name} | " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def limits(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Programs above the bound or with a leak, by the name of the limit that they state."""
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.outcome in ("above", "leak", "stopped"):
            form = "private_step" if verdict.form == PERSONS else verdict.form
            expected = verdict.program.expected[form]
            name = "Code that raises for some records" if verdict.as_expected else "not stated"
            name = expected.words if expected.outcome == "limit" else name
            found.setdefault(f"{verdict.form}: {name}", []).append(verdict)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.oracle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--form", choices=(*FORMS, PERSONS), action="append")
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--write-limits", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    programs = [
        program
        for program in all_programs()
        if any(word in f"{program.family} {program.name}" for word in options.only)
    ]
    worlds = {"pairs": SHORT_PAIRS, "extreme": SHORT_EXTREME} if options.short else {}
    gc.collect()
    gc.freeze()
    verdicts, wrong = [], 0
    for program in programs:
        for form in options.form or FORMS:
            stated = program.expected.get("private_step" if form == PERSONS else form)
            if stated is None:
                continue
            if options.write_limits and stated.outcome != "limit":
                continue
            start = time.perf_counter()
            verdict = judge(program, form, device=options.device, **worlds)
            verdicts.append(verdict)
            problem = "" if verdict.as_expected else "UNEXPECTED "
            if form == "private_step" and program.legitimate and not program.draws:
                error = gradient_error(program) if verdict.outcome == "bounded" else 0.0
                problem += f"GRADIENT {error:.1e} " if not error <= 1e-9 else ""
            wrong += bool(problem)
            if problem or options.each:
                took = time.perf_counter() - start
                name = f"{form} | {program.family} | {program.name}"
                print(f"{problem}{name}: {verdict} [{took:.1f} s]", flush=True)
    if options.write_limits:
        found = {each.key: [each.outcome, round(each.worst, 3)] for each in verdicts}
        LIMITS_FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return 0
    print(table(verdicts))
    for name, found in limits(verdicts).items():
        print(f"{name}: " + ", ".join(f"{v.program.name} ({v.worst:.3g} C)" for v in found))
    print(f"{wrong} of {len(verdicts)} came to something else than they state")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
