"""What a report of a run shows, with public values and private diagnostics kept apart.

Public values are the statement, what follows from it, and the results of released weights on a
public test set. Accuracy along the run is public as well: it is computed from kept weights, all of
which are charged. The number of trials behind a kept update is not, so rows are reduced to updates,
epsilon and scores before anything else reads them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpsur.errors import CheckpointError, DpsurError, InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.per_example import explain
from dpsur.privacy.statement import plan_from_statement
from dpsur.runs.evaluation import check_fits, evaluate
from dpsur.runs.files import release_folder
from dpsur.runs.release import read_release
from dpsur.runs.result import (
    Curve,
    accuracy_by_epsilon,
    epsilon_by_update,
    private_curves,
    run_rows,
    tradeoff,
)
from dpsur.runs.verification import statement_faults
from dpsur.tasks import TASKS, load_test_records

MOST_CLASSES = 20  # of a confusion matrix that people can read


@dataclass(frozen=True)
class Notes:
    """What the user adds to a report. `earlier` are releases from the same records before this."""

    purpose: str | None = None
    controller: str | None = None
    date: str | None = None
    test_origin: str | None = None
    earlier: str | None = None


NO_NOTES = Notes()


@dataclass(frozen=True)
class TestResult:
    """How the released model does on a public test set."""

    task: str
    records: int
    scores: Mapping[str, float]
    names: Sequence[str] | None = None  # of the classes
    confusion: Sequence[Sequence[int]] | None = None  # rows are true classes


@dataclass(frozen=True)
class ReportContents:
    """Everything that a report shows. `private` is empty unless it was asked for."""

    name: str
    statement: Mapping[str, Any]
    task: str | None
    network: Mapping[str, Any] | None
    parameters: int
    epsilon_by_update: Curve | None
    accuracy_by_epsilon: Curve | None
    tradeoff: Curve | None
    test: TestResult | None = None
    no_test: str | None = None  # why there is no test result
    engine: str | None = None
    private: Mapping[str, Curve] = field(default_factory=dict)
    notes: Notes = NO_NOTES


def read_report(
    path: str | os.PathLike[str],
    *,
    task: str | None = None,
    schema: Path | None = None,
    data_dir: Path | None = None,
    private: bool = False,
    device: torch.device | None = None,
    notes: Notes = NO_NOTES,
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
            test = test_result(model, loss, records.to(target), name, class_names(statement))
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
        network=origin.network,
        parameters=sum(value.numel() for value in model.parameters()),
        epsilon_by_update=epsilon_by_update(plan),
        accuracy_by_epsilon=None if plan.run_all_trials else accuracy_by_epsilon(rows),
        tradeoff=tradeoff(plan),
        test=test,
        no_test=no_test,
        engine=engine,
        private=private_curves(rows) if private else {},
        notes=notes,
    )


def class_names(statement: Mapping[str, Any]) -> Sequence[str] | None:
    """The names of the classes of a table, in their order."""
    (column, *more) = statement["public"].get("schema", {}).get("target", {"": {}}).values()
    return None if more or "values" not in column else [str(name) for name in column["values"]]


def test_result(
    model: torch.nn.Module,
    loss: Any,
    test: Examples,
    task: str,
    names: Sequence[str] | None,
) -> TestResult:
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
    return TestResult(task, len(test), scores, names, confusion)
