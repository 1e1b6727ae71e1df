from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ["classes", "draining", "limits", "models", "ready", "sessions", "uptime_us", "version"]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_US_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    classes: _containers.RepeatedCompositeFieldContainer[LatencyClass]
    draining: bool
    limits: Limits
    models: _containers.RepeatedScalarFieldContainer[str]
    ready: bool
    sessions: int
    uptime_us: int
    version: str
    def __init__(self, version: _Optional[str] = ..., uptime_us: _Optional[int] = ..., ready: bool = ..., draining: bool = ..., sessions: _Optional[int] = ..., models: _Optional[_Iterable[str]] = ..., classes: _Optional[_Iterable[_Union[LatencyClass, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class LatencyClass(_message.Message):
    __slots__ = ["deadline_us", "degrades", "name", "runs_late", "tier"]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    DEGRADES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUNS_LATE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    deadline_us: int
    degrades: bool
    name: str
    runs_late: bool
    tier: int
    def __init__(self, name: _Optional[str] = ..., deadline_us: _Optional[int] = ..., tier: _Optional[int] = ..., runs_late: bool = ..., degrades: bool = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ["acts_in_flight", "acts_per_s", "frames_per_s", "max_beams", "max_image_bytes", "max_instruction_bytes", "max_instruction_tokens", "max_message_bytes", "max_new_tokens", "max_pixels", "max_samples", "messages_per_s", "outbox_messages", "pixels_per_s", "session_idle_s", "sessions_per_peer"]
    ACTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    ACTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_BEAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_INSTRUCTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_INSTRUCTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_PER_S_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PIXELS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_PER_PEER_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDLE_S_FIELD_NUMBER: _ClassVar[int]
    acts_in_flight: int
    acts_per_s: float
    frames_per_s: float
    max_beams: int
    max_image_bytes: int
    max_instruction_bytes: int
    max_instruction_tokens: int
    max_message_bytes: int
    max_new_tokens: int
    max_pixels: int
    max_samples: int
    messages_per_s: float
    outbox_messages: int
    pixels_per_s: float
    session_idle_s: float
    sessions_per_peer: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., max_pixels: _Optional[int] = ..., max_instruction_bytes: _Optional[int] = ..., max_instruction_tokens: _Optional[int] = ..., acts_in_flight: _Optional[int] = ..., acts_per_s: _Optional[float] = ..., frames_per_s: _Optional[float] = ..., max_samples: _Optional[int] = ..., session_idle_s: _Optional[float] = ..., outbox_messages: _Optional[int] = ..., messages_per_s: _Optional[float] = ..., pixels_per_s: _Optional[float] = ..., sessions_per_peer: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., max_beams: _Optional[int] = ...) -> None: ...
