"""Recorded traces: CSV as Azure publishes it, raw or as Vidur keeps it, and Mooncake's JSONL.

===================  =================================================  ======================
file                 fields                                             times
===================  =================================================  ======================
``.csv[.gz]``        arrived_at, num_prefill_tokens, num_decode_tokens  seconds; may be absent
``.csv[.gz]``        TIMESTAMP, ContextTokens, GeneratedTokens          date and time
``.jsonl[.gz]``      timestamp, input_length, output_length, hash_ids   milliseconds
===================  =================================================  ======================

Further columns are ignored. ``hash_ids`` are of the prompt's blocks of 512 tokens, and optional.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from ecoserve.sim.records import BLOCK, Arrival


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival: seconds from the first one, tokens, blocks.

    ``times`` is None for a file of lengths only.
    """

    times: tuple[float, ...] | None
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.prompts)


T = TypeVar("T")
_Row = tuple[float | None, int, int, tuple[int, ...]]


def read(path: Path) -> Trace:
    """The trace in a file; requests of no output are left out, as nothing is asked by them.

    Raises ``ValueError`` that names file, line and field.
    """
    name = path.name.removesuffix(".gz")
    parse = {".csv": _csv, ".jsonl": _jsonl}.get(Path(name).suffix)
    if parse is None:
        raise ValueError(f"{path}: a trace is .csv, .csv.gz, .jsonl or .jsonl.gz")
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    rows = [row for row in parse(path, text) if row[2] > 0]
    if not rows:
        raise ValueError(f"{path} holds no request")
    return _trace(rows)


def _trace(rows: list[_Row]) -> Trace:
    times = [row[0] for row in rows]
    if times[0] is not None:
        rows.sort(key=lambda row: row[0] or 0.0)
        first = rows[0][0] or 0.0
        when = tuple((row[0] or 0.0) - first for row in rows)
    else:
        when = None
    return Trace(
        when,
        tuple(row[1] for row in rows),
        tuple(row[2] for row in rows),
        tuple(row[3] for row in rows),
    )


_KEPT = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_RAW = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _csv(path: Path, text: str) -> Iterator[_Row]:
    lines = csv.reader(io.StringIO(text))
    header = [column.strip() for column in next(lines, [])]
    kind = next((k for k in (_KEPT, _RAW) if k[1] in header and k[2] in header), None)
    if kind is None:
        raise ValueError(
            f"{path}, line 1: the header must have {', '.join(_KEPT)} or {', '.join(_RAW)},"
            f" not {', '.join(header) or 'nothing'}"
        )
    time, prompt, output = kind
    at = header.index(time) if time in header else None
    prompts, outputs = header.index(prompt), header.index(output)
    parse_time = _seconds if kind is _KEPT else _date
    for cells in lines:
        if not cells:
            continue
        where = f"{path}, line {lines.line_num}"
        if len(cells) < len(header):
            raise ValueError(f"{where}: {len(header)} fields expected, {len(cells)} found")
        yield (
            None if at is None else _field(where, time, cells[at], parse_time),
            _field(where, prompt, cells[prompts], _prompt),
            _field(where, output, cells[outputs], _output),
            (),
        )


def _jsonl(path: Path, text: str) -> Iterator[_Row]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: an object is expected, not {line[:40]!r}")
        yield (
            _field(where, "timestamp", record.get("timestamp"), _seconds) / 1000,
            prompt := _field(where, "input_length", record.get("input_length"), _prompt),
            _field(where, "output_length", record.get("output_length"), _output),
            # The last block may be partly filled; only full ones can be shared.
            _field(where, "hash_ids", record.get("hash_ids", []), _hashes)[: prompt // BLOCK],
        )


def _field(where: str, name: str, value: Any, parse: Callable[[Any], T]) -> T:
    try:
        return parse(value)
    except (ValueError, TypeError, OverflowError):
        wanted = (parse.__doc__ or "").rstrip(".")
        shown = "missing" if value is None else repr(value)
        raise ValueError(f"{where}: {name} must be {wanted}, is {shown}") from None


def _seconds(value: Any) -> float:
    """a number from 0."""
    number = float(value)
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise ValueError
    return number


def _date(value: Any) -> float:
    """a date and time, as 2023-11-16 18:15:46.68."""
    moment = datetime.fromisoformat(value.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _whole(value: Any, least: int) -> int:
    number = float(value)
    if isinstance(value, bool) or not number.is_integer() or number < least:
        raise ValueError
    return int(number)


def _prompt(value: Any) -> int:
    """a whole number from 1."""
    return _whole(value, 1)


def _output(value: Any) -> int:
    """a whole number from 0."""
    return _whole(value, 0)


def _hashes(value: Any) -> tuple[int, ...]:
    """a list of whole numbers."""
    if not isinstance(value, list) or not all(type(v) is int for v in value):
        raise ValueError
    return tuple(value)


def write_csv(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Writes arrivals as ``arrived_at, num_prefill_tokens, num_decode_tokens``."""
    rows = ((f"{a.at:.3f}", a.prompt, a.output) for a in arrivals)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([_KEPT, *rows])


def write_jsonl(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Writes arrivals as Mooncake's traces are; gzipped if the path ends in .gz."""
    lines = "".join(
        json.dumps(
            {
                "timestamp": round(a.at * 1000),
                "input_length": a.prompt,
                "output_length": a.output,
                "hash_ids": list(a.blocks),
            }
        )
        + "\n"
        for a in arrivals
    )
    data = lines.encode()
    # No time stamp in the gzip header: the same trace is the same file.
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
