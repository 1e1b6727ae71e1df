"""Every reason of the contract has its class; what a newer server sends does no harm."""

from __future__ import annotations

import grpc
import pytest

import saccade
from saccade import errors, types
from saccade.v1 import error_pb2, inference_pb2, models_pb2

REASONS = [v for v in error_pb2.ErrorReason.DESCRIPTOR.values if v.number != 0]


@pytest.mark.parametrize("value", REASONS, ids=lambda v: v.name)
def test_each_reason_has_a_class_of_its_own_name(value: object) -> None:
    reason = value.name.removeprefix("ERROR_REASON_")  # type: ignore[attr-defined]
    number = value.number  # type: ignore[attr-defined]
    detail = error_pb2.ErrorDetail(
        reason=number,
        field="a.b",
        retry_after_us=1_500_000,
        deadline_us=20_000,
        predicted_finish_us=30_000,
    )
    failed = errors.from_detail(13, "why", detail)
    expected = "".join(word.capitalize() for word in reason.split("_"))
    assert type(failed).__name__ == expected
    assert getattr(saccade, expected) is type(failed) and expected in saccade.__all__
    assert isinstance(failed, saccade.RequestFailed) and isinstance(failed, saccade.SaccadeError)
    assert (failed.code, failed.reason, failed.field) == ("INTERNAL", reason, "a.b")
    assert failed.retry_after_s == pytest.approx(1.5) and failed.retriable
    assert failed.deadline_s == pytest.approx(0.02)
    assert failed.predicted_finish_s == pytest.approx(0.03)
    again = failed.again()
    assert type(again) is type(failed) and again is not failed and vars(again) == vars(failed)


def test_no_class_serves_two_reasons() -> None:
    classes = list(errors.BY_REASON.values())
    assert len(set(classes)) == len(classes) == len(error_pb2.ErrorReason.DESCRIPTOR.values)


def test_the_reason_of_a_newer_server_is_the_base_class() -> None:
    detail = error_pb2.ErrorDetail()
    detail.ParseFromString(bytes([8, 99]))  # reason = 99
    failed = errors.from_detail(8, "new", detail)
    assert type(failed) is saccade.RequestFailed
    assert (failed.reason, failed.code, failed.retriable) == ("99", "RESOURCE_EXHAUSTED", False)


def test_other_enum_values_of_a_newer_server_are_numbers() -> None:
    answer = inference_pb2.ActionChunk(degradation=[inference_pb2.Degradation.ValueType(7)])
    answer.action_space.steps = answer.action_space.dim = 1
    answer.action_space.reference = models_pb2.ActionReference.ValueType(9)
    answer.tokens.add(modality=inference_pb2.Modality.ValueType(42), total=3)
    actions = types.actions(answer, 0.0)
    assert actions.degradation == ("7",) and actions.space.reference == "9"
    assert actions.tokens == {"42": types.ModalityTokens(3, 0)}


class Failed(grpc.RpcError):
    """What gRPC raises, with metadata of a test's choice."""

    def __init__(self, code: grpc.StatusCode, metadata: bytes | None) -> None:
        self._code = code
        self._metadata = metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "what happened"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        if self._metadata is None:
            return ()
        return (("other", b"x"), ("grpc-status-details-bin", self._metadata))


def test_unavailable_without_a_reason_is_a_lost_connection() -> None:
    lost = errors.from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, None))
    assert type(lost) is saccade.ConnectionLost and lost.retriable and lost.code == "UNAVAILABLE"


def test_a_call_that_ran_into_its_own_deadline_timed_out() -> None:
    late = errors.from_rpc_error(Failed(grpc.StatusCode.DEADLINE_EXCEEDED, None))
    assert type(late) is saccade.TimedOut and late.reason == "EXPIRED"


def test_details_that_are_not_ours_are_passed_over() -> None:
    for metadata in (b"\xff\xff\xff", error_pb2.RpcStatus(code=5).SerializeToString()):
        failed = errors.from_rpc_error(Failed(grpc.StatusCode.NOT_FOUND, metadata))
        assert type(failed) is saccade.RequestFailed
        assert (failed.code, failed.message) == ("NOT_FOUND", "what happened")


def test_a_time_out_is_a_timeout_error_and_an_expired_request() -> None:
    failed = errors.TimedOut("no answer", code="DEADLINE_EXCEEDED", reason="EXPIRED")
    assert isinstance(failed, TimeoutError) and isinstance(failed, saccade.Expired)
    assert str(failed) == "DEADLINE_EXCEEDED (expired): no answer"
