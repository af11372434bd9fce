"""The privacy statement as a page for people."""

import math
from collections.abc import Mapping
from typing import Any

from dpsur.privacy.events import CoinTest, LossTest, NoisyChoice, SampledGaussian
from dpsur.privacy.statement import (
    NO_GUARANTEE,
    RECORDS_PER_PERSON,
    format_epsilon,
    unit_of,
    used_settings,
)


def render_markdown(statement: Mapping[str, Any]) -> str:
    """The page that goes beside the weights."""
    guarantee = statement["guarantee"]
    lines = [
        "# Privacy statement",
        "",
        _promise(guarantee),
        "",
        *(f"> **Warning:** {warning}.\n" for warning in statement["warnings"]),
        *_table(_guarantee_rows(statement)),
        "",
        "## The mechanism",
        "",
        *_table(_mechanism_rows(statement)),
        "",
        *_metrics(statement),
        *_holdout(statement),
        *_assumptions(statement),
        "## Versions",
        "",
        *(f"- {name} {version}" for name, version in statement["versions"].items()),
        "",
        "`dpsur verify` recomputes the figures of this page from `privacy.json` and checks that "
        "the weights are the stated ones. It is not a signature.",
        "",
    ]
    return "\n".join(lines)


def render_model_card(statement: Mapping[str, Any]) -> str:
    """A model card in the form that model hubs read, with the privacy of the weights on top."""
    guarantee, versions = statement["guarantee"], statement["versions"]
    private = _is_private(guarantee)
    declared = [*_public_rows(statement["public"]), *_class_rows(statement["public"])]
    figures = (
        [
            f"  epsilon: {guarantee['epsilon']:.6g}",
            f"  delta: {guarantee['delta']:g}",
            f"  accounting: {guarantee['accounting']}",
            f"  proved: {'true' if guarantee['proved'] else 'false'}",
            f"  unit: {statement['unit']}",
        ]
        if private
        else ["  epsilon: .inf"]
    )
    tags = [*(("differential-privacy", "dp-sgd") if private else ()), statement["method"]]
    return "\n".join(
        [
            "---",
            "library_name: dpsur",
            "tags:",
            *(f"- {tag}" for tag in tags),
            "privacy:",
            *figures,
            f"  records: {statement['dataset_size']}",
            f"  method: {statement['method']}",
            "---",
            "",
            "# Model card",
            "",
            _promise(guarantee),
            "",
            *(f"> **Warning:** {warning}.\n" for warning in statement["warnings"]),
            "The full statement is in [PRIVACY.md](PRIVACY.md), for programs in "
            "[privacy.json](privacy.json).",
            "",
            "## Use",
            "",
            "```python",
            "import dpsur",
            "",
            'model = dpsur.load("FOLDER")  # pass your own module as second argument if it is one',
            "model.predict(records)        # a file, a data frame, texts, images or arrays",
            "```",
            "",
            *(["## Records", "", *_table(declared), ""] if declared else []),
            "## Check the guarantee",
            "",
            "```sh",
            f"pip install dpsur=={versions['dpsur']}",
            "dpsur verify FOLDER",
            "dpsur proof",
            "```",
            "",
            *_figures(statement),
            *_holdout(statement),
            "## Training",
            "",
            *_table(_mechanism_rows(statement)),
            "",
            "## Settings",
            "",
            *_table([(f"`{name}`", _plain(v)) for name, v in used_settings(statement).items()]),
            "",
        ]
    )


def _figures(statement: Mapping[str, Any]) -> list[str]:
    """Results on public test records and the names of the classes; nothing without either."""
    rows = []
    schema = statement["public"].get("schema")
    if schema is not None:
        for name, column in schema["target"].items():
            if column["kind"] == "category":
                shown = [str(value) for value in column["values"]]
                rows.append((f"Classes of {name}, in order", ", ".join(shown[:20])))
    test = statement.get("test")
    if test is not None:
        rows.append(("Public test records", f"{test['records']:,}"))
        scores = {name: v for name, v in test["scores"].items() if v is not None}
        if "log_loss" in scores:  # which the mean loss is then
            scores.pop("loss", None)
        rows += [(name.replace("_", " "), _plain(v)) for name, v in scores.items()]
    if not rows:
        return []
    return ["## Results", "", *_table(rows), ""]


def _plain(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _is_private(guarantee: Mapping[str, Any]) -> bool:
    epsilon = guarantee["epsilon"]
    return epsilon is not None and not math.isinf(epsilon)


def _assumptions(statement: Mapping[str, Any]) -> list[str]:
    """What a guarantee rests on, and what it leaves out; nothing where there is none."""
    guarantee = statement["guarantee"]
    if not _is_private(guarantee):
        return []
    return [
        "## What the accounting assumes",
        "",
        guarantee["assumes"],
        "",
        "## The theorem",
        "",
        guarantee["theorem"],
        "",
        "## What is not covered",
        "",
        f"- {statement['tuning']}",
        f"- {statement['arithmetic']}",
        *(f"- {item}" for item in (*statement["side_channels"], *statement["not_covered"])),
        "",
    ]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _guarantee_rows(statement: Mapping[str, Any]) -> list[tuple[str, str]]:
    guarantee, epsilon, budget = (statement[key] for key in ("guarantee", "epsilon", "budget"))
    if not _is_private(guarantee):
        return [
            ("Privacy", NO_GUARANTEE),
            (f"{unit_of(statement).plural} N (public)", str(statement["dataset_size"])),
            ("Released", ", ".join(statement["released"])),
        ]
    return [
        ("Definition", guarantee["definition"]),
        ("Unit of privacy", statement["unit"]),
        ("Neighbouring data sets", statement["adjacency"]),
        (f"{unit_of(statement).plural} N (public)", str(statement["dataset_size"])),
        *_public_rows(statement["public"]),
        (
            "Accounting",
            f"`{guarantee['accounting']}`, {'proved' if guarantee['proved'] else 'not proved'}",
        ),
        ("Budget", f"epsilon {budget['epsilon']:g}, delta {budget['delta']:g}"),
        *(
            [("Epsilon, by privacy loss distributions", _figure(epsilon["proven_pld"]))]
            if "proven_pld" in epsilon
            else []
        ),
        ("Epsilon, proven for selective release", _figure(epsilon["proven"])),
        ("The least any analysis of that kind can give", _figure(epsilon["proven_lower"])),
        ("Epsilon, every trial charged", _figure(epsilon["every_trial"])),
        ("Epsilon, as published (a claim)", _figure(epsilon["published"])),
        ("Released", ", ".join(statement["released"])),
    ]


def _public_rows(public: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the user declared; it is not read off the records, and epsilon does not cover it."""
    rows = []
    if "classes" in public:
        rows.append(("Classes (public, given by the user)", str(public["classes"])))
    if "labels" in public:
        names = ", ".join(map(str, public["labels"]))
        rows.append(("Classes (public, given by the user)", names))
    if "inputs" in public:
        shape = public["inputs"].get("shape", [public["inputs"].get("dimension")])
        sizes = " x ".join(map(str, shape))
        rows.append(("Inputs (public)", f"{public['inputs']['kind']}, {sizes} numbers each"))
    if RECORDS_PER_PERSON in public:
        rows.append(
            (
                "Records per person (public, given by the user)",
                f"at most {public[RECORDS_PER_PERSON]}; which of a person's records are used "
                "follows from that person's records alone, and how many are left out is private",
            )
        )
    if "keep_fraction" in public:
        rows.append(
            (
                "Records kept (public, given by the user)",
                f"a fraction of {public['keep_fraction']:g}, each record by its own draw; N counts "
                "those that were kept",
            )
        )
    if "schema" in public:
        columns, target = (public["schema"][part] for part in ("columns", "target"))
        rows.append(
            (
                "Schema (public, given by the user)",
                f"{len(columns)} columns with declared ranges and categories, target "
                f"{', '.join(map(str, target))}; N counts the records with a declared target",
            )
        )
    return rows


def _class_rows(public: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a model that was trained on a table predicts."""
    target = public.get("schema", {}).get("target", {})
    return [
        (f"Predicts {name}", ", ".join(map(str, column["values"])))
        if "values" in column
        else (f"Predicts {name}", f"a number from {column['low']:g} to {column['high']:g}")
        for name, column in target.items()
    ]


def _promise(guarantee: Mapping[str, Any]) -> str:
    """The first sentence, which must not sound better than it is."""
    if not _is_private(guarantee):
        return "The released weights come **without any privacy**: epsilon is infinite."
    verb = "satisfies" if guarantee["proved"] else "is claimed by the paper (not proved) to satisfy"
    return (
        f"The released weights come from a training procedure that {verb} "
        f"**({_figure(guarantee['epsilon'])}, {guarantee['delta']:g})-differential privacy**."
    )


def _mechanism_rows(statement: Mapping[str, Any]) -> list[tuple[str, str]]:
    mechanism, settings = statement["mechanism"], statement["settings"]
    update, test = mechanism["trial"]["update"], mechanism["trial"]["test"]
    rows = [("Method", f"`{statement['method']}`"), ("Sampler", statement["sampler"])]
    if mechanism["filter"] is not None:
        rows += _filter_rows(mechanism["filter"])
    elif "menu" in mechanism:
        rows += _menu_rows(mechanism["menu"], f"{settings['max_grad_norm']:g}")
    elif "blocks" in mechanism:
        rows += _block_rows(mechanism, settings)
    elif update["kind"] == SampledGaussian.__name__:
        rows.append(
            (
                "Candidate update",
                f"sample rate {update['sample_rate']:.5g}, noise multiplier "
                f"{update['noise_multiplier']:.5g}, gradient clip norm "
                f"{settings['max_grad_norm']:g}",
            )
        )
    if test is not None:
        rows.append(("Test of a candidate", _test(test, settings)))
    if test is not None and test["kind"] != NoisyChoice.__name__:
        rows.append(("After a rejection", mechanism["on_reject"]))
    for event in mechanism["setup"]:
        noise = f"noise multiplier {event['noise_multiplier']:g}"
        rows.append(("Before training", f"{event['kind']}, {noise}"))
    rows.append(("Accepted updates", str(statement["accepted_updates"])))
    rows.append(("Trials", _trials(mechanism)))
    how = statement["independence"]
    rows.append(("Records are independent", f"{how['how']}: {how['meaning']}"))
    rows.append(("Random numbers", _randomness(statement)))
    return rows


def _filter_rows(chosen: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a privacy filter was fixed to, and how many kinds of steps it let pass."""
    count = sum(row["charged"] for row in chosen["steps"])
    return [
        (
            "Privacy filter",
            f"Rényi order {chosen['order']:.5g}, allowance {chosen['allowance']:.5g}, both fixed "
            "before the run; a step that would not fit is not taken",
        ),
        (
            "Steps",
            f"{count} charged, of {len(chosen['steps'])} kinds, each chosen from released values "
            "only; privacy.json lists them",
        ),
    ]


def _menu_rows(chosen: Mapping[str, Any], clip: str) -> list[tuple[str, str]]:
    """What an update could be, and what decided which it was."""
    choices, steering = chosen["offer"]["choices"], chosen["steering"]
    ranges = [
        f"{name} {min(values):.5g} to {max(values):.5g}"
        for name, values in (
            ("sample rates", [choice["sample_rate"] for choice in choices]),
            ("noise multipliers", [choice["noise_multiplier"] for choice in choices]),
        )
    ]
    return [
        (
            "Candidate update",
            f"one of {len(choices)} choices fixed before the run, {', '.join(ranges)}, gradient "
            f"clip norm {clip}; chosen from released values only, and "
            "charged as if it were the worst of them; privacy.json lists them",
        ),
        (
            "Released to choose by",
            f"a noisy sum before every {chosen['offer']['repeats']} updates, sample rate "
            f"{steering['sample_rate']:.5g}, noise multiplier {steering['noise_multiplier']:.5g}",
        ),
    ]


def _block_rows(mechanism: Mapping[str, Any], settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Updates and tests in the order that was fixed before the run."""
    update, chosen = mechanism["trial"]["update"], mechanism["blocks"]
    test, sizes = chosen["test"], chosen["updates"]
    by_rule = chosen["searches"] and settings.get("clip_norm") == "median"
    clip = "set by the first test" if by_rule else f"{settings['max_grad_norm']:g}"
    looks_at = f"sample rate {test['sample_rate']:.5g}" if "sample_rate" in test else "all records"
    updates = [
        (
            "Update",
            f"sample rate {update['sample_rate']:.5g}, noise multiplier "
            f"{update['noise_multiplier']:.5g}, gradient clip norm {clip}; noise in proportion to "
            "the clip norm in force",
        )
    ]
    return [
        *(_menu_rows(chosen, clip) if "offer" in chosen else updates),
        (
            "Blocks",
            f"{len(sizes)} tests, after {', '.join(map(str, sizes))} updates; order and numbers "
            "were fixed before the run, and every update and every test is charged, kept or not; "
            + (
                "the weights after an earlier block are released if its test was clearly better"
                if chosen["searches"]
                else "tests decide nothing, they measure training loss and accuracy"
            ),
        ),
        (
            "Test of a block",
            f"{looks_at}, noise multiplier {test['noise_multiplier']:.5g}, each record's value "
            "bounded by 1",
        ),
    ]


def _metrics(statement: Mapping[str, Any]) -> list[str]:
    """Noisy values that the tests released; nothing where there are none."""
    if "metrics" not in statement:
        return []
    rows = []
    for row in statement["metrics"]:
        rate = "" if row["learning_rate"] is None else f"{row['learning_rate']:.4g}"
        error = "" if row["standard_error"] is None else f" ± {row['standard_error']:.2g}"
        rows.append(f"| {row['after']} | {row['quantity']} | {rate} | {row['value']:.4g}{error} |")
    return [
        "## Noisy values that were paid for",
        "",
        "Each is the result of a test on the training records with its noise, which epsilon "
        "covers, plus or minus a standard error. Each record's value was clipped first; the bias "
        "from that is not part of the error.",
        "",
        "| after | quantity | learning rate | value |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _holdout(statement: Mapping[str, Any]) -> list[str]:
    """Noisy figures of private records that were held out; nothing where there are none."""
    if "holdout" not in statement:
        return []
    held = statement["holdout"]
    rows = [
        (row["quantity"], f"{row['value']:.4g} ± {row['standard_error']:.2g}")
        for row in held["figures"]
    ]
    noise = held["event"]["noise_multiplier"]
    return [
        "## Noisy test figures of held-out records",
        "",
        f"{held['records']:,} private records, a fraction of {held['fraction']:g}. One Gaussian "
        f"mechanism, noise multiplier {noise:.5g}, epsilon {format_epsilon(held['epsilon'])}. "
        f"{held['composition']} The error is that of the noise.",
        "",
        *_table(rows),
        "",
    ]


def _test(test: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    rate = f"sample rate {test['sample_rate']:.5g}"
    if test["kind"] == NoisyChoice.__name__:
        return (
            f"{rate}; the step length is chosen by the exponential mechanism, epsilon "
            f"{test['choice_epsilon']:.5g} before sampling, loss clip {settings['loss_clip']:g}"
        )
    if test["kind"] == CoinTest.__name__:
        return (
            f"{rate}; an improvement passes, a worsening with probability "
            f"{1 / test['accept_ratio']:.4g}"
        )
    assert test["kind"] == LossTest.__name__
    return (
        f"{rate}, noise multiplier {test['noise_multiplier']:.5g}, threshold "
        f"{test['accept_threshold']:g}, loss clip {settings['loss_clip']:g}"
    )


def _trials(mechanism: Mapping[str, Any]) -> str:
    if mechanism["filter"] is not None and mechanism["updates"] is None:
        return "as many as the filter let pass, each one charged"
    if mechanism["trials"] is not None:
        return f"{mechanism['trials']}, fixed in advance, each one charged"
    if mechanism["trial"]["test"] is None:
        return "as many as updates"
    if mechanism.get("to_the_cap"):
        return f"{mechanism['trial_cap']}, fixed in advance; those after the last update dropped"
    return f"private (at most {mechanism['trial_cap']}, or nothing would have been released)"


def _randomness(statement: Mapping[str, Any]) -> str:
    if statement["random"]["seeded"]:
        return "seeded, so that the run can be repeated; the seed is not part of the release"
    return "seeded by the operating system"


def _figure(value: float | None) -> str:
    return "does not apply" if value is None else format_epsilon(value)
