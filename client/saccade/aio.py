"""The client for asyncio: the names, values and errors of the blocking one.

What waits is awaited; sending never waits, so it is a plain call. Everything belongs to the event
loop it was made in.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from types import TracebackType

import grpc
import grpc.aio

from saccade import _core, channel, errors, images, types
from saccade.admin import AsyncAdmin
from saccade.client import DEFAULT_ADDRESS
from saccade.credentials import Credentials
from saccade.v1 import inference_pb2 as pb
from saccade.v1 import (
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)

_HEARD_AFTER_S = 0.25
"""How long a second opening listens before it writes."""

__all__ = ["ActStream", "Client", "Session", "TextStream"]


class Client:
    """Calls one server; use it as ``async with`` or await ``close``."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        timeout_s: float = 10.0,
        credentials: Credentials | None = None,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        credentials = credentials or Credentials()
        self._channel = channel.connect_aio(address, credentials)
        self._metadata = credentials.metadata()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._models = models_pb2_grpc.ModelsStub(self._channel)
        self._server = server_pb2_grpc.ServerStub(self._channel)
        self.admin = AsyncAdmin(self._channel, timeout_s, self._metadata)
        """For whoever runs the server; needs the role admin where tokens are configured."""

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Returns once the server admits requests; raises TimeoutError."""
        end = time.monotonic() + timeout_s
        last = "no answer"
        while time.monotonic() < end:
            try:
                if (await self.status(timeout_s=1.0)).ready:
                    return
                last = "not ready"
            except errors.RequestFailed as error:
                last = str(error)
            await asyncio.sleep(0.1)
        raise TimeoutError(f"{self.address} is not ready after {timeout_s:g} s: {last}")

    async def status(self, timeout_s: float | None = None) -> types.ServerStatus:
        """The server as a whole."""
        try:
            answer = await self._server.GetStatus(
                server_pb2.GetStatusRequest(),
                timeout=timeout_s or self._timeout_s,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
        return types.server_status(answer)

    async def models(self) -> list[types.ModelInfo]:
        """Every model the server has loaded."""
        try:
            answer = await self._models.List(
                models_pb2.ListRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
        return [types.model_info(m) for m in answer.models]

    async def predict(
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

        ``timeout_s`` is the gRPC deadline and bounds the request's own; default: none. Cancelling
        the task that awaits it cancels the call.
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
            answer = await self._inference.Predict(
                request, timeout=timeout_s, metadata=self._metadata
            )
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
        call = self._inference.Generate(request, timeout=timeout_s, metadata=self._metadata)
        return TextStream(call)

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
        """A session, opened by ``async with`` or by awaiting it; see the blocking client's."""
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
        session = Session(
            self._inference,
            message,
            reconnect,
            retry_acts,
            on_token,
            on_reconnect,
            self._metadata,
        )
        self._sessions.add(session)
        return session

    async def close(self) -> None:
        """Closes the connection; open sessions end."""
        for session in list(self._sessions):
            await session.abort()
        await self._channel.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class TextStream:
    """The tokens of one text as they are written; ``async for``, then await the ``result``.

    A beam search yields no tokens. ``cancel``, or the end of an ``async with`` block, ends the
    call.
    """

    def __init__(self, call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]):
        self._call = call
        self._events = call.__aiter__()
        self._result: types.Text | None = None

    def __aiter__(self) -> AsyncIterator[types.TextToken]:
        return self

    async def __anext__(self) -> types.TextToken:
        try:
            async for event in self._events:
                if event.HasField("token"):
                    return types.text_token(event.token)
                if event.HasField("result"):
                    self._result = types.text(event.result)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
        raise StopAsyncIteration

    async def result(self) -> types.Text:
        """The whole text; reads what is left of the tokens."""
        async for _ in self:
            pass
        if self._result is None:
            raise errors.SessionClosed("the call was cancelled")
        return self._result

    def cancel(self) -> None:
        """Ends the call; the server frees what it held."""
        self._call.cancel()

    async def __aenter__(self) -> TextStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


class ActStream:
    """The tokens of one answer as they are decoded (``async for``), then the answer (``actions``)."""

    def __init__(
        self, future: asyncio.Future[types.Actions], tokens: asyncio.Queue[types.Token | None]
    ) -> None:
        self._future = future
        self._tokens = tokens
        self._withdrawn = False
        future.add_done_callback(lambda _: tokens.put_nowait(None))

    async def __aiter__(self) -> AsyncIterator[types.Token]:
        """Ends with the answer; raises what the request failed with.

        A request that is repeated after a reconnect begins again at index 0.
        """
        while (token := await self._next()) is not None:
            yield token
        self._tokens.put_nowait(None)
        await self.actions()

    async def _next(self) -> types.Token | None:
        try:
            return await self._tokens.get()
        except asyncio.CancelledError:
            self._future.cancel()
            raise

    async def actions(self, timeout_s: float | None = None) -> types.Actions:
        """The answer. Cancelling the task that awaits it withdraws the request."""
        try:
            return await _wait(self._future, timeout_s)
        except asyncio.CancelledError:
            if not self._withdrawn:
                raise
            raise errors.Cancelled("withdrawn", code="CANCELLED", reason="CANCELLED") from None

    def cancel(self) -> None:
        """Withdraws the request; iterating and ``actions`` then raise Cancelled."""
        self._withdrawn = self._future.cancel()


class Session(_core.SessionBase):
    """One robot's stream; see ``saccade.Session``. Made by ``Client.session``."""

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceStub,
        message: pb.Open,
        reconnect: types.Reconnect | None,
        retry_acts: bool,
        on_token: _core.OnToken | None,
        on_reconnect: _core.OnReconnect | None,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        core = _core.Core(message, reconnect, retry_acts, on_token, on_reconnect, self._on_first)
        super().__init__(core, message.options.stream_tokens)
        self._stub = stub
        self._metadata = metadata
        self._first: asyncio.Future[None] | None = None
        self._runner: asyncio.Task[None] | None = None

    async def open(self) -> Session:
        """Opens it; returns when the server has answered."""
        if self._runner is None:
            self._first = asyncio.get_running_loop().create_future()
            self._runner = asyncio.create_task(self._run(), name="saccade-session")
        assert self._first is not None
        try:
            await asyncio.shield(self._first)
        except BaseException:
            await self.abort()
            raise
        return self

    def __await__(self) -> Generator[object, None, Session]:
        return self.open().__await__()

    # -------------------------------------------------------------------------------------- asking
    def act_async(
        self,
        deadline_s: float = 0.0,
        max_frame_age_s: float = 0.0,
        latency_class: str = "",
        samples: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        flow: types.Flow | None = None,
    ) -> asyncio.Future[types.Actions]:
        """Asks for actions and returns at once; 0 stands for the class's or no limit.

        Cancelling the future, or a task that awaits it, withdraws the request.
        """
        return self._ask(
            _core.act_request(
                deadline_s, max_frame_age_s, latency_class, samples, seed, temperature, flow
            )
        )

    async def act(
        self,
        deadline_s: float = 0.0,
        max_frame_age_s: float = 0.0,
        latency_class: str = "",
        samples: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        flow: types.Flow | None = None,
        timeout_s: float | None = None,
    ) -> types.Actions:
        """Asks for actions and waits for them; a task that is cancelled here withdraws the request.

        ``timeout_s`` bounds the wait and the deadline; after it the request is withdrawn and
        ``TimedOut`` raised.
        """
        request = _core.act_request(
            deadline_s, max_frame_age_s, latency_class, samples, seed, temperature, flow
        )
        return await _wait(self._ask(self._bounded(request, timeout_s)), timeout_s)

    def act_stream(
        self,
        deadline_s: float = 0.0,
        max_frame_age_s: float = 0.0,
        latency_class: str = "",
        samples: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        flow: types.Flow | None = None,
    ) -> ActStream:
        """Asks for actions whose tokens are read as they come (``stream_tokens=True``)."""
        self._check_tokens()
        tokens: asyncio.Queue[types.Token | None] = asyncio.Queue()
        request = _core.act_request(
            deadline_s, max_frame_age_s, latency_class, samples, seed, temperature, flow
        )
        return ActStream(self._ask(request, tokens), tokens)

    # ------------------------------------------------------------------------------------- closing
    async def close(self, timeout_s: float = 5.0) -> None:
        """Stops sending, waits for what is unanswered, ends the stream."""
        if self._core.begin_close() and self._runner is not None:
            await asyncio.wait([self._runner], timeout=timeout_s)
        await self.abort()

    async def abort(self) -> None:
        """Ends the stream at once; unanswered requests fail."""
        self._core.begin_close()
        if self._runner is None:
            self._core.fail(errors.SessionClosed("the session is closed"))
        elif self._runner is not asyncio.current_task():
            self._runner.cancel()
            await asyncio.wait([self._runner])

    async def __aenter__(self) -> Session:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            await self.abort()
        else:
            await self.close()

    # ------------------------------------------------------------------------------------ internal
    def _on_first(self, error: errors.SaccadeError | None) -> None:
        if self._first is None or self._first.done():
            return
        if error is None:
            self._first.set_result(None)
        else:
            self._first.set_exception(error)
            self._first.exception()  # its opener may have been cancelled; that is no news

    def _ask(
        self,
        request: pb.ActRequest,
        tokens: asyncio.Queue[types.Token | None] | None = None,
    ) -> asyncio.Future[types.Actions]:
        future: asyncio.Future[types.Actions] = asyncio.get_running_loop().create_future()

        def resolve(outcome: _core.Outcome) -> None:
            if future.done():
                return
            if isinstance(outcome, errors.SaccadeError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        on_token = tokens.put_nowait if tokens is not None else None
        act_id = self._core.act(request, resolve, on_token)
        future.add_done_callback(lambda f: self._core.cancel(act_id) if f.cancelled() else None)
        return future

    async def _run(self) -> None:
        """One stream after the other."""
        over = errors.SessionClosed("the session is closed")
        try:
            while True:
                delay_s = self._core.ended(await self._stream())
                if delay_s is None:
                    break
                end = time.monotonic() + delay_s
                while (left := end - time.monotonic()) > 0:
                    self._core.expire()
                    await asyncio.sleep(min(left, _core.EXPIRE_EVERY_S))
        except Exception as error:  # nobody may be left waiting
            _core.LOG.exception("a session failed")
            over = errors.SessionClosed(f"a fault of the client: {error!r}")
        finally:
            self._core.fail(over)

    async def _stream(self) -> errors.SaccadeError | None:
        """One stream from opening to end; what it ended with."""
        ended = await self._try(0.0)
        if isinstance(ended, _Unheard):
            ended = await self._try(_HEARD_AFTER_S)
        return ended

    async def _try(self, write_after_s: float) -> errors.SaccadeError | None:
        outgoing: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._core.connect(outgoing.put_nowait)
        messages = _until_none(outgoing, write_after_s)
        call = self._stub.Session(messages, metadata=self._metadata)
        answered = False
        try:
            event = await self._first_event(call)
            answered = True
            while event is not grpc.aio.EOF:
                self._core.handle(event)
                event = await call.read()
        except errors.TimedOut as error:
            return error
        except grpc.RpcError as error:
            failed = errors.from_rpc_error(error)
            # gRPC's asyncio calls say this when a write meets a stream that the server has ended, and
            # forget what it ended with. Nothing is lost by opening again, and listening first.
            if not answered and (failed.code, failed.reason) == ("INTERNAL", "UNSPECIFIED"):
                return _Unheard(failed.message, code=failed.code)
            return failed
        except grpc.aio.UsageError as error:  # the channel was closed
            return errors.SessionClosed(str(error))
        finally:
            outgoing.put_nowait(None)
            call.cancel()
        return None

    async def _first_event(self, call: grpc.aio.StreamStreamCall) -> pb.SessionResponse:
        first = asyncio.ensure_future(call.read())
        end = time.monotonic() + _core.OPEN_TIMEOUT_S
        try:
            while not first.done():
                await asyncio.wait([first], timeout=_core.EXPIRE_EVERY_S)
                self._core.expire()
                if not first.done() and time.monotonic() >= end:
                    raise _core.timed_out("no answer to the opening", _core.OPEN_TIMEOUT_S)
            event: pb.SessionResponse = first.result()
            return event
        finally:
            first.cancel()


class _Unheard(errors.RequestFailed):
    """An opening that was refused before it was written."""


async def _until_none(
    outgoing: asyncio.Queue[pb.SessionRequest | None], after_s: float
) -> AsyncIterator[pb.SessionRequest]:
    await asyncio.sleep(after_s)
    while (message := await outgoing.get()) is not None:
        yield message


async def _wait(future: asyncio.Future[types.Actions], timeout_s: float | None) -> types.Actions:
    if timeout_s is None:
        return await future
    done, _ = await _first_of(future, timeout_s)
    if not done:
        future.cancel()
        raise _core.timed_out("no answer", timeout_s)
    return future.result()


async def _first_of(
    future: asyncio.Future[types.Actions], timeout_s: float
) -> tuple[set[asyncio.Future[types.Actions]], set[asyncio.Future[types.Actions]]]:
    """asyncio.wait, which leaves the future alone, but for a task that is cancelled meanwhile."""
    try:
        return await asyncio.wait([future], timeout=timeout_s)
    except asyncio.CancelledError:
        future.cancel()
        raise
