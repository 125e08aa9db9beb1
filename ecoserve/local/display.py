"""What the user sees of a start: a line for each step, a moving one for the step under way."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console
from rich.status import Status
from rich.text import Text


class _Output:
    """Standard output, of which nothing is left when its reader goes: a Ctrl-C ends the ``tee``
    behind a pipe too, and a terminal may be closed. What runs still has to end well."""

    def write(self, text: str) -> int:
        self._try(lambda: sys.stdout.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(sys.stdout.flush)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def terminal() -> Console:
    """A console on standard output that does not mind when that is gone."""
    return Console(highlight=False, file=cast(IO[str], _Output()))


class Display:
    """Prints to one console; without a terminal only finished steps are shown."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status: Status | None = None
        self._title = ""

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """A step with its duration. Its failure is for whoever catches the exception to show."""
        began = time.monotonic()
        self._title = title
        with self.console.status(Text(title)) as self._status:
            try:
                yield
            finally:
                self._status = None
        self.line("✓", f"{self._title} ({time.monotonic() - began:.1f} s)", "green")

    def detail(self, text: str) -> None:
        """What the step is at, beside its title."""
        if self._status is not None:
            self._status.update(Text(f"{self._title}: {text}"))

    def retitle(self, title: str) -> None:
        """What the step turned out to be."""
        self._title = title

    def warn(self, text: str) -> None:
        self.line("!", text, "yellow")

    def error(self, text: str) -> None:
        self.line("✗", text, "red")

    def line(self, sign: str, text: str, style: str) -> None:
        self.console.print(Text(f"{sign} ", style=style) + Text(text), soft_wrap=True)

    def plain(self, text: str = "") -> None:
        """As it is, never broken, so that it can be copied."""
        self.console.print(Text(text), soft_wrap=True)
