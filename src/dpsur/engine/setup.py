"""What `make_private` is given, checked before anything is changed."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpsur import checks
from dpsur.engine.loader import check_loader
from dpsur.engine.weights import check_optimizer
from dpsur.errors import InvalidInputError, UnsupportedModelError
from dpsur.functional.persons import (
    DEFAULT_RECORDS,
    Groups,
    PersonRecords,
    called,
    check_by_record,
    number_persons,
)
from dpsur.per_example.model_check import refuse_complex
from dpsur.per_example.rules import layer_fault
from dpsur.privacy.accountants.noise_tail import MOST_WEIGHTS
from dpsur.privacy.statement import (
    DECLARED_SIZE,
    GROUP_SIZE,
    PERSON,
    RECORD,
    RECORDS_PER_PERSON,
    SAMPLED_BY,
)

_log = logging.getLogger("dpsur.engine")


def parameters_to_train(
    module: nn.Module, optimizer: Optimizer, data_loader: DataLoader[Any]
) -> dict[str, nn.Parameter]:
    """Refuse what cannot be made private; returns the parameters to be trained."""
    if not isinstance(module, nn.Module):
        raise InvalidInputError(f"module must be an nn.Module, got {type(module).__name__}")
    if hasattr(module, "_orig_mod"):
        raise InvalidInputError(
            "module was compiled by torch.compile, inside which layers cannot be watched; pass "
            "the module itself"
        )
    for name, value in module.named_parameters():
        if is_lazy(value) or value.is_meta:
            raise InvalidInputError(
                f"parameter {name} has no values yet: call the module once on a batch of zeros, if "
                "it has lazy layers, or load its weights after module.to_empty(device=...), if it "
                "is on the device meta; then build the optimizer"
            )
    check_optimizer(optimizer)
    check_loader(data_loader)
    for name, part in module.named_modules():
        early = isinstance(part, torch.jit.ScriptModule) or (
            part.training and isinstance(part, _BatchNorm)
        )
        fault = layer_fault(part) if early else None
        if fault is not None:
            raise UnsupportedModelError(fault.describe(name, part))
    held = {id(value) for group in optimizer.param_groups for value in group["params"]}
    if not held <= {id(value) for value in module.parameters()}:
        raise InvalidInputError(
            "Module parameters are different than optimizer Parameters, as they are after "
            "dpsur.fix, which repairs a copy; build the optimizer from module.parameters(), after "
            "the module is repaired and on its device"
        )
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    for name, value in trained.items():
        if id(value) not in held:
            raise InvalidInputError(
                f"parameter {name} requires a gradient but is not in the optimizer; freeze it "
                "with requires_grad_(False), or add it to the optimizer"
            )
        refuse_complex(name, value)
    if not trained:
        raise InvalidInputError("no parameter in the optimizer requires a gradient")
    count = sum(value.numel() for value in trained.values())
    if count > MOST_WEIGHTS:
        raise InvalidInputError(
            f"the model has {count} trainable weights, and guarantees are computed for at most "
            f"{MOST_WEIGHTS}; freeze some of them with requires_grad_(False)"
        )
    return trained


def refuse_options(
    batch_first: bool,
    poisson_sampling: bool,
    clipping: str,
    noise_generator: Any,
    grad_sample_mode: str,
) -> None:
    if not batch_first:
        raise InvalidInputError(
            "batch_first=False is not supported; put the records into the first dimension, or "
            "write the loss as engine.private_step, where each record is collated alone"
        )
    if not poisson_sampling:
        raise InvalidInputError(
            "poisson_sampling=False is not supported: no epsilon is known for shuffled batches; "
            "leave it out. Batches then have different sizes: read them from the batch, as len(x)"
        )
    if clipping != "flat":
        raise InvalidInputError(
            f"clipping={clipping!r} is not supported; use 'flat', one norm over all parameters"
        )
    if noise_generator is not None:
        raise InvalidInputError(
            "noise_generator is not supported: noise is drawn in double precision from a secret "
            "key; for a repeatable run pass seed=..."
        )
    checks.one_of("grad_sample_mode", grad_sample_mode, ("hooks", "functorch", "ew", "ghost"))


@dataclass(frozen=True)
class Units:
    """What is sampled: the records of a data set, or the persons whom they belong to.

    Attributes:
        held: how many there are. Private, where a public number was declared.
        size: how many there are by public knowledge; what is charged and divided by follows from
            this number alone.
        length: how many batches are as many.
        persons: the records of each person; None where records are sampled.
    """

    held: int
    size: int
    length: int
    persons: PersonRecords | None = None
    declared: bool = False  # whether `size` was given by the user
    by_record: bool = False  # whether records of persons are sampled one by one
    group_size: int | None = None  # of groups that a converted guarantee is stated for

    @cached_property
    def rate(self) -> float:
        return 1 / self.length

    @property
    def joining(self) -> int:
        """How many that belong to one unit of privacy may join a batch, each by itself."""
        return self.persons.records_each if self.persons and self.by_record else 1

    @property
    def public(self) -> dict[str, Any]:
        """What was declared, as statements and checkpoints hold it."""
        found: dict[str, Any] = {}
        if self.persons is not None:
            found[RECORDS_PER_PERSON] = self.persons.records_each
        if self.by_record:
            found[SAMPLED_BY] = RECORD
        if self.declared:
            found[DECLARED_SIZE] = True
        if self.group_size is not None:
            found[GROUP_SIZE] = self.group_size
        return found


def units_of(
    loader: DataLoader[Any],
    groups: Any = None,
    records_per_person: int | None = None,
    records: int | None = None,
    sampling: str = PERSON,
    *,
    plain: bool = True,
) -> Units:
    """What batches of a loader are drawn from; its `batch_size` counts records, or persons."""
    dataset = cast(Any, loader.dataset)
    persons, by_record = None, sampling == RECORD
    checks.one_of("sampling", sampling, (PERSON, RECORD))
    if by_record:
        check_by_record(groups, records, plain=plain)
    if groups is not None:
        if callable(groups):
            groups = called(groups, "a record", ((dataset[row],) for row in range(len(dataset))))
        most = DEFAULT_RECORDS if records_per_person is None else records_per_person
        persons = PersonRecords(Groups(number_persons(groups, len(dataset)), most))
    elif records_per_person is not None:
        raise InvalidInputError(
            f"records_per_person {records_per_person} needs groups=..., which name the person of "
            "each record"
        )
    held = len(dataset if persons is None else persons)
    if persons is not None and by_record:
        held = persons.joining
    if records is None and persons is None:
        return Units(held, held, len(loader))
    size = held if records is None else checks.whole("records", records, 1)
    share = -(-size // getattr(loader.sampler, "num_replicas", 1))
    assert loader.batch_size is not None
    whole = share // loader.batch_size if loader.drop_last else -(-share // loader.batch_size)
    return Units(held, size, max(1, whole), persons, records is not None, by_record)


# Data sets that engines of this process train on, and whether that was warned of.
_trained_on: WeakValueDictionary[int, Any] = WeakValueDictionary()
_warned: list[bool] = []


def warn_of_second_engine(dataset: Any) -> None:
    if _trained_on.get(id(dataset)) is dataset and not _warned:
        _warned.append(True)
        _log.warning(
            "dpsur: another engine has trained on this data set, and what both release adds up; "
            "book trainings in a ledger of the data: `dpsur ledger create`, make_private(ledger=)"
        )
    with suppress(TypeError):  # of what takes no weak reference nothing is remembered
        _trained_on[id(dataset)] = dataset


def planned_steps(epochs: int | None, steps: int | None, length: int) -> int | None:
    if epochs is not None and steps is not None:
        raise InvalidInputError("give epochs or steps, not both")
    if epochs is not None:
        checks.at_least_one("epochs", epochs)
        return int(epochs) * length
    if steps is not None:
        checks.at_least_one("steps", steps)
    return steps
