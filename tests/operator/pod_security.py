"""The Pod Security Standards' ``restricted`` profile, from its published rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}
_SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def violations(spec: Json) -> list[str]:
    """What in a Pod's spec ``restricted`` forbids, by field."""
    return [*_pod(spec), *(found for c in _containers(spec) for found in _container(spec, *c))]


def _containers(spec: Json) -> Iterator[tuple[str, Json]]:
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind, []):
            yield f"{kind}[{container['name']}]", container


def _pod(spec: Json) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", []):
        if not (set(volume) - {"name"}) <= _VOLUMES:
            yield f"volumes[{volume['name']}]"
    for sysctl in spec.get("securityContext", {}).get("sysctls", []):
        if sysctl["name"] not in _SYSCTLS:
            yield f"securityContext.sysctls[{sysctl['name']}]"


def _container(spec: Json, where: str, container: Json) -> Iterator[str]:
    pod, own = spec.get("securityContext", {}), container.get("securityContext", {})

    def effective(name: str) -> Any:
        return own[name] if name in own else pod.get(name)

    capabilities = own.get("capabilities", {})
    checks = {
        "privileged": not own.get("privileged"),
        "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
        "capabilities.drop": "ALL" in capabilities.get("drop", []),
        "capabilities.add": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
        "runAsNonRoot": effective("runAsNonRoot") is True,
        "runAsUser": effective("runAsUser") != 0,
        "seccompProfile": (effective("seccompProfile") or {}).get("type")
        in ("RuntimeDefault", "Localhost"),
        "appArmorProfile": (effective("appArmorProfile") or {}).get("type", "RuntimeDefault")
        in ("RuntimeDefault", "Localhost"),
        "seLinuxOptions": all(
            options.get("type", "") in _SELINUX and not options.get("user", options.get("role"))
            for options in (pod.get("seLinuxOptions", {}), own.get("seLinuxOptions", {}))
        ),
        "procMount": own.get("procMount", "Default") == "Default",
        "windowsOptions": not any(
            options.get("hostProcess")
            for options in (pod.get("windowsOptions", {}), own.get("windowsOptions", {}))
        ),
        "ports": not any(port.get("hostPort") for port in container.get("ports", [])),
        "probes": not any(
            handler.get(kind, {}).get("host")
            for handler in _handlers(container)
            for kind in ("httpGet", "tcpSocket")
        ),
    }
    for name, fine in checks.items():
        if not fine:
            yield f"{where}.{name}"


def _handlers(container: Json) -> Iterator[Json]:
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        yield container.get(probe, {})
    yield from container.get("lifecycle", {}).values()
