"""`torch.autograd.backward`, wrapped once per process, so that losses are inspected before it.

The loss of a watched model has to be read before autograd frees what it has saved.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpsur.errors import StepError
from dpsur.per_example.record_level import only_trusted_rules

_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_plain_backward: Callable[..., None] | None = None


def watch_backward(watcher: Any) -> None:
    """Ask a watcher about every loss from now on."""
    _watchers.add(watcher)
    _wrap_backward()


def leave_backward(watcher: Any) -> None:
    """Ask it no longer."""
    _watchers.discard(watcher)


def _wrap_backward() -> None:
    """Let watched losses be inspected before autograd differentiates them."""
    global _plain_backward
    if _plain_backward is not None:
        return
    _plain_backward = torch.autograd.backward
    plain = _plain_backward

    @functools.wraps(plain)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *args: Any,
        **options: Any,
    ) -> None:
        found = [
            (watcher, loss, calls)
            for loss in ([tensors] if isinstance(tensors, Tensor) else list(tensors))
            if isinstance(loss, Tensor)
            for watcher in list(_watchers)
            if (calls := watcher.reached(loss))
        ]
        if not found:
            plain(tensors, grad_tensors, retain_graph, create_graph, *args, **options)
            return
        if len(found) > 1:
            raise StepError("several losses in one backward pass; add them up first")
        watcher, loss, calls = found[0]
        if grad_tensors is not None and any(
            one is not None
            for one in ([grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors)
        ):
            raise StepError("backward(gradient=...) is not supported; reduce the loss to a number")
        if create_graph:
            raise StepError("create_graph=True is not supported in a private backward pass")
        if loss.dtype in (torch.float16, torch.bfloat16):
            raise StepError(
                f"the loss is in {loss.dtype}, in which a record's gradient is rounded by the size "
                "of the batch; compute it from outputs.float()"
            )
        # Each record's gradient from the start: a mean over the batch would divide it by the number
        # of records, and what is rounded after that would depend on the others. The rest is what a
        # record's gradient still has to be multiplied by, which depends on that record alone.
        first, rest = watcher.before_backward(calls, loss)
        start = torch.ones_like(loss) * first
        with only_trusted_rules():
            plain([loss], [start.to(loss.dtype)], retain_graph, False, *args, **options)
        watcher.after_backward(calls, rest)

    torch.autograd.backward = backward
