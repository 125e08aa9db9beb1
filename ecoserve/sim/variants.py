"""Systems by name, as experiment files and the command line write them.

==================================  ==========================================================
``vllm``                            prompts first
``sarathi-512``                     chunked prefill of 512 tokens a step
``distserve-1:1``, ``mooncake-1:1`` that ratio of prefill to decode instances
``paper`` ``padg`` ``window`` ...   EcoServe with that policy; ``default`` for the default one
``vllm-best``, ``sarathi-best`` ... the system with its setting searched
==================================  ==========================================================

``sarathi`` alone is ``sarathi-512``, ``distserve`` and ``mooncake`` alone are at 1:1.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from ecoserve.policy import DEFAULT, POLICIES, make
from ecoserve.sim.records import Cluster
from ecoserve.sim.systems import VLLM, DistServe, EcoServe, MoonCake, Routing, Sarathi, System

CHUNKS = (64, 96, 128, 160, 192, 256, 384, 512, 1024, 2048)
ROUTINGS: tuple[Routing, ...] = ("least-loaded", "round-robin")
BUDGETS = (2048, 8192)
BEST = "best"

_KINDS: Mapping[str, type[Any]] = {
    "vllm": VLLM,
    "sarathi": Sarathi,
    "distserve": DistServe,
    "mooncake": MoonCake,
}
_BASELINE = re.compile(r"(vllm|sarathi|distserve|mooncake)(?:-(best|\d+|\d+:\d+))?")
ALLOWED = (
    "vllm, sarathi-CHUNK, distserve-P:D, mooncake-P:D, one of those four with -best, default, "
    + ", ".join(POLICIES)
)


def check(name: str, settings: Mapping[str, Any]) -> None:
    """Raises ``ValueError``, with what is allowed, unless such a system exists."""
    kind, _, fixed = _parse(name)
    fields = {f.name for f in dataclasses.fields(kind)} - {"policy", *fixed}
    if kind in (DistServe, MoonCake):
        fields -= {"prefill"}  # the ratio in the name says it for any number of instances
    for setting in settings:
        if setting not in fields:
            allowed = ", ".join(sorted(fields))
            raise ValueError(f"system {name} has no setting {setting!r}; it has: {allowed}")
    if kind is EcoServe:
        own = settings.get("settings", {})
        if not (isinstance(own, Mapping) and all(map(_is_number, own.values()))):
            raise ValueError(
                f"system {name}: settings must be numbers by name, as guard: 0.02, not {own!r}"
            )
        make(_policy(name), own)
    if "late_wait" in settings:
        wait = settings["late_wait"]
        if not (_is_number(wait) and 0 <= wait < math.inf):
            raise ValueError(f"system {name}: late_wait must be 0 s or more, not {wait!r}")
    for field, allowed_values in (
        ("routing", ROUTINGS),
        ("late", ("serve", "shed")),
        ("hops", (1, 2)),
        ("layerwise", (True, False)),
    ):
        if field in settings and settings[field] not in allowed_values:
            choices = " or ".join(map(str, allowed_values))
            raise ValueError(f"system {name}: {field} must be {choices}, not {settings[field]!r}")
    for field in ("budget", "queue_limit"):
        if field in settings and not (type(settings[field]) is int and settings[field] > 0):
            raise ValueError(
                f"system {name}: {field} must be a whole number from 1, not {settings[field]!r}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def mixes(name: str) -> bool:
    """Whether the system makes steps that hold prompt tokens beside decodes."""
    kind, _, _ = _parse(name)
    return POLICIES[_policy(name)].mixes if kind is EcoServe else kind is Sarathi


def build(
    name: str,
    settings: Mapping[str, Any],
    cluster: Cluster,
    *,
    chunks: Sequence[int] = CHUNKS,
    routings: Sequence[Routing] = ROUTINGS,
) -> list[System]:
    """The system for that cluster: one, or all that a search has to choose from.

    Raises ``ValueError`` if the cluster has too few instances for it.
    """
    kind, how, fixed = _parse(name)
    if kind is EcoServe:
        return [EcoServe(policy=_policy(name), **settings)]
    if how == BEST:
        return list(_candidates(kind, settings, cluster, chunks, routings))
    if kind in (DistServe, MoonCake):
        fixed = {"prefill": _share(kind, cluster, how)}
    system: System = kind(**fixed, **settings)
    return [system]


def dump(system: System) -> dict[str, Any]:
    """The system's settings, as ``load`` takes them back."""
    return {"kind": type(system).__name__, **dataclasses.asdict(system)}  # type: ignore[call-overload]


def load(dumped: Mapping[str, Any]) -> System:
    """The system that was dumped."""
    kinds = {kind.__name__: kind for kind in (*_KINDS.values(), EcoServe)}
    fields = {name: value for name, value in dumped.items() if name != "kind"}
    system: System = kinds[dumped["kind"]](**fields)
    return system


def _parse(name: str) -> tuple[type[Any], str, dict[str, Any]]:
    """Class, what follows the dash, and the settings that this fixes."""
    if name == "default" or name in POLICIES:
        return EcoServe, "", {}
    match = _BASELINE.fullmatch(name)
    if match is None:
        raise ValueError(f"system must be one of {ALLOWED}; not {name!r}")
    kind, how = match[1], match[2] or ""
    wanted = {"vllm": ("",), "sarathi": ("", "number"), "distserve": ("", "ratio")}
    form = "ratio" if ":" in how else "number" if how.isdigit() else how
    if form not in (*wanted.get(kind, ("", "ratio")), BEST):
        raise ValueError(f"system must be one of {ALLOWED}; not {name!r}")
    if kind == "sarathi" and how != BEST:
        chunk = int(how or 512)
        if chunk < 1:
            raise ValueError(f"system {name}: the chunk must be 1 token or more")
        return Sarathi, how, {"chunk": chunk}
    if form == "ratio" and "0" in how.split(":"):
        raise ValueError(f"system {name}: both sides of the ratio must be 1 or more")
    return _KINDS[kind], how, {}


def _policy(name: str) -> str:
    return DEFAULT if name == "default" else name


def _pool(kind: type[Any], cluster: Cluster) -> int:
    """Instances that P and D are split among: a node's for DistServe, else all."""
    within_node = kind is DistServe and cluster.per_node > 1
    size = cluster.per_node if within_node else cluster.instances
    if size < 2:
        raise ValueError(f"{kind.__name__.lower()} needs two instances or more, there is {size}")
    return size


def _share(kind: type[Any], cluster: Cluster, ratio: str) -> int:
    """Prefill instances of a pool at that ratio, to the nearest; at least one of each."""
    prefill, decode = map(int, (ratio or "1:1").split(":"))
    size = _pool(kind, cluster)
    return max(1, min(size - 1, round(size * prefill / (prefill + decode))))


def _candidates(
    kind: type[Any],
    settings: Mapping[str, Any],
    cluster: Cluster,
    chunks: Sequence[int],
    routings: Sequence[Routing],
) -> Iterator[System]:
    axes: dict[str, Sequence[Any]] = {"routing": routings}
    if kind is VLLM:
        axes["budget"] = BUDGETS
    elif kind is Sarathi:
        axes["chunk"] = chunks
    else:
        size = _pool(kind, cluster)
        # At most eight shares: more would differ by less than a search can tell.
        axes["prefill"] = sorted({max(1, round(size * i / 9)) for i in range(1, 9)} - {size})
    if kind is MoonCake:
        axes["layerwise"] = (True, False)
        axes["hops"] = (1, 2)
    axes = {name: values for name, values in axes.items() if name not in settings}
    for values in product(*axes.values()):
        yield kind(**dict(zip(axes, values, strict=True)), **settings)


def between(system: System, chunks: Sequence[int]) -> list[System]:
    """Finer settings on both sides of one that a search over ``chunks`` chose, and beyond their
    ends if it is the least or the largest.

    The best chunk's peak is sharp; other settings have no finer ones.
    """
    if not isinstance(system, Sarathi):
        return []
    below = max((c for c in chunks if c < system.chunk), default=system.chunk // 2)
    above = min((c for c in chunks if c > system.chunk), default=system.chunk * 2)
    middles = {round((system.chunk * c) ** 0.5 / 16) * 16 for c in (below, above)}
    return [
        dataclasses.replace(system, chunk=chunk)
        for chunk in sorted(middles - {0, below, system.chunk, above})
    ]
