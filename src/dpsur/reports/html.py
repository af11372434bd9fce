"""One self-contained HTML page about a run: no scripts, no network, readable on a phone.

Public values are the statement, what follows from it, and the results of released weights on a
public test set. Accuracy along the run is public as well: it is computed from kept weights, all of
which are charged. The number of trials behind a kept update is not, so rows are reduced to updates,
epsilon and scores before anything else reads them.
"""

import html
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from dpsur.errors import CheckpointError, DpsurError, InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.state import Verdict
from dpsur.mechanism.trial import Progress
from dpsur.per_example import explain
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import (
    PERSON,
    counted_by,
    format_epsilon,
    group_rows,
    metric_text,
    plan_from_statement,
    shown_settings,
    unit_of,
)
from dpsur.runs.evaluation import check_fits, evaluate, objection, shown_scores
from dpsur.runs.files import release_folder, write_atomically
from dpsur.runs.release import read_release
from dpsur.runs.result import (
    Curve,
    accuracy_by_epsilon,
    epsilon_by_update,
    guess_bound,
    private_curves,
    run_rows,
    tradeoff,
)
from dpsur.runs.verification import statement_faults
from dpsur.tasks import TASKS, load_test_records
from dpsur.tasks.schema import Schema, in_words

MOST_CLASSES = 20  # of a confusion matrix that people can read


# What only the user knows, for a data protection officer: in the page, and as an option.
NOTES = {
    "purpose": ("Purpose", "what the model is for"),
    "controller": ("Controller", "who answers for it"),
    "date": ("Date of this report", "of the report (default: today)"),
    "test_origin": ("Origin of the test records", "where the public test records come from"),
    "earlier": (
        "Earlier releases from the same records",
        "earlier releases from the same records, and their epsilons",
    ),
}
Notes = Mapping[str, str | None]


@dataclass(frozen=True)
class TestResult:
    """How the released model does on a public test set."""

    task: str
    records: int
    scores: Mapping[str, float]
    confusion: Sequence[Sequence[int]] | None = None  # rows are true classes


@dataclass(frozen=True)
class ReportContents:
    """Everything that a report shows. `private` is empty unless it was asked for."""

    name: str
    statement: Mapping[str, Any]
    task: str | None
    parameters: int
    epsilon_by_update: Curve | None
    accuracy_by_epsilon: Curve | None
    tradeoff: Curve | None
    test: TestResult | None = None
    no_test: str | None = None  # why there is no test result
    engine: str | None = None
    private: Mapping[str, Curve] = field(default_factory=dict)
    notes: Notes = field(default_factory=dict)


def read_report(
    path: str | os.PathLike[str],
    *,
    task: str | None = None,
    schema: Path | None = None,
    data_dir: Path | None = None,
    private: bool = False,
    device: torch.device | None = None,
    notes: Notes | None = None,
) -> ReportContents:
    """Read a finished run and compute what its report shows.

    `task` names the public test set where the release does not, such as `npz:FILE`, and `schema`
    the columns of a table. Refuses a release whose statement does not follow from its parameters.
    """
    folder = release_folder(path)
    model, statement, origin = read_release(path)
    faults, _ = statement_faults(statement)
    if faults:
        raise CheckpointError(
            f"the privacy statement in {folder} does not follow from its own parameters "
            f"({faults[0]}); no report is written. See: dpsur verify"
        )
    plan = plan_from_statement(statement)
    rows = run_rows(Path(path))
    if private and not rows:
        raise InvalidInputError(
            f"{path} holds no private diagnostics; give the folder of the run, or leave out "
            "--private"
        )
    test, no_test, engine = None, None, None
    name = task or (origin.task if origin.task in TASKS else None)
    if name is not None:
        try:
            records, loss = load_test_records(name, data_dir, schema, statement["public"])
            target = torch.device("cpu") if device is None else device
            model = model.to(target).eval()
            check_fits(model, records, loss, name)
            test = _tested(model, loss, records.to(target), name)
            engine = str(explain(model, records.part(slice(2)).to(target).inputs))
        except DpsurError as error:
            if task is not None:
                raise
            no_test = str(error)
    elif "test" in statement:  # as measured at the end of the run
        stated = statement["test"]
        scores = {key: value for key, value in stated["scores"].items() if value is not None}
        test = TestResult("at the end of the run", stated["records"], scores)
    else:
        no_test = "the release names no public test set; name one with --task"
    return ReportContents(
        name=Path(path).resolve().name,
        statement=statement,
        task=origin.task,
        parameters=sum(value.numel() for value in model.parameters()),
        epsilon_by_update=epsilon_by_update(plan),
        accuracy_by_epsilon=None if plan.run_all_trials else accuracy_by_epsilon(rows),
        tradeoff=tradeoff(plan),
        test=test,
        no_test=no_test,
        engine=engine,
        private=private_curves(rows) if private else {},
        notes=notes or {},
    )


def _tested(model: torch.nn.Module, loss: Any, test: Examples, task: str) -> TestResult:
    problem = Problem(model, loss, test)
    scores = evaluate(problem, problem.initial_params(), test)
    confusion = None
    if "accuracy" in scores:
        outputs = problem.outputs(problem.initial_params(), test.inputs)
        assert isinstance(outputs, torch.Tensor)
        assert isinstance(test.targets, torch.Tensor)
        classes = outputs.shape[1]
        if classes <= MOST_CLASSES:
            pairs = test.targets.long() * classes + outputs.argmax(1)
            counts = torch.bincount(pairs.flatten(), minlength=classes**2)
            confusion = counts.view(classes, classes).tolist()
    return TestResult(task, len(test), scores, confusion)


# Epsilons on the scale, and the ends of the scale.
MARKS = (0.1, 0.3, 1.0, 3.0, 10.0)
LOW, HIGH = 0.05, 20.0
SCALE_WIDTH, SCALE_HEIGHT, SIDE = 400, 92, 20


def epsilon_text(epsilon: float) -> str:
    """Three digits, rounded up: a guarantee must not look better than it is."""
    if epsilon <= 0 or not math.isfinite(epsilon):
        return f"{epsilon:g}"
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    rounded = math.ceil(epsilon / unit - 1e-9) * unit
    return f"{rounded:.{max(0, -math.floor(math.log10(unit) + 1e-9))}f}"


def officer_section(notes: Notes, statement: Mapping[str, Any]) -> str:
    """For a data protection officer: who answers for the model, and how strong its epsilon is."""
    whom = statement["unit"]
    if unit_of(statement) != PERSON:
        whom += "; of a person with k records, epsilon is k times as large, and delta grows too"
    rows = [(title, notes.get(name) or "not stated") for name, (title, _) in NOTES.items()]
    rows.insert(3, ("Who is protected", whom))
    if not notes.get("earlier"):
        missing = "not stated; if there are any, the epsilons and deltas of all of them add up"
        rows[-1] = (rows[-1][0], missing)
    epsilon = statement["guarantee"]["epsilon"]
    scale = "" if epsilon is None or math.isinf(epsilon) else _scale(epsilon)
    signed = '<p class="sign">Reviewed by: <span></span> Date: <span></span></p>'
    return section("For the record", f'<div class="scroll">{_table(rows)}</div>', scale, signed)


def _scale(epsilon: float) -> str:
    """A logarithmic scale of epsilon, with how often a guess can be right below it."""
    baseline = 46

    def place(value: float) -> float:
        share = math.log(value / LOW) / math.log(HIGH / LOW)
        return SIDE + min(1.0, max(0.0, share)) * (SCALE_WIDTH - 2 * SIDE)

    parts = [
        f'<line class="axis" x1="{SIDE}" x2="{SCALE_WIDTH - SIDE}" '
        f'y1="{baseline}" y2="{baseline}"/>'
    ]
    for mark in MARKS:
        at, right = place(mark), 1 / (1 + math.exp(-mark))
        share = f"{right:.0%}" if right < 0.99 else f"{math.floor(right * 1000) / 10:g}%"
        parts.append(
            f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{baseline - 5}" '
            f'y2="{baseline + 5}"/>'
            f'<text x="{at:.1f}" y="{baseline + 21}" text-anchor="middle">{mark:g}</text>'
            f'<text x="{at:.1f}" y="{baseline + 38}" text-anchor="middle">{share}</text>'
        )
    here = place(epsilon)
    anchor = "middle" if 60 < here < SCALE_WIDTH - 60 else ("start" if here <= 60 else "end")
    parts.append(
        f'<circle class="dot" cx="{here:.1f}" cy="{baseline}" r="6"/>'
        f'<text class="here" x="{here:.1f}" y="{baseline - 16}" text-anchor="{anchor}">'
        f"this model: {epsilon_text(epsilon)}</text>"
    )
    words = (
        "Epsilon, and below it how often someone who knows everything else can guess rightly "
        "whether a given record was used, at even odds; 50% is no information. The limit for this "
        "model is often lower and stands above."
    )
    return (
        f'<svg class="scale" viewBox="0 0 {SCALE_WIDTH} {SCALE_HEIGHT}" role="img" '
        f'aria-label="epsilon {epsilon:.3g} on a scale from {LOW:g} to {HIGH:g}">'
        f"{''.join(parts)}</svg>"
        f'<p class="small soft">{words}</p>'
    )


def declared_rows(public: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in public.items():
        title = f"{name.replace('_', ' ').capitalize()} (declared public)"
        if name == "schema":
            schema = Schema.from_json(value)
            for part, columns in (("Columns", schema.columns), ("Target", schema.target)):
                shown = "; ".join(f"{key}: {in_words(one)}" for key, one in columns.items())
                rows.append((f"{part} (declared public)", shown))
        elif name == "inputs":
            size = value.get("shape") or [value.get("dimension")]
            rows.append((title, f"{value['kind']} of {' x '.join(map(str, size))} numbers"))
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            rows.append((title, shown))
    return rows


WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 12, 44

STYLE = """
:root{--ink:#1c2530;--soft:#5d6b7a;--line:#d8dee6;--page:#f6f8fa;--card:#fff;--blue:#0072b2;
--orange:#d55e00;--band:#e3eef6;--warn:#fff3ea;--good:#0b7a57}
@media (prefers-color-scheme:dark){:root{--ink:#e4e9ef;--soft:#9aa7b5;--line:#36414d;--page:#12171d;
--card:#1b222a;--blue:#62b6ea;--orange:#ff9a57;--band:#203344;--warn:#3a2918;--good:#4cc99a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:64rem;margin:0 auto;padding:1.2rem 1rem 3rem}
h1{font-size:1.5rem;margin:.4rem 0 .1rem}
h2{font-size:1.12rem;margin:0 0 .6rem}h3{font-size:1rem;margin:1rem 0 .2rem}
p{margin:.4rem 0}.soft{color:var(--soft)}.small{font-size:.88rem}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:1rem 1.1rem;margin:1rem 0;min-width:0}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
.grid section{margin:0}
.promise{border-left:5px solid var(--good)}.promise.none{border-left-color:var(--orange)}
.figures{display:flex;flex-wrap:wrap;gap:1rem 2.4rem;margin:.8rem 0 .2rem}
.figures div{min-width:7rem}.figures b{display:block;font-size:1.7rem;line-height:1.15}
.banner{background:var(--warn);border:2px solid var(--orange);border-radius:10px;
padding:.8rem 1.1rem;margin:1rem 0;font-weight:600}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:.32rem .6rem .32rem 0;
border-bottom:1px solid var(--line);overflow-wrap:anywhere}
th{font-weight:600;width:38%}
.scroll{overflow-x:auto}
.confusion{width:auto;font-variant-numeric:tabular-nums}
.confusion td,.confusion th{width:auto;text-align:right;padding:.22rem .45rem;border:0;
white-space:nowrap;overflow-wrap:normal}
progress{width:100%;height:1rem;accent-color:var(--blue)}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:13px}
svg .axis{stroke:var(--line)}svg .curve{fill:none;stroke:var(--blue);stroke-width:2.2}
svg .guide{fill:none;stroke:var(--soft);stroke-dasharray:4 4}svg .dot{fill:var(--blue)}
pre{overflow-x:auto;background:var(--page);border:1px solid var(--line);border-radius:6px;
padding:.6rem .8rem;font-size:.85rem;margin:.5rem 0}
code{font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:.92em;
overflow-wrap:anywhere}
ul{padding-left:1.2rem;margin:.4rem 0}
svg.scale{max-width:30rem;margin:.6rem 0}svg .here{fill:var(--ink);font-weight:600}
.sign{margin-top:1.2rem}.sign span{display:inline-block;width:12rem;max-width:70%;
border-bottom:1px solid var(--soft);margin-right:1.5rem}
@media print{:root{--ink:#000;--soft:#444;--line:#bbb;--page:#fff;--card:#fff;--blue:#0072b2;
--orange:#b34e00;--band:#eee;--warn:#fff;--good:#0b7a57}
body{font-size:10.5pt}main{max-width:none;padding:0}
section{border-radius:0;padding:.5rem .7rem;margin:.5rem 0}svg,tr,.grid>section{break-inside:avoid}
.grid{grid-template-columns:1fr 1fr;gap:.5rem}h2{break-after:avoid}
.confusion td{padding:.1rem .2rem}
pre{white-space:pre-wrap}@page{margin:15mm}}
"""
BANNER = (
    "This page holds private diagnostics. They depend on the training records and are not covered "
    "by epsilon. Do not publish or share this page."
)


def render_report(contents: ReportContents) -> str:
    """The page. It holds public values only, unless the contents hold private diagnostics."""
    settings = [
        (name.replace("_", " "), _number(value) if isinstance(value, float) else str(value))
        for name, value in shown_settings(contents.statement).items()
    ]
    versions = contents.statement["versions"]
    settings.append(("versions", ", ".join(f"{name} {v}" for name, v in versions.items())))
    engine = f"<p>How per-example gradients are computed:</p><pre>{_text(contents.engine)}</pre>"
    parts = [
        f'<div class="banner" role="alert">{BANNER}</div>' if contents.private else "",
        _promise(contents),
        officer_section(contents.notes, contents.statement),
        '<div class="grid">',
        *_charts(contents),
        _test(contents),
        "</div>",
        _private(contents.private),
        section("Data", _table(_data_rows(contents))),
        section("Mechanism", _table(_mechanism_rows(contents.statement))),
        section("Settings", _table(settings)),
        "" if contents.engine is None else section("Engine", engine),
        _limits(contents.statement),
        _verify(contents),
    ]
    footer = (
        f"Written by dpsur {versions['dpsur']}. This page needs no network and holds no script."
    )
    return page(f"Privacy report: {contents.name}", parts, footer)


def page(title: str, parts: Iterable[str], footer: str, *, reload: int | None = None) -> str:
    """A page of sections, which a browser reads anew every `reload` seconds."""
    refresh = "" if reload is None else f'<meta http-equiv="refresh" content="{reload}">\n'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'{refresh}<link rel="icon" href="data:,">\n'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n<h1>{_text(title)}</h1>\n" + "\n".join(filter(None, parts)) + "\n"
        f'<p class="soft small">{_text(footer)}</p>\n</main></body></html>\n'
    )


def section(title: str, *parts: str, kind: str | None = None) -> str:
    opened = "<section>" if kind is None else f'<section class="{kind}">'
    return f"{opened}<h2>{_text(title)}</h2>{''.join(parts)}</section>"


def _text(value: object) -> str:
    return html.escape(str(value))


def _number(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def _promise(contents: ReportContents) -> str:
    guarantee, unit = contents.statement["guarantee"], unit_of(contents.statement)
    epsilon, delta = guarantee["epsilon"], guarantee["delta"]
    if epsilon is None or math.isinf(epsilon):
        words = (
            "<p>This model was trained without differential privacy. Training records may show in "
            "its weights.</p>"
        )
        return section("No privacy guarantee", words, kind="promise none")
    figures = [
        (epsilon_text(epsilon), f"epsilon at delta {delta:g}"),
        (
            "proved" if guarantee["proved"] else "not proved",
            f"accounting {guarantee['accounting']}",
        ),
        (f"{contents.statement['dataset_size']:,}", f"training {counted_by(contents.statement)}s"),
    ]
    if contents.test is not None and "accuracy" in contents.test.scores:
        scores = contents.test.scores
        base = f", most frequent class {scores['base_rate']:.2%}" if "base_rate" in scores else ""
        figures.insert(0, (f"{scores['accuracy']:.2%}", f"test accuracy{base}"))
    several = " A person with several records has less protection than the figure says."
    beyond, times = "" if unit == PERSON else several, math.exp(epsilon)
    words = (
        f"Take any one {unit} and any conclusion that someone could draw from this model. "
        f"With the {unit} in the training data, the conclusion is at most {times:.3g} times "
        f"as likely as without, up to an extra probability of {delta:g}. This holds whatever else "
        "anyone knows, and for whatever is done with the model later."
    )
    if contents.tradeoff is not None:
        share = guess_bound(contents.tradeoff)
        words += (
            f" Someone who has to guess whether a given {unit} was used, with even odds "
            f"beforehand, is right in at most {share:.0%} of the cases, however good the attack."
        )
    if not guarantee["proved"]:
        proven = contents.statement["epsilon"]["proven"]
        beside = "not known" if proven is None else format_epsilon(proven)
        words = (
            f"The figure {format_epsilon(epsilon)} is a claim of the paper's analysis that is not "
            f"proved. The proven epsilon of this run is {beside}."
        )
    warnings = "".join(
        f"<p><strong>Warning:</strong> {_text(one)}.</p>" for one in contents.statement["warnings"]
    )
    shown = "".join(f"<div><b>{_text(a)}</b>{_text(b)}</div>" for a, b in figures)
    return section(
        "The guarantee",
        f'<p>{_text(words)}</p>{warnings}<div class="figures">{shown}</div>',
        f'<p class="small soft">The unit of protection is '
        f"{_text(contents.statement['unit'])}.{_text(beyond)}</p>",
        kind="promise" if guarantee["proved"] else "promise none",
    )


def _charts(contents: ReportContents) -> Iterable[str]:
    if contents.epsilon_by_update is not None:
        yield chart_section(
            "Epsilon by update",
            contents.epsilon_by_update,
            "updates",
            "epsilon",
            "What a run of so many updates would cost. The guarantee is that of the whole run.",
            zero=True,
        )
    if contents.accuracy_by_epsilon is not None:
        yield chart_section(
            "Accuracy against epsilon",
            contents.accuracy_by_epsilon,
            "epsilon spent",
            "accuracy on the public test set",
            "Accuracy of the kept weights along the run, on public test records.",
            percent=True,
        )
    if contents.tradeoff is not None:
        yield chart_section(
            "The best possible attack",
            contents.tradeoff,
            "false positive rate",
            "true positive rate",
            "No test for membership lies above this line. The dashed line is guessing.",
            percent=True,
            diagonal=True,
        )


def chart_section(
    title: str,
    curve: Curve,
    x_label: str,
    y_label: str,
    note: str,
    *,
    zero: bool = False,
    percent: bool = False,
    diagonal: bool = False,
) -> str:
    """A section with a line chart as SVG, in the colours of the page."""
    xs, ys = list(curve.x), list(curve.y)
    x_ticks, y_ticks = (
        _ticks(0.0 if zero or diagonal else min(values), max(values)) for values in (xs, ys)
    )
    x_low, x_high = min(x_ticks[0], *xs), max(x_ticks[-1], *xs)
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x_low) / (x_high - x_low or 1) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low or 1) * (HEIGHT - TOP - BOTTOM),
        )

    def label(value: float, as_percent: bool) -> str:
        return f"{value * 100:g}%" if as_percent else f"{value:g}"

    parts = []
    for value in y_ticks:
        at, shown = place(x_low, value)[1], label(value, percent)
        parts.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{shown}</text>'
        )
    for value in x_ticks:
        at, _ = place(value, y_low)
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{label(value, percent and diagonal)}</text>"
        )
    if diagonal:
        (a, b), (c, d) = place(0, 0), place(1, 1)
        parts.append(f'<path class="guide" d="M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}"/>')
    points = [place(x, y) for x, y in zip(xs, ys, strict=True)]
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    parts.append(f'<path class="curve" d="M{path}"/>')
    if len(points) <= 40:
        parts += [f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in points]
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{_text(x_label)}</text>"
    )
    parts.append(
        f'<text transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{_text(y_label)}</text>'
    )
    described = f"{y_label} against {x_label}, from {_number(ys[0])} to {_number(ys[-1])}"
    return section(
        title,
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(described)}">'
        f'{"".join(parts)}</svg><p class="small soft">{_text(note)}</p>',
    )


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers within a range."""
    if not high > low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / 4))
    while (high - low) / step > 7:
        step *= 2.5 if round(step / 10 ** math.floor(math.log10(step))) == 2 else 2
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _test(contents: ReportContents) -> str:
    test = contents.test
    if test is None:
        words = f"<p>The released model was not tested: {_text(contents.no_test)}.</p>"
        return section("Public test set", words)
    tested = ("Test set", f"{test.task}, {test.records:,} public records")
    table = _table([tested, *shown_scores(test.scores)])
    warning = objection(test.scores)
    note = "" if warning is None else f"<p><strong>Warning:</strong> {_text(warning)}.</p>"
    (column, *more) = (
        contents.statement["public"].get("schema", {}).get("target", {"": {}}).values()
    )
    names = None if more else column.get("values")
    matrix = "" if test.confusion is None else _confusion(test.confusion, names)
    return section("Public test set", note, table, matrix)


def _confusion(counts: Sequence[Sequence[int]], known: Sequence[Any] | None) -> str:
    """A matrix of counts, the larger the darker. Rows are true classes."""
    names = [_text(name) for name in known or range(len(counts))]
    head = "".join(f"<th>{name}</th>" for name in names)
    body = []
    for index, row in enumerate(counts):
        total = sum(row) or 1
        cells = "".join(
            f'<td style="background:color-mix(in srgb,var(--blue) {round(60 * count / total)}%,'
            f'transparent)">{count}</td>'
            for count in row
        )
        body.append(f"<tr><th>{names[index]}</th>{cells}</tr>")
    return (
        "<h3>Confusion matrix</h3>"
        '<p class="small soft">Rows are true classes, columns are predictions.</p>'
        f'<div class="scroll"><table class="confusion"><tr><th></th>{head}</tr>{"".join(body)}'
        "</table></div>"
    )


def _private(curves: Mapping[str, Curve]) -> str:
    if not curves:
        return ""
    charts = "".join(
        chart_section(name, curve, "trials", name, "Private: do not publish.")
        for name, curve in curves.items()
    )
    return f'<h2>Private diagnostics: do not publish</h2><div class="grid">{charts}</div>'


def _table(rows: Iterable[tuple[str, str]]) -> str:
    listed = "".join(f"<tr><th>{_text(a)}</th><td>{_text(b)}</td></tr>" for a, b in rows)
    return f"<table>{listed}</table>"


def _data_rows(contents: ReportContents) -> list[tuple[str, str]]:
    statement = contents.statement
    return [
        ("Task", contents.task or "custom data"),
        (f"Training {counted_by(statement)}s (public)", f"{statement['dataset_size']:,}"),
        *declared_rows(statement["public"]),
        ("Unit of privacy", statement["unit"]),
        ("Neighbouring data sets", statement["adjacency"]),
        *group_rows(statement),
        ("Model", f"{contents.parameters:,} parameters"),
    ]


def _method(statement: Mapping[str, Any]) -> str:
    """The method by name, and how it tests updates, where that is an option."""
    name, gate = str(statement["method"]), statement["settings"].get("gate", "none")
    if gate != "none":
        return f"{name}, gate {gate}"
    # Statements of earlier versions call a run of `Dpsur` without a gate dpsur.
    return "dpsgd" if name == "dpsur" else name


def _mechanism_rows(statement: Mapping[str, Any]) -> list[tuple[str, str]]:
    mechanism, epsilon = statement["mechanism"], statement["epsilon"]
    rows = [("Method", _method(statement)), ("Sampling", statement["sampler"])]
    trial = mechanism.get("trial")
    if trial:
        rows += [(name, _event(trial[key])) for key, name in EVENTS if trial.get(key)]
    rows += [("Before training", _event(event)) for event in mechanism.get("setup", ())]
    rows.append(("Updates in the release", f"{statement['accepted_updates']:,}"))
    names = {
        "proven_pld": "Epsilon, by privacy loss distributions",
        "proven": "Epsilon, proven",
        "every_trial": "Epsilon, every trial charged",
        "published": "Epsilon, as published (a claim)",
    }
    rows += [
        (label, format_epsilon(epsilon[key]))
        for key, label in names.items()
        if epsilon.get(key) is not None
    ]
    for row in statement.get("metrics", []):
        error = "" if row["standard_error"] is None else f" ± {row['standard_error']:.2g}"
        rows.append(
            (f"{row['quantity']} of {row['after']} (noisy, paid)", f"{row['value']:.4g}{error}")
        )
    return rows


EVENTS = (("update", "Update"), ("test", "Test of an update"))


def _event(event: Mapping[str, Any]) -> str:
    values = ", ".join(
        f"{name.replace('_', ' ')} {_number(value)}"
        for name, value in event.items()
        if name != "kind" and isinstance(value, (int, float)) and not isinstance(value, bool)
    )
    return f"{event['kind']}: {values}"


def _limits(statement: Mapping[str, Any]) -> str:
    if statement["guarantee"]["epsilon"] is None:
        return ""
    items = [
        statement["tuning"],
        statement["arithmetic"],
        *statement["side_channels"],
        *statement["not_covered"],
    ]
    listed = "".join(f"<li>{_text(item)}</li>" for item in items)
    return section("What the guarantee does not cover", f"<ul>{listed}</ul>")


def _verify(contents: ReportContents) -> str:
    digest = contents.statement["weights"]["sha256"]
    return section(
        "How to check this",
        "<pre>pip install dpsur\ndpsur verify RELEASE_FOLDER\ndpsur proof</pre>"
        "<p><code>dpsur verify</code> computes every figure again from the statement, asks an "
        "independent library (dp-accounting) for a second opinion, and compares the weights with "
        "the hash in the statement. <code>dpsur proof</code> prints the theorem behind "
        "epsilon and its proof. A release is not a signature: whoever can change the weights can "
        "change the statement.</p>"
        f'<p class="small soft">SHA-256 of the weights: <code>{_text(digest)}</code></p>',
    )


# Seconds between two pages, and after which a browser reads the next.
SECONDS, RELOAD = 2.0, 3


class LivePage:
    """An observer that keeps a page of the run; leaving the context ends its reloading.

    The page shows what the progress bar does: how far the run is, the budget spent and scores on
    public records. How often it changes is a figure of time, so only its owner can read it, until
    the report of the finished run takes its place.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._plan: Plan  # once the run has started
        self._passed = -1
        self._due = 0.0
        self._spent = self._scores = self._paid = ""
        self._evaluated: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._passed >= 0:
            self._write("stopped before its end" if kind else "finished")

    def started(self, plan: Plan, progress: Progress) -> None:
        self._plan, self._passed = plan, plan.elapsed(progress.ledger)
        self._write()

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:
        del verdicts
        self._passed = self._plan.elapsed(progress.ledger)
        if time.perf_counter() < self._due:
            return
        if not self._plan.run_all_trials and progress.ledger.updates:
            self._note_spent(self._plan.spent(progress.ledger))
        self._write()

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        del progress
        if self._plan.run_all_trials:  # accuracy at a given trial reveals rejections
            return
        self._note_spent(epsilon)
        self._scores = ", ".join(f"{name} {figure}" for name, figure in shown_scores(scores))
        if "accuracy" in scores:
            self._evaluated.append((self._passed, scores["accuracy"]))
        self._write()

    def measured(self, progress: Progress, rows: Sequence[Mapping[str, Any]]) -> None:
        del progress
        self._paid = ", ".join(metric_text(row) for row in rows)
        self._write()

    def _note_spent(self, epsilon: float) -> None:
        self._spent = f"{epsilon_text(epsilon)} of {self._plan.budget.epsilon:g}"

    def _write(self, ended: str | None = None) -> None:
        plan = self._plan
        unit = "trials" if plan.run_all_trials else plan.unit
        rows = [
            ("Progress", f"{self._passed:,} of {plan.duration:,} {unit}"),
            ("Epsilon spent so far", self._spent or "not yet known"),
            ("Plan", plan.describe()),
        ]
        rows += [("Public test records", self._scores)] if self._scores else []
        rows += [("Training records (noisy, paid)", self._paid)] if self._paid else []
        words = f"The run has {ended}." if ended else "The run is under way; this page follows it."
        bar = f'<progress value="{self._passed}" max="{plan.duration}"></progress>'
        parts = [f"<section><p>{words}</p>{bar}</section>", section("So far", _table(rows))]
        if len(self._evaluated) > 1:
            updates, accuracies = zip(*self._evaluated, strict=True)
            curve = Curve("accuracy", updates, accuracies)
            note = "Accuracy of the kept weights, on public test records."
            chart = chart_section("Accuracy", curve, unit, "accuracy", note, percent=True)
            parts.append(f'<div class="grid">{chart}</div>')
        reload = None if ended else RELOAD
        text = page(f"Privacy report: {self._name}", parts, "Written by dpsur.", reload=reload)
        write_atomically(self._path, text.encode("utf-8"), mode=0o600)
        self._due = time.perf_counter() + SECONDS
