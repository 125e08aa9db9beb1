"""Mitosis: how instances are spread over macro instances as their number changes.

Two steps, both pure. ``regroup`` decides sizes: which macro instances (here: groups) there are and
how many instances each is to have. Its ``Layout`` is all that must be remembered, and it changes
whole, so a split or a merge is decided at once. ``arrange`` then compares the layout with what is
there and says what to do: each action is idempotent and safe on its own, so whoever carries them
out may stop anywhere and plan anew. ``plan`` does one or the other.

Expansion fills the groups in their order up to N_u; one instance more, and N_l instances are split
off. Contraction takes from the smallest group down to N_l, then from the largest; two groups that
fit in N_u together are merged. N_u is hard: a group never has more instances that take requests.
N_l is soft for a lone group and until ``Bounds.merge_cooldown`` has passed since the last split or
merge, so that a number that swings around N_u causes one split and one merge in that time at most.

Instances that drain belong to no size: they finish in the group where they are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

State = Literal["starting", "serving", "draining", "drained"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """``lower`` is N_l, ``upper`` N_u; ``merge_cooldown`` in seconds.

    Raises ``ValueError`` unless a group that passes N_u leaves two of at least N_l.
    """

    lower: int
    upper: int
    merge_cooldown: float = 300.0

    def __post_init__(self) -> None:
        if self.lower < 1:
            raise ValueError(f"lower must be at least 1, not {self.lower}")
        if self.upper + 1 < 2 * self.lower:
            raise ValueError(
                f"upper must be at least 2 x lower - 1 = {2 * self.lower - 1}, not {self.upper}"
            )
        if not self.merge_cooldown >= 0:
            raise ValueError(f"merge_cooldown must not be negative, not {self.merge_cooldown}")


def default_sizes(gpus: int) -> tuple[int, int]:
    """N_l and N_u for a cluster of so many GPUs."""
    upper = 4 if gpus <= 16 else 8 if gpus <= 64 else 16
    return (upper + 1) // 2, upper


# --- what there is ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance that exists and has not failed.

    ``load`` is any measure of what it would have to finish, the same for all (e.g. its requests).
    """

    name: str
    group: str
    load: float = 0.0
    state: State = "serving"

    @property
    def counts(self) -> bool:
        """Whether it takes requests or will: it is not being retired."""
        return self.state in ("starting", "serving")


@dataclass(frozen=True, slots=True)
class Layout:
    """What was decided: the groups with their sizes, oldest first, and when a group was last split
    and groups were last merged (the caller's clock, seconds)."""

    groups: tuple[tuple[str, int], ...] = ()
    last_split: float | None = None
    last_merge: float | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Size by group, oldest first."""
        return dict(self.groups)

    @property
    def total(self) -> int:
        """Instances of all groups."""
        return sum(size for _, size in self.groups)


def found(instances: Iterable[Instance]) -> Layout:
    """A layout that fits what is there, for when the decided one was lost."""
    sizes = Counter(instance.group for instance in instances if instance.counts)
    return Layout(tuple(sorted(sizes.items())))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``groups`` are those that exist, empty ones and those that only drain included."""

    layout: Layout
    groups: frozenset[str]
    instances: tuple[Instance, ...]


# --- what is decided ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """``count`` instances of ``group`` become the group ``new``."""

    group: str
    new: str
    count: int


@dataclass(frozen=True, slots=True)
class Merge:
    """The instances of ``group`` go to ``into``, and ``group`` ends."""

    group: str
    into: str


@dataclass(frozen=True, slots=True)
class Level:
    """``count`` instances of ``donor`` bring ``group`` to N_l: the two do not fit in N_u
    together."""

    group: str
    donor: str
    count: int


Decision: TypeAlias = Split | Merge | Level


@dataclass(frozen=True, slots=True)
class Change:
    """What ``regroup`` decided. ``marked`` is the group that will be merged, ``wake_at`` when
    (None: as soon as all is settled)."""

    layout: Layout
    decision: Decision | None = None
    marked: str | None = None
    wake_at: float | None = None


def regroup(
    layout: Layout,
    wanted: int,
    bounds: Bounds,
    now: float,
    *,
    prefix: str = "macro-",
    taken: Collection[str] = (),
    loads: Mapping[str, float] | None = None,
    settled: bool = True,
) -> Change:
    """The layout for ``wanted`` instances; at most one split or merge at a time.

    ``settled`` says that nothing has to move for what was decided before: else nothing is split or
    merged, and the layout holds only what fits without. Call again until the layout stays as it is.
    New groups are named ``prefix`` and the least number that is not among ``taken``. Of several
    groups to merge with, the one with the least of ``loads`` per instance is chosen.
    """
    if wanted < 0:
        raise ValueError(f"wanted must not be negative, not {wanted}")
    sizes = layout.sizes
    if not sizes and wanted:
        sizes[_fresh(prefix, taken)] = 0
    while sum(sizes.values()) > wanted:
        sizes[_to_shrink(sizes, bounds)] -= 1
    _fill(sizes, wanted, bounds)
    change = Change(replace(layout, groups=_groups(sizes)))
    decision = _split(sizes, wanted, bounds, _fresh(prefix, {*taken, *sizes}))
    if decision is not None:
        if not settled:
            return change
        _give(sizes, decision.group, decision.new, decision.count)
        _fill(sizes, wanted, bounds)
        return Change(replace(layout, groups=_groups(sizes), last_split=now), decision)
    union = _merge(change.layout.sizes, bounds, loads or {})
    if union is None:
        return change
    times = [at for at in (layout.last_split, layout.last_merge) if at is not None]
    due = max(times) + bounds.merge_cooldown if times else now
    if due > now or not settled:
        return replace(change, marked=union.group, wake_at=due if due > now else None)
    if isinstance(union, Merge):
        _give(sizes, union.group, union.into, sizes[union.group])
    else:
        _give(sizes, union.donor, union.group, union.count)
    return Change(replace(layout, groups=_groups(sizes), last_merge=now), union)


def _groups(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, size) for name, size in sizes.items() if size)


def _give(sizes: dict[str, int], source: str, group: str, count: int) -> None:
    sizes[source] -= count
    sizes[group] = sizes.get(group, 0) + count


def _fresh(prefix: str, taken: Collection[str]) -> str:
    return next(name for n in range(len(taken) + 1) if (name := f"{prefix}{n}") not in taken)


def _to_shrink(sizes: dict[str, int], bounds: Bounds) -> str:
    """Of the smallest down to N_l, then of the largest; all at N_l: of the smallest, the newest."""
    names = [name for name in reversed(sizes) if sizes[name]]
    smallest = min(names, key=lambda name: sizes[name])
    largest = max(names, key=lambda name: sizes[name])
    return largest if sizes[smallest] <= bounds.lower < sizes[largest] else smallest


def _fill(sizes: dict[str, int], wanted: int, bounds: Bounds) -> None:
    """Grows groups below N_l first, then the oldest that is not full, as far as it goes."""
    while sum(sizes.values()) < wanted:
        free = [name for name, size in sizes.items() if size < bounds.upper]
        if not free:
            return
        short = [name for name in free if sizes[name] < bounds.lower]
        sizes[(short or free)[0]] += 1


def _split(sizes: dict[str, int], wanted: int, bounds: Bounds, new: str) -> Split | None:
    """The split of a group that passes N_u, if there is one; it is counted as one more then."""
    if sum(sizes.values()) < wanted:
        group = next(name for name, size in sizes.items() if size >= bounds.upper)
        sizes[group] += 1
    group = max(sizes, key=lambda name: sizes[name], default="")
    over = sizes.get(group, 0) - bounds.upper
    if over <= 0:
        return None
    # N_l for one too many; where N_u was lowered, as many as are too many and one group may have.
    return Split(group, new, min(bounds.upper, max(bounds.lower, over)))


def _merge(
    sizes: dict[str, int], bounds: Bounds, loads: Mapping[str, float]
) -> Merge | Level | None:
    """The merge that the sizes call for: of the smallest group that fits in N_u with another.

    A group below N_l that fits with none gets instances of the largest instead: the two have more
    than N_u, so at least 2 N_l.
    """
    newest_first = list(reversed(sizes))
    by_size = sorted(newest_first, key=lambda name: sizes[name])
    for group in by_size:
        fits = [n for n in sizes if n != group and sizes[n] + sizes[group] <= bounds.upper]
        if fits:
            return Merge(group, min(fits, key=lambda n: loads.get(n, 0.0) / sizes[n]))
    if len(by_size) > 1 and sizes[by_size[0]] < bounds.lower:
        return Level(by_size[0], by_size[-1], bounds.lower - sizes[by_size[0]])
    return None


# --- what to do ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateGroup:
    """Make an empty group."""

    group: str


@dataclass(frozen=True, slots=True)
class MoveInstance:
    """Hand an instance over to another group; nothing is restarted, its requests go on."""

    instance: str
    source: str
    group: str


@dataclass(frozen=True, slots=True)
class AddInstance:
    """Start an instance in the group unless it has ``count`` already, those that drain left out."""

    group: str
    count: int


@dataclass(frozen=True, slots=True)
class DrainInstance:
    """Stop routing to the instance and let it finish what it has."""

    instance: str


@dataclass(frozen=True, slots=True)
class ResumeInstance:
    """Route to an instance again that was draining: it is needed after all."""

    instance: str


@dataclass(frozen=True, slots=True)
class DeleteInstance:
    """End an instance that is drained."""

    instance: str


@dataclass(frozen=True, slots=True)
class RemoveGroup:
    """Remove a group that has no instances left."""

    group: str


Action: TypeAlias = (
    CreateGroup
    | MoveInstance
    | AddInstance
    | DrainInstance
    | ResumeInstance
    | DeleteInstance
    | RemoveGroup
)


def arrange(snapshot: Snapshot) -> tuple[Action, ...]:
    """What brings the groups to the layout, in an order in which it may end anywhere."""
    return tuple(_arrange(snapshot))


def _arrange(snapshot: Snapshot) -> Iterator[Action]:
    sizes, members = snapshot.layout.sizes, _members(snapshot.instances)
    for group in sizes:
        if group not in snapshot.groups:
            yield CreateGroup(group)
    resumed = _resumed(sizes, members, snapshot.instances)
    for instance in resumed:
        members[instance.group].append(instance)
        yield ResumeInstance(instance.name)
    victims = _victims(sizes, members)
    for instance in victims:
        members[instance.group].remove(instance)
        yield DrainInstance(instance.name)
    have = Counter({group: len(those) for group, those in members.items()})
    for move in _moves(sizes, members):
        have[move.group] += 1
        yield move
    for group, size in sizes.items():
        for count in range(have[group] + 1, size + 1):
            yield AddInstance(group, count)
    for instance in snapshot.instances:
        if instance.state == "drained" and instance not in resumed:
            yield DeleteInstance(instance.name)
    used = {instance.group for instance in snapshot.instances}
    for group in sorted(snapshot.groups - used - sizes.keys()):
        yield RemoveGroup(group)


def _members(instances: Iterable[Instance]) -> dict[str, list[Instance]]:
    members: dict[str, list[Instance]] = defaultdict(list)
    for instance in instances:
        if instance.counts:
            members[instance.group].append(instance)
    return members


def _resumed(
    sizes: Mapping[str, int],
    members: Mapping[str, Sequence[Instance]],
    instances: Iterable[Instance],
) -> list[Instance]:
    """The instances that drain but are needed again, the busiest first, where there is room."""
    missing = sum(sizes.values()) - sum(map(len, members.values()))
    room = {group: size - len(members.get(group, ())) for group, size in sizes.items()}
    chosen: list[Instance] = []
    for instance in sorted(instances, key=lambda i: (-i.load, i.name)):
        if not instance.counts and len(chosen) < missing and room.get(instance.group, 0) > 0:
            room[instance.group] -= 1
            chosen.append(instance)
    return chosen


def _victims(sizes: Mapping[str, int], members: Mapping[str, Sequence[Instance]]) -> list[Instance]:
    """The instances to retire, of groups that have too many: first those that serve nothing yet,
    then those with the least to finish."""
    over = {group: len(those) - sizes.get(group, 0) for group, those in members.items()}
    excess = sum(map(len, members.values())) - sum(sizes.values())
    chosen: list[Instance] = []
    for instance in sorted(
        (instance for those in members.values() for instance in those),
        key=lambda i: (i.state != "starting", i.load, i.name),
    ):
        if len(chosen) < excess and over[instance.group] > 0:
            over[instance.group] -= 1
            chosen.append(instance)
    return chosen


def _moves(
    sizes: Mapping[str, int], members: Mapping[str, Sequence[Instance]]
) -> list[MoveInstance]:
    """Instances that a group has too many go where some are missing, never into a full group.

    Of each group the movers are taken evenly over its members by load, so that both parts of a
    split carry as much per instance.
    """
    places = [
        group for group, size in sizes.items() for _ in range(size - len(members.get(group, ())))
    ]
    movers: list[Instance] = []
    for group, those in members.items():
        staying, over = sorted(those, key=lambda i: (i.load, i.name)), len(those)
        over -= sizes.get(group, 0)
        movers += (staying[(2 * n + 1) * len(staying) // (2 * over)] for n in range(over))
    return [
        MoveInstance(instance.name, instance.group, group)
        for instance, group in zip(movers, places, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class Plan:
    """What comes next. If ``layout`` is not the one of the snapshot, keep it and plan again; else
    carry out ``actions``, then look again. At ``wake_at`` (None: not) plan even if nothing has
    changed."""

    layout: Layout
    actions: tuple[Action, ...] = ()
    decision: Decision | None = None
    marked: str | None = None
    wake_at: float | None = None


def plan(
    snapshot: Snapshot, wanted: int, bounds: Bounds, now: float, *, prefix: str = "macro-"
) -> Plan:
    """What to decide, or else what to do, so that ``wanted`` instances run in groups of the right
    sizes."""
    loads: dict[str, float] = defaultdict(float)
    for instance in snapshot.instances:
        loads[instance.group] += instance.load
    change = regroup(
        snapshot.layout,
        wanted,
        bounds,
        now,
        prefix=prefix,
        taken=snapshot.groups | loads.keys(),
        loads=loads,
        settled=not _moves(snapshot.layout.sizes, _members(snapshot.instances)),
    )
    actions = arrange(snapshot) if change.layout == snapshot.layout else ()
    return Plan(change.layout, actions, change.decision, change.marked, change.wake_at)
