from google.protobuf import any_pb2 as _any_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
ERROR_REASON_CANCELLED: ErrorReason
ERROR_REASON_DRAINING: ErrorReason
ERROR_REASON_EXPIRED: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
ERROR_REASON_INVALID_ACTION_TOKEN: ErrorReason
ERROR_REASON_INVALID_INPUT: ErrorReason
ERROR_REASON_LATE: ErrorReason
ERROR_REASON_MISSING_INPUT: ErrorReason
ERROR_REASON_MODEL_UNLOADED: ErrorReason
ERROR_REASON_NEVER_FITS: ErrorReason
ERROR_REASON_NON_FINITE: ErrorReason
ERROR_REASON_NO_FRAME: ErrorReason
ERROR_REASON_OUT_OF_MEMORY: ErrorReason
ERROR_REASON_PERMISSION_DENIED: ErrorReason
ERROR_REASON_QUEUE_FULL: ErrorReason
ERROR_REASON_RATE_LIMITED: ErrorReason
ERROR_REASON_STALE_FRAME: ErrorReason
ERROR_REASON_SUPERSEDED: ErrorReason
ERROR_REASON_UNAUTHENTICATED: ErrorReason
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_WORKER_FAILED: ErrorReason

class ErrorDetail(_message.Message):
    __slots__ = ["deadline_us", "field", "predicted_finish_us", "reason", "retry_after_us"]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FINISH_US_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_US_FIELD_NUMBER: _ClassVar[int]
    deadline_us: int
    field: str
    predicted_finish_us: int
    reason: ErrorReason
    retry_after_us: int
    def __init__(self, reason: _Optional[_Union[ErrorReason, str]] = ..., field: _Optional[str] = ..., retry_after_us: _Optional[int] = ..., deadline_us: _Optional[int] = ..., predicted_finish_us: _Optional[int] = ...) -> None: ...

class RpcStatus(_message.Message):
    __slots__ = ["code", "details", "message"]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ...) -> None: ...

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
