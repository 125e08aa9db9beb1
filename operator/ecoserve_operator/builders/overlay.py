"""Lays an overlay over a Pod as ``kubectl patch --local --type=strategic`` does.

Strategic merge: maps are merged field by field, null removes a field, lists are replaced, but those
that Kubernetes marks with a merge key are merged item by item. Directives: ``$patch: replace`` and
``$patch: delete``, ``$retainKeys``, ``$deleteFromPrimitiveList/<field>``,
``$setElementOrder/<field>``. See "Strategic Merge Patch" in Kubernetes' API conventions; the order
of merged items follows k8s.io/apimachinery/pkg/util/strategicpatch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

JSON = dict[str, Any]


class OverlayError(ValueError):
    """The overlay cannot be merged; the message names the field."""


@dataclass(frozen=True, slots=True)
class _Type:
    """What Kubernetes' API says of a type's fields: ``merged`` are its lists that are merged, each
    with its merge key (empty: a list of plain values) and the type of its items; ``fields`` are
    objects that hold such lists."""

    merged: Mapping[str, tuple[str, _Type]] = field(default_factory=dict)
    fields: Mapping[str, _Type] = field(default_factory=dict)


_PLAIN = _Type()
_CONTAINER = _Type(
    merged={
        "env": ("name", _PLAIN),
        "ports": ("containerPort", _PLAIN),
        "volumeDevices": ("devicePath", _PLAIN),
        "volumeMounts": ("mountPath", _PLAIN),
    }
)
_POD = _Type(
    fields={
        "metadata": _Type(merged={"finalizers": ("", _PLAIN), "ownerReferences": ("uid", _PLAIN)}),
        "spec": _Type(
            merged={
                "containers": ("name", _CONTAINER),
                "ephemeralContainers": ("name", _CONTAINER),
                "hostAliases": ("ip", _PLAIN),
                "imagePullSecrets": ("name", _PLAIN),
                "initContainers": ("name", _CONTAINER),
                "resourceClaims": ("name", _PLAIN),
                "schedulingGates": ("name", _PLAIN),
                "topologySpreadConstraints": ("topologyKey", _PLAIN),
                "volumes": ("name", _PLAIN),
            }
        ),
    }
)

_PATCH, _RETAIN = "$patch", "$retainKeys"
_ORDER, _DELETE = "$setElementOrder/", "$deleteFromPrimitiveList/"
_DIRECTIVES = (_PATCH, _RETAIN, _ORDER, _DELETE)


def overlay(pod: Mapping[str, Any], patch: Mapping[str, Any], path: str = "podTemplate") -> JSON:
    """The Pod, or Pod template, with ``patch`` merged into it; both stay as they are.

    Raises ``OverlayError`` where the API server would refuse the patch; ``path`` begins the name of
    the field in its message.
    """
    return _map(copy.deepcopy(dict(pod)), copy.deepcopy(dict(patch)), _POD, path)


def _map(original: JSON, patch: JSON, type: _Type, path: str) -> JSON:
    if _PATCH in patch:
        directive = patch.pop(_PATCH)
        if directive == "replace":
            return patch
        if directive == "delete":
            return {}
        raise OverlayError(f"{path}.$patch: must be replace or delete, not {directive!r}")
    _retain(original, patch, path)
    _ordered(original, patch, type, path)
    for key, value in patch.items():
        where = f"{path}.{key}"
        if key.startswith(_DELETE):
            name = key.removeprefix(_DELETE)
            there = original.get(name)
            if isinstance(there, list):
                gone = _list_of(value, where)
                original[name] = [item for item in there if item not in gone]
        elif value is None:
            original.pop(key, None)
        elif key not in original or not _alike(original[key], value):
            original.pop(key, None)
            if not _patched(value):
                original[key] = _bare(value)
        elif isinstance(value, dict):
            original[key] = _map(original[key], value, type.fields.get(key, _PLAIN), where)
        elif isinstance(value, list) and key in type.merged:
            merge_key, item = type.merged[key]
            original[key] = _items(original[key], value, merge_key, item, where)
        else:
            original[key] = value
    return original


def _alike(one: object, other: object) -> bool:
    return isinstance(one, dict) == isinstance(other, dict) and isinstance(one, list) == isinstance(
        other, list
    )


def _retain(original: JSON, patch: JSON, path: str) -> None:
    if _RETAIN not in patch:
        return
    keys = _list_of(patch.pop(_RETAIN), f"{path}.{_RETAIN}")
    for key, value in patch.items():
        if value is not None and not key.startswith((_DELETE, _ORDER)) and key not in keys:
            raise OverlayError(f"{path}.{_RETAIN}: must list {key}, which the overlay sets")
    for key in [key for key in original if key not in keys]:
        del original[key]


def _ordered(original: JSON, patch: JSON, type: _Type, path: str) -> None:
    """Merges the lists whose order the patch gives, and takes them out of the patch."""
    for key in [key for key in patch if key.startswith(_ORDER)]:
        order = _list_of(patch.pop(key), f"{path}.{key}")
        name = key.removeprefix(_ORDER)
        if name not in type.merged:
            raise OverlayError(f"{path}.{key}: {name} is not a list that is merged")
        merge_key, item = type.merged[name]
        there, given = original.get(name), patch.pop(name, None)
        where = f"{path}.{name}"
        if there is None and given is None:
            continue
        if given is None:
            merged = _list_of(there, where)
        elif there is None:
            merged = _bare(_list_of(given, where))
        else:
            merged = _items(list(there), _list_of(given, where), merge_key, item, where)
        original[name] = _sorted(merged or [], order, there or [], _key(merge_key))


def _items(original: list[Any], patch: list[Any], key: str, type: _Type, path: str) -> list[Any]:
    """Merges the items of a list; ``key`` is what tells them apart, empty: themselves."""
    if not key:
        merged = original + [item for item in dict.fromkeys(patch) if item not in original]
        return _sorted(merged, patch, original, _key(key))
    wanted = []
    replace = False
    for number, item in enumerate(patch):
        where = f"{path}[{number}]"
        if not isinstance(item, dict):
            raise OverlayError(f"{where}: must be an object, not {item!r}")
        directive = item.get(_PATCH)
        if directive == "replace":
            replace = True
            continue
        if directive not in (None, "delete"):
            raise OverlayError(f"{where}.$patch: must be replace or delete, not {directive!r}")
        if key not in item:
            raise OverlayError(f"{where}: {key} must be set: items of this list are merged by it")
        if directive == "delete":
            original = [there for there in original if there.get(key) != item[key]]
        else:
            wanted.append((where, item))
    if replace:
        return [item for _, item in wanted]
    merged = list(original)
    for where, item in wanted:
        at = next((n for n, there in enumerate(merged) if there.get(key) == item[key]), None)
        if at is None:
            merged.append(item)
        else:
            merged[at] = _map(merged[at], item, type, where)
    return _sorted(merged, [item for _, item in wanted], original, _key(key))


def _key(merge_key: str) -> Callable[[Any], Any]:
    return (lambda item: item.get(merge_key)) if merge_key else (lambda item: item)


def _sorted(
    merged: Sequence[Any], order: Sequence[Any], before: Sequence[Any], key: Callable[[Any], Any]
) -> list[Any]:
    """What the patch names in its order; the rest before the first of them that it preceded."""
    first = {key(item): n for n, item in reversed(list(enumerate(order)))}
    place = {key(item): n for n, item in reversed(list(enumerate(before)))}
    named = sorted((i for i in merged if key(i) in first), key=lambda item: first[key(item)])
    rest = sorted(
        (i for i in merged if key(i) not in first),
        key=lambda item: place.get(key(item), len(place)),
    )
    result = []
    while named and rest:
        one, other = place.get(key(rest[0])), place.get(key(named[0]))
        ahead = one is not None and other is not None and one < other
        result.append(rest.pop(0) if ahead else named.pop(0))
    return [*result, *rest, *named]


def _bare(value: Any) -> Any:
    """A value that there was nothing to merge with: without nulls and directives, and without what
    carries a ``$patch``."""
    if isinstance(value, dict):
        return {
            key: _bare(part)
            for key, part in value.items()
            if part is not None and not key.startswith(_DIRECTIVES) and not _patched(part)
        }
    if isinstance(value, list):
        return [_bare(part) for part in value if not _patched(part)]
    return value


def _patched(value: object) -> bool:
    return isinstance(value, dict) and _PATCH in value


def _list_of(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise OverlayError(f"{path}: must be a list, not {value!r}")
    return value
