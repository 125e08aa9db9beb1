"""Cells on all cores, in their order, within a time if one is given."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait

from ecoserve.sim.evaluate import attainment, evaluate
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
    """Runs the cells that ``results`` lacks; ``done`` is told of each.

    None is begun after ``seconds``. A cell that cannot be simulated gets a row with the reason as
    ``error``; any other failure ends the run, with all that was finished kept.
    """
    end = time.monotonic() + seconds
    unique = {cell.key: cell for cell in cells}.values()
    left = [cell for cell in unique if results.get(cell) is None]

    def take(cell: Cell, found: Row) -> None:
        results.add(found)
        done(cell, found)

    if jobs == 1 or len(left) == 1:
        for cell in left:
            if time.monotonic() >= end:
                return
            take(cell, one(cell))
        return
    queue = iter(left)
    with _pool(jobs, len(left)) as pool:
        running: dict[Future[Row], Cell] = {}
        try:
            while True:
                while len(running) < jobs and time.monotonic() < end:
                    following = next(queue, None)
                    if following is None:
                        break
                    running[pool.submit(one, following)] = following
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


def one(cell: Cell) -> Row:
    """The row of a cell."""
    start = time.process_time()
    try:
        figures = evaluate(cell)
    except ValueError as error:
        figures = {"error": str(error)}
    return row(cell, figures, time.process_time() - start)


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
