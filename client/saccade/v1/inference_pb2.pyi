from saccade.v1 import error_pb2 as _error_pb2
from saccade.v1 import models_pb2 as _models_pb2
from saccade.v1 import server_pb2 as _server_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

COMMIT_MODE_INPAINT: CommitMode
COMMIT_MODE_PER_ACTION_TIME: CommitMode
COMMIT_MODE_UNSPECIFIED: CommitMode
DEGRADATION_FEWER_FLOW_STEPS: Degradation
DEGRADATION_UNSPECIFIED: Degradation
DESCRIPTOR: _descriptor.FileDescriptor
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_UNSPECIFIED: FinishReason
MODALITY_ACTION: Modality
MODALITY_STATE: Modality
MODALITY_TEXT: Modality
MODALITY_UNSPECIFIED: Modality
MODALITY_VISION: Modality
NOTICE_KIND_DRAINING: NoticeKind
NOTICE_KIND_MODEL_REPLACED: NoticeKind
NOTICE_KIND_MODEL_UNLOADING: NoticeKind
NOTICE_KIND_STALE_FRAME: NoticeKind
NOTICE_KIND_UNSPECIFIED: NoticeKind
PIXEL_FORMAT_RGB8: PixelFormat
PIXEL_FORMAT_UNSPECIFIED: PixelFormat
TOKEN_SOURCE_COMPUTED: TokenSource
TOKEN_SOURCE_EVICTED: TokenSource
TOKEN_SOURCE_REUSED: TokenSource
TOKEN_SOURCE_UNSPECIFIED: TokenSource

class ActRequest(_message.Message):
    __slots__ = ["committed", "deadline_us", "flow_steps", "id", "latency_class", "least_flow_steps", "max_frame_age_us", "noise", "samples", "seed", "temperature"]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    FLOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LATENCY_CLASS_FIELD_NUMBER: _ClassVar[int]
    LEAST_FLOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_AGE_US_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    committed: CommittedActions
    deadline_us: int
    flow_steps: int
    id: int
    latency_class: str
    least_flow_steps: int
    max_frame_age_us: int
    noise: _containers.RepeatedScalarFieldContainer[float]
    samples: int
    seed: int
    temperature: float
    def __init__(self, id: _Optional[int] = ..., latency_class: _Optional[str] = ..., deadline_us: _Optional[int] = ..., max_frame_age_us: _Optional[int] = ..., samples: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., flow_steps: _Optional[int] = ..., noise: _Optional[_Iterable[float]] = ..., committed: _Optional[_Union[CommittedActions, _Mapping]] = ..., least_flow_steps: _Optional[int] = ...) -> None: ...

class ActionChunk(_message.Message):
    __slots__ = ["act_id", "action_space", "deadline_met", "deadline_us", "degradation", "flow_steps", "frames", "frames_cached", "late", "latency_class", "observation_version", "samples", "state", "state_capture_time_ns", "statistics_key", "timings", "tokens"]
    ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
    ACT_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MET_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    DEGRADATION_FIELD_NUMBER: _ClassVar[int]
    FLOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_CACHED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    LATENCY_CLASS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STATE_CAPTURE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_KEY_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    act_id: int
    action_space: _models_pb2.ActionSpace
    deadline_met: bool
    deadline_us: int
    degradation: _containers.RepeatedScalarFieldContainer[Degradation]
    flow_steps: int
    frames: _containers.RepeatedCompositeFieldContainer[FrameUsed]
    frames_cached: bool
    late: bool
    latency_class: str
    observation_version: int
    samples: _containers.RepeatedCompositeFieldContainer[ActionSample]
    state: _containers.RepeatedScalarFieldContainer[float]
    state_capture_time_ns: int
    statistics_key: str
    timings: Timings
    tokens: _containers.RepeatedCompositeFieldContainer[ModalityTokens]
    def __init__(self, act_id: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[ActionSample, _Mapping]]] = ..., action_space: _Optional[_Union[_models_pb2.ActionSpace, _Mapping]] = ..., frames: _Optional[_Iterable[_Union[FrameUsed, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[ModalityTokens, _Mapping]]] = ..., frames_cached: bool = ..., deadline_us: _Optional[int] = ..., deadline_met: bool = ..., late: bool = ..., degradation: _Optional[_Iterable[_Union[Degradation, str]]] = ..., latency_class: _Optional[str] = ..., statistics_key: _Optional[str] = ..., observation_version: _Optional[int] = ..., state: _Optional[_Iterable[float]] = ..., state_capture_time_ns: _Optional[int] = ..., flow_steps: _Optional[int] = ...) -> None: ...

class ActionSample(_message.Message):
    __slots__ = ["normalized", "token_ids", "values"]
    NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    normalized: _containers.RepeatedScalarFieldContainer[float]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ..., normalized: _Optional[_Iterable[float]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ActionToken(_message.Message):
    __slots__ = ["act_id", "index", "sample", "token"]
    ACT_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    act_id: int
    index: int
    sample: int
    token: int
    def __init__(self, act_id: _Optional[int] = ..., sample: _Optional[int] = ..., index: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ["act_id", "all"]
    ACT_ID_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    act_id: int
    all: bool
    def __init__(self, act_id: _Optional[int] = ..., all: bool = ...) -> None: ...

class CommittedActions(_message.Message):
    __slots__ = ["mode", "normalized"]
    MODE_FIELD_NUMBER: _ClassVar[int]
    NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    mode: CommitMode
    normalized: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, normalized: _Optional[_Iterable[float]] = ..., mode: _Optional[_Union[CommitMode, str]] = ...) -> None: ...

class ExecutedAction(_message.Message):
    __slots__ = ["time_ns", "values"]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    time_ns: int
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ..., time_ns: _Optional[int] = ...) -> None: ...

class ExecutedActions(_message.Message):
    __slots__ = ["actions"]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    actions: _containers.RepeatedCompositeFieldContainer[ExecutedAction]
    def __init__(self, actions: _Optional[_Iterable[_Union[ExecutedAction, _Mapping]]] = ...) -> None: ...

class FrameUsed(_message.Message):
    __slots__ = ["age_us", "camera", "capture_time_ns", "runs"]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    age_us: int
    camera: str
    capture_time_ns: int
    runs: _containers.RepeatedCompositeFieldContainer[TokenRun]
    def __init__(self, camera: _Optional[str] = ..., capture_time_ns: _Optional[int] = ..., age_us: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[TokenRun, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ["deadline_us", "early_stopping", "frames", "ignore_eos", "latency_class", "length_penalty", "max_new_tokens", "model", "num_beams", "num_sequences", "seed", "stop_token_ids", "temperature", "text", "token_ids", "top_p"]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_CLASS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    deadline_us: int
    early_stopping: bool
    frames: _containers.RepeatedCompositeFieldContainer[VisionFrame]
    ignore_eos: bool
    latency_class: str
    length_penalty: float
    max_new_tokens: int
    model: str
    num_beams: int
    num_sequences: int
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    temperature: float
    text: str
    token_ids: TokenIds
    top_p: float
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., frames: _Optional[_Iterable[_Union[VisionFrame, _Mapping]]] = ..., latency_class: _Optional[str] = ..., deadline_us: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_beams: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: bool = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ["result", "token"]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    result: GenerateResult
    token: GeneratedToken
    def __init__(self, token: _Optional[_Union[GeneratedToken, _Mapping]] = ..., result: _Optional[_Union[GenerateResult, _Mapping]] = ...) -> None: ...

class GenerateResult(_message.Message):
    __slots__ = ["deadline_met", "deadline_us", "frames", "frames_cached", "late", "latency_class", "sequences", "timings", "tokens"]
    DEADLINE_MET_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    FRAMES_CACHED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    LATENCY_CLASS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    deadline_met: bool
    deadline_us: int
    frames: _containers.RepeatedCompositeFieldContainer[FrameUsed]
    frames_cached: bool
    late: bool
    latency_class: str
    sequences: _containers.RepeatedCompositeFieldContainer[GeneratedSequence]
    timings: Timings
    tokens: _containers.RepeatedCompositeFieldContainer[ModalityTokens]
    def __init__(self, sequences: _Optional[_Iterable[_Union[GeneratedSequence, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[ModalityTokens, _Mapping]]] = ..., frames_cached: bool = ..., frames: _Optional[_Iterable[_Union[FrameUsed, _Mapping]]] = ..., deadline_us: _Optional[int] = ..., deadline_met: bool = ..., late: bool = ..., latency_class: _Optional[str] = ...) -> None: ...

class GeneratedSequence(_message.Message):
    __slots__ = ["finish_reason", "log_probability", "score", "text", "token_ids"]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    log_probability: float
    score: float
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., log_probability: _Optional[float] = ..., score: _Optional[float] = ...) -> None: ...

class GeneratedToken(_message.Message):
    __slots__ = ["index", "sequence", "text", "token_id"]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    index: int
    sequence: int
    text: str
    token_id: int
    def __init__(self, sequence: _Optional[int] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class ModalityTokens(_message.Message):
    __slots__ = ["cached", "modality", "total"]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    cached: int
    modality: Modality
    total: int
    def __init__(self, modality: _Optional[_Union[Modality, str]] = ..., total: _Optional[int] = ..., cached: _Optional[int] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ["camera", "capture_time_ns", "kind", "message", "message_number"]
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    camera: str
    capture_time_ns: int
    kind: NoticeKind
    message: str
    message_number: int
    def __init__(self, kind: _Optional[_Union[NoticeKind, str]] = ..., message: _Optional[str] = ..., camera: _Optional[str] = ..., capture_time_ns: _Optional[int] = ..., message_number: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ["cameras", "instruction", "latency_class", "model", "options", "statistics_key"]
    CAMERAS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    LATENCY_CLASS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_KEY_FIELD_NUMBER: _ClassVar[int]
    cameras: _containers.RepeatedScalarFieldContainer[str]
    instruction: str
    latency_class: str
    model: str
    options: SessionOptions
    statistics_key: str
    def __init__(self, model: _Optional[str] = ..., instruction: _Optional[str] = ..., cameras: _Optional[_Iterable[str]] = ..., statistics_key: _Optional[str] = ..., latency_class: _Optional[str] = ..., options: _Optional[_Union[SessionOptions, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ["action_space", "latency_class", "limits", "model", "session_id", "statistics_key"]
    ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_CLASS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_KEY_FIELD_NUMBER: _ClassVar[int]
    action_space: _models_pb2.ActionSpace
    latency_class: _server_pb2.LatencyClass
    limits: _server_pb2.Limits
    model: _models_pb2.Model
    session_id: int
    statistics_key: str
    def __init__(self, session_id: _Optional[int] = ..., model: _Optional[_Union[_models_pb2.Model, _Mapping]] = ..., statistics_key: _Optional[str] = ..., action_space: _Optional[_Union[_models_pb2.ActionSpace, _Mapping]] = ..., latency_class: _Optional[_Union[_server_pb2.LatencyClass, _Mapping]] = ..., limits: _Optional[_Union[_server_pb2.Limits, _Mapping]] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ["act", "frames", "model", "state", "statistics_key", "text"]
    ACT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_KEY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    act: ActRequest
    frames: _containers.RepeatedCompositeFieldContainer[VisionFrame]
    model: str
    state: StateInput
    statistics_key: str
    text: TextInput
    def __init__(self, model: _Optional[str] = ..., text: _Optional[_Union[TextInput, _Mapping]] = ..., frames: _Optional[_Iterable[_Union[VisionFrame, _Mapping]]] = ..., state: _Optional[_Union[StateInput, _Mapping]] = ..., statistics_key: _Optional[str] = ..., act: _Optional[_Union[ActRequest, _Mapping]] = ...) -> None: ...

class PredictResponse(_message.Message):
    __slots__ = ["chunk"]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: ActionChunk
    def __init__(self, chunk: _Optional[_Union[ActionChunk, _Mapping]] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ["act", "hz"]
    ACT_FIELD_NUMBER: _ClassVar[int]
    HZ_FIELD_NUMBER: _ClassVar[int]
    act: ActRequest
    hz: float
    def __init__(self, hz: _Optional[float] = ..., act: _Optional[_Union[ActRequest, _Mapping]] = ...) -> None: ...

class RawImage(_message.Message):
    __slots__ = ["data", "height", "pixel_format", "width"]
    DATA_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    PIXEL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    height: int
    pixel_format: PixelFormat
    width: int
    def __init__(self, pixel_format: _Optional[_Union[PixelFormat, str]] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ["act_id", "code", "detail", "message", "message_number"]
    ACT_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    act_id: int
    code: int
    detail: _error_pb2.ErrorDetail
    message: str
    message_number: int
    def __init__(self, act_id: _Optional[int] = ..., message_number: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., detail: _Optional[_Union[_error_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class Reset(_message.Message):
    __slots__ = ["keep_instruction"]
    KEEP_INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    keep_instruction: bool
    def __init__(self, keep_instruction: bool = ...) -> None: ...

class SessionOptions(_message.Message):
    __slots__ = ["refresh_class", "stream_tokens", "supersede"]
    REFRESH_CLASS_FIELD_NUMBER: _ClassVar[int]
    STREAM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDE_FIELD_NUMBER: _ClassVar[int]
    refresh_class: str
    stream_tokens: bool
    supersede: bool
    def __init__(self, supersede: bool = ..., stream_tokens: bool = ..., refresh_class: _Optional[str] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ["act", "cancel", "executed", "open", "push", "reset", "state", "text", "vision"]
    ACT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VISION_FIELD_NUMBER: _ClassVar[int]
    act: ActRequest
    cancel: Cancel
    executed: ExecutedActions
    open: Open
    push: Push
    reset: Reset
    state: StateInput
    text: TextInput
    vision: VisionFrame
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., vision: _Optional[_Union[VisionFrame, _Mapping]] = ..., text: _Optional[_Union[TextInput, _Mapping]] = ..., state: _Optional[_Union[StateInput, _Mapping]] = ..., executed: _Optional[_Union[ExecutedActions, _Mapping]] = ..., act: _Optional[_Union[ActRequest, _Mapping]] = ..., reset: _Optional[_Union[Reset, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., push: _Optional[_Union[Push, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ["chunk", "error", "notice", "opened", "token"]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    chunk: ActionChunk
    error: RequestError
    notice: Notice
    opened: Opened
    token: ActionToken
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., token: _Optional[_Union[ActionToken, _Mapping]] = ..., chunk: _Optional[_Union[ActionChunk, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ...) -> None: ...

class StateInput(_message.Message):
    __slots__ = ["capture_time_ns", "values"]
    CAPTURE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    capture_time_ns: int
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ..., capture_time_ns: _Optional[int] = ...) -> None: ...

class TextInput(_message.Message):
    __slots__ = ["instruction", "token_ids"]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    instruction: str
    token_ids: TokenIds
    def __init__(self, instruction: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ["act_us", "decode_us", "encode_us", "prefill_us", "queue_us", "total_us"]
    ACT_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    ENCODE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    act_us: int
    decode_us: int
    encode_us: int
    prefill_us: int
    queue_us: int
    total_us: int
    def __init__(self, queue_us: _Optional[int] = ..., encode_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., act_us: _Optional[int] = ..., total_us: _Optional[int] = ..., decode_us: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ["ids"]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenRun(_message.Message):
    __slots__ = ["count", "source"]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    count: int
    source: TokenSource
    def __init__(self, source: _Optional[_Union[TokenSource, str]] = ..., count: _Optional[int] = ...) -> None: ...

class VisionFrame(_message.Message):
    __slots__ = ["age_us", "camera", "capture_time_ns", "encoded", "raw"]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    age_us: int
    camera: str
    capture_time_ns: int
    encoded: bytes
    raw: RawImage
    def __init__(self, camera: _Optional[str] = ..., capture_time_ns: _Optional[int] = ..., age_us: _Optional[int] = ..., encoded: _Optional[bytes] = ..., raw: _Optional[_Union[RawImage, _Mapping]] = ...) -> None: ...

class PixelFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class CommitMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class TokenSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Modality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Degradation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class NoticeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
