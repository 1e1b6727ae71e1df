"""A connection to a server."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import grpc

from saccade import _core, channel, errors, images, types
from saccade.admin import Admin
from saccade.credentials import Credentials
from saccade.session import Session
from saccade.v1 import (
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)

DEFAULT_ADDRESS = "127.0.0.1:50051"


class TextStream:
    """The tokens of one text as they are written; iterate, then ask for the ``result``.

    A beam search yields no tokens. Leaving it early, by ``cancel`` or the end of a ``with`` block,
    ends the call.
    """

    def __init__(self, call: _core.GenerateCall) -> None:
        self._call = call
        self._result: types.Text | None = None

    def __iter__(self) -> Iterator[types.TextToken]:
        return self

    def __next__(self) -> types.TextToken:
        try:
            for event in self._call:
                if event.HasField("token"):
                    return types.text_token(event.token)
                if event.HasField("result"):
                    self._result = types.text(event.result)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
        raise StopIteration

    def result(self) -> types.Text:
        """The whole text; reads what is left of the tokens."""
        for _ in self:
            pass
        if self._result is None:
            raise errors.SessionClosed("the call was cancelled")
        return self._result

    def cancel(self) -> None:
        """Ends the call; the server frees what it held."""
        self._call.cancel()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


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
        self._channel = channel.connect(address, credentials or Credentials())
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._models = models_pb2_grpc.ModelsStub(self._channel)
        self._server = server_pb2_grpc.ServerStub(self._channel)
        self.admin = Admin(self._channel, timeout_s)
        """For whoever runs the server; needs the role admin where tokens are configured."""

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
        flow: types.Flow | None = None,
        timeout_s: float | None = None,
    ) -> types.Actions:
        """One observation in, one chunk out. A single image goes to the model's only camera.

        ``timeout_s`` is the gRPC deadline and bounds the request's own; default: none.
        """
        request = _core.predict_request(
            images_by_camera,
            instruction,
            model,
            statistics_key,
            state,
            _core.act_request(deadline_s, 0.0, latency_class, samples, seed, temperature, flow),
        )
        sent = time.perf_counter()
        try:
            answer = self._inference.Predict(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
        return types.actions(answer.chunk, time.perf_counter() - sent)

    def generate(
        self,
        prompt: str | Sequence[int],
        images_by_camera: images.ImageLike | Mapping[str, images.ImageLike] | None = None,
        options: types.TextOptions = types.DEFAULT_TEXT_OPTIONS,
        model: str = "",
        latency_class: str = "",
        deadline_s: float = 30.0,
        timeout_s: float | None = None,
    ) -> TextStream:
        """A text for a prompt (words, or token ids with the model's BOS) and maybe images.

        The prompt is used as it is. ``deadline_s`` 0 is the class's, which is meant for short
        answers; ``timeout_s`` is the gRPC deadline and bounds it; default: none.
        """
        request = _core.generate_request(
            prompt, images_by_camera, model, latency_class, deadline_s, options
        )
        return TextStream(self._inference.Generate(request, timeout=timeout_s))

    def session(
        self,
        model: str = "",
        instruction: str = "",
        cameras: Sequence[str] = (),
        statistics_key: str = "",
        latency_class: str = "",
        supersede: bool = False,
        on_token: _core.OnToken | None = None,
        stream_tokens: bool = False,
        refresh_class: str = "",
        reconnect: types.Reconnect | None = types.DEFAULT_RECONNECT,
        retry_acts: bool = False,
        on_reconnect: _core.OnReconnect | None = None,
    ) -> Session:
        """Opens a session.

        ``on_token(act_id, sample, index, token)`` and ``on_reconnect`` are called by its reader
        thread; ``stream_tokens`` allows ``Session.act_stream``. ``refresh_class``: what is sent is made
        into a prefix at once, by requests of that latency class, and acts read the newest one. When the connection or the server
        goes away the session is opened again (``reconnect``; None: it ends) with the newest
        instruction, state and frames; act requests without an answer fail with a retriable error,
        or are sent again where their deadline allows it (``retry_acts``).
        """
        stream_tokens = stream_tokens or on_token is not None
        message = _core.open_message(
            model,
            instruction,
            cameras,
            statistics_key,
            latency_class,
            supersede,
            stream_tokens,
            refresh_class,
        )
        session = Session(self._inference, message, reconnect, retry_acts, on_token, on_reconnect)
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """Closes the connection; open sessions end."""
        for session in list(self._sessions):
            session.abort()
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
