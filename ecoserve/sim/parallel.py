"""Cells on all cores, in their order, within a time if one is given."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait

from ecoserve.sim.evaluate import attainment, limits, measured
from ecoserve.sim.experiment import Cell
from ecoserve.sim.results import Results, Row, row

# Not forked: the progress bar's thread may hold a lock.
_SPAWN = multiprocessing.get_context("spawn")

Done = Callable[[Cell, Row], None]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run(
    cells: Sequence[Cell],
    results: Results,
    *,
    jobs: int,
    done: Done,
    seconds: float = float("inf"),
) -> None:
    """Runs the cells that ``results`` lacks; ``done`` is told of each. What is played alike
    (``Cell.played``) is played once.

    None is begun after ``seconds``. A cell that cannot be simulated gets a row with the reason as
    ``error``; any other failure ends the run, with all that was finished kept.
    """
    end = time.monotonic() + seconds
    alike: dict[str, list[Cell]] = {}
    for cell in {cell.key: cell for cell in cells}.values():
        if results.get(cell) is None:
            alike.setdefault(cell.played.key, []).append(cell)
    left = list(alike.values())

    def take(some: Sequence[Cell], found: Sequence[Row]) -> None:
        for cell, its in zip(some, found, strict=True):
            results.add(its)
            done(cell, its)

    if jobs == 1 or len(left) == 1:
        for some in left:
            if time.monotonic() >= end:
                return
            take(some, rows(some))
        return
    queue = iter(left)
    with _pool(jobs, len(left)) as pool:
        running: dict[Future[list[Row]], Sequence[Cell]] = {}
        try:
            while True:
                while len(running) < jobs and time.monotonic() < end:
                    following = next(queue, None)
                    if following is None:
                        break
                    running[pool.submit(rows, following)] = following
                if not running:
                    return
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    take(running.pop(future), future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _pool(jobs: int, tasks: int) -> ProcessPoolExecutor:
    processes = min(jobs, max(tasks, 1))
    return ProcessPoolExecutor(processes, mp_context=_SPAWN, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """A process of a pool waits for work for ever if the one that made it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def rows(alike: Sequence[Cell]) -> list[Row]:
    """The rows of cells that are played alike; the time that it took is shared among them."""
    start = time.process_time()
    try:
        figures = measured(alike[0])
        found = [figures | limits(cell, figures) for cell in alike]
    except ValueError as error:
        found = [{"error": str(error)} for _ in alike]
    took = (time.process_time() - start) / len(alike)
    return [row(cell, its, took) for cell, its in zip(alike, found, strict=True)]


def attainments(
    rows: Sequence[tuple[Cell, Row]], *, jobs: int, done: Callable[[Cell, float, float], None]
) -> None:
    """Attainment around the goodput of cells that have one; ``done`` is told cell, rate, and
    attainment."""
    asked = [
        (cell, share * found["figures"]["goodput"], found["figures"])
        for cell, found in rows
        if found["figures"].get("goodput")
        for share in (0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)
    ]
    with _pool(jobs, len(asked)) as pool:
        futures = {pool.submit(attainment, *one): one for one in asked}
        for future in as_completed(futures):
            cell, rate, _ = futures[future]
            done(cell, rate, future.result())
