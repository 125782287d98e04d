"""Ending runs and requests early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ._native import Object, call, instance_of, lib, out

R = TypeVar("R")


class Cancel(Object):
    """Cancels runs and requests. Any number of them may share one. Once triggered, it stays triggered."""

    _free = "pagoda_cancel_free"

    def __init__(self) -> None:
        self._own(out(lib.pagoda_cancel_new, "pagoda_cancel *"))

    def trigger(self) -> None:
        """Cancels all runs and requests that have this cancel, now and later. They raise `CancelledError`; the answers
        of a generator end with what they have."""
        call(lib.pagoda_cancel_trigger, self.handle)


async def awaited(start: Callable[[Cancel], Future[R]], cancel: Cancel | None) -> R:
    """Waits for what was started. If the task is cancelled, so is it, unless it has a `cancel` of the caller, which
    others may have too."""
    own = Cancel() if cancel is None else instance_of(Cancel, cancel, "cancel")
    try:
        return await asyncio.wrap_future(start(own))
    except asyncio.CancelledError:
        if cancel is None:
            own.trigger()
        raise
    finally:
        if cancel is None:
            own.close()
