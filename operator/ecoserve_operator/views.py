"""What the API server's objects mean to the plan."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from ecoserve.policy.autoscale import Step
from ecoserve.policy.mitosis import Layout, default_sizes
from ecoserve.policy.signals import Contract, Expand, Settings
from ecoserve_operator.api import EcoServeCluster, EcoServeClusterSpec
from ecoserve_operator.api.scaling import Autoscaling
from ecoserve_operator.cluster_api import Json
from ecoserve_operator.names import (
    GATE,
    LEAVING_REASON,
    LEAVING_SINCE,
    MACRO_LABEL,
    REVISION_LABEL,
    index_of,
)
from ecoserve_operator.states import Desired, Macro, Pod, Reason, Roster


def desired(cluster: EcoServeCluster, revision: str) -> Desired:
    """What the spec asks for."""
    spec = cluster.spec
    lower, upper = sizes(spec)
    return Desired(
        name=cluster.metadata.name,
        replicas=spec.replicas,
        minimum=spec.min_replicas,
        maximum=spec.max_replicas,
        lower=lower,
        upper=upper,
        revision=revision,
        merge_cooldown=spec.macro.merge_cooldown,
        drain_timeout=spec.drain.timeout,
        strategy=spec.rollout.strategy,
        ready_timeout=spec.rollout.ready_timeout,
        paused=spec.rollout.paused,
        autoscaled=spec.autoscaling.enabled,
    )


def sizes(spec: EcoServeClusterSpec) -> tuple[int, int]:
    """N_l and N_u in force. The default goes by the GPUs that the cluster may grow to, so that it
    does not change as it grows; an instance on CPUs counts as one."""
    if spec.macro.upper is None:
        return default_sizes(spec.max_replicas * max(spec.gpus, 1))
    upper = spec.macro.upper
    return spec.macro.lower or (upper + 1) // 2, upper


def scaling(spec: Autoscaling) -> Settings:
    """What autoscaling goes by."""
    expand, contract = spec.expand, spec.contract
    return Settings(
        Expand(
            violations=expand.violation_percent / 100,
            violations_for=expand.violation_for,
            use=expand.use_percent / 100,
            use_for=expand.use_for,
            ttft=expand.ttft_percent / 100,
            ttft_for=expand.ttft_for,
            waiting=expand.waiting,
            waiting_for=expand.waiting_for,
            cooldown=expand.cooldown,
            max_step=expand.max_step,
            starting=expand.starting_for,
        ),
        Contract(
            use=contract.use_percent / 100,
            use_for=contract.use_for,
            idle=contract.idle_percent / 100,
            idle_for=contract.idle_for,
            saved=contract.saved_percent / 100,
            saved_for=contract.saved_for,
            cooldown=contract.cooldown,
            max_step=contract.max_step,
        ),
        "predictive" if spec.strategy == "Predictive" else "threshold",
    )


def steps(status: Mapping[str, list[Json]], *, dry_run: bool) -> list[Step]:
    """The autoscaler's steps that the status tells of, newest first; those that were only decided
    if ``dry_run``."""
    return [
        Step(seconds(item["time"]) or 0.0, item["before"], item["after"])
        for item in status.get("scaling", ())
        if dry_run or not item.get("dryRun")
    ]


def roster(cluster: EcoServeCluster) -> Roster | None:
    """What was decided, as the status keeps it; None if nothing ever was."""
    status = cluster.status
    if "next_index" not in status.model_fields_set:
        return None
    return Roster(
        status.next_index,
        Layout(
            tuple((group.name, group.replicas) for group in status.groups),
            seconds(status.last_split_time),
            seconds(status.last_merge_time),
        ),
    )


def macro(item: Json) -> Macro:
    """A MacroInstance."""
    metadata = item["metadata"]
    return Macro(
        metadata["name"],
        metadata["uid"],
        item.get("spec", {}).get("replicas", 0),
        "deletionTimestamp" in metadata,
    )


def pod(item: Json) -> Pod | None:
    """A worker Pod; None if its name is none of ours."""
    metadata, status = item["metadata"], item.get("status", {})
    labels, notes = metadata.get("labels", {}), metadata.get("annotations", {})
    index = index_of(metadata["name"], labels)
    if index is None:
        return None
    conditions: dict[str, Json] = {c["type"]: c for c in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    created = seconds(metadata["creationTimestamp"]) or 0.0
    no_room = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    gate = conditions.get(GATE)
    reason: Reason = "Rollout" if notes.get(LEAVING_REASON) == "Rollout" else "ScaleIn"
    return Pod(
        name=metadata["name"],
        index=index,
        uid=metadata["uid"],
        macro=labels.get(MACRO_LABEL, ""),
        owner=_owner(metadata),
        revision=labels.get(REVISION_LABEL, ""),
        created=created,
        accepted=None if gate is None else gate["status"] == "True",
        ready=conditions.get("Ready", {}).get("status") == "True",
        running=status.get("phase") == "Running" and _runs(status),
        failed=status.get("phase") in ("Failed", "Succeeded"),
        terminating="deletionTimestamp" in metadata,
        ends=seconds(metadata.get("deletionTimestamp")),
        no_room_since=seconds(scheduled.get("lastTransitionTime")) or created if no_room else None,
        leaving_since=seconds(notes.get(LEAVING_SINCE)),
        leaving_reason=reason,
        trouble=_trouble(scheduled, status),
    )


def unavailable(deployment: Json | None) -> str:
    """Why a Deployment serves nobody; empty if it does, or nobody has said so yet."""
    conditions = ((deployment or {}).get("status") or {}).get("conditions", ())
    for condition in conditions:
        if condition["type"] == "Available" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason", "it is not available"))
    return ""


def _owner(metadata: Json) -> str | None:
    for reference in metadata.get("ownerReferences", ()):
        if reference.get("controller"):
            return str(reference["uid"])
    return None


def _trouble(scheduled: Json, status: Json) -> str:
    """Why a Pod does not run, as Kubernetes has it, in words that do not change all the time."""
    if scheduled.get("status") == "False":
        return str(scheduled.get("message") or scheduled.get("reason", ""))
    for container in (
        *status.get("initContainerStatuses", ()),
        *status.get("containerStatuses", ()),
    ):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        if reason == "CrashLoopBackOff":
            last = container.get("lastState", {}).get("terminated", {})
            how = f"{last.get('reason', 'it ended')}, exit code {last.get('exitCode', 'unknown')}"
            return f"{reason}: container {container['name']}: {how}"
        if reason not in ("", "ContainerCreating", "PodInitializing"):
            return f"{reason}: {waiting.get('message', container['name'])}"
    return ""


def _runs(status: Mapping[str, list[Json]]) -> bool:
    containers = status.get("containerStatuses", [])
    return not containers or any("running" in c.get("state", {}) for c in containers)


def seconds(time: str | None) -> float | None:
    """A time of the API as seconds since the epoch; None if it is none."""
    try:
        return datetime.fromisoformat(time).timestamp() if time else None
    except ValueError:
        return None


def stamp(at: float) -> str:
    """Seconds since the epoch as a time of the API, whole seconds."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
