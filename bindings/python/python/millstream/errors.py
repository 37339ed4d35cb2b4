"""What can go wrong."""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Something went wrong.

    ``code`` is the number of the C API, ``peer`` the segment's name, ``range`` the address and length of the bytes
    that it is about, and ``remedy`` what to do about it. Each but ``code`` is ``None`` where there is none.
    """

    code: int
    peer: str | None
    range: tuple[int, int] | None
    remedy: str | None

    def __init__(
        self,
        message: str = "",
        *,
        code: int = -1,
        peer: str | None = None,
        range: tuple[int, int] | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.peer = peer
        self.range = range
        self.remedy = remedy

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} (remedy: {self.remedy})" if self.remedy else message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_remake, (type(self), self.args, self.__dict__))


def _remake(kind: type[Error], args: tuple[Any, ...], values: dict[str, Any]) -> Error:
    error = kind(*args)
    error.__dict__.update(values)
    return error


class ArgumentError(Error, ValueError):
    """An argument makes no sense."""


class ConfigError(Error):
    """An engine cannot be made as asked for."""


class ClosedError(Error):
    """The engine is closed."""


class ForkError(Error):
    """The engine belongs to the process of which this one is a fork."""


class RegisterError(Error):
    """Memory or a file was not registered, or not unregistered."""


class SegmentError(Error):
    """A segment or its process is not there, or does not answer."""


class SubmitError(Error):
    """Requests were refused: no byte moved.

    ``kind`` says why in one word, as ``"target_out_of_range"`` or ``"unknown_policy"``; empty where there was no batch.
    """

    kind: str

    def __init__(self, message: str = "", *, kind: str = "", **values: Any) -> None:
        super().__init__(message, **values)
        self.kind = kind


class OverloadedError(SubmitError):
    """More than the policy file allows is in flight: submit again when transfers have ended."""


class DeadlineError(SubmitError):
    """The time is over, or too short for so many bytes."""


class RestartedError(SubmitError):
    """The peer is another process by now: look up its buffers again."""


class PathError(SubmitError):
    """No transport leads there, or none of those that may do it."""


class TransferError(Error):
    """A request failed."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A request was not done in time."""
