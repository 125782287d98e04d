"""Answers of generators on their way: whole ones, and token by token."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextvars import Context
from typing import Any, Self, cast

from ._native import Object, begin, ffi, lib, pending, read_error, streams, taken
from .cancel import Cancel
from .generate import FinishReason, GenerateRequest, GenerateResponse, Token, TokenLogprobs

_REASONS = {reason.value: reason for reason in FinishReason}


class _Answer:
    """A request that runs, until its end."""

    def __init__(self) -> None:
        self.response: Future[GenerateResponse] = pending()
        # What the library calls for a token, and with which user_data.
        self.push, self.user_data = ffi.NULL, cast(Any, None)

    def start(self, generator: Object, request: GenerateRequest, cancel: Cancel) -> None:
        keep: list[Any] = []
        made = request.to_c("request", keep)
        made.cancel = cancel.handle
        function, arguments = lib.pagoda_generator_generate_async, (generator.handle, made, self.push, _ended)
        begin(self, function, *arguments, user_data=self.user_data)

    def end(self) -> None:
        """Called after the response is there."""


class _Tokens(_Answer):
    """A request whose tokens go into a queue in C (native/stream.h). The library's threads do not wait for a reader, and
    take the GIL only at the end of a request."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = streams.pagoda_python_stream_new()
        if not self.queue:
            raise MemoryError
        weakref.finalize(self, streams.pagoda_python_stream_free, self.queue).atexit = False
        self.push, self.user_data = streams.pagoda_python_stream_push, ffi.cast("void *", self.queue)

    def end(self) -> None:
        streams.pagoda_python_stream_end(self.queue)

    def next(self, milliseconds: int, fd: int = -1) -> Token | bool:
        """The next token; False at the end; True if there may be more later, of which the eventfd `fd` then tells."""
        place = ffi.new("pagoda_generate_token **")
        found = streams.pagoda_python_stream_next(self.queue, milliseconds, fd, place)
        if found != 1:
            if found == -2:
                raise MemoryError("there was no memory for a token of the stream")
            return bool(found)
        token = place[0]
        length, logprobs = token.text_length, token.logprobs
        text = ffi.unpack(token.text, length).decode() if length else ""
        told = TokenLogprobs.from_c(logprobs) if logprobs else None
        made = Token(text, token.id, token.choice, _REASONS[token.finish_reason], told)
        streams.pagoda_python_token_free(token)
        return made


class _Waker:
    """Wakes the task that waits for a token. The task awaits it as a future, and goes on within the event of the loop: after a
    future of asyncio it would wait for the next round of the loop, with every token."""

    # By this attribute asyncio knows what can be awaited as a future.
    _asyncio_future_blocking = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.fd = loop, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.waiting: tuple[Callable[[_Waker], object], Context] | None = None
        self.cancelled = False
        loop.add_reader(self.fd, self.wake)

    def wake(self) -> None:
        os.eventfd_read(self.fd)
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            go_on, context = waiting
            context.run(go_on, self)

    def wake_soon(self) -> bool:
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            return False
        go_on, context = waiting
        self.loop.call_soon(go_on, self, context=context)
        return True

    def close(self) -> None:
        if not self.loop.is_closed():
            self.loop.remove_reader(self.fd)
            self.wake_soon()
        os.close(self.fd)

    # What a task calls of a future.

    def __await__(self) -> Generator[_Waker, None, None]:
        self._asyncio_future_blocking = True
        yield self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def add_done_callback(self, go_on: Callable[[_Waker], object], *, context: Context) -> None:
        self.waiting = go_on, context

    def cancel(self, msg: object = None) -> bool:
        self.cancelled = self.wake_soon()
        return self.cancelled

    def result(self) -> None:
        cancelled, self.cancelled = self.cancelled, False
        if cancelled:
            raise asyncio.CancelledError


@ffi.callback("pagoda_generate_callback")  # type: ignore[untyped-decorator]
def _ended(user_data: Any, status: int, response: Any, error: Any) -> None:
    answer = taken(user_data)
    try:
        if status:
            answer.response.set_exception(read_error(status, error))
        else:
            answer.response.set_result(GenerateResponse._taken(response))
    except BaseException as failure:
        answer.response.set_exception(failure)
        raise
    finally:
        answer.end()


def start(generator: Object, request: GenerateRequest, cancel: Cancel) -> Future[GenerateResponse]:
    """Starts to answer a request as a whole."""
    answer = _Answer()
    answer.start(generator, request, cancel)
    return answer.response


class TokenStream(Iterator[Token], AsyncIterator[Token]):
    """The tokens of a request as they are generated, for `for` and for `async for`. The request runs whether the tokens
    are read or not; one that failed raises after its last token. A stream that is closed, left by its `with`, or
    forgotten before its end is cancelled, unless the request has a `cancel` of the caller. Threads may share a stream;
    of tasks only one may wait for it at a time.

    ```python
    with generator.stream("Once upon a time", max_new_tokens=100) as stream:
        for token in stream:
            print(token.text, end="", flush=True)
    ```
    """

    def __init__(self, generator: Object, request: GenerateRequest) -> None:
        """Streams are made by `Generator.stream`."""
        # The generator is not closed as garbage while its stream is read.
        self._generator, self._read, self._waker = generator, True, cast(_Waker | None, None)
        self._shared = request.cancel is not None
        self._tokens = _Tokens()
        self._cancel = Cancel() if request.cancel is None else request.cancel
        try:
            self._tokens.start(generator, request, self._cancel)
        except BaseException:
            if not self._shared:
                self._cancel.close()
            raise
        self._read = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        while not self._read:
            # Not for ever, so that Ctrl-C is noticed.
            if isinstance(token := self._tokens.next(100), Token):
                return token
            if not token:
                self._end()
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        while not self._read:
            waker, loop = self._waker, asyncio.get_running_loop()
            if waker is None or waker.loop is not loop:
                self._sleep()
                waker = self._waker = _Waker(loop)
            if isinstance(token := self._tokens.next(0, waker.fd), Token):
                return token
            if not token:
                self._end()
            else:
                await waker
        raise StopAsyncIteration

    def _sleep(self) -> None:
        """Wakes no task any more."""
        waker, self._waker = self._waker, None
        if waker is not None:
            streams.pagoda_python_stream_unwatch(self._tokens.queue)
            try:
                inside = asyncio.get_running_loop() is waker.loop
            except RuntimeError:
                inside = False
            if inside or waker.loop.is_closed():
                waker.close()
            else:
                waker.loop.call_soon_threadsafe(waker.close)

    def _end(self) -> None:
        """After the last token: raises what the request failed with."""
        self._read = True
        self._sleep()
        if not self._shared:
            self._cancel.close()
        self._tokens.response.result()

    def response(self, timeout: float | None = None) -> GenerateResponse:
        """The whole answer; waits for its end, up to `timeout` seconds. It need not be read token by token."""
        return self._tokens.response.result(timeout)

    async def response_async(self) -> GenerateResponse:
        """The whole answer; waits for its end."""
        return await asyncio.shield(asyncio.wrap_future(self._tokens.response))

    @property
    def ended(self) -> bool:
        """Whether the request has ended."""
        return self._tokens.response.done()

    def cancel(self) -> None:
        """Triggers the cancel of the request. The answer ends with what it has; tokens that were generated before
        still follow."""
        if not self.ended and not self._cancel.closed:
            self._cancel.trigger()

    def close(self) -> None:
        """Stops reading, and cancels the request unless it has a `cancel` of the caller."""
        self._read = True
        self._sleep()
        if not self._shared:
            self.cancel()
            self._cancel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_read", True):
            self.close()
