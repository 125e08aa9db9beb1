from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "report", "done")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    report: Report
    done: CommandDone
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., done: _Optional[_Union[CommandDone, _Mapping]] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("accepted", "refused", "command", "ack")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    refused: Refused
    command: Command
    ack: Ack
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., command: _Optional[_Union[Command, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ...) -> None: ...

class SLO(_message.Message):
    __slots__ = ("ttft_s", "tpot_s")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    tpot_s: float
    def __init__(self, ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("prefill_fixed", "prefill_token", "prefill_pair", "decode_fixed", "decode_sequence", "decode_context", "mixing", "error")
    PREFILL_FIXED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIR_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIXED_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MIXING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    prefill_fixed: float
    prefill_token: float
    prefill_pair: float
    decode_fixed: float
    decode_sequence: float
    decode_context: float
    mixing: float
    error: float
    def __init__(self, prefill_fixed: _Optional[float] = ..., prefill_token: _Optional[float] = ..., prefill_pair: _Optional[float] = ..., decode_fixed: _Optional[float] = ..., decode_sequence: _Optional[float] = ..., decode_context: _Optional[float] = ..., mixing: _Optional[float] = ..., error: _Optional[float] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("cluster", "instance", "incarnation", "address", "model", "version", "limits", "latency", "draining", "health_address")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HEALTH_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    instance: str
    incarnation: str
    address: str
    model: str
    version: str
    limits: Limits
    latency: Latency
    draining: bool
    health_address: str
    def __init__(self, cluster: _Optional[str] = ..., instance: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., latency: _Optional[_Union[Latency, _Mapping]] = ..., draining: _Optional[bool] = ..., health_address: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_num_seqs", "max_model_len", "step_budget", "kv_tokens", "block_tokens")
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    STEP_BUDGET_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_num_seqs: int
    max_model_len: int
    step_budget: int
    kv_tokens: int
    block_tokens: int
    def __init__(self, max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ..., step_budget: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("id", "tokens", "context", "since_switch")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SINCE_SWITCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    tokens: int
    context: int
    since_switch: bool
    def __init__(self, id: _Optional[str] = ..., tokens: _Optional[int] = ..., context: _Optional[int] = ..., since_switch: _Optional[bool] = ...) -> None: ...

class Decode(_message.Message):
    __slots__ = ("id", "context", "generated", "slack_s", "tpot_s", "since_switch")
    ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    SLACK_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    SINCE_SWITCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    context: int
    generated: int
    slack_s: float
    tpot_s: float
    since_switch: bool
    def __init__(self, id: _Optional[str] = ..., context: _Optional[int] = ..., generated: _Optional[int] = ..., slack_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., since_switch: _Optional[bool] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("kind", "estimated_s", "elapsed_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_S_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    estimated_s: float
    elapsed_s: float
    def __init__(self, kind: _Optional[str] = ..., estimated_s: _Optional[float] = ..., elapsed_s: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("number", "id", "status", "prompt_tokens", "cached_tokens", "generated", "ttft_s", "tpot_s", "ttft_slo_s", "tpot_slo_s", "broken")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    number: int
    id: str
    status: int
    prompt_tokens: int
    cached_tokens: int
    generated: int
    ttft_s: float
    tpot_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    broken: bool
    def __init__(self, number: _Optional[int] = ..., id: _Optional[str] = ..., status: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated: _Optional[int] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., ttft_slo_s: _Optional[float] = ..., tpot_slo_s: _Optional[float] = ..., broken: _Optional[bool] = ...) -> None: ...

class Switch(_message.Message):
    __slots__ = ("phase", "age_s", "reason")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    phase: str
    age_s: float
    reason: str
    def __init__(self, phase: _Optional[str] = ..., age_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("number", "phase", "since_switch_s", "waiting", "running", "kv_free_tokens", "use", "busy", "step", "latency", "finished", "switches", "batch_limit", "present", "draining", "engine_dead")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SINCE_SWITCH_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    BATCH_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DEAD_FIELD_NUMBER: _ClassVar[int]
    number: int
    phase: str
    since_switch_s: float
    waiting: _containers.RepeatedCompositeFieldContainer[Prompt]
    running: _containers.RepeatedCompositeFieldContainer[Decode]
    kv_free_tokens: int
    use: float
    busy: float
    step: Step
    latency: Latency
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    switches: _containers.RepeatedCompositeFieldContainer[Switch]
    batch_limit: int
    present: _containers.RepeatedScalarFieldContainer[str]
    draining: bool
    engine_dead: bool
    def __init__(self, number: _Optional[int] = ..., phase: _Optional[str] = ..., since_switch_s: _Optional[float] = ..., waiting: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., running: _Optional[_Iterable[_Union[Decode, _Mapping]]] = ..., kv_free_tokens: _Optional[int] = ..., use: _Optional[float] = ..., busy: _Optional[float] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., latency: _Optional[_Union[Latency, _Mapping]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., switches: _Optional[_Iterable[_Union[Switch, _Mapping]]] = ..., batch_limit: _Optional[int] = ..., present: _Optional[_Iterable[str]] = ..., draining: _Optional[bool] = ..., engine_dead: _Optional[bool] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("configure",)
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    configure: Configure
    def __init__(self, configure: _Optional[_Union[Configure, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("report", "finished", "interval_s")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    report: int
    finished: int
    interval_s: float
    def __init__(self, report: _Optional[int] = ..., finished: _Optional[int] = ..., interval_s: _Optional[float] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("number", "drain", "resume", "configure", "warm")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    number: int
    drain: Drain
    resume: Resume
    configure: Configure
    warm: Warm
    def __init__(self, number: _Optional[int] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., configure: _Optional[_Union[Configure, _Mapping]] = ..., warm: _Optional[_Union[Warm, _Mapping]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Configure(_message.Message):
    __slots__ = ("policy", "policy_settings", "slo", "debug")
    class PolicySettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    policy: str
    policy_settings: _containers.ScalarMap[str, float]
    slo: SLO
    debug: bool
    def __init__(self, policy: _Optional[str] = ..., policy_settings: _Optional[_Mapping[str, float]] = ..., slo: _Optional[_Union[SLO, _Mapping]] = ..., debug: _Optional[bool] = ...) -> None: ...

class Warm(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[WarmRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[WarmRequest, _Mapping]]] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("path", "body")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    path: str
    body: bytes
    def __init__(self, path: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class CommandDone(_message.Message):
    __slots__ = ("number", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: str
    def __init__(self, number: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...
