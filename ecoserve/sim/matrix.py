"""The full matrix: every model, data set, GPU, percentile and price of mixing, and every system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import geometric_mean

from rich.table import Table

from ecoserve.sim.experiment import Cell, Experiment
from ecoserve.sim.report import Pairs, bound, heads, number, pivot, rate, shown, written
from ecoserve.sim.results import Row

USUAL = ("vllm", "sarathi-256", "sarathi-512", "sarathi-2048", "distserve-1:1", "mooncake-1:1")
BEST = ("vllm-best", "sarathi-best", "distserve-best", "mooncake-best")
OURS = ("paper", "padg", "window", "default")
PUBLISHED = {
    "vllm": ("vllm",),
    "sarathi": ("sarathi-256", "sarathi-512", "sarathi-2048"),
    "distserve": ("distserve-1:1",),
    "mooncake": ("mooncake-1:1",),
}
"""Each system's usual settings; the better one counts."""
AIMS = {"vllm": 1.96, "sarathi": 1.99, "distserve": 2.51, "mooncake": 2.40}
"""What the paper reports for its L20 cluster: goodput over each system's, on average."""

MODELS = ("Llama-30B", "CodeLlama-34B", "Qwen2-72B")
DATA = ("sharegpt", "longbench", "alpaca")


def experiments(
    *, quick: bool, layouts: bool = False, overlap: float = 0.0, published: bool = True
) -> list[Experiment]:
    """The matrix in the order in which it is run: L20 at P99 first.

    On L20, 8 instances as usually laid out; on A800, 16 GPUs. ``layouts`` searches TP and PP for
    each system on as many GPUs. ``quick`` makes runs short and searches coarse: for orientation
    only. ``published`` counts the wait for decode to TTFT, for every system alike; plainly it
    counts to TPOT, which systems that move KV can hardly keep for short answers.
    """
    found = []
    for gpu, percentile in (("L20", 99), ("L20", 90), ("A800-PCIe", 99), ("A800-PCIe", 90)):
        for model in MODELS:
            gpus = 16 if gpu != "L20" else 64 if model == "Qwen2-72B" else 32
            found.append(
                Experiment.model_validate(
                    {
                        "name": "matrix-quick" if quick else "matrix",
                        "model": model,
                        "gpu": gpu,
                        "gpus": gpus,
                        "layout": "best" if layouts else "usual",
                        "data": list(DATA),
                        "percentile": percentile,
                        "mixing": [0.2, 0.0],
                        "overlap": overlap,
                        "published": published,
                        "systems": [*USUAL, *OURS, *(_QUICK_BEST if quick else BEST)],
                        **(_QUICK | {"requests": _QUICK_REQUESTS[percentile]} if quick else _FULL),
                    }
                )
            )
    return found


# To send KV while the prompt is computed is never worse; what remains is the ratio, and whether KV
# goes by the pool.
_QUICK_BEST = (*BEST[:-1], {"system": BEST[-1], "label": BEST[-1], "layerwise": True})
_QUICK = {
    "min_seconds": 50,
    "warmup": 30,
    "resolution": 0.05,
    "seeds": [11],
    "tune_seeds": [1],
    "chunks": [128, 256, 512, 1024],
    "routings": ["least-loaded"],
}
# At P99 eight of so many may miss, at P90 forty of half as many.
_QUICK_REQUESTS = {99: 800, 90: 400}
_FULL = {"requests": 10_000, "resolution": 0.01, "seeds": [11, 12], "tune_seeds": [1, 2]}


def order(cells: list[Cell]) -> list[Cell]:
    """The cells as they are run: for each GPU and percentile what needs no search first."""
    blocks = {(cell.gpu, cell.percentile): place for place, cell in reversed([*enumerate(cells)])}
    return sorted(
        cells, key=lambda cell: (blocks[cell.gpu, cell.percentile], cell.system.name in BEST)
    )


def rates_table(pairs: Pairs, title: str) -> Table:
    """Goodput of every system with what was searched for it, and the fluid bound."""
    fields, cases = pivot(pairs)
    table = Table(title=title, title_justify="left")
    for head in heads(fields):
        table.add_column(head, no_wrap=True)
    for head in ("bound", *USUAL, *BEST, *OURS):
        table.add_column(head.replace("-", "\n", 1), justify="right")
    for case, rows in cases.items():
        limit = bound(rows)
        names = (*USUAL, *BEST, *OURS)
        cells = (shown(rows.get(name)) + _searched(rows.get(name)) for name in names)
        table.add_row(*case, "–" if limit is None else number(limit), *cells)
    return table


def _searched(found: Row | None) -> str:
    """The setting and the layout that a search chose."""
    if rate(found) is None:
        return ""
    assert found is not None
    cell, chosen = found["cell"], found["figures"]["chosen"]
    setting = chosen["name"] if cell["system"]["system"] in BEST else ""
    layout = "" if cell["layout"] else chosen["layout"]
    return "".join(f"\n{part}" for part in (setting, layout) if part)


def ratios_table(pairs: Pairs, title: str) -> Table:
    """The default over every system as published, over the best usual, the best of all, the bound;
    and how far ahead of the best usual a scheduler of instances alike can be at all.

    Ratios over what reached nothing at all are left out, as they say nothing.
    """
    fields, cases = pivot(pairs)
    table = Table(title=title, title_justify="left")
    for head in heads(fields):
        table.add_column(head, no_wrap=True)
    names = [f"default over\n{name}" for name in _RATIOS]
    for head in (*names, "bound over\nbest usual"):
        table.add_column(head, justify="right")
    ratios = (*_RATIOS.values(), _room)
    for case, rows in cases.items():
        cells = [ratio(rows) for ratio in ratios]
        table.add_row(*case, *("–" if value is None else f"{value:.2f}" for value in cells))
    means = [_mean(cases.values(), ratio) for ratio in ratios]
    table.add_section()
    table.add_row("geometric mean", *[""] * (len(fields) - 1), *means)
    aims = [f"{AIMS[name]:.2f}" if name in AIMS else "" for name in _RATIOS]
    table.add_row("reported by the paper, L20", *[""] * (len(fields) - 1), *aims)
    return table


def verdicts(pairs: Pairs) -> Iterator[str]:
    """What the matrix was asked to show, and in how many cases it does."""
    _, cases = pivot(pairs)
    at_p99 = _cases(pairs, lambda cell: cell.percentile == 99)
    free = _cases(pairs, lambda cell: cell.mixing == 0)
    for what, ratio, least, among in (
        (
            "ahead of every usual setting by 1.25 or more, at P99",
            _RATIOS["best usual"],
            1.25,
            at_p99,
        ),
        ("level with every best setting (0.98) or ahead", _RATIOS["best of all"], 0.98, None),
        ("0.97 of the bound or more where mixing is free", _RATIOS["bound"], 0.97, free),
    ):
        rows = [r for case, r in cases.items() if among is None or case in among]
        values = [value for value in map(ratio, rows) if value is not None]
        kept = sum(value >= least for value in values)
        missing = f", {len(rows) - len(values)} not run" if len(values) < len(rows) else ""
        yield f"{what}: {kept} of {len(values)} cases{missing}"


def _cases(pairs: Pairs, wanted: Callable[[Cell], bool]) -> set[tuple[str, ...]]:
    """The cases of the cells that are wanted, as ``pivot`` keys them."""
    fields, _ = pivot(pairs)
    return {tuple(written(cell, field) for field in fields) for cell, _ in pairs if wanted(cell)}


Rows = Mapping[str, Row | None]
Ratio = Callable[[Rows], float | None]


def _over(*names: str) -> Ratio:
    """The default over the best of those systems; None unless all of them were run."""

    def ratio(rows: Rows) -> float | None:
        ours = rate(rows.get("default"))
        # One that cannot be built there (disaggregation on one instance) is no rival; one that was
        # not run may be.
        if ours is None or any(rows.get(name) is None for name in names):
            return None
        theirs = max((r for name in names if (r := rate(rows[name])) is not None), default=0.0)
        return ours / theirs if theirs > 0 else None

    return ratio


def _of_bound(rows: Rows) -> float | None:
    ours, limit = rate(rows.get("default")), bound(rows)
    return None if ours is None or limit is None else ours / limit


def _room(rows: Rows) -> float | None:
    ours, ratio = _of_bound(rows), _over(*USUAL)(rows)
    return None if not ours or ratio is None else ratio / ours


_RATIOS: Mapping[str, Ratio] = {
    **{system: _over(*names) for system, names in PUBLISHED.items()},
    "best usual": _over(*USUAL),
    "best of all": _over(*USUAL, *BEST),
    "bound": _of_bound,
}


def _mean(cases: Iterable[Rows], ratio: Ratio) -> str:
    values = [value for rows in cases if (value := ratio(rows))]
    return f"{geometric_mean(values):.2f}" if values else "–"
