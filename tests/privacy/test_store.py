"""Where certified divergences and calibrated noise are kept; whole numbers are as good as any."""

import os

import pytest

from dpsur.methods import Dpsur
from dpsur.privacy import planning
from dpsur.privacy import search as calibration_cache
from dpsur.privacy.accountants import proven
from dpsur.privacy.accountants.proven import (
    SelectiveUpdate,
    Store,
    event_divergence,
    selective_divergence,
)
from dpsur.privacy.accountants.selective.divergence import Interval
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Gaussian, LossTest, SampledGaussian, Trial
from dpsur.privacy.planning import calibrate, plan_blocks


def test_the_cache_of_the_package_comes_before_the_general_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "general"))
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "own"))
    proven.known.cache_clear()
    selective_divergence(SelectiveUpdate(0.02, 3.0, 0.0, 1.0), 3.0, "add")
    proven.known.cache_clear()
    assert list((tmp_path / "own").glob("selective-*.json"))
    assert not (tmp_path / "general").exists()


def test_whole_numbers_share_what_is_stored(tmp_path):
    one = Store((0.5, 8.0, 1.0, 2.0), tmp_path)
    one.put("add", Interval(1.0, 2.0))
    one.flush()
    assert Store((0.5, 8, 1, 2), tmp_path).get("add") == Interval(1.0, 2.0)


@pytest.mark.parametrize(
    "event",
    [
        SampledGaussian(1, 8),
        Trial(SampledGaussian(1, 8), LossTest(1, 8, 0)),
        Gaussian(8),
    ],
    ids=lambda event: type(event).__name__,
)
def test_whole_numbers_cost_what_fractions_do(event):
    whole = event_divergence(event, 3)
    event_divergence.cache_clear()
    assert event_divergence(event, 3.0) == whole > 0


def test_a_method_takes_whole_numbers():
    options = {"batch_size": 8, "val_batch_size": 4, "updates": 2}
    whole = Dpsur(noise_multiplier=8, accept_ratio=2, **options)
    same = Dpsur(noise_multiplier=8.0, accept_ratio=2.0, **options)
    plans = [method.resolve(64, Budget(3, 1e-3), "proven")[1] for method in (whole, same)]
    assert plans[0].epsilon() == plans[1].epsilon() <= 3


def test_the_longest_unused_files_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(proven, "MOST_FILES", 20)
    other = tmp_path / "other.json"
    other.touch()

    def known(number):
        return Store((number, 1.0, 0.0, 1.0), tmp_path).get("add") is not None

    def keep(number):
        before = set(tmp_path.glob("selective-*.json"))
        one = Store((number, 1.0, 0.0, 1.0), tmp_path)
        one.put("add", Interval(1.0, 2.0))
        one.flush()
        return set(tmp_path.glob("selective-*.json")) - before

    for number in range(20):
        (path,) = keep(number)
        os.utime(path, (number + 1, number + 1))  # long ago, one after the other
    assert known(0)  # which is a use
    keep(20)
    assert [number for number in range(21) if known(number)] == [0, *range(4, 21)]
    assert other.exists()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of stored noise, in use."""
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path))
    token = calibration_cache._enabled.set(True)
    yield tmp_path / "calibrations"
    calibration_cache._enabled.reset(token)


def plain(**changes):
    return calibrate(
        **{"epsilon": 1.0, "delta": 1e-5, "sample_rate": 0.05, "updates": 40} | changes
    )


def blocks():
    test = Gaussian(20.0)
    return plan_blocks(
        Budget(1.0, 1e-5), "proven", (0, 5, 20), sample_rate=0.05, test_noise=test.noise_multiplier
    )


@pytest.mark.parametrize("calibrated", [plain, blocks])
def test_calibrated_noise_is_stored_and_found_again(cache, monkeypatch, calibrated):
    first = calibrated()
    assert len(list(cache.glob("*.json"))) == 1
    monkeypatch.setattr(planning, "least_noise", lambda *_: pytest.fail("searched again"))
    assert calibrated() == first


def test_other_questions_and_other_code_are_searched_anew(cache, monkeypatch):
    found = {plain(), plain(epsilon=2.0), plain(delta=1e-6), plain(updates=41)}
    found |= {plain(sample_rate=0.06), plain(setup=(Gaussian(30.0),))}
    assert len(found) == len(list(cache.glob("*.json"))) == 6
    monkeypatch.setattr(calibration_cache, "code", lambda: "changed")
    assert plain() in found
    assert len(list(cache.glob("*.json"))) == 7


def test_stored_noise_that_does_not_fit_is_not_used(cache):
    """A forged or damaged file never lowers the noise."""
    right = plain()
    (path,) = cache.glob("*.json")
    whole = path.read_text()
    for content in (
        '{"noise_multiplier": 0.3}',
        f'{{"noise_multiplier": {right * 0.999}}}',
        '{"noise_multiplier": -1.0}',
        '{"noise_multiplier": NaN}',
        '{"noise_multiplier": "2"}',
        "[]",
        whole[:9],
        "",
    ):
        path.write_text(content)
        assert plain() == right, content
        assert path.read_text() == whole


def test_a_check_of_figures_does_not_use_stored_noise(cache):
    right = plain()
    (path,) = cache.glob("*.json")
    path.write_text('{"noise_multiplier": 99.0}')
    assert plain() == 99.0  # more noise than needed costs accuracy alone
    with calibration_cache.ignore_cache():
        assert plain() == right


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, cache):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "file"))
    assert plain() == plain()
