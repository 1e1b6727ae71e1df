"""What the client does on its own: frames, errors, answers, the command line. No server is needed but one that fails."""

from __future__ import annotations

import io
import queue
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from saccade import Client, Credentials, RequestFailed, SessionClosed, cli, errors, images, types
from saccade.v1 import error_pb2, inference_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc


def test_a_raw_frame_carries_its_exact_size_and_rows() -> None:
    array = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    frame = images.frame(array, "front", capture_time_ns=5, age_s=0.25)
    assert (frame.raw.width, frame.raw.height) == (3, 2)
    assert frame.raw.data == bytes(range(18))
    assert frame.raw.pixel_format == inference_pb2.PIXEL_FORMAT_RGB8
    assert (frame.camera, frame.capture_time_ns, frame.age_us) == ("front", 5, 250_000)


def test_a_transposed_array_is_sent_in_row_order() -> None:
    array = np.zeros((4, 2, 3), np.uint8)
    array[3, 1] = (1, 2, 3)
    frame = images.frame(np.transpose(array, (1, 0, 2)))
    assert (frame.raw.width, frame.raw.height) == (4, 2)
    assert frame.raw.data[-3:] == b"\x01\x02\x03"


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((3, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
    ],
)
def test_an_array_of_another_kind_is_refused(wrong: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match="uint8"):
        images.frame(wrong)


def test_gray_and_alpha_pil_images_become_rgb() -> None:
    for mode in ("L", "RGBA", "P"):
        assert len(images.frame(Image.new(mode, (5, 4))).raw.data) == 5 * 4 * 3


def test_bytes_and_files_go_as_they_are(tmp_path: Path) -> None:
    jpeg = images.to_jpeg(np.full((8, 8, 3), 200, np.uint8))
    path = tmp_path / "f.jpg"
    path.write_bytes(jpeg)
    assert images.frame(jpeg).encoded == images.frame(path).encoded == jpeg
    assert np.asarray(Image.open(io.BytesIO(jpeg)))[0, 0].tolist() == [200, 200, 200]


def test_a_wire_error_keeps_absent_apart_from_zero() -> None:
    detail = error_pb2.ErrorDetail(
        reason=error_pb2.ERROR_REASON_LATE, deadline_us=20_000, predicted_finish_us=26_500
    )
    failed = errors.from_detail(4, "too late", detail)
    assert (failed.code, failed.reason) == ("DEADLINE_EXCEEDED", "LATE")
    assert failed.retry_after_s is None
    assert failed.predicted_finish_s == pytest.approx(0.0265)
    assert "predicted 26.5 ms, deadline 20.0 ms" in str(failed)


def chunk(act_id: int = 0) -> inference_pb2.ActionChunk:
    """A small answer."""
    answer = inference_pb2.ActionChunk(act_id=act_id, deadline_us=20_000, deadline_met=True)
    answer.action_space.steps, answer.action_space.dim = 2, 3
    answer.samples.add(values=range(6), normalized=[0.5] * 6, token_ids=range(10, 16))
    answer.tokens.add(modality=inference_pb2.MODALITY_VISION, total=256, cached=255)
    answer.frames.add(camera="image", capture_time_ns=7, age_us=1500)
    return answer


def test_an_answer_is_shaped_by_its_action_space() -> None:
    actions = types.actions(chunk(), 0.01)
    assert actions.values.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert actions.samples[0].token_ids.dtype == np.int32
    assert actions.tokens["vision"] == types.ModalityTokens(256, 255)
    assert actions.frames[0].age_s == pytest.approx(0.0015)
    assert "deadline 20 ms met" in cli.format_summary(actions)
    assert "step 1: a0 +3.0000" in cli.format_actions(actions)


class Scripted(inference_pb2_grpc.InferenceServicer, server_pb2_grpc.ServerServicer):
    """Answers act requests in reverse, fails every third, ends the stream on a reset."""

    def GetStatus(self, request: object, context: object) -> server_pb2.GetStatusResponse:
        return server_pb2.GetStatusResponse(version="9.9", ready=True, models=["m"])

    def Predict(
        self, request: object, context: grpc.ServicerContext
    ) -> inference_pb2.PredictResponse:
        detail = error_pb2.ErrorDetail(reason=error_pb2.ERROR_REASON_INVALID_INPUT, field="text")
        status = error_pb2.RpcStatus(code=3, message="text: missing")
        status.details.add().Pack(detail)
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "text: missing")
        raise AssertionError("abort raises")

    def Session(
        self, requests: Iterator[inference_pb2.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.SessionResponse]:
        next(requests)
        opened = inference_pb2.Opened(session_id=3)
        yield inference_pb2.SessionResponse(opened=opened)
        asked: list[int] = []
        for message in requests:
            kind = message.WhichOneof("message")
            if kind == "act":
                asked.append(message.act.id)
            elif kind == "vision":
                error = inference_pb2.RequestError(code=3, message="bad frame", message_number=2)
                yield inference_pb2.SessionResponse(error=error)
            elif kind == "reset":
                return
            if len(asked) == 3:
                for act_id in reversed(asked):
                    if act_id % 3 == 0:
                        error = inference_pb2.RequestError(act_id=act_id, code=8, message="full")
                        yield inference_pb2.SessionResponse(error=error)
                    else:
                        yield inference_pb2.SessionResponse(chunk=chunk(act_id))
                asked = []


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of the scripted server on a free loopback port."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    scripted = Scripted()
    inference_pb2_grpc.add_InferenceServicer_to_server(scripted, server)
    server_pb2_grpc.add_ServerServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"127.0.0.1:{port}") as connected:
        yield connected
    server.stop(None)


def test_answers_find_their_own_requests_in_any_order(client: Client) -> None:
    with client.session() as session:
        asked = [session.act_async() for _ in range(3)]
        assert asked[0].result(10).deadline_met and asked[1].result(10).deadline_met
        with pytest.raises(RequestFailed) as failed:
            asked[2].result(10)
        assert failed.value.code == "RESOURCE_EXHAUSTED"


def test_an_error_of_a_message_is_kept_and_the_session_goes_on(client: Client) -> None:
    with client.session() as session:
        session.send_frame(b"x")
        asked = [session.act_async() for _ in range(3)]
        asked[0].result(10)
        assert [e.message for e in session.message_errors] == ["bad frame"]


def test_the_end_of_the_stream_fails_what_is_unanswered(client: Client) -> None:
    session = client.session()
    asked = session.act_async()
    session.reset()
    with pytest.raises(SessionClosed):
        asked.result(10)
    with pytest.raises(SessionClosed):
        session.act_async()
    session.close()


def test_a_failed_call_carries_its_typed_detail(client: Client) -> None:
    with pytest.raises(RequestFailed) as failed:
        client.predict(b"x", "")
    assert (failed.value.code, failed.value.reason) == ("INVALID_ARGUMENT", "INVALID_INPUT")
    assert failed.value.field == "text"


def test_nobody_there_is_a_typed_error_too() -> None:
    with Client("127.0.0.1:1", timeout_s=2) as nobody:
        with pytest.raises(RequestFailed) as failed:
            nobody.status()
        assert failed.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        with pytest.raises(TimeoutError, match="not ready"):
            nobody.wait_ready(0.2)


def test_command_line_codes(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--address", client.address, "status"]) == 0
    assert "saccade 9.9, ready" in capsys.readouterr().out
    assert cli.main(["--address", "127.0.0.1:1", "models"]) == 1
    missing = ["predict", "--image", "/no/such/file.jpg", "--instruction", "x"]
    assert cli.main(["--address", client.address, *missing]) == 2
    with pytest.raises(SystemExit) as usage:
        cli.main(["stream"])
    assert usage.value.code == 2


def test_tokens_are_passed_on() -> None:
    got: queue.SimpleQueue[tuple[int, int, int, int]] = queue.SimpleQueue()
    server = grpc.server(futures.ThreadPoolExecutor(2))

    class Tokens(inference_pb2_grpc.InferenceServicer):
        def Session(
            self, requests: Iterator[inference_pb2.SessionRequest], context: object
        ) -> Iterator[inference_pb2.SessionResponse]:
            assert next(requests).open.options.stream_tokens
            yield inference_pb2.SessionResponse(opened=inference_pb2.Opened())
            token = inference_pb2.ActionToken(act_id=1, sample=2, index=3, token=4)
            yield inference_pb2.SessionResponse(token=token)

    inference_pb2_grpc.add_InferenceServicer_to_server(Tokens(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"127.0.0.1:{port}") as client:
        client.session(on_token=lambda *event: got.put(event)).close()
    server.stop(None)
    assert got.get(timeout=10) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("credentials", "address", "said"),
    [
        ({"token_file": "token"}, "robot:1", "in the clear"),
        ({"token_file": "token"}, "127.0.0.1.example.com:1", "in the clear"),
        ({"tls_cert": "c"}, "robot:1", "together"),
        ({"tls_cert": "c", "tls_key": "k"}, "robot:1", "tls_ca"),
        ({"token_file": "two"}, "127.0.0.1:1", "one token"),
    ],
)
def test_credentials_that_do_not_fit_are_refused(
    tmp_path: Path, credentials: dict[str, str], address: str, said: str
) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "two").write_text("secret\nsecret\n")
    files = {k: str(tmp_path / v) for k, v in credentials.items()}
    with pytest.raises(ValueError, match=said):
        Client(address, credentials=Credentials(**files))


def test_the_token_is_sent_with_every_kind_of_call(tmp_path: Path) -> None:
    seen: list[tuple[str, object]] = []

    class Note(grpc.ServerInterceptor):
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            seen.append((details.method, dict(details.invocation_metadata).get("authorization")))
            return continuation(details)

    (tmp_path / "token").write_text("secret\n")
    server = grpc.server(futures.ThreadPoolExecutor(2), interceptors=[Note()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        credentials = Credentials(token_file=str(tmp_path / "token"))
        with Client(f"127.0.0.1:{port}", credentials=credentials) as client:
            with pytest.raises(RequestFailed) as failed:
                client.status()
            assert failed.value.code == "UNIMPLEMENTED"
            with pytest.raises((RequestFailed, SessionClosed)), client.session():
                pass
    finally:
        server.stop(None)
    assert seen == [
        ("/saccade.v1.Server/GetStatus", "Bearer secret"),
        ("/saccade.v1.Inference/Session", "Bearer secret"),
    ]
