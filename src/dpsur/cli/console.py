"""Standard output and standard error that may go away without ending a run."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from dpsur.errors import FileError, cause_of


@contextmanager
def standard_streams() -> Iterator[None]:
    """Wrap the standard streams: what nobody reads is dropped, a full disk is an error.

    Standard error shows progress and warnings only, so there it is dropped in any case.
    """
    before = sys.stdout, sys.stderr
    _fill_closed_descriptors()
    with _Stream(before[0], "standard output") as out, _Stream(before[1]) as err:
        sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
        try:
            yield
            out.flush()
        finally:
            sys.stdout, sys.stderr = before


def _fill_closed_descriptors() -> None:
    """Open closed ones (`2>&-`), or the next file takes the number and gets what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


class _Nowhere(io.StringIO):
    """Stands in for a stream that was closed before the process began."""

    def write(self, text: str) -> int:
        return len(text)


class _Stream:
    """A text stream whose reader may leave. `name` makes other failures errors, by that name."""

    def __init__(self, stream: TextIO | None, name: str | None = None) -> None:
        self._stream = _Nowhere() if stream is None else stream
        self._name = name

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.flush()

    def write(self, text: str) -> int:
        """Write, as far as someone reads."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:  # the C locale: question marks for other letters
            return self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except (OSError, ValueError) as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """Flush, as far as someone reads."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: OSError | ValueError) -> None:
        self._discard()
        gone = isinstance(error, (BrokenPipeError, ValueError))  # ValueError: closed in the process
        if self._name is not None and isinstance(error, OSError) and not gone:
            raise FileError(f"{self._name} cannot be written ({cause_of(error)})") from error

    def _discard(self) -> None:
        """Send the rest to nowhere, also what the interpreter flushes at its end."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
