"""What a cluster was declared to be, checked: the Admin service's message as plain values."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ecoserve.policy import DEFAULT, make
from ecoserve.policy.base import Policy
from ecoserve.proto.v1 import admin_pb2, session_pb2

LATE_WAIT_S = 30.0
QUEUE_LIMIT = 1024


class Slo(BaseModel):
    """The promise of a cluster, seconds."""

    model_config = ConfigDict(frozen=True)

    ttft_s: float = Field(gt=0, allow_inf_nan=False)
    tpot_s: float = Field(gt=0, allow_inf_nan=False)


class Macro(BaseModel):
    """A macro instance and the names of its instances, in their fixed cyclic order."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(min_length=1)
    instances: tuple[str, ...] = ()


class MutualTls(BaseModel):
    """The DNS names in the certificates of a cluster's gateways and workers, and who signs them
    (PEM: roots, and what is between)."""

    model_config = ConfigDict(frozen=True)

    gateway: str = Field(min_length=1)
    worker: str = Field(min_length=1)
    ca: str

    @field_validator("ca")
    @classmethod
    def _can_be_used(cls, ca: str) -> str:
        authorities(ca)
        return ca


def authorities(bundle: str) -> tuple[list[Any], list[Any]]:
    """The certificates of a PEM bundle: roots, and what is between. ValueError without a root."""
    # Not needed, and perhaps not installed, where there is no mutual TLS.
    from cryptography import x509

    try:
        known = x509.load_pem_x509_certificates(bundle.encode())
    except ValueError:
        known = []
    roots = [c for c in known if c.issuer == c.subject]
    if not roots:
        raise ValueError("must be certificates in PEM, a root (one that signs itself) among them")
    return roots, [c for c in known if c.issuer != c.subject]


class ClusterSpec(BaseModel):
    """A declared cluster. Times are seconds; an ``slo`` of None means not known yet."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(min_length=1)
    model: str = ""
    slo: Slo | None = None
    policy: str = DEFAULT
    policy_settings: dict[str, float] = {}
    late: Literal["serve", "shed"] = "serve"
    queue_limit: int = Field(default=QUEUE_LIMIT, ge=1)
    late_wait_s: float = Field(default=LATE_WAIT_S, ge=0, allow_inf_nan=False)
    macro_instances: tuple[Macro, ...] = ()
    ramp_s: float = Field(default=20.0, ge=0, allow_inf_nan=False)
    cold_joins: bool = False
    debug: bool = False
    drain_timeout_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    mtls: MutualTls | None = None

    @field_validator("macro_instances")
    @classmethod
    def _distinct(cls, macros: tuple[Macro, ...]) -> tuple[Macro, ...]:
        names = [macro.name for macro in macros]
        if len(set(names)) < len(names):
            raise ValueError("two macro instances have the same name")
        members = [name for macro in macros for name in macro.instances]
        if "" in members:
            raise ValueError("an instance has an empty name")
        doubled = sorted(name for name, count in Counter(members).items() if count > 1)
        if doubled:
            raise ValueError(f"instance {doubled[0]} is listed twice")
        return macros

    @model_validator(mode="after")
    def _policy_exists(self) -> ClusterSpec:
        self.make_policy()
        return self

    def make_policy(self) -> Policy:
        """The policy that the macro instances decide with; ValueError if there is none."""
        try:
            return make(self.policy, self.policy_settings)
        except ValueError as error:
            raise ValueError(f"policy: {error}") from None


def from_proto(message: admin_pb2.Cluster) -> ClusterSpec:
    """Checks a declaration; ValueError names every field that is wrong.

    Fields that are unset, or at a zero that says nothing, get the defaults of ``ClusterSpec``.
    """
    fields: dict[str, object] = {"name": message.name, "model": message.model}
    if message.HasField("slo"):
        fields["slo"] = {"ttft_s": message.slo.ttft_s, "tpot_s": message.slo.tpot_s}
    fields["policy_settings"] = dict(message.policy_settings)
    fields["macro_instances"] = [
        {"name": macro.name, "instances": list(macro.instances)}
        for macro in message.macro_instances
    ]
    for name in ("policy", "late", "queue_limit", "drain_timeout_s"):
        value = getattr(message, name)
        if value:
            fields[name] = value
    for name in ("late_wait_s", "ramp_s"):
        if message.HasField(name):
            fields[name] = getattr(message, name)
    fields["debug"] = message.debug
    fields["cold_joins"] = message.cold_joins
    if message.HasField("mtls"):
        mtls = message.mtls
        fields["mtls"] = {"gateway": mtls.gateway, "worker": mtls.worker, "ca": mtls.ca}
    try:
        return ClusterSpec.model_validate(fields)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            where = ".".join(str(part) for part in ("cluster", *item["loc"]))
            problems.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
        raise ValueError("; ".join(problems)) from None


def to_proto(spec: ClusterSpec) -> admin_pb2.Cluster:
    """The declaration as it is in force, defaults filled in."""
    message = admin_pb2.Cluster(
        name=spec.name,
        model=spec.model,
        policy=spec.policy,
        policy_settings=spec.policy_settings,
        late=spec.late,
        queue_limit=spec.queue_limit,
        late_wait_s=spec.late_wait_s,
        macro_instances=[
            admin_pb2.MacroInstance(name=macro.name, instances=macro.instances)
            for macro in spec.macro_instances
        ],
        ramp_s=spec.ramp_s,
        debug=spec.debug,
        drain_timeout_s=spec.drain_timeout_s,
        cold_joins=spec.cold_joins,
    )
    if spec.slo:
        message.slo.CopyFrom(session_pb2.SLO(ttft_s=spec.slo.ttft_s, tpot_s=spec.slo.tpot_s))
    if spec.mtls:
        message.mtls.CopyFrom(admin_pb2.MutualTls(**spec.mtls.model_dump()))
    return message


def configure(spec: ClusterSpec) -> session_pb2.Configure:
    """What a worker of the cluster is told; the SLO must be known."""
    assert spec.slo is not None
    return session_pb2.Configure(
        policy=spec.policy,
        policy_settings=spec.policy_settings,
        slo=session_pb2.SLO(ttft_s=spec.slo.ttft_s, tpot_s=spec.slo.tpot_s),
        debug=spec.debug,
    )
