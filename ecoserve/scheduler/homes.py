"""Where the instances of a cluster belong, which of them can be routed to, and what each macro
instance carries: kept as they change, so that a pick need not look at all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ecoserve.policy import balance
from ecoserve.scheduler.config import Macro
from ecoserve.scheduler.instance import Instance


class Homes:
    """The macro instances of a cluster with their instances; ``members`` is each one's home."""

    def __init__(self) -> None:
        self.members: dict[str, str] = {}
        self._homes: dict[str, list[Instance]] = {}
        # Of each instance that is routed to, the load that ``_loads`` counts it with.
        self._counted: dict[str, int] = {}
        self._loads: dict[str, int] = {}
        # What is routed to, and where conversations belong, until an instance comes or goes.
        self._able: dict[str, list[Instance]] = {}
        self._places: balance.Places | None = None

    def declare(self, macros: Iterable[Macro], instances: Mapping[str, Instance]) -> None:
        """These macro instances are there from now on, of ``instances`` by name."""
        self._homes = {m.name: [instances[name] for name in m.instances] for m in macros}
        self.members = {i.name: macro for macro, home in self._homes.items() for i in home}
        self._counted.clear()
        self._loads = dict.fromkeys(self._homes, 0)
        self._able.clear()
        self._places = None
        for home in self._homes.values():
            for instance in home:
                self.touched(instance)

    def touched(self, instance: Instance) -> None:
        """The load of an instance may have changed, or whether it can be routed to."""
        home = self.members.get(instance.name)
        if home is None:
            return
        before = self._counted.get(instance.name)
        routable = instance.routable
        if routable != (before is not None):
            self._able.pop(home, None)
            self._places = None
        if routable:
            after = self._counted[instance.name] = instance.load
            self._loads[home] += after - (before or 0)
        elif before is not None:
            self._loads[home] -= self._counted.pop(instance.name)

    def others(self, instance: Instance) -> list[Instance]:
        """Those that are in the same macro instance."""
        home = self._homes[self.members[instance.name]]
        return [one for one in home if one is not instance]

    def routable(self, macro: str | None = None) -> list[Instance]:
        """Instances that may be given work, of one macro instance or of all, in their order."""
        if macro is None:
            return [instance for home in self._homes for instance in self.routable(home)]
        able = self._able.get(macro)
        if able is None:
            able = self._able[macro] = [i for i in self._homes[macro] if i.routable]
        return able

    def choose(
        self, key: bytes, waiting: Sequence[int], permitted: frozenset[str] | None
    ) -> str | None:
        """The macro instance that the conversation ``key`` belongs to, with so many requests
        ``waiting`` at each, limited to the ``permitted`` instances; None if none can be routed to.
        """
        if len(self._homes) == 1 and permitted is None:
            # Nothing to choose, as in most clusters.
            (only,) = self._homes
            return only if self.routable(only) else None
        places = self._places
        if permitted is not None:
            places = balance.Places(
                {m: [i.name for i in self.routable(m) if i.name in permitted] for m in self._homes}
            )
        elif places is None:
            places = self._places = balance.Places(
                {macro: [i.name for i in self.routable(macro)] for macro in self._homes}
            )
        loads = list(self._loads.values())
        if waiting:
            loads = [held + queued for held, queued in zip(loads, waiting, strict=True)]
        return places.choose(key, loads)
