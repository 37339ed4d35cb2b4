"""Moves bytes between the memories of processes.

An :class:`Engine` registers memory, opens the segments of its peers, and reads and writes them::

    with millstream.Engine("127.0.0.1") as engine:
        region = engine.register(array)
        segment = engine.open("127.0.0.1:15001")
        engine.write(segment, region, segment.buffers[0]).wait(timeout=10)

Whatever goes wrong is an :class:`Error` with ``code``, ``peer``, ``range`` and ``remedy``.
"""

from ._native import Batch, Engine, Range, Region, Segment, Status, Transfer
from .errors import (
    ArgumentError,
    ClosedError,
    ConfigError,
    DeadlineError,
    Error,
    ForkError,
    OverloadedError,
    PathError,
    RegisterError,
    RestartedError,
    SegmentError,
    SubmitError,
    TransferError,
    TransferTimeoutError,
)

__all__ = [
    "ArgumentError",
    "Batch",
    "ClosedError",
    "ConfigError",
    "DeadlineError",
    "Engine",
    "Error",
    "ForkError",
    "OverloadedError",
    "PathError",
    "Range",
    "Region",
    "RegisterError",
    "RestartedError",
    "Segment",
    "SegmentError",
    "Status",
    "SubmitError",
    "Transfer",
    "TransferError",
    "TransferTimeoutError",
]
