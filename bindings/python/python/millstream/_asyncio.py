"""Transfers that are awaited."""

import asyncio
import contextlib
import weakref

from ._native import Transfer, Wakeup
from .errors import ClosedError

_waiting: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiting]" = weakref.WeakKeyDictionary()


class _Waiting:
    """The transfers that one event loop awaits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wakeup = Wakeup()
        self.futures: dict[int, asyncio.Future[None]] = {}
        self.last = 0
        loop.add_reader(self.wakeup.fileno(), self._look)

    def _look(self) -> None:
        for number in self.wakeup.take():
            future = self.futures.pop(number, None)
            if future is not None and not future.done():
                future.set_result(None)


async def wait(transfer: Transfer) -> int:
    """The bytes moved, once all is over. If it is canceled, so is the transfer."""
    loop = asyncio.get_running_loop()
    waiting = _waiting.get(loop)
    if waiting is None:
        waiting = _waiting[loop] = _Waiting(loop)
    waiting.last += 1
    number = waiting.last
    future = loop.create_future()
    waiting.futures[number] = future
    try:
        if not transfer._tell(waiting.wakeup, number):
            await future
    except asyncio.CancelledError:
        # A closed engine has ended it.
        with contextlib.suppress(ClosedError):
            transfer.cancel()
        raise
    finally:
        waiting.futures.pop(number, None)
    return transfer.result()
