"""The processes' logs: shows them, merged, as they grow, and keeps them from growing for ever."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.text import Text

log = logging.getLogger("ecoserve.local")

_POLL = 0.1
_LONGEST = 64 << 20  # bytes; one call takes some 500 of the gateway's
_LOOK = 5.0
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")


async def bound(files: Collection[Path]) -> None:
    """Begins a log anew when it is long, until cancelled. What it held is then beside it, in the
    place of what was there before."""
    while True:
        for path in files:
            try:
                if path.stat().st_size > _LONGEST:
                    await asyncio.to_thread(_begin_anew, path)
            except FileNotFoundError:
                pass
            except OSError as error:  # calls are answered all the same
                log.warning("%s is not begun anew: %s", path, error)
        await asyncio.sleep(_LOOK)


def _begin_anew(path: Path) -> None:
    """Its processes have it open, to append to it, so it stays the same file."""
    with contextlib.suppress(OSError):  # a full disk is no reason to let it grow
        shutil.copyfile(path, path.with_suffix(".old.log"))
    os.truncate(path, 0)


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
                if file.seek(0, os.SEEK_END) < self._position:  # it was begun anew
                    self._position = 0
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = Text.from_ansi(line.decode(errors="replace").rstrip("\r"))
            console.print(self._prefix + text, soft_wrap=True, highlight=False)
