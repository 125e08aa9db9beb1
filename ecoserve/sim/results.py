"""Finished cells on disk, a JSON line each, so that an interrupted experiment goes on."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ecoserve
from ecoserve.sim.experiment import Cell

Row = dict[str, Any]

# What shows results, and cannot change them.
_SHOWN_ONLY = {
    "commands.py",
    "console.py",
    "matrix.py",
    "options.py",
    "plan.py",
    "plan_command.py",
    "plots.py",
    "report.py",
    "scale.py",
    "scale_command.py",
    "table.py",
    "trace.py",
}


@cache
def code() -> str:
    """A fingerprint of the policies and the simulator that results come from."""
    root = Path(ecoserve.__file__).parent
    digest = hashlib.sha256()
    for folder in ("policy", "sim"):
        for path in sorted((root / folder).glob("*.py")):
            if path.name not in _SHOWN_ONLY:
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def row(cell: Cell, figures: Mapping[str, Any], took: float) -> Row:
    """A finished cell: what was asked, what came of it, and by which code; ``took`` CPU seconds."""
    return {
        "key": cell.key,
        "version": ecoserve.__version__,
        "code": code(),
        "cell": cell.model_dump(mode="json"),
        "figures": dict(figures),
        "took": round(took, 2),
    }


class Results:
    """The rows of a file, and those added; without a path they are only kept in memory."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises ``ValueError`` for a file that is not one of results."""
        self._path = path
        self._rows: dict[str, Row] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
                self._rows[found["key"]] = found
            except (ValueError, TypeError, KeyError):
                # A run that was killed while it wrote leaves half a line at the end.
                if number == len(lines) and not text.endswith("\n"):
                    path.write_text("".join(f"{kept}\n" for kept in lines[:-1]), encoding="utf-8")
                    return
                raise ValueError(f"{path}, line {number}: not a result of `ecoserve sim`") from None

    def add(self, added: Row) -> None:
        """Keeps a row and appends it to the file at once."""
        self._rows[added["key"]] = added
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(added) + "\n")

    def get(self, cell: Cell) -> Row | None:
        return self._rows.get(cell.key)

    def of(self, cells: Iterable[Cell]) -> list[tuple[Cell, Row | None]]:
        """The cells, each with its row; None for one that was not run."""
        return [(cell, self.get(cell)) for cell in cells]

    def stale(self, cells: Iterable[Cell]) -> int:
        """How many of the cells' rows come from other code than this."""
        rows = (self.get(cell) for cell in cells)
        return sum(found is not None and found["code"] != code() for found in rows)

    def forget(self, cells: Iterable[Cell]) -> None:
        """Drops the cells' rows, so that they are run again; the file keeps them until then."""
        for cell in cells:
            self._rows.pop(cell.key, None)


def write_json(path: Path, rows: Iterable[Row]) -> None:
    """All rows as one JSON list."""
    path.write_text(json.dumps(list(rows), indent=1) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """A line a cell: what was asked, then what was found; ``a.b`` is field b of a."""
    flat = [flatten(found) for found in rows]
    names = list(dict.fromkeys(name for line in flat for name in line))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)


def flatten(found: Row) -> dict[str, Any]:
    """A row in one level; lists as JSON."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else name, inner)
        else:
            flat[prefix] = json.dumps(value) if isinstance(value, list | dict) else value

    cell = {k: v for k, v in found["cell"].items() if k not in ("chunks", "routings")}
    figures = {k: v for k, v in found["figures"].items() if k != "tried"}
    walk("", {"key": found["key"], "version": found["version"], "code": found["code"]})
    walk("", cell)
    walk("", figures)
    flat["took"] = found["took"]
    return flat
