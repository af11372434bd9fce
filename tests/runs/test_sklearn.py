"""The estimators for scikit-learn, by its own checks and by what privacy asks of them."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import dpsur
from dpsur.runs.files import WEIGHTS
from dpsur.sklearn import DPClassifier, DPRegressor

# A short run whose noise needs no calibration: there are over a hundred of them.
SHORT = dpsur.Dpsgd(updates=3, noise_multiplier=20.0, learning_rate=1.0)
LONGER = dpsur.Dpsgd(updates=40, noise_multiplier=2.0, learning_rate=2.0, batch_size=64)
SHARED = {"epsilon": 8.0, "delta": 1e-4, "random_state": 0, "device": "cpu"}
# What privacy demands of an estimator that is to pass the checks:
# - classes and target_range have no default: a default would be read off the records, so that the
#   checks, which bring labels of all kinds, get an estimator for which those labels are public;
# - the tag poor_score: with noise no estimator is good on the few records of the checks;
# - a random_state, without which no run is repeatable (the tag non_deterministic says so).
# No check is expected to fail.
CHECKED = [
    DPClassifier(classes="public", model="linear", method=SHORT, **SHARED),
    DPRegressor(target_range=(-300.0, 300.0), model="linear", method=SHORT, **SHARED),
]


@pytest.mark.filterwarnings("ignore::dpsur.PrivacyWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@parametrize_with_checks(CHECKED)
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def points(count=400):
    generator = np.random.default_rng(0)
    inputs = generator.uniform(-1, 1, (count, 3))
    score = inputs @ [2.0, -1.0, 0.5]
    return inputs, score


@pytest.mark.filterwarnings("ignore:delta")
def test_a_classifier_learns_and_states_what_it_cost(tmp_path):
    inputs, score = points()
    labels = np.where(score > 0, "yes", "no")
    model = DPClassifier(classes=["yes", "no"], bounds=(-1, 1), method=LONGER, **SHARED)
    model.fit(inputs, labels)
    assert model.score(inputs, labels) > 0.85
    assert model.classes_.tolist() == ["no", "yes"]
    shares = model.predict_proba(inputs)
    np.testing.assert_allclose(shares.sum(1), 1)
    np.testing.assert_allclose(np.log(shares), model.predict_log_proba(inputs))
    assert (model.classes_[shares.argmax(1)] == model.predict(inputs)).all()
    assert 0 < model.epsilon_ <= 8
    assert model.statement_["public"]["schema"]["target"]["target"]["values"] == ["no", "yes"]
    release = model.save(tmp_path / "out")
    assert dpsur.verify(release)[0] == []
    # a label that was not declared leaves its record out
    model.fit(inputs, np.where(np.arange(400) < 390, labels, "perhaps"))
    assert model.statement_["dataset_size"] == 390


def test_a_regressor_predicts_in_the_units_of_the_target():
    inputs, score = points()
    target = 1000 + 200 * score
    model = DPRegressor(target_range=(0, 2000), bounds=(-1, 1), method=LONGER, **SHARED)
    model.fit(inputs, target)
    assert model.score(inputs, target) > 0.7
    assert 800 < model.predict(inputs).mean() < 1200


@pytest.mark.parametrize("classes", [["no", "yes"], [0, 1], [False, True]])
def test_an_estimator_is_read_back_from_its_release(classes, tmp_path):
    inputs, score = points(200)
    labels = np.array(classes)[(score > 0).astype(int)]
    model = DPClassifier(epsilon=8, classes=classes, bounds=(-1, 1), method=SHORT, random_state=0)
    model.fit(inputs, labels)
    path = model.save(tmp_path / "out")
    assert dpsur.verify(path)[0] == []
    found = DPClassifier.load(path)
    assert found.predict(inputs).dtype == model.predict(inputs).dtype
    np.testing.assert_array_equal(found.predict(inputs), model.predict(inputs))
    np.testing.assert_array_equal(found.predict_proba(inputs), model.predict_proba(inputs))
    np.testing.assert_array_equal(dpsur.load(path).classes, model.classes_)
    assert (found.epsilon, found.delta, found.epsilon_) == (8, 1e-5, model.epsilon_)
    assert found.get_params()["classes"] == classes
    assert found.statement_["public"] == model.statement_["public"]
    again = found.save(tmp_path / "again")
    assert (again / WEIGHTS).read_bytes() == (path / WEIGHTS).read_bytes()
    with pytest.raises(ValueError, match="2 features"):
        found.predict(inputs[:, :2])
    with pytest.raises(dpsur.InvalidInputError, match="predicts classes; load it with DPClassi"):
        DPRegressor.load(path)


def test_estimators_with_a_schema_and_of_numbers_are_read_back(tmp_path):
    inputs, score = points(200)
    frame = pd.DataFrame(inputs, columns=list("abc"))
    schema = dpsur.Schema(
        {name: dpsur.Number(-1, 1) for name in "abc"}, {"rich": dpsur.Category(["no", "yes"])}
    )
    labels = pd.Series(np.where(score > 0, "yes", "no"))
    model = DPClassifier(schema=schema, method=SHORT, **SHARED).fit(frame, labels)
    found = DPClassifier.load(model.save(tmp_path / "frame"))
    np.testing.assert_array_equal(found.predict(frame), model.predict(frame))
    assert found.schema == schema
    model = DPRegressor(target_range=(-2, 2), bounds=(-1, 1), method=SHORT, **SHARED)
    model.fit(inputs, score)
    found = DPRegressor.load(model.save(tmp_path / "numbers"))
    np.testing.assert_array_equal(found.predict(inputs), model.predict(inputs))
    assert found.target_range == (-2, 2)
    with pytest.raises(dpsur.InvalidInputError, match="load it with DPRegressor"):
        DPClassifier.load(tmp_path / "numbers")


def test_a_fitted_estimator_holds_nothing_private():
    inputs, score = points(60)
    method = dpsur.Dpsur(noise_multiplier=20.0, accept_ratio=1.5, updates=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpsur.PrivacyWarning)
        model = DPClassifier(classes=[False, True], method=method, **SHARED)
        model.fit(inputs, score > 0)
    content = pickle.dumps(model)
    for secret in (b"loss_difference", b"Ledger", b"PrivateDiagnostics", b"rows"):
        assert secret not in content
    assert (pickle.loads(content).predict(inputs) == model.predict(inputs)).all()


def test_what_is_not_declared_is_refused():
    inputs, score = points(20)
    for model, message in (
        (DPClassifier(), "classes must be declared"),
        (DPClassifier(classes=[1]), "at least two classes"),
        (DPClassifier(classes=[0, 1], bounds=3), "bounds must be"),
        (DPClassifier(classes=[0, 1], bounds=([0, 1], 2)), "one for each of the 3 features"),
        (DPClassifier(classes=[0, 1], model="cnn"), "unknown model 'cnn'"),
        (DPClassifier(classes=[0, 1], model=3), "model must be auto, linear, mlp or a module"),
        (DPRegressor(), "target_range must be declared"),
        (DPRegressor(target_range=(2, 1)), "low of a number must be below"),
    ):
        with pytest.raises(dpsur.InvalidInputError, match=message):
            model.fit(inputs, (score > 0).astype(int))


def test_a_frame_with_a_schema():
    inputs, score = points()
    frame = pd.DataFrame({"a": inputs[:, 0], "b": inputs[:, 1], "c": inputs[:, 2], "name": "x"})
    columns = {name: dpsur.Number(-1, 1) for name in "abc"}
    schema = dpsur.Schema(columns, {"rich": dpsur.Category(["no", "yes"])})
    labels = pd.Series(np.where(score > 0, "yes", "no"))
    model = DPClassifier(schema=schema, method=LONGER, **SHARED).fit(frame, labels)
    assert model.score(frame, labels) > 0.85
    with pytest.raises(dpsur.InvalidInputError, match="whose target is a number"):
        DPRegressor(schema=schema).fit(frame, score)
    with pytest.raises(dpsur.InvalidInputError, match="takes data frames"):
        DPClassifier(schema=schema).fit(inputs, labels)


def test_steps_that_learn_from_private_records_are_warned_of():
    inputs, score = points(50)
    labels = (score > 0).astype(int)
    model = DPClassifier(classes=[0, 1], method=SHORT, **SHARED)
    with pytest.warns(dpsur.PrivacyWarning, match="step standardscaler .* without noise"):
        make_pipeline(StandardScaler(), model).fit(inputs, labels)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pipeline = make_pipeline(FunctionTransformer(), model).fit(inputs, labels)
    assert not [one for one in found if "without noise" in str(one.message)]
    assert set(pipeline.predict(inputs)) <= {0, 1}


@pytest.mark.filterwarnings("ignore:delta")
def test_a_search_of_hyper_parameters_is_refused_unless_the_records_are_public():
    inputs, score = points(40)
    labels = (score > 0).astype(int)
    model = DPClassifier(classes=[0, 1], method=SHORT, **SHARED)
    grid = {"model": ["linear", "mlp"]}
    with pytest.raises(dpsur.InvalidInputError, match="not charged|neither those runs"):
        GridSearchCV(model, grid, cv=2).fit(inputs, labels)
    with pytest.raises(dpsur.InvalidInputError, match="neither those runs"):
        GridSearchCV(make_pipeline(model), {"dpclassifier__model": ["mlp"]}, cv=2).fit(
            inputs, labels
        )
    open_one = clone(model).set_params(allow_search=True)
    with pytest.warns(dpsur.PrivacyWarning, match="neither those runs"):
        GridSearchCV(open_one, grid, cv=2).fit(inputs, labels)
    assert len(cross_val_score(model, inputs, labels, cv=2)) == 2
    assert clone(model).get_params() == model.get_params()


def test_words_without_a_schema_are_refused_without_being_quoted():
    frame = pd.DataFrame({"sex": ["M", "a rare one"] * 20})
    with pytest.raises(dpsur.InvalidInputError, match="schema=") as found:
        DPClassifier(epsilon=3.0, classes=[0, 1], bounds=(0, 1)).fit(frame, [0, 1] * 20)
    assert "M'" not in str(found.value)
