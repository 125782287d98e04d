"""A progress bar for long work."""

import sys
import time
from typing import Self, TextIO

WIDTH = 30
# Seconds between redraws.
PAUSE = 0.1


class Progress:
    """Draws a bar on standard error while work is under way, if that is a terminal and the work takes a while."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        self.title, self.total, self.done = title, max(total, 1), 0
        self.stream = stream or sys.stderr
        self.shown = self.stream.isatty()
        self.last, self.drawn = time.monotonic() + PAUSE, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.drawn:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def add(self, amount: int) -> None:
        self.done += amount
        if self.shown and time.monotonic() >= self.last:
            self.last, self.drawn = time.monotonic() + PAUSE, True
            part = min(self.done / self.total, 1)
            bar = ("█" * round(part * WIDTH)).ljust(WIDTH, "░")
            self.stream.write(f"\r{self.title} {bar} {part:4.0%}")
            self.stream.flush()
