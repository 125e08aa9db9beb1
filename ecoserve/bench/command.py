"""`ecoserve bench` at a terminal: progress, a table, files, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ecoserve.bench import report
from ecoserve.bench.endpoint import EndpointError
from ecoserve.bench.load import Outcome
from ecoserve.bench.plan import Kind, Plan
from ecoserve.bench.runner import Bench, Found, Step

INTERRUPTED = 130
_UNITS: dict[Kind, str] = {"concurrency": "concurrent", "rate": "requests/s"}
_HEAD = (
    f"{'load':>16} {'calls':>6} {'failed':>6} {'in time':>7} {'TTFT p50':>8} {'p90':>7}"
    f" {'TPOT p50':>8} {'p90':>7} {'req/s':>7} {'tokens/s':>8} {'late p99':>8}"
)


def bench(plan: Plan, console: Console, *, as_json: bool = False) -> int:
    """Runs a bench; its exit code. With ``as_json`` all figures go to standard output, as JSON."""

    def failed(why: object) -> int:
        console.print(str(why), style="red", markup=False, soft_wrap=True)
        return 1

    if plan.out is not None:
        try:
            plan.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return failed(f"--out: {error}")
        if not os.access(plan.out, os.W_OK):
            return failed(f"--out: {plan.out} cannot be written to")
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    try:
        work = Bench(plan, _Terminal(console, progress))
        with progress:
            uvloop.run(_until_done(work))
    except (EndpointError, ValueError) as error:
        return failed(error)
    found = work.found
    _conclude(found, console)
    if plan.out is not None and found.steps:
        try:
            for path in report.write(found, plan.out):
                console.print(f"written: {path}", markup=False, soft_wrap=True)
        except OSError as error:
            return failed(f"--out: {error}")
    if as_json:
        json.dump(report.document(found), sys.stdout, indent=1)
        print()
    return INTERRUPTED if found.interrupted else 0


async def _until_done(work: Bench) -> None:
    loop = asyncio.get_running_loop()

    def once() -> None:
        # The second one ends the program at once.
        loop.remove_signal_handler(signal.SIGINT)
        work.stop()

    loop.add_signal_handler(signal.SIGINT, once)
    try:
        await work.play()
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Terminal:
    """Shows how the bench goes on."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._found: Found | None = None
        self._task: TaskID | None = None
        self._timed = False
        self._met = self._done = self._failed = 0

    def known(self, found: Found) -> None:
        self._found = found
        model, alone, slo = found.model, found.alone, found.slo
        assert model is not None
        assert alone is not None
        assert slo is not None
        self._console.print(
            f"{model.name} at {found.plan.url}; alone, TTFT {alone.ttft:.3f} s and TPOT"
            f" {alone.tpot:.4f} s; SLOs TTFT {slo.ttft:.3f} s, TPOT {slo.tpot:.4f} s",
            highlight=False,
            soft_wrap=True,
        )
        if found.writer is not None and not found.writer.extra:
            self._console.print("the endpoint refuses ignore_eos: answers end when they like")
        self._console.print(_HEAD, highlight=False, style="bold", soft_wrap=True)

    def began(self, kind: Kind, load: float, calls: int | None, seconds: float) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._met = self._done = self._failed = 0
        what = f"{load:.4g} {_UNITS[kind]}"
        self._timed = calls is None
        total = seconds if calls is None else float(calls)
        self._task = self._progress.add_task(what, total=total, note="")

    def ended(self, outcome: Outcome) -> None:
        assert self._task is not None
        self._done += 1
        self._failed += not outcome.ok
        slo = self._found.slo if self._found is not None else None
        self._met += slo is not None and outcome.meets(slo)
        self._progress.update(
            self._task,
            completed=outcome.end if self._timed else self._done,
            note=f"{self._done} calls, {self._met / self._done:.0%} in time, {self._failed} failed",
        )

    def stepped(self, step: Step) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        self._console.print(row(step), highlight=False, soft_wrap=True)
        for error, count in step.summary.errors.items():
            self._console.print(f"{'':>16} {count} x {error}", highlight=False, markup=False)


def row(step: Step) -> str:
    """A step as a line of the table."""
    s = step.summary
    load = f"{step.load:.4g} {_UNITS[step.kind]}"
    note = " (ended early: fails)" * step.decided_early + " (interrupted)" * step.interrupted
    attained = f"{s.attained:7.1%}" if s.attained is not None else f"{'':>7}"
    return (
        f"{load:>16} {s.calls:>6} {s.failed:>6} {attained} {s.ttft.p50:>8.3f} {s.ttft.p90:>7.3f}"
        f" {s.tpot.p50:>8.4f} {s.tpot.p90:>7.4f} {s.requests_per_s:>7.3g}"
        f" {s.output_tokens_per_s:>8.4g} {s.lateness.p99:>8.4f}{note}"
    )


def _conclude(found: Found, console: Console) -> None:
    late = max((s.summary.lateness.p99 for s in found.steps), default=0.0)
    if found.slo is not None and late > 0.1 * found.slo.ttft:
        console.print(
            f"[yellow]calls went out late, by {late:.3f} s in the worst percent: this machine"
            " cannot play that load[/yellow]"
        )
    search = found.search
    if search is None or found.interrupted:
        return
    target = f"{found.plan.attainment:.0%}"
    if search.bracketed:
        console.print(
            f"goodput: {search.low:.4g} requests/s with {target} in time ({search.high:.4g} fails)",
            highlight=False,
        )
    elif search.low:
        console.print(f"goodput: above {search.low:.4g} requests/s, the highest rate tried")
    else:
        console.print(f"goodput: no rate tried had {target} of the calls in time", style="yellow")
