from saccade.v1 import error_pb2 as _error_pb2
from saccade.v1 import inference_pb2 as _inference_pb2
from saccade.v1 import models_pb2 as _models_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheState(_message.Message):
    __slots__ = ["embeddings_held", "embeddings_idle", "free_blocks", "model", "partitions", "total_blocks", "worker"]
    EMBEDDINGS_HELD_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_IDLE_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    embeddings_held: int
    embeddings_idle: int
    free_blocks: int
    model: str
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionState]
    total_blocks: int
    worker: int
    def __init__(self, model: _Optional[str] = ..., worker: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[PartitionState, _Mapping]]] = ..., embeddings_held: _Optional[int] = ..., embeddings_idle: _Optional[int] = ...) -> None: ...

class ClassLimit(_message.Message):
    __slots__ = ["max_queued", "name"]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    max_queued: int
    name: str
    def __init__(self, name: _Optional[str] = ..., max_queued: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetCacheRequest(_message.Message):
    __slots__ = ["check_invariants"]
    CHECK_INVARIANTS_FIELD_NUMBER: _ClassVar[int]
    check_invariants: bool
    def __init__(self, check_invariants: bool = ...) -> None: ...

class GetCacheResponse(_message.Message):
    __slots__ = ["broken_invariant", "caches"]
    BROKEN_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    broken_invariant: str
    caches: _containers.RepeatedCompositeFieldContainer[CacheState]
    def __init__(self, caches: _Optional[_Iterable[_Union[CacheState, _Mapping]]] = ..., broken_invariant: _Optional[str] = ...) -> None: ...

class GetLimitsRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetLimitsResponse(_message.Message):
    __slots__ = ["limits"]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: LiveLimits
    def __init__(self, limits: _Optional[_Union[LiveLimits, _Mapping]] = ...) -> None: ...

class GetMemoryRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetMemoryResponse(_message.Message):
    __slots__ = ["held_bytes", "kinds", "limit_bytes"]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    held_bytes: int
    kinds: _containers.RepeatedCompositeFieldContainer[MemoryUse]
    limit_bytes: int
    def __init__(self, limit_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., kinds: _Optional[_Iterable[_Union[MemoryUse, _Mapping]]] = ...) -> None: ...

class GetRecentRequest(_message.Message):
    __slots__ = ["max_requests"]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    max_requests: int
    def __init__(self, max_requests: _Optional[int] = ...) -> None: ...

class GetRecentResponse(_message.Message):
    __slots__ = ["requests"]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecentRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[RecentRequest, _Mapping]]] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ["json"]
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class LiveLimits(_message.Message):
    __slots__ = ["acts_in_flight", "acts_per_s", "classes", "frames_per_s", "max_image_bytes", "max_instruction_bytes", "max_instruction_tokens", "max_message_bytes", "max_pixels", "max_samples", "max_sessions", "messages_per_s", "outbox_messages", "pixels_per_s", "session_idle_s", "sessions_per_peer"]
    ACTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    ACTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_INSTRUCTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_INSTRUCTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_PER_S_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PIXELS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_PER_PEER_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDLE_S_FIELD_NUMBER: _ClassVar[int]
    acts_in_flight: int
    acts_per_s: float
    classes: _containers.RepeatedCompositeFieldContainer[ClassLimit]
    frames_per_s: float
    max_image_bytes: int
    max_instruction_bytes: int
    max_instruction_tokens: int
    max_message_bytes: int
    max_pixels: int
    max_samples: int
    max_sessions: int
    messages_per_s: float
    outbox_messages: int
    pixels_per_s: float
    session_idle_s: float
    sessions_per_peer: int
    def __init__(self, max_sessions: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., max_pixels: _Optional[int] = ..., max_instruction_bytes: _Optional[int] = ..., max_instruction_tokens: _Optional[int] = ..., acts_per_s: _Optional[float] = ..., frames_per_s: _Optional[float] = ..., messages_per_s: _Optional[float] = ..., pixels_per_s: _Optional[float] = ..., sessions_per_peer: _Optional[int] = ..., acts_in_flight: _Optional[int] = ..., session_idle_s: _Optional[float] = ..., max_samples: _Optional[int] = ..., outbox_messages: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassLimit, _Mapping]]] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ["folder", "like", "name"]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    LIKE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    folder: str
    like: str
    name: str
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ..., like: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ["model"]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _models_pb2.Model
    def __init__(self, model: _Optional[_Union[_models_pb2.Model, _Mapping]] = ...) -> None: ...

class MemoryUse(_message.Message):
    __slots__ = ["held_bytes", "kind"]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    held_bytes: int
    kind: str
    def __init__(self, kind: _Optional[str] = ..., held_bytes: _Optional[int] = ...) -> None: ...

class PartitionState(_message.Message):
    __slots__ = ["cap", "floor", "held", "hit_tokens", "idle", "miss_tokens", "modality"]
    CAP_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    MISS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    cap: int
    floor: int
    held: int
    hit_tokens: int
    idle: int
    miss_tokens: int
    modality: str
    def __init__(self, modality: _Optional[str] = ..., held: _Optional[int] = ..., idle: _Optional[int] = ..., floor: _Optional[int] = ..., cap: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., miss_tokens: _Optional[int] = ...) -> None: ...

class RecentRequest(_message.Message):
    __slots__ = ["arrival_us", "cached_tokens", "code", "deadline_us", "late", "latency_class", "model", "prompt_tokens", "reason", "request_id", "session_id", "timings", "total_us"]
    ARRIVAL_US_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    LATENCY_CLASS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    arrival_us: int
    cached_tokens: int
    code: int
    deadline_us: int
    late: bool
    latency_class: str
    model: str
    prompt_tokens: int
    reason: _error_pb2.ErrorReason
    request_id: int
    session_id: int
    timings: _inference_pb2.Timings
    total_us: int
    def __init__(self, request_id: _Optional[int] = ..., session_id: _Optional[int] = ..., model: _Optional[str] = ..., latency_class: _Optional[str] = ..., arrival_us: _Optional[int] = ..., deadline_us: _Optional[int] = ..., total_us: _Optional[int] = ..., code: _Optional[int] = ..., reason: _Optional[_Union[_error_pb2.ErrorReason, str]] = ..., late: bool = ..., timings: _Optional[_Union[_inference_pb2.Timings, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ReloadModelRequest(_message.Message):
    __slots__ = ["folder", "grace_s", "name"]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    folder: str
    grace_s: float
    name: str
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class ReloadModelResponse(_message.Message):
    __slots__ = ["model"]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _models_pb2.Model
    def __init__(self, model: _Optional[_Union[_models_pb2.Model, _Mapping]] = ...) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ["limits"]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: LiveLimits
    def __init__(self, limits: _Optional[_Union[LiveLimits, _Mapping]] = ...) -> None: ...

class SetLimitsResponse(_message.Message):
    __slots__ = ["limits"]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: LiveLimits
    def __init__(self, limits: _Optional[_Union[LiveLimits, _Mapping]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ["grace_s", "name"]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    name: str
    def __init__(self, name: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...
