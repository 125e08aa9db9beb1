"""Shows the processes' logs, merged, as they grow."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from rich.console import Console
from rich.text import Text

_POLL = 0.1
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")


async def follow(files: dict[str, Path], console: Console) -> None:
    """Prints each new line of the files with its name before it, until cancelled."""
    width = max(map(len, files))
    tails = [
        _Tail(Text(f"{name:<{width}} | ", style=color), path)
        for (name, path), color in zip(files.items(), itertools.cycle(_COLORS), strict=False)
    ]
    try:
        while True:
            for tail in tails:
                tail.show(console)
            await asyncio.sleep(_POLL)
    finally:
        for tail in tails:
            tail.show(console)


class _Tail:
    def __init__(self, prefix: Text, path: Path) -> None:
        self._prefix = prefix
        self._path = path
        self._position = 0
        self._rest = b""

    def show(self, console: Console) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = Text.from_ansi(line.decode(errors="replace").rstrip("\r"))
            console.print(self._prefix + text, soft_wrap=True, highlight=False)
