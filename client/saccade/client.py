"""A connection to a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import grpc

from saccade import errors, images, types
from saccade.credentials import Credentials
from saccade.session import Session
from saccade.v1 import inference_pb2 as pb
from saccade.v1 import (
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)

DEFAULT_ADDRESS = "127.0.0.1:50051"


class Client:
    """Calls one server. Thread-safe; use it as a context manager or call ``close``."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        timeout_s: float = 10.0,
        credentials: Credentials | None = None,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = (credentials or Credentials()).channel(
            address,
            options=[
                ("grpc.max_send_message_length", -1),  # the server states and enforces its limit
                ("grpc.max_receive_message_length", -1),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.http2.max_pings_without_data", 0),
            ],
        )
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._models = models_pb2_grpc.ModelsStub(self._channel)
        self._server = server_pb2_grpc.ServerStub(self._channel)

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Returns once the server admits requests; raises TimeoutError."""
        end = time.monotonic() + timeout_s
        last = "no answer"
        while time.monotonic() < end:
            try:
                if self.status(timeout_s=1.0).ready:
                    return
                last = "not ready"
            except errors.RequestFailed as error:
                last = str(error)
            time.sleep(0.1)
        raise TimeoutError(f"{self.address} is not ready after {timeout_s:g} s: {last}")

    def status(self, timeout_s: float | None = None) -> types.ServerStatus:
        """The server as a whole."""
        try:
            answer = self._server.GetStatus(
                server_pb2.GetStatusRequest(), timeout=timeout_s or self._timeout_s
            )
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
        return types.server_status(answer)

    def models(self) -> list[types.ModelInfo]:
        """Every model the server has loaded."""
        try:
            answer = self._models.List(models_pb2.ListRequest(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
        return [types.model_info(m) for m in answer.models]

    def predict(
        self,
        images_by_camera: images.ImageLike | Mapping[str, images.ImageLike],
        instruction: str,
        model: str = "",
        statistics_key: str = "",
        state: Sequence[float] | None = None,
        latency_class: str = "",
        deadline_s: float = 0.0,
        samples: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        timeout_s: float | None = None,
    ) -> types.Actions:
        """One observation in, one chunk out. A single image goes to the model's only camera.

        ``timeout_s`` is the gRPC deadline and bounds the request's own; default: none.
        """
        if not isinstance(images_by_camera, Mapping):
            images_by_camera = {"": images_by_camera}
        request = pb.PredictRequest(
            model=model,
            text=pb.TextInput(instruction=instruction),
            frames=[images.frame(image, camera) for camera, image in images_by_camera.items()],
            statistics_key=statistics_key,
            act=pb.ActRequest(
                latency_class=latency_class,
                deadline_us=round(deadline_s * 1e6),
                samples=samples,
                seed=seed,
                temperature=temperature,
            ),
        )
        if state is not None:
            request.state.values.extend(state)
        sent = time.perf_counter()
        try:
            answer = self._inference.Predict(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
        return types.actions(answer.chunk, time.perf_counter() - sent)

    def session(
        self,
        model: str = "",
        instruction: str = "",
        cameras: Sequence[str] = (),
        statistics_key: str = "",
        latency_class: str = "",
        supersede: bool = False,
        on_token: Callable[[int, int, int, int], None] | None = None,
    ) -> Session:
        """Opens a session; its reader thread calls ``on_token(act_id, sample, index, token)``."""
        message = pb.Open(
            model=model,
            instruction=instruction,
            cameras=cameras,
            statistics_key=statistics_key,
            latency_class=latency_class,
            options=pb.SessionOptions(supersede=supersede, stream_tokens=on_token is not None),
        )
        return Session(self._inference, message, on_token)

    def close(self) -> None:
        """Closes the connection; open sessions end."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
