"""Refuse a model or a loss that changes when it is called.

Clipping bounds what one record adds to a sum only if its gradient depends on that record alone. A
running mean, a counter or the last batch in an attribute makes it depend on the records before.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from dpsur.core.snapshots import LEFT_BEHIND, difference, snapshot
from dpsur.errors import InvalidInputError


def refuse_memory(
    what: str,
    subject: Any,
    call: Callable[[Any, int], None],
    error: type[InvalidInputError],
    *,
    weights: bool = True,
) -> None:
    """Refuse a model or loss that changes while it is called on made-up records.

    `call` makes the n-th call, each with other records and another number of them. What the first
    one sets for good is a cache, and fine if another copy sets the same on other records.
    """
    fresh = _copy(subject)
    start = snapshot(subject, weights=weights)
    try:
        call(subject, 0)
    except RuntimeError:
        # torch.vmap cannot use what an earlier call of it left behind in an attribute, and autograd
        # cannot use what was overwritten
        after = snapshot(subject, weights=weights)
        left = (name for (name, _), held in after.items() if held is LEFT_BEHIND)
        with suppress(RuntimeError):
            call(subject, 1)
        changed = next(left, difference(after, snapshot(subject, weights=weights)))
        if changed is None:
            raise
        raise error(changes(what, subject, changed)) from None
    first = snapshot(subject, weights=weights)
    for number in (1, 2):
        call(subject, number)
        changed = difference(first, snapshot(subject, weights=weights))
        if changed is not None:
            raise error(changes(what, subject, changed))
    changed = difference(start, first)
    if changed is None:
        return
    if fresh is not None and difference(start, snapshot(fresh, weights=weights)) is None:
        call(fresh, 2)
        changed = difference(first, snapshot(fresh, weights=weights))
    if changed is not None:
        raise error(changes(what, subject, changed))


def changes(what: str, subject: object, name: str) -> str:
    """One line about a model or loss that changes."""
    return (
        f"the {what} ({getattr(subject, '__name__', type(subject).__name__)}) keeps state: "
        f"{name or 'its value'} changes when it is called, so that one record's gradient would "
        "depend on others and exceed the clipping norm; compute everything from the arguments of "
        "the call and keep nothing, not even a count of calls"
    )


def _copy(subject: Any) -> Any:
    """Another one with the same weights; None if it cannot be copied."""
    shared = {}
    if isinstance(subject, nn.Module):
        shared = {id(value): value for value in subject.parameters()}
    try:
        return copy.deepcopy(subject, shared)
    except Exception:  # whatever an object of a user raises: then there is no copy to compare with
        return None
