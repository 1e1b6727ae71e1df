"""Errors of the client, with the typed part that the server sends."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from saccade.v1 import error_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class SaccadeError(Exception):
    """Base of everything this package raises on its own."""


class SessionClosed(SaccadeError):
    """The session's stream is over; a request without an answer never gets one."""


@dataclass
class RequestFailed(SaccadeError):
    """One request was refused or failed. The session, if there is one, goes on."""

    code: str
    """gRPC status name, e.g. ``DEADLINE_EXCEEDED``."""
    message: str
    reason: str = "UNSPECIFIED"
    """Why, e.g. ``LATE``, ``QUEUE_FULL``, ``INVALID_INPUT``; the names of ErrorReason."""
    field: str = ""
    """The offending field, e.g. ``vision.raw.width``."""
    retry_after_s: float | None = None
    """Seconds from now: the earliest useful retry."""
    deadline_s: float | None = None
    """Seconds from the request's arrival: the deadline it was judged by."""
    predicted_finish_s: float | None = None
    """Seconds from the request's arrival: when it was predicted to finish."""

    def __str__(self) -> str:
        text = f"{self.code} ({self.reason.lower()}): {self.message}"
        if self.predicted_finish_s is not None and self.deadline_s is not None:
            text += (
                f" [predicted {self.predicted_finish_s * 1e3:.1f} ms,"
                f" deadline {self.deadline_s * 1e3:.1f} ms]"
            )
        return text


def from_detail(code: int, message: str, detail: error_pb2.ErrorDetail) -> RequestFailed:
    """The exception for a wire error."""

    def seconds(name: str) -> float | None:
        return getattr(detail, name) * 1e-6 if detail.HasField(name) else None

    reason = error_pb2.ErrorReason.Name(detail.reason).removeprefix("ERROR_REASON_")
    return RequestFailed(
        code=_CODE_NAMES.get(code, str(code)),
        message=message,
        reason=reason,
        field=detail.field,
        retry_after_s=seconds("retry_after_us"),
        deadline_s=seconds("deadline_us"),
        predicted_finish_s=seconds("predicted_finish_us"),
    )


def from_rpc_error(error: grpc.RpcError) -> RequestFailed:
    """The exception for a failed call; typed where the server sent details."""
    detail = error_pb2.ErrorDetail()
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY:
            continue
        status = error_pb2.RpcStatus()
        status.ParseFromString(value)
        for item in status.details:
            if item.Is(error_pb2.ErrorDetail.DESCRIPTOR):
                item.Unpack(detail)
    return from_detail(error.code().value[0], error.details() or "", detail)
