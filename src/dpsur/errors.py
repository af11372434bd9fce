"""What can go wrong, in words a user can act on."""


class DpsurError(Exception):
    """Any error that this package raises on purpose."""


class InvalidInputError(DpsurError, ValueError):
    """A value that cannot be used; the message names it and the remedy.

    `private` is what the message must not quote: values of private records. It is no part of the
    text or of a traceback. The command writes it to a log that only its user can read.
    """

    def __init__(self, message: str, *, private: str | None = None) -> None:
        super().__init__(message)
        self.private = private
        if private is not None:
            self.add_note("The attribute `private` of this error says more. Do not share it.")


class BudgetError(InvalidInputError):
    """What was asked for does not fit the privacy budget."""


class UnsupportedModelError(InvalidInputError):
    """The model has a part whose per-example gradient is undefined or unknown."""


class CheckpointError(InvalidInputError):
    """A checkpoint or release that is damaged, or belongs to another run."""


class NothingReleasedError(DpsurError):
    """The run used up its trials before its updates; its result must not be published."""


class PrivacyWarning(UserWarning):
    """Something about a guarantee that the user should know."""


class InterruptedRunError(DpsurError):
    """The run was stopped at a trial boundary, after writing a checkpoint."""
