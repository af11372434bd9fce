"""One hyper-parameter at a time: the grid, the paper's statements, and what is drawn of a part."""

import pytest

from reproduction.base import Options
from reproduction.experiments import ablation
from tests.reproduction.made_up import check_every_part_renders, made_up

EXPERIMENT = ablation.EXPERIMENT
BEST_RATE = 2.0


def accuracy_of(config, seed):
    """Highest at a learning rate of 2, flat elsewhere."""
    off = abs(config["options"]["learning_rate"] - BEST_RATE)
    return 0.7 - 0.01 * off + 0.001 * (seed - 1)


def test_one_setting_is_changed_at_a_time():
    cells = list(EXPERIMENT.cells(Options()))
    presets = {}
    for cell in cells:
        config = cell["config"]
        changed = set(config["tried"])
        if config["tried"].get("val_batch_size") == ablation.OTHER_BASE and len(changed) > 1:
            assert config["arm"] == ablation.RELEASED  # the other default of the paper
            changed -= {"val_batch_size"}
        assert len(changed) <= 1
        if not config["tried"]:
            presets[config["arm"]] = config["options"]
    for cell in cells:
        config = cell["config"]
        unlike = {k for k, v in config["options"].items() if v != presets[config["arm"]][k]}
        assert unlike == set(config["tried"])
    assert {cell["seed"] for cell in cells} == {0, 1, 2}


def test_every_value_that_the_paper_names_is_run():
    for factor in ablation.FACTORS:
        claims = ablation.paper_claims(factor.name)
        assert claims
        named = {end for claim in claims for end in (claim.low, claim.high)}
        assert named <= set(factor.values)


def test_the_preset_stands_on_every_curve():
    rows = made_up(EXPERIMENT, accuracy_of)
    for factor in ablation.FACTORS:
        for arm in ablation.ARMS_SHOWN:
            points = ablation.measured(rows, arm, factor)
            assert [point.value for point in points] == sorted(factor.values)
            assert all(point.seeds == 3 for point in points)


def test_the_other_validation_batch_has_its_own_curve():
    rows = made_up(EXPERIMENT, accuracy_of)
    for factor, panel in zip(ablation.FACTORS, ablation.panels(rows), strict=True):
        if factor.name == ablation.BATCH:
            assert "other-base" not in panel.lines
        else:
            assert [p.value for p in panel.lines["other-base"]] == sorted(factor.values)
    known = [row for row in rows if len(row["config"]["tried"]) < 2]  # its preset alone
    assert all("other-base" not in panel.lines for panel in ablation.panels(known))


def test_a_statement_is_set_against_the_rows():
    rows = made_up(EXPERIMENT, accuracy_of)
    record = next(
        r
        for r in ablation.claim_records(rows)
        if (r["parameter"], r["low"], r["what"][:11]) == ("learning_rate", 4.0, "Algorithm 1")
    )
    assert record["says"] == "highest"
    assert record["paper"] == 70.83
    assert record["least"] == record["most"] == pytest.approx(68.0)
    assert record["elsewhere"] == pytest.approx(70.0)
    assert record["elsewhere_at"] == BEST_RATE
    assert record["spread"] == pytest.approx(0.1)


@pytest.mark.slow
def test_a_part_of_the_rows_is_rendered(tmp_path):
    check_every_part_renders(EXPERIMENT, made_up(EXPERIMENT, accuracy_of), tmp_path)
