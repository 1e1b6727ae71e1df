"""Errors of the client: one class per reason the server gives, and the few the client has itself."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from saccade.v1 import error_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class SaccadeError(Exception):
    """Base of everything this package raises on its own."""

    _retriable = False

    def __init__(
        self,
        message: str = "",
        *,
        code: str = "UNKNOWN",
        reason: str = "UNSPECIFIED",
        field: str = "",
        retry_after_s: float | None = None,
        deadline_s: float | None = None,
        predicted_finish_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        """gRPC status name, e.g. ``DEADLINE_EXCEEDED``."""
        self.reason = reason
        """Why, e.g. ``LATE``; the names of ErrorReason. One this client does not know is its number."""
        self.field = field
        """The offending field, e.g. ``vision.raw.width``."""
        self.retry_after_s = retry_after_s
        """Seconds from now: the earliest useful retry."""
        self.deadline_s = deadline_s
        """Seconds from the request's arrival: the deadline it was judged by."""
        self.predicted_finish_s = predicted_finish_s
        """Seconds from the request's arrival: when it was predicted to finish."""

    @property
    def retriable(self) -> bool:
        """The same request, sent again later, may succeed."""
        return self._retriable or self.retry_after_s is not None

    def again(self) -> SaccadeError:
        """A fresh exception that says the same: one for each of several waiters."""
        return type(self)(
            self.message,
            code=self.code,
            reason=self.reason,
            field=self.field,
            retry_after_s=self.retry_after_s,
            deadline_s=self.deadline_s,
            predicted_finish_s=self.predicted_finish_s,
        )

    def __str__(self) -> str:
        return self.message


class SessionClosed(SaccadeError):
    """The session is over; a request without an answer never gets one."""


class RequestFailed(SaccadeError):
    """One request was refused or failed; the session, if there is one, goes on.

    Reasons that this client does not know, and errors without a reason, are this class itself.
    """

    def __str__(self) -> str:
        text = f"{self.code} ({self.reason.lower()}): {self.message}"
        if self.predicted_finish_s is not None and self.deadline_s is not None:
            text += (
                f" [predicted {self.predicted_finish_s * 1e3:.1f} ms,"
                f" deadline {self.deadline_s * 1e3:.1f} ms]"
            )
        return text


class ConnectionLost(RequestFailed):
    """The server cannot be reached, or went away before it answered: it is unknown what it did."""

    _retriable = True


class InvalidInput(RequestFailed):
    """A field is missing, malformed, out of range, or names something unknown; ``field`` says which."""


class Late(RequestFailed):
    """Refused at once: it would finish after its deadline; see ``predicted_finish_s``."""


class Expired(RequestFailed):
    """Its deadline passed before it finished."""


class TimedOut(Expired, TimeoutError):
    """``timeout_s`` passed at the client; the request was withdrawn."""


class QueueFull(RequestFailed):
    """Its latency class, or its session, has as many unanswered requests as it may have."""

    _retriable = True


class NeverFits(RequestFailed):
    """It needs more tokens or cache than the model or the server can ever give."""


class NoFrame(RequestFailed):
    """A camera the model needs has sent no frame yet; ``field`` names it."""


class StaleFrame(RequestFailed):
    """The newest frame is older than the request allows; ``field`` names the camera."""


class Cancelled(RequestFailed):
    """Cancelled by the client."""


class Superseded(RequestFailed):
    """Replaced by a newer request of the same session."""


class Draining(RequestFailed):
    """The server is shutting down."""

    _retriable = True


class RateLimited(RequestFailed):
    """A limit on sessions, rate, or unread answers."""

    _retriable = True


class InvalidActionToken(RequestFailed):
    """The model produced a token that is no action."""


class NonFinite(RequestFailed):
    """The model produced NaN or Inf."""


class WorkerFailed(RequestFailed):
    """The device, or the worker that drives it, failed."""

    _retriable = True


class Internal(RequestFailed):
    """A fault of the server."""


class MissingInput(RequestFailed):
    """An instruction or a state that the model needs has not been sent yet; ``field`` says which."""


class Unauthenticated(RequestFailed):
    """The call brings no bearer token, or one the server does not know."""


class PermissionDenied(RequestFailed):
    """The token is known, but its role does not reach this call."""


class OutOfMemory(RequestFailed):
    """The server's memory budget has no room for the frame, the session or the model."""

    _retriable = True


class ModelUnloaded(RequestFailed):
    """The model is unloaded, or a newer load took its place, which a new session reaches."""

    _retriable = True


BY_REASON: dict[int, type[RequestFailed]] = {
    error_pb2.ERROR_REASON_UNSPECIFIED: RequestFailed,
    error_pb2.ERROR_REASON_INVALID_INPUT: InvalidInput,
    error_pb2.ERROR_REASON_LATE: Late,
    error_pb2.ERROR_REASON_EXPIRED: Expired,
    error_pb2.ERROR_REASON_QUEUE_FULL: QueueFull,
    error_pb2.ERROR_REASON_NEVER_FITS: NeverFits,
    error_pb2.ERROR_REASON_NO_FRAME: NoFrame,
    error_pb2.ERROR_REASON_STALE_FRAME: StaleFrame,
    error_pb2.ERROR_REASON_CANCELLED: Cancelled,
    error_pb2.ERROR_REASON_SUPERSEDED: Superseded,
    error_pb2.ERROR_REASON_DRAINING: Draining,
    error_pb2.ERROR_REASON_RATE_LIMITED: RateLimited,
    error_pb2.ERROR_REASON_INVALID_ACTION_TOKEN: InvalidActionToken,
    error_pb2.ERROR_REASON_NON_FINITE: NonFinite,
    error_pb2.ERROR_REASON_WORKER_FAILED: WorkerFailed,
    error_pb2.ERROR_REASON_INTERNAL: Internal,
    error_pb2.ERROR_REASON_MISSING_INPUT: MissingInput,
    error_pb2.ERROR_REASON_UNAUTHENTICATED: Unauthenticated,
    error_pb2.ERROR_REASON_PERMISSION_DENIED: PermissionDenied,
    error_pb2.ERROR_REASON_OUT_OF_MEMORY: OutOfMemory,
    error_pb2.ERROR_REASON_MODEL_UNLOADED: ModelUnloaded,
}
"""The class of each reason of the contract."""


def reason_name(reason: int) -> str:
    """``LATE`` and the like; the number, for a reason of a newer server."""
    known = error_pb2.ErrorReason.DESCRIPTOR.values_by_number.get(reason)
    return known.name.removeprefix("ERROR_REASON_") if known else str(reason)


def from_detail(code: int, message: str, detail: error_pb2.ErrorDetail) -> RequestFailed:
    """The exception for a wire error."""

    def seconds(name: str) -> float | None:
        return getattr(detail, name) * 1e-6 if detail.HasField(name) else None

    return BY_REASON.get(detail.reason, RequestFailed)(
        message,
        code=_CODE_NAMES.get(code, str(code)),
        reason=reason_name(detail.reason),
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
        try:
            status.ParseFromString(value)
            for item in status.details:
                if item.Is(error_pb2.ErrorDetail.DESCRIPTOR):
                    item.Unpack(detail)
        except DecodeError:
            pass  # some proxy's; the code and the message remain
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and detail.reason == 0:
        return ConnectionLost(message, code=code.name)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and detail.reason == 0:
        return TimedOut(message, code=code.name, reason="EXPIRED")
    return from_detail(code.value[0], message, detail)
