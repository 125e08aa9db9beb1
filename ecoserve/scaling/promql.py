"""Queries as Prometheus reads them."""

from __future__ import annotations

from ecoserve.scaling.queries import Query


def promql(query: Query, selector: str, fresh: float, by: str = "") -> str:
    """The query in PromQL, of the series that ``selector`` names; ``by`` are further labels to
    keep, as recording rules for all clusters need."""
    labels = ",".join([selector, *(f'{name}="{value}"' for name, value in query.labels)])
    series = f"{query.metric}{{{labels.strip(',')}}}"
    window = f"{fresh:g}s"
    if query.kind == "rate":
        values = f"rate({series}[{window}])"
    else:
        # A selector alone would take values of up to five minutes ago for the present.
        values = f"({series} and time() - timestamp({series}) <= {fresh:g})"
    kept = ", ".join(filter(None, (by, "instance" if query.per_instance else "")))
    # An instance that moves to another macro instance has two series for a moment.
    how = "max" if query.per_instance else "sum"
    return f"{how} by ({kept}) {_bracketed(values)}" if kept else f"{how}{_bracketed(values)}"


def _bracketed(text: str) -> str:
    return text if text.startswith("(") else f"({text})"
