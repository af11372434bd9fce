"""Private estimators for scikit-learn: `DPClassifier` and `DPRegressor`.

    model = DPClassifier(epsilon=3.0, classes=["no", "yes"], bounds=(0.0, 1.0))
    model.fit(X, y).predict(X_new)

Ranges and classes are declared, by arguments or by a `dpsur.Schema`, and never read off the
records. A fitted estimator holds what is released and nothing private, so that it may be pickled
and shared. It needs scikit-learn: pip install 'dpsur[sklearn]'.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from dpsur.errors import InvalidInputError, PrivacyWarning
from dpsur.methods import Method
from dpsur.privacy.budget import Budget
from dpsur.runs.evaluation import model_outputs
from dpsur.runs.files import RunFolder
from dpsur.runs.fit import fit
from dpsur.runs.release import Origin, read_release, write_release
from dpsur.tasks.schema import AUTO, Category, Number, Schema, Values
from dpsur.tasks.tables import person_names

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError:
    raise InvalidInputError(
        "dpsur.sklearn needs scikit-learn 1.6 or later; run: pip install 'dpsur[sklearn]'"
    ) from None

# `classes` of a classifier whose user declares that the labels which occur are public knowledge.
PUBLIC = "public"
_SEARCH = "sklearn.model_selection._search"
_TARGET = "target"


@dataclass(eq=False, repr=False)
class _PrivateEstimator(BaseEstimator):  # type: ignore[misc]
    """What both estimators share. scikit-learn reads the parameters off `__init__`."""

    epsilon: float = 3.0
    delta: float = 1e-5
    _: KW_ONLY
    bounds: Any = (-3.0, 3.0)
    schema: Schema | None = None
    model: Any = AUTO
    method: Method | None = None
    accounting: str | None = None
    max_updates: int | None = None
    random_state: Any = None
    device: str = "auto"
    allow_search: bool = False

    def __sklearn_clone__(self) -> Self:
        """Copy the parameters, but not for a search of hyper-parameters."""
        callers = (str(frame.f_globals.get("__name__", "")) for frame in _frames())
        if any(name.startswith(_SEARCH) for name in callers):
            text = (
                "a search of hyper-parameters trains on the same private records many times, and "
                "neither those runs nor the choice among them are charged to epsilon; choose "
                "hyper-parameters on public records"
            )
            if not self.allow_search:
                raise InvalidInputError(f"{text}, and set allow_search=True for a search on them")
            warnings.warn(text, PrivacyWarning, stacklevel=3)
        found: Self = super().__sklearn_clone__()
        return found

    def fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        groups: Any = None,
        records_per_person: int | None = None,
    ) -> Self:
        """Train on private records within the budget.

        Numbers beyond the declared bounds are clipped to them. Records with a target that was not
        declared are left out. `groups` name the person of every record: an array, or, with a
        schema, a column of X or a function of a row of X. One person with all of their records is
        then the unit of privacy.
        """
        _warn_of_fitted_steps(self)
        if self.schema is None:
            try:
                X, y = validate_data(  # noqa: N806
                    self, X, y, dtype=np.float64, y_numeric=self._kind == "number"
                )
            except ValueError as error:
                if not str(error).startswith("could not convert string"):
                    raise
                raise InvalidInputError(  # which does not quote the words
                    "X has values that are no numbers; declare its columns with "
                    "schema=dpsur.Schema(...)",
                    private=str(error),
                ) from None
        else:
            validate_data(self, X, skip_check_array=True)
        y = column_or_1d(y, warn=True)
        schema = self._declare(X, y)
        seed, first = None, int.from_bytes(os.urandom(7), "little")
        if self.random_state is not None:
            seed = first = int(check_random_state(self.random_state).randint(2**31))
        (target,) = schema.target
        model = self.model
        if not isinstance(model, (nn.Module, str)):
            raise InvalidInputError(f"model must be auto, linear, mlp or a module, got {model!r}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(first)  # of the initial weights
            run = fit(
                model,
                {**self._table(X, schema), target: y},
                schema=schema,
                budget=Budget(self.epsilon, self.delta),
                method=self.method,
                accounting=self.accounting,
                max_updates=self.max_updates,
                groups=groups if self.schema is None else person_names(groups, X, schema),
                records_per_person=records_per_person,
                seed=seed,
                device=self.device,
                progress=False,
            )
        # not the run itself: its diagnostics are private, and estimators are pickled and shared
        public = {**run.statement["public"], **self._declared_classes()}
        self.schema_, self.model_ = schema, run.model
        self.statement_ = {**run.statement, "public": public}
        self.origin_: Origin = replace(run.origin, public=public)
        self.epsilon_ = float(run.statement["guarantee"]["epsilon"])
        return self

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `release/` with its privacy statement into a new folder and return its path."""
        check_is_fitted(self)
        folder = RunFolder(path)
        folder.check_new()
        write_release(folder.release, self.model_, self.statement_, self.origin_)
        return folder.release

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> Self:
        """Read a fitted estimator back from a release; pass the module of a custom model.

        Its parameters are those that the release states: the budget, classes and ranges.
        """
        module, statement, origin = read_release(path, model)
        if "schema" not in statement["public"]:
            raise InvalidInputError(
                f"{path} was not trained on a table, and {cls.__name__} predicts for tables; use "
                "dpsur.load"
            )
        schema = Schema.from_json(statement["public"]["schema"])
        if schema.kind != cls._kind:
            remedy = {"number": "DPRegressor", "classes": "DPClassifier"}
            raise InvalidInputError(
                f"the release in {path} predicts {schema.kind}; load it with "
                f"{remedy.get(schema.kind, 'dpsur.load')}"
            )
        budget = statement["budget"]
        named = {"epsilon": budget["epsilon"], "delta": budget["delta"]}
        columns = schema.columns
        if list(columns) == [f"x{place}" for place in range(len(columns))]:
            numbers = [column for column in columns.values() if isinstance(column, Number)]
            bounds = [column.low for column in numbers], [column.high for column in numbers]
            found = cls(bounds=bounds, **named)
            found.n_features_in_ = len(columns)
        else:
            found = cls(schema=schema, **named)
        found.schema_, found.model_, found.statement_ = schema, module.eval(), statement
        found.origin_ = replace(origin, public=statement["public"])
        epsilon = statement["guarantee"]["epsilon"]
        found.epsilon_ = float("inf") if epsilon is None else float(epsilon)
        found._restore(schema, statement["public"])
        return found

    _kind = "number"

    def _declared_classes(self) -> dict[str, Any]:
        """The classes as they were declared: a schema holds their names only."""
        return {}

    def _restore(self, schema: Schema, public: Mapping[str, Any]) -> None:
        """Set what only one of the estimators has."""

    def _declare(self, X: Any, y: Values) -> Schema:  # noqa: N803
        raise NotImplementedError

    def _given_schema(self, kind: str) -> Schema:
        assert self.schema is not None
        if not isinstance(self.schema, Schema) or self.schema.kind != kind:
            wanted = "a category" if kind == "classes" else "a number"
            raise InvalidInputError(
                f"schema of {type(self).__name__} must be a dpsur.Schema whose target is {wanted}"
            )
        return self.schema

    def _columns(self, X: Any) -> dict[str, Number]:  # noqa: N803
        """A column of numbers in the declared bounds for each feature."""
        try:
            low, high = self.bounds
            lows, highs = (
                np.broadcast_to(np.asarray(end, float), X.shape[1]) for end in (low, high)
            )
        except (TypeError, ValueError):
            raise InvalidInputError(
                f"bounds must be (low, high), numbers or one for each of the {X.shape[1]} features"
            ) from None
        ends = zip(lows.tolist(), highs.tolist(), strict=True)
        return {f"x{place}": Number(*pair) for place, pair in enumerate(ends)}

    def _table(self, X: Any, schema: Schema) -> Mapping[str, Any]:  # noqa: N803
        if self.schema is not None:
            if not hasattr(X, "columns"):
                raise InvalidInputError("an estimator with a schema takes data frames")
            return {name: X[name] for name in schema.columns if name in X.columns}
        return {f"x{place}": X[:, place] for place in range(X.shape[1])}

    def _outputs(self, X: Any) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        if self.schema is None:
            X = validate_data(self, X, reset=False, dtype=np.float64)  # noqa: N806
        elif hasattr(self, "feature_names_in_"):  # one that was loaded knows its schema only
            validate_data(self, X, reset=False, skip_check_array=True)
        inputs = self.schema_.inputs(self._table(X, self.schema_))
        found: Tensor = model_outputs(self.model_, inputs)
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None
        return tags


@dataclass(eq=False, repr=False)
class DPClassifier(ClassifierMixin, _PrivateEstimator):  # type: ignore[misc]
    """A classifier that is trained with differential privacy.

    Args:
        epsilon: of the guarantee.
        delta: of the guarantee.
        classes: the labels, declared. `"public"` declares that the labels that occur in `y` are
            public knowledge. Records with another label are left out.
        bounds: (low, high) of all features, or of each. Numbers beyond are clipped.
        schema: a `dpsur.Schema` for data frames, in place of `classes` and `bounds`.
        model: "auto" (a linear model on noisy quantiles in soft bins), "linear", "mlp" or a module
            that takes the scaled features.
        method: what `dpsur.fit` chooses from public facts, unless one is given.
        accounting: how privacy loss is counted, by name (default: as of `fit`).
        max_updates: ends the planned run early.
        random_state: makes the run repeatable, and void against anyone who knows it.
        device: "cpu", "cuda" or "auto".
        allow_search: lets `GridSearchCV` and its kind clone this estimator, which charges nothing:
            for public records.

    `epsilon_`, `statement_` and `model_` are those of the release; `save` writes it.

    Formal guarantee: that of `dpsur.fit`, for one record of `X` and `y`.
    """

    _: KW_ONLY
    classes: Any = None

    def _declare(self, X: Any, y: Values) -> Schema:  # noqa: N803
        if self.schema is not None:
            schema = self._given_schema("classes")
            (column,) = schema.target.values()
            assert isinstance(column, Category)
            self.classes_ = np.array(column.values)
            return schema
        if self.classes is None:
            raise InvalidInputError(
                "classes must be declared, since the labels are private: classes=[...], or "
                'classes="public" if the labels that occur are public knowledge'
            )
        if isinstance(self.classes, str) and self.classes == PUBLIC:
            check_classification_targets(y)
            self.classes_ = np.unique(y)
        else:
            self.classes_ = np.unique(np.asarray(self.classes))
        if len(self.classes_) < 2:
            raise InvalidInputError(
                f"a classifier needs at least two classes, got {len(self.classes_)} class"
            )
        return Schema(self._columns(X), {_TARGET: Category(self.classes_.tolist())})

    _kind = "classes"

    def _declared_classes(self) -> dict[str, Any]:
        return {} if self.schema is not None else {"labels": self.classes_.tolist()}

    def _restore(self, schema: Schema, public: Mapping[str, Any]) -> None:
        (column,) = schema.target.values()
        assert isinstance(column, Category)
        self.classes_ = np.array(public.get("labels", column.values))
        if self.schema is None:
            self.classes = self.classes_.tolist()

    def predict(self, X: Any) -> Values:  # noqa: N803
        """The most probable class of each record."""
        places = self._outputs(X).argmax(1).numpy()
        found: Values = self.classes_[places]
        return found

    def predict_proba(self, X: Any) -> Values:  # noqa: N803
        """Probabilities of the classes, in the order of `classes_`."""
        found: Values = self._outputs(X).double().softmax(1).numpy()
        return found

    def predict_log_proba(self, X: Any) -> Values:  # noqa: N803
        """Logarithms of `predict_proba`."""
        found: Values = self._outputs(X).double().log_softmax(1).numpy()
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # noise, on few records
        return tags


@dataclass(eq=False, repr=False)
class DPRegressor(RegressorMixin, _PrivateEstimator):  # type: ignore[misc]
    """A regression that is trained with differential privacy.

    Args:
        target_range: (low, high) of the target, declared. Targets beyond are clipped.
        schema: a `dpsur.Schema` for data frames, in place of `target_range` and `bounds`.

    The other arguments are those of `DPClassifier`.

    `epsilon_`, `statement_` and `model_` are those of the release; `save` writes it.

    Formal guarantee: that of `dpsur.fit`, for one record of `X` and `y`.
    """

    _: KW_ONLY
    target_range: Any = None

    def _declare(self, X: Any, y: Values) -> Schema:  # noqa: ARG002, N803
        if self.schema is not None:
            return self._given_schema("number")
        try:
            low, high = self.target_range
        except (TypeError, ValueError):
            raise InvalidInputError(
                "target_range must be declared as (low, high), since targets are private, got "
                f"{self.target_range!r}"
            ) from None
        return Schema(self._columns(X), {_TARGET: Number(float(low), float(high))})

    def _restore(self, schema: Schema, public: Mapping[str, Any]) -> None:  # noqa: ARG002
        (column,) = schema.target.values()
        assert isinstance(column, Number)
        if self.schema is None:
            self.target_range = (column.low, column.high)

    def predict(self, X: Any) -> Values:  # noqa: N803
        """The target of each record, in its units."""
        outputs = self._outputs(X)
        return self.schema_.decode(outputs)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # noise, on few records
        return tags


def _warn_of_fitted_steps(estimator: Any) -> None:
    """Warn of steps before this one in a pipeline that learn from the records without noise."""
    from sklearn.pipeline import Pipeline
    from sklearn.utils import get_tags

    for frame in _frames():
        pipeline = frame.f_locals.get("self") if frame.f_code.co_name == "fit" else None
        if not isinstance(pipeline, Pipeline) or pipeline.steps[-1][1] is not estimator:
            continue
        for name, step in pipeline.steps[:-1]:
            if step in (None, "passthrough") or not get_tags(step).requires_fit:
                continue
            warnings.warn(
                f"step {name} ({type(step).__name__}) of the pipeline is fitted to the private "
                "records without noise, which epsilon does not cover; fit it to public records, or "
                "scale by declared bounds",
                PrivacyWarning,
                stacklevel=3,
            )
        return


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
