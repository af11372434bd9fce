from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import pytest
import torch
from torch import Tensor

from dpsur.errors import CheckpointError
from dpsur.functional.tree import empty_like, flatten, map_tensors, tensors_of, unflatten


@dataclass(frozen=True)
class Nest:
    here: Tensor
    below: dict[str, Tensor]
    absent: Tensor | None = None


def nest(value):
    return Nest(torch.tensor(value), {"x": torch.tensor([value, value])})


def test_every_tensor_is_reached():
    doubled = map_tensors(lambda a, b: a + b, nest(1.0), nest(2.0))
    assert flatten(doubled).keys() == {"here", "below/x"}
    assert all((value == 3.0).all() for value in flatten(doubled).values())


def test_round_trip():
    assert unflatten(nest(0.0), flatten(nest(5.0))) is not None
    assert float(unflatten(nest(0.0), flatten(nest(5.0))).here) == 5.0


@pytest.mark.parametrize(
    "change",
    [
        lambda flat: flat.pop("here"),
        lambda flat: flat.update(extra=torch.zeros(1)),
        lambda flat: flat.update(here=torch.zeros(2)),
        lambda flat: flat.update(here=torch.tensor(1)),
    ],
)
def test_a_state_of_another_shape_is_refused(change):
    flat = flatten(nest(1.0))
    change(flat)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        unflatten(nest(0.0), flat)


def test_other_things_are_not_trees():
    with pytest.raises(TypeError):
        map_tensors(lambda t: t, {"a": 3})


def test_a_field_that_a_class_fills_in_itself_is_not_forgotten():
    @dataclass
    class Hidden:
        here: Tensor
        kept: Tensor = field(init=False)

        def __post_init__(self):
            self.kept = torch.zeros(len(self.here))

    found = map_tensors(lambda value: value + 1, Hidden(torch.ones(2)))
    assert found.here.tolist() == [2.0, 2.0]
    assert found.kept.tolist() == [1.0, 1.0]
    assert len(tensors_of(found)) == 2


def test_what_is_no_field_of_a_class_stays_behind():
    @dataclass
    class Scaled:
        here: Tensor

        def __post_init__(self):
            self.most = self.here.max()

        @cached_property
        def total(self):
            return self.here.sum()

    first = Scaled(torch.ones(2))
    assert first.total == 2
    found = map_tensors(lambda *both: torch.stack(both), first, Scaled(torch.zeros(2)))
    assert found.here.shape == (2, 2)
    assert vars(found).keys() == {"here"}
    assert map_tensors(lambda value: value[1], found).total == 0


def test_large_memory_is_lent_again_when_nobody_uses_it():
    like = {"a": torch.zeros(2**18), "b": torch.zeros(3)}
    first = empty_like(like)
    kept, place = first["b"].view(3, 1), first["a"].data_ptr()
    assert place % 64 == 0
    del first
    second = empty_like(like)
    assert second["a"].data_ptr() != place  # a view of a part is still there
    place = second["a"].data_ptr()
    del second, kept
    assert empty_like(like)["a"].data_ptr() == place
    with ThreadPoolExecutor(1) as other:
        assert other.submit(empty_like, like).result()["a"].data_ptr() != place
