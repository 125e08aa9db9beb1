"""The statuses of an EcoServeCluster and its MacroInstances: what there is to tell, as plain data.

Nothing in them changes with time alone, so that a cluster at rest causes no writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ecoserve_operator.cluster_api import Json
from ecoserve_operator.names import MACRO_LABEL, worker_selector
from ecoserve_operator.plan import Plan, View
from ecoserve_operator.states import Pod, Roster
from ecoserve_operator.views import stamp


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a person has to see to: ``reason`` in one word, ``message`` names the field or
    the object."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition without its times."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""


def cluster_status(
    view: View,
    done: Plan | None,
    problems: Iterable[Problem],
    old: Json,
    generation: int,
    url: str,
    gateway: str = "",
) -> Json:
    """The status of the EcoServeCluster; ``old`` is the one before, ``gateway`` says why nobody can
    reach it."""
    desired, pods = view.desired, view.alive
    status = roster_fields(view.roster) | {
        "observedGeneration": generation,
        "replicas": len(pods),
        "readyReplicas": sum(pod.ready for pod in pods),
        "updatedReplicas": len(view.current),
        "drainingReplicas": len(view.leaving),
        "macroInstances": len(view.roster.sizes),
        "selector": worker_selector(desired.name),
        "revision": desired.revision,
        "macroLower": desired.lower,
        "macroUpper": desired.upper,
        "url": url,
    }
    if old.get("scaling"):
        status["scaling"] = old["scaling"]
    found = cluster_conditions(view, done, list(problems), gateway)
    kept = _autoscalers(old) if desired.autoscaled else []
    if not kept:
        found.append(_NOT_YET_SCALED if desired.autoscaled else _NOT_AUTOSCALED)
    conditions = with_times(found, old, generation, view.observed.now) + kept
    return status | {"conditions": conditions}


_NOT_AUTOSCALED = Condition("Autoscaling", "False", "Disabled", "spec.autoscaling is not enabled")
_NOT_YET_SCALED = Condition(
    "Autoscaling", "Unknown", "NotYetMeasured", "no signal has been read yet"
)


def _autoscalers(old: Json) -> list[Json]:
    """The autoscaler's own condition as the status has it: only the autoscaler changes it, and
    knows of which generation it speaks."""
    ours = (_NOT_AUTOSCALED.reason, _NOT_YET_SCALED.reason)
    conditions = old.get("conditions", ())
    return [c for c in conditions if c["type"] == "Autoscaling" and c["reason"] not in ours]


def roster_fields(roster: Roster) -> Json:
    """The fields that keep the roster."""
    layout = roster.layout
    fields: Json = {
        "nextIndex": roster.next_index,
        "groups": [{"name": name, "replicas": size} for name, size in layout.groups],
    }
    if layout.last_split is not None:
        fields["lastSplitTime"] = stamp(layout.last_split)
    if layout.last_merge is not None:
        fields["lastMergeTime"] = stamp(layout.last_merge)
    return fields


def cluster_conditions(
    view: View, done: Plan | None, problems: list[Problem], gateway: str
) -> list[Condition]:
    """What there is to tell of a cluster."""
    return [
        _ready("Ready", view.alive, view.roster.total),
        _available(view.alive, gateway),
        _progressing(view, done),
        _degraded(view, done, problems),
        _bounds(view),
        _drained(view.leaving, view.desired.drain_timeout),
    ]


def _ready(kind: str, pods: list[Pod], wanted: int) -> Condition:
    ready = sum(pod.ready for pod in pods)
    message = f"{ready} of {wanted} instances take requests"
    if ready >= wanted and len(pods) >= wanted:
        return Condition(kind, "True", "AllReady", message)
    return Condition(kind, "False", "NotReady", message)


def _available(pods: list[Pod], gateway: str) -> Condition:
    if not any(pod.ready for pod in pods):
        return Condition("Available", "False", "NoInstance", "no instance takes requests")
    if gateway:
        return Condition("Available", "False", "GatewayUnavailable", f"gateway: {gateway}")
    return Condition("Available", "True", "Serving", "at least one instance takes requests")


def _progressing(view: View, done: Plan | None) -> Condition:
    kind, total = "Progressing", view.roster.total
    stalled = _stalled(view)
    if stalled is not None:
        return Condition(kind, "False", stalled.reason, stalled.message)
    if view.outdated:
        message = f"{len(view.current)} of {total} instances have the current template"
        if view.desired.paused:
            return Condition(kind, "False", "RolloutPaused", message)
        return Condition(kind, "True", "RollingOut", message)
    if view.misplaced:
        names = ", ".join(f"{pod.name} to {macro}" for pod, macro in view.misplaced)
        return Condition(kind, "True", "Regrouping", f"instances move: {names}")
    if view.excess < 0 or view.loading or any(not pod.ready for pod in view.alive):
        waiting = [pod.name for pod in view.alive if not pod.ready]
        message = f"instances are not ready yet: {', '.join(waiting) or 'none exist'}"
        return Condition(kind, "True", "Starting", message)
    if view.excess > 0 or view.leaving:
        return Condition(kind, "True", "ScalingIn", done.waits if done is not None else "")
    return Condition(kind, "False", "Settled", f"{total} instances as wanted")


def _stalled(view: View) -> Problem | None:
    now, limit = view.observed.now, view.desired.ready_timeout
    if not view.outdated or view.desired.paused:
        return None
    late = [p.name for p in view.current if not p.ready and now - p.created >= limit]
    if not late:
        return None
    return Problem(
        "RolloutStalled",
        f"{', '.join(late)} did not become ready within spec.rollout.readyTimeout; "
        "no further instance is replaced",
    )


def _degraded(view: View, done: Plan | None, problems: list[Problem]) -> Condition:
    problems = list(problems)
    if (stalled := _stalled(view)) is not None:
        problems.append(stalled)
    if view.observed.instances is None:
        why = "it does not answer; requests are served without it"
        if done is not None and done.waits:
            why += f"; {done.waits}"
        problems.append(Problem("SchedulerUnavailable", f"scheduler: {why}"))
    problems += _troubles(view)
    if not problems:
        return Condition("Degraded", "False", "NoProblem")
    message = "; ".join(problem.message for problem in problems)
    return Condition("Degraded", "True", problems[0].reason, message)


def _troubles(view: View) -> list[Problem]:
    """What keeps instances from running, once for all that have the same."""
    found: dict[tuple[str, str], list[str]] = {}
    for pod in view.alive:
        if pod.trouble and not pod.ready:
            reason = "InstanceFails" if pod.no_room_since is None else "Unschedulable"
            found.setdefault((reason, pod.trouble), []).append(pod.name)
    return [
        Problem(reason, f"{', '.join(names)}: {trouble}")
        for (reason, trouble), names in found.items()
    ]


def _bounds(view: View) -> Condition:
    desired = view.desired
    replicas, wanted = desired.replicas, desired.wanted
    if replicas is None or replicas == wanted:
        return Condition("ReplicasClamped", "False", "WithinBounds")
    field, bound = (
        ("below spec.minReplicas", desired.minimum)
        if replicas < wanted
        else ("above spec.maxReplicas", desired.maximum)
    )
    message = f"spec.replicas {replicas} is {field} {bound}; {wanted} is used"
    return Condition("ReplicasClamped", "True", "OutOfBounds", message)


def _drained(leaving: list[Pod], timeout: float) -> Condition:
    if not leaving:
        return Condition("Drained", "True", "NoneLeaving", "no instance has requests to finish")
    until = ", ".join(
        f"{pod.name} (by {stamp((pod.leaving_since or 0.0) + timeout)} at the latest)"
        for pod in leaving
    )
    return Condition("Drained", "False", "Draining", f"instances finish their requests: {until}")


def macro_status(view: View, name: str, nodes: Json, old: Json, generation: int) -> Json:
    """The status of a MacroInstance; ``nodes`` are the nodes of Pods by name."""
    alive = view.members(name)
    leaving = [pod for pod in view.leaving if pod.macro == name]
    wanted = view.roster.sizes.get(name, 0)
    moving = [pod.name for pod, macro in view.misplaced if name in (macro, pod.macro)]
    conditions = [
        _ready("Ready", alive, wanted),
        Condition("Regrouping", "True", "Moving", f"instances move: {', '.join(moving)}")
        if moving
        else Condition("Regrouping", "False", "Settled"),
        _drained(leaving, view.desired.drain_timeout),
    ]
    return {
        "observedGeneration": generation,
        "replicas": len(alive),
        "readyReplicas": sum(pod.ready for pod in alive),
        "drainingReplicas": len(leaving),
        "selector": f"{worker_selector(view.desired.name)},{MACRO_LABEL}={name}",
        "instances": [_instance(view, pod, nodes) for pod in (*alive, *leaving)],
        "conditions": with_times(conditions, old, generation, view.observed.now),
    }


def _instance(view: View, pod: Pod, nodes: Json) -> Json:
    instance = view.instance(pod)
    state = instance.state if instance is not None else "pending"
    if state == "lost" and not pod.running:
        state = "pending"
    item = {"name": pod.name, "state": state, "revision": pod.revision}
    return item | ({"node": nodes[pod.name]} if nodes.get(pod.name) else {})


def with_times(found: list[Condition], old: Json, generation: int, now: float) -> list[Json]:
    """Conditions as the API has them; a time changes with the status only."""
    before = {item["type"]: item for item in old.get("conditions", ())}
    conditions = []
    for condition in found:
        known = before.get(condition.type, {})
        same = known.get("status") == condition.status
        conditions.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "lastTransitionTime": known["lastTransitionTime"] if same else stamp(now),
                "observedGeneration": generation,
            }
        )
    return conditions
