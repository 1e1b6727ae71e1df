"""A stream of frames in and actions out."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import TracebackType

import grpc

from saccade import _core, errors, types
from saccade.v1 import inference_pb2 as pb
from saccade.v1 import inference_pb2_grpc


class ActStream:
    """The tokens of one answer as they are decoded, then the answer. Iterate, then ``actions``."""

    def __init__(
        self, future: Future[types.Actions], tokens: queue.SimpleQueue[types.Token | None]
    ) -> None:
        self._future = future
        self._tokens = tokens
        future.add_done_callback(lambda _: tokens.put(None))

    def __iter__(self) -> Iterator[types.Token]:
        """Ends with the answer; raises what the request failed with.

        A request that is repeated after a reconnect begins again at index 0.
        """
        while (token := self._tokens.get()) is not None:
            yield token
        self._tokens.put(None)
        self.actions()

    def actions(self, timeout_s: float | None = None) -> types.Actions:
        """The answer; waits for it."""
        return _wait(self._future, timeout_s)

    def cancel(self) -> None:
        """Withdraws the request."""
        self._future.cancel()


class Session(_core.SessionBase):
    """One robot's stream. Made by ``Client.session``; use it as a context manager.

    Frames replace older frames of their camera on the server; an act request uses what has been
    sent before it. Methods may be called from any thread. A failed act request raises
    ``RequestFailed`` and the session goes on; ``SessionClosed`` means that it is over.
    """

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceStub,
        message: pb.Open,
        reconnect: types.Reconnect | None,
        retry_acts: bool,
        on_token: _core.OnToken | None,
        on_reconnect: _core.OnReconnect | None,
    ) -> None:
        first: Future[None] = Future()

        def on_first(error: errors.SaccadeError | None) -> None:
            if error is None:
                first.set_result(None)
            else:
                first.set_exception(error)

        core = _core.Core(message, reconnect, retry_acts, on_token, on_reconnect, on_first)
        super().__init__(core, message.options.stream_tokens)
        self._stub = stub
        self._call: grpc.Call | None = None
        self._aborted = threading.Event()
        self._reader = threading.Thread(target=self._run, name="saccade-session", daemon=True)
        self._reader.start()
        try:
            first.result()
        except BaseException:
            self.abort()
            raise

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
    ) -> Future[types.Actions]:
        """Asks for actions and returns at once; 0 stands for the class's or no limit.

        Cancelling the future withdraws the request.
        """
        return self._ask(
            _core.act_request(
                deadline_s, max_frame_age_s, latency_class, samples, seed, temperature, flow
            )
        )

    def act(
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
        """Asks for actions and waits for them.

        ``timeout_s`` bounds the wait and the deadline; after it the request is withdrawn and
        ``TimedOut`` raised.
        """
        request = _core.act_request(
            deadline_s, max_frame_age_s, latency_class, samples, seed, temperature, flow
        )
        return _wait(self._ask(self._bounded(request, timeout_s)), timeout_s)

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
        tokens: queue.SimpleQueue[types.Token | None] = queue.SimpleQueue()
        request = _core.act_request(
            deadline_s, max_frame_age_s, latency_class, samples, seed, temperature, flow
        )
        return ActStream(self._ask(request, tokens), tokens)

    # ------------------------------------------------------------------------------------- closing
    def close(self, timeout_s: float = 5.0) -> None:
        """Stops sending, waits for what is unanswered, ends the stream."""
        if self._core.begin_close():
            self._join(timeout_s)
        self.abort()
        self._join(timeout_s)

    def abort(self) -> None:
        """Ends the stream at once; unanswered requests fail."""
        self._core.begin_close()
        self._aborted.set()
        if self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        self.close()

    # ------------------------------------------------------------------------------------ internal
    def _join(self, timeout_s: float) -> None:
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout_s)

    def _ask(
        self,
        request: pb.ActRequest,
        tokens: queue.SimpleQueue[types.Token | None] | None = None,
    ) -> Future[types.Actions]:
        future: Future[types.Actions] = Future()

        def resolve(outcome: _core.Outcome) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if isinstance(outcome, errors.SaccadeError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        act_id = self._core.act(request, resolve, tokens.put if tokens is not None else None)
        future.act_id = act_id  # type: ignore[attr-defined]
        future.add_done_callback(lambda f: self._core.cancel(act_id) if f.cancelled() else None)
        return future

    def _run(self) -> None:
        """The reader thread: one stream after the other."""
        try:
            while True:
                delay_s = self._core.ended(self._stream())
                if delay_s is None or not self._pause(delay_s):
                    break
            self._core.fail(errors.SessionClosed("the session is closed"))
        except Exception as error:  # nobody may be left waiting
            _core.LOG.exception("a session failed")
            self._core.fail(errors.SessionClosed(f"a fault of the client: {error!r}"))

    def _pause(self, delay_s: float) -> bool:
        """Waits; False: the session is closed."""
        end = time.monotonic() + delay_s
        while (left := end - time.monotonic()) > 0:
            self._core.expire()
            if self._aborted.wait(min(left, _core.EXPIRE_EVERY_S)):
                break
        return not self._aborted.is_set()

    def _stream(self) -> errors.SaccadeError | None:
        """One stream from opening to end; what it ended with."""
        outgoing: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._core.connect(outgoing.put)
        try:
            call = self._stub.Session(iter(outgoing.get, None))
        except ValueError as error:  # gRPC's word for a channel that was closed
            return errors.SessionClosed(str(error))
        self._call = call
        if self._aborted.is_set():
            call.cancel()
        answered, late = threading.Event(), threading.Event()

        def watch() -> None:
            end = time.monotonic() + _core.OPEN_TIMEOUT_S
            while not answered.wait(_core.EXPIRE_EVERY_S):
                self._core.expire()
                if time.monotonic() >= end:
                    late.set()
                    call.cancel()
                    return

        threading.Thread(target=watch, name="saccade-opening", daemon=True).start()
        try:
            for event in call:
                answered.set()
                self._core.handle(event)
        except grpc.RpcError as error:
            if late.is_set():
                return _core.timed_out("no answer to the opening", _core.OPEN_TIMEOUT_S)
            return errors.from_rpc_error(error)
        finally:
            answered.set()
            outgoing.put(None)  # lets gRPC's sending thread end
        return None


def _wait(future: Future[types.Actions], timeout_s: float | None) -> types.Actions:
    try:
        return future.result(timeout_s)
    except concurrent.futures.TimeoutError:
        if not future.cancel():  # answered in this very moment
            return future.result()
        raise _core.timed_out("no answer", timeout_s or 0.0) from None
    except concurrent.futures.CancelledError:
        raise errors.Cancelled("withdrawn", code="CANCELLED", reason="CANCELLED") from None
