"""What can go wrong, in words a user can act on."""


class DpsurError(Exception):
    """Any error that this package raises on purpose."""


class InvalidInputError(DpsurError, ValueError):
    """A value that cannot be used; the message names it and the remedy."""


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
