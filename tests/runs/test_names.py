"""What `import dpsur` offers."""

import subprocess
import sys
from importlib import import_module

import pytest

import dpsur
from tests.conftest import blobs, small_model


def test_every_name_is_where_it_is_said_to_be():
    for name in dpsur.__all__:
        assert getattr(dpsur, name) is not None
    assert dpsur.Intervals is import_module("dpsur.config").Intervals
    assert dpsur.verify is import_module("dpsur.runs.verification").verify
    assert dir(dpsur) == sorted(dpsur.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dpsur.nothing


def test_packages_are_attributes_of_a_fresh_import():
    code = "import dpsur; print(dpsur.methods.Dpsgd.name, dpsur.privacy, dpsur.runs)"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert found.startswith("dpsgd <module 'dpsur.privacy'")


def test_a_run_may_end_early():
    budget, method = dpsur.Budget(3.0, 1e-4), dpsur.Dpsgd(updates=20)
    run = dpsur.fit(small_model(), blobs(), budget=budget, method=method, max_updates=3)
    whole = dpsur.fit(small_model(), blobs(), budget=budget, method=method)
    assert run.private.ledger.updates == 3
    assert run.method.noise_multiplier == whole.method.noise_multiplier
    assert run.epsilon["proven"] < whole.epsilon["proven"]
    with pytest.raises(dpsur.InvalidInputError, match="max_updates must be a whole number"):
        dpsur.fit(small_model(), blobs(), budget=budget, method=method, max_updates=0)


def test_observers_and_pace_from_the_front_door():
    class Watching:
        seen = 0

        def started(self, plan, progress):
            pass

        def trials(self, progress, verdicts):
            Watching.seen += len(verdicts)

        def evaluated(self, progress, scores, epsilon):
            pass

    watching: dpsur.Observer = Watching()
    dpsur.fit(
        small_model(),
        blobs(),
        budget=dpsur.Budget(3.0, 1e-4),
        method=dpsur.Dpsgd(updates=4),
        observers=[watching],
        intervals=dpsur.Intervals(checkpoint_every=2),
        performance=dpsur.Performance(capture=False),
    )
    assert Watching.seen == 4
