"""Opacus's own tests, run against `dpsur.opacus`: how many pass, and why each other one does not.

    python -m reproduction.opacus_suite --write    # runs them, writes the row and the table
    python -m reproduction.opacus_suite            # prints the table of the row

The tests are those inside the installed package `opacus`. They are copied into a temporary folder,
where `opacus` is replaced by `dpsur.opacus`, and run by pytest. A test that fails is sorted by what
it said: the first rule that matches names the reason. A failure without a rule is unexplained.
torchvision is needed, for the models of the tests.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dpsur.errors import InvalidInputError
from reproduction.artifacts import Column, Table
from reproduction.rows import provenance, read_rows, write_rows

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "results" / "opacus_suite.jsonl"
PAGE = ROOT / "docs" / "tables" / "opacus.md"
BLOCK = re.compile(r"(<!-- results/opacus_suite.jsonl -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SUBSTITUTIONS = (
    (r"\bopacus\.tests\b", "opacus_suite"),
    (r"\bfrom opacus\b", "from dpsur.opacus"),
    (r"(?m)^import opacus$", "import dpsur.opacus as opacus"),
    (r'"opacus\.', '"dpsur.opacus.'),
)
# Run inside the process of the tests: writes down what each of them said.
PLUGIN = """
import json
found = {}
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        said = report.longrepr.reprcrash.message if hasattr(report.longrepr, "reprcrash") else ""
        said = report.longrepr[-1] if isinstance(report.longrepr, tuple) else said
        if found.get(report.nodeid, ("passed",))[0] == "passed":
            found[report.nodeid] = (report.outcome, said[:400])
def pytest_collectreport(report):
    if report.failed:
        found[report.nodeid] = ("failed", str(report.longrepr)[-400:])
def pytest_sessionfinish():
    with open("found.json", "w") as file:
        json.dump(found, file)
"""

NOTHING = r"(?!)"  # matches no message
_LENGTHS = ("epochs", "steps")
DELIBERATE, INSIDE, MISSING = "difference on purpose", "inside of Opacus", "not supported"


class Rule(NamedTuple):
    """Failures that say what `said` matches have this reason, or those of the named tests."""

    kind: str
    reason: str
    said: str
    tests: tuple[str, ...] = ()


RULES = (
    Rule("environment", "downloads weights or data", r"URLError|HTTPError|urlopen|download"),
    Rule(DELIBERATE, "batches that are not Poisson samples", r"poisson_sampling=False"),
    Rule(
        DELIBERATE,
        "no noise without a number of steps (`epochs=`), which makes the training not private",
        r"noise_multiplier=0 trains without privacy",
    ),
    Rule(
        DELIBERATE,
        "`torch.manual_seed` does not repeat noise and batches (`seed=` does)",
        r"must match after|runs? must match|deterministic run must match|noise_generator",
    ),
    Rule(
        DELIBERATE,
        "every batch of the loader is one step",
        r"optimizer\.step\(\) was not called for the one before",
    ),
    Rule(
        DELIBERATE,
        "`loss.backward()` of one number, whose reduction is the declared one",
        r"backward\(gradient=|loss_reduction is 'mean'",
    ),
    Rule(
        DELIBERATE,
        "epsilon and noise are computed more sharply, and rounded up",
        NOTHING,
        (
            *(f"test_get_noise_multiplier_{a}_{b}" for a in ("prv", "rdp") for b in _LENGTHS),
            *("test_prv_accountant", "test_rdp_accountant"),
        ),
    ),
    Rule(DELIBERATE, "Gaussian DP can report too low an epsilon", r"[gG]aussianAccountant|gdp"),
    Rule(
        DELIBERATE,
        "LSTM, GRU and attention need no replacement, and `dpsur.fix` repairs InstanceNorm",
        r"KeyError: .*(rnn\.GRU|rnn\.LSTM|MultiheadAttention|InstanceNorm)",
    ),
    Rule(
        DELIBERATE,
        "a BatchNorm mixes records also where its scale is frozen; other numbers of groups, other "
        "words in the log",
        r"Replaced sub_module",
        ("test_is_valid_non_learnable_bn", "test_fix_bn_with_args"),
    ),
    Rule(
        MISSING,
        "clipping per layer or adaptive, schedules of noise and clipping norm",
        r"AdaClip|target_unclipped|noise and clipping norm are fixed|clipping='",
    ),
    Rule(
        MISSING,
        "records in the second dimension (`engine.private_step` takes them)",
        r"batch_first=False|collate function gives a record other tensors",
    ),
    Rule(
        MISSING,
        "packed sequences and bags with offsets that come from outside of the model",
        r"_gen_packed_data|packed sequences|there must be one row per record in each",
        ("test_input_across_dims",),
    ),
    Rule(
        INSIDE,
        "`GradSampleModule`, its hooks, `p.grad_sample`, ghost clipping's tensors",
        r"(GradSampl|get_gsm_class|DPTensorFast|grad_sample).* has no counterpart",
        (
            "test_custom_linear_hooks",  # looks for what a hook has left in a module
            "test_extra_param_hooks_requires_grad",
            "test_unsupported_hooks",
        ),
    ),
    Rule(
        INSIDE,
        "loader and samplers",
        r"(DPDataLoader|CollateFn|ReplacementSampler|switch_gen|wrap_coll).* has no counterpart",
    ),
    Rule(
        INSIDE,
        "`DPOptimizer` and what it keeps in parameters",
        r"DPOptimizer has no|_clip_and_accum",
    ),
    Rule(INSIDE, "the table of accountants", r"_ACCOUNTANTS"),
    Rule(
        INSIDE,
        "rules and helpers of single layers",
        r"(compute_embedding_norm|unfold2d|SequenceBias).* has no counterpart",
    ),
)
UNEXPLAINED = ("unexplained", "no rule says why")


def reason_of(test: str, said: str) -> tuple[str, str]:
    """The kind and the reason of a failure."""
    for rule in RULES:
        if re.search(rule.said, said) or test.rpartition("::")[2] in rule.tests:
            return rule.kind, rule.reason
    return UNEXPLAINED


def substituted(text: str) -> str:
    """The text of a test with the names of this library."""
    for pattern, new in SUBSTITUTIONS:
        text = re.sub(pattern, new, text)
    return text


def run(folder: Path) -> dict[str, tuple[str, str]]:
    """Outcome and message of every test, run in a folder that is filled here."""
    home = find_spec("opacus")
    if home is None or home.origin is None or find_spec("torchvision") is None:
        raise InvalidInputError("Opacus's tests need opacus and torchvision; install both")
    tests = folder / "opacus_suite"
    shutil.copytree(
        Path(home.origin).parent / "tests", tests, ignore=shutil.ignore_patterns("__pycache__")
    )
    for path in tests.rglob("*.py"):
        path.write_text(substituted(path.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "suite_plugin.py").write_text(PLUGIN, encoding="utf-8")
    options = "-q -p no:cacheprovider -p suite_plugin --continue-on-collection-errors -W ignore"
    arguments = [*options.split(), "-o", "python_files=*_test.py", str(tests)]
    where = os.pathsep.join([str(folder), str(ROOT / "src"), *sys.path])
    subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": where},
        check=False,
        stdout=subprocess.DEVNULL,
    )
    found: dict[str, tuple[str, str]] = json.loads((folder / "found.json").read_text())
    return found


def row_of(found: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """The row: how many tests passed, and how many have each reason not to."""
    failures = [reason_of(test, said) for test, (way, said) in found.items() if way == "failed"]
    unexplained = sorted(
        test
        for test, (way, said) in found.items()
        if way == "failed" and reason_of(test, said) == UNEXPLAINED
    )
    ways = Counter(way for way, _ in found.values())
    return {
        "opacus": version("opacus"),
        "passed": ways["passed"],
        "skipped": ways["skipped"],
        "failed": [
            {"kind": kind, "reason": reason, "tests": count}
            for (kind, reason), count in Counter(failures).most_common()
        ],
        "unexplained": unexplained,
        **provenance(),
    }


def table(row: dict[str, Any]) -> str:
    """The row as a table of the page."""
    columns = [Column("tests", "tests"), Column("outcome", "kind"), Column("reason", "reason")]
    records = [{"tests": row["passed"], "kind": "pass", "reason": ""}, *row["failed"]]
    skipped = "skipped by the tests themselves: GPUs, torchcsprng, empty batches"
    records.append({"tests": row["skipped"], "kind": "skipped", "reason": skipped})
    return Table(columns, records).markdown() + "\n"


def main() -> None:
    """Run the tests and write row and table, or print the table."""
    if "--write" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            row = row_of(run(Path(folder)))
        write_rows(ROWS, [row])
        text = PAGE.read_text(encoding="utf-8")
        page = BLOCK.sub(lambda found: found[1] + table(row) + found[3], text)
        PAGE.write_text(page, encoding="utf-8")
    print(table(read_rows(ROWS)[0]))


if __name__ == "__main__":
    main()
