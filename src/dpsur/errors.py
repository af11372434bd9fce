"""What can go wrong, in words a user can act on."""

import os
import sys
from typing import TYPE_CHECKING

# An error from anywhere else comes from a model, a loss or a data set of the user.
_PACKAGES = {"dpsur", "torch", "numpy", *sys.stdlib_module_names}


class DpsurError(Exception):
    """Any error that this package raises on purpose.

    `code` is short and stable: messages may be improved, codes stay. docs/troubleshooting.md has
    the cause and the remedy of the most frequent ones. A class has a code; a call may give another.
    """

    code = "error"

    def __init__(self, *values: object, code: str | None = None) -> None:
        super().__init__(*values)
        if code is not None:
            self.code = code


class InvalidInputError(DpsurError, ValueError):
    """A value that cannot be used; the message names it and the remedy.

    `private` is what the message must not quote: values of private records. It is no part of the
    text or of a traceback. The command writes it to a log that only its user can read.
    """

    code = "invalid-input"

    def __init__(
        self, message: str, *, private: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.private = private
        if private is not None:
            self.add_note("The attribute `private` of this error says more. Do not share it.")


class ArgumentError(InvalidInputError, TypeError):
    """An argument that a function does not have, or needs and was not given."""

    code = "argument"


class BudgetError(InvalidInputError):
    """What was asked for does not fit the privacy budget."""

    code = "budget"


class UnsupportedModelError(InvalidInputError):
    """The model has a part whose per-example gradient is undefined or unknown."""

    code = "unsupported-model"


class ModelInputError(UnsupportedModelError):
    """The model does not take inputs of this shape or type."""

    code = "model-input"


class StepError(InvalidInputError):
    """A loop that does something the accounting does not cover; nothing was released by it."""

    code = "step"


if TYPE_CHECKING:
    Fixed = property
else:

    class Fixed(property):
        """A property of a training that its guarantee depends on, so that nobody can set it."""

        def __set__(self, owner: object, value: object) -> None:
            raise StepError(
                f"{self.fget.__name__} is fixed by make_private, since the guarantee is made for "
                "it; call make_private on a new PrivacyEngine with another value"
            )


class OpaqueBatchError(StepError, AttributeError):
    """A loop that looks into a batch which only a private step may open."""

    code = "opaque-batch"


class CouplingError(StepError):
    """One record's gradient may depend on other records. This is final for an engine.

    After it there is no further step, no statement and no release: what the refused code has seen
    or kept cannot be taken back.
    """

    code = "coupling"


class CheckpointError(InvalidInputError):
    """A checkpoint or release that is damaged, or belongs to another run."""

    code = "checkpoint"


class FileError(DpsurError, OSError):
    """A file or folder that cannot be read or written; the message names it and the cause."""

    code = "file"


class NothingReleasedError(DpsurError):
    """The run used up its trials before its updates; its result must not be published."""

    code = "nothing-released"


class ReplayError(DpsurError):
    """A finished run that its records, its key and its release do not give again."""

    code = "replay"


class DistributedError(DpsurError):
    """Another process of a distributed run has failed, or differs; nothing is released."""

    code = "distributed"


class PrivacyWarning(UserWarning):
    """Something about a guarantee that the user should know."""


class DiagnosticsWarning(UserWarning):
    """A private record of a run, such as its curves, is incomplete. The release is not affected."""


class InterruptedRunError(DpsurError):
    """The run was stopped at a trial boundary, after writing a checkpoint."""

    code = "interrupted"


def from_custom_code(error: BaseException) -> bool:
    """Whether an error passed through code that belongs neither to this package nor to torch."""
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _PACKAGES:
            return True
        trace = trace.tb_next
    return False


def cause_of(error: OSError) -> str:
    """Why the operating system refused, without the path."""
    return error.strerror or str(error) or type(error).__name__


def describe_os_error(error: OSError) -> str:
    """An error of the operating system on one line: the path, where it is known, and the cause."""
    if isinstance(error, FileError):
        return str(error)
    if error.filename is None or isinstance(error.filename, int):
        return f"a file cannot be read or written ({cause_of(error)})"
    name = os.fsdecode(error.filename)
    return f"{name if name.isprintable() else repr(name)}: {cause_of(error)}"
