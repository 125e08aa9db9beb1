from ecoserve.proto.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Cluster(_message.Message):
    __slots__ = ("name", "model", "slo", "policy", "policy_settings", "late", "queue_limit", "late_wait_s", "macro_instances", "ramp_s", "debug", "drain_timeout_s", "mtls", "cold_joins")
    class PolicySettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    LATE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MACRO_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    RAMP_S_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MTLS_FIELD_NUMBER: _ClassVar[int]
    COLD_JOINS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    slo: _session_pb2.SLO
    policy: str
    policy_settings: _containers.ScalarMap[str, float]
    late: str
    queue_limit: int
    late_wait_s: float
    macro_instances: _containers.RepeatedCompositeFieldContainer[MacroInstance]
    ramp_s: float
    debug: bool
    drain_timeout_s: float
    mtls: MutualTls
    cold_joins: bool
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., slo: _Optional[_Union[_session_pb2.SLO, _Mapping]] = ..., policy: _Optional[str] = ..., policy_settings: _Optional[_Mapping[str, float]] = ..., late: _Optional[str] = ..., queue_limit: _Optional[int] = ..., late_wait_s: _Optional[float] = ..., macro_instances: _Optional[_Iterable[_Union[MacroInstance, _Mapping]]] = ..., ramp_s: _Optional[float] = ..., debug: _Optional[bool] = ..., drain_timeout_s: _Optional[float] = ..., mtls: _Optional[_Union[MutualTls, _Mapping]] = ..., cold_joins: _Optional[bool] = ...) -> None: ...

class MutualTls(_message.Message):
    __slots__ = ("gateway", "worker", "ca")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CA_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    worker: str
    ca: str
    def __init__(self, gateway: _Optional[str] = ..., worker: _Optional[str] = ..., ca: _Optional[str] = ...) -> None: ...

class MacroInstance(_message.Message):
    __slots__ = ("name", "instances")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    instances: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., instances: _Optional[_Iterable[str]] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("cluster",)
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    cluster: Cluster
    def __init__(self, cluster: _Optional[_Union[Cluster, _Mapping]] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class ClusterState(_message.Message):
    __slots__ = ("cluster", "instances", "waiting", "late")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    cluster: Cluster
    instances: _containers.RepeatedCompositeFieldContainer[InstanceState]
    waiting: int
    late: int
    def __init__(self, cluster: _Optional[_Union[Cluster, _Mapping]] = ..., instances: _Optional[_Iterable[_Union[InstanceState, _Mapping]]] = ..., waiting: _Optional[int] = ..., late: _Optional[int] = ...) -> None: ...

class InstanceState(_message.Message):
    __slots__ = ("name", "macro_instance", "incarnation", "address", "state", "reason", "limits", "latency", "use", "waiting", "running")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MACRO_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    name: str
    macro_instance: str
    incarnation: str
    address: str
    state: str
    reason: str
    limits: _session_pb2.Limits
    latency: _session_pb2.Latency
    use: float
    waiting: int
    running: int
    def __init__(self, name: _Optional[str] = ..., macro_instance: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., limits: _Optional[_Union[_session_pb2.Limits, _Mapping]] = ..., latency: _Optional[_Union[_session_pb2.Latency, _Mapping]] = ..., use: _Optional[float] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...

class InstanceRequest(_message.Message):
    __slots__ = ("cluster", "instance", "timeout_s")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    instance: str
    timeout_s: float
    def __init__(self, cluster: _Optional[str] = ..., instance: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class InstanceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
