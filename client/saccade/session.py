"""A stream of frames in and actions out."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType

import grpc

from saccade import errors, images, types
from saccade.v1 import inference_pb2 as pb
from saccade.v1 import inference_pb2_grpc


class Session:
    """One robot's stream. Made by ``Client.session``; use it as a context manager.

    Frames replace older frames of their camera on the server; an act request uses what has been
    sent before it. Methods may be called from any thread. A failed act request raises
    ``RequestFailed`` and the session goes on; ``SessionClosed`` means that it is over.
    """

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceStub,
        open_message: pb.Open,
        on_token: Callable[[int, int, int, int], None] | None = None,
        open_timeout_s: float = 10.0,
    ) -> None:
        self._outgoing: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future[types.Actions], float]] = {}
        self._next_act = 1
        self._sent = 0
        self._over: Exception | None = None
        self._on_token = on_token
        self._opened: Future[pb.Opened] = Future()
        self.notices: list[str] = []
        """What the server told in passing, newest last; at most 100 are kept."""
        self.message_errors: list[errors.RequestFailed] = []
        """Errors of messages other than act requests (a refused frame, say); at most 100."""

        self._send(pb.SessionRequest(open=open_message))
        self._call = stub.Session(self._requests())
        self._reader = threading.Thread(target=self._read, name="saccade-session", daemon=True)
        self._reader.start()
        try:
            opened = self._opened.result(open_timeout_s)
        except BaseException:
            self._call.cancel()
            raise
        self.session_id: int = opened.session_id
        self.model: types.ModelInfo = types.model_info(opened.model)
        self.statistics_key: str = opened.statistics_key
        self.action_space: types.ActionSpace = types.action_space(opened.action_space)
        self.deadline_s: float = opened.latency_class.deadline_us * 1e-6
        """Default deadline of this session's latency class; 0: none."""

    # ------------------------------------------------------------------------------------- sending
    def send_frame(
        self,
        image: images.ImageLike,
        camera: str = "",
        capture_time_ns: int | None = None,
        age_s: float = 0.0,
    ) -> None:
        """Sends a frame; the newest of each camera is used."""
        frame = images.frame(image, camera, capture_time_ns, age_s)
        self._send(pb.SessionRequest(vision=frame))

    def set_instruction(self, instruction: str) -> None:
        """Replaces the instruction for act requests that follow."""
        self._send(pb.SessionRequest(text=pb.TextInput(instruction=instruction)))

    def set_prompt_tokens(self, ids: Sequence[int]) -> None:
        """Replaces the instruction by token ids of the whole prompt, BOS first."""
        tokens = pb.TokenIds(ids=ids)
        self._send(pb.SessionRequest(text=pb.TextInput(token_ids=tokens)))

    def set_state(self, values: Sequence[float], capture_time_ns: int = 0) -> None:
        """Replaces the state of the robot."""
        state = pb.StateInput(values=values, capture_time_ns=capture_time_ns)
        self._send(pb.SessionRequest(state=state))

    def report_executed(self, actions: Sequence[Sequence[float]], time_ns: int = 0) -> None:
        """Tells what the robot really did."""
        executed = [pb.ExecutedAction(values=a, time_ns=time_ns) for a in actions]
        self._send(pb.SessionRequest(executed=pb.ExecutedActions(actions=executed)))

    def reset(self, keep_instruction: bool = True) -> None:
        """Starts a new episode: frames, state and executed actions are forgotten."""
        self._send(pb.SessionRequest(reset=pb.Reset(keep_instruction=keep_instruction)))

    def act_async(
        self,
        deadline_s: float = 0.0,
        max_frame_age_s: float = 0.0,
        latency_class: str = "",
        samples: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
    ) -> Future[types.Actions]:
        """Asks for actions and returns at once; 0 stands for the class's or no limit."""
        future: Future[types.Actions] = Future()
        with self._lock:
            if self._over is not None:
                raise errors.SessionClosed(str(self._over))
            act_id = self._next_act
            self._next_act += 1
            self._waiting[act_id] = (future, time.perf_counter())
        future.act_id = act_id  # type: ignore[attr-defined]
        self._send(
            pb.SessionRequest(
                act=pb.ActRequest(
                    id=act_id,
                    latency_class=latency_class,
                    deadline_us=round(deadline_s * 1e6),
                    max_frame_age_us=round(max_frame_age_s * 1e6),
                    samples=samples,
                    seed=seed,
                    temperature=temperature,
                )
            )
        )
        return future

    def act(
        self,
        deadline_s: float = 0.0,
        max_frame_age_s: float = 0.0,
        latency_class: str = "",
        samples: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        timeout_s: float | None = None,
    ) -> types.Actions:
        """Asks for actions and waits for them."""
        future = self.act_async(
            deadline_s, max_frame_age_s, latency_class, samples, seed, temperature
        )
        return future.result(timeout_s)

    def cancel_all(self) -> None:
        """Withdraws every unanswered act request; each then fails with CANCELLED."""
        self._send(pb.SessionRequest(cancel=pb.Cancel(all=True)))

    # ------------------------------------------------------------------------------------- closing
    def close(self, timeout_s: float = 5.0) -> None:
        """Stops sending, waits for what is unanswered, ends the stream."""
        self._outgoing.put(None)
        self._reader.join(timeout_s)
        if self._reader.is_alive():
            self._call.cancel()
            self._reader.join(timeout_s)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._call.cancel()
        self.close()

    # ------------------------------------------------------------------------------------ internal
    def _send(self, message: pb.SessionRequest) -> None:
        if self._over is not None:
            raise errors.SessionClosed(str(self._over))
        self._outgoing.put(message)

    def _requests(self) -> Iterator[pb.SessionRequest]:
        while True:
            message = self._outgoing.get()
            if message is None:
                return
            yield message

    def _read(self) -> None:
        over: Exception = errors.SessionClosed("the stream has ended")
        try:
            for event in self._call:
                self._handle(event)
        except grpc.RpcError as error:
            over = errors.from_rpc_error(error)
        with self._lock:
            self._over = over
            waiting = list(self._waiting.values())
            self._waiting.clear()
        self._outgoing.put(None)  # lets gRPC's sending thread end
        if not self._opened.done():
            self._opened.set_exception(over)
        for future, _ in waiting:
            future.set_exception(errors.SessionClosed(str(over)))

    def _handle(self, event: pb.SessionResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "opened":
            self._opened.set_result(event.opened)
        elif kind == "token" and self._on_token is not None:
            t = event.token
            self._on_token(t.act_id, t.sample, t.index, t.token)
        elif kind == "chunk":
            future, sent = self._take(event.chunk.act_id)
            if future is not None:
                future.set_result(types.actions(event.chunk, time.perf_counter() - sent))
        elif kind == "error":
            failed = errors.from_detail(event.error.code, event.error.message, event.error.detail)
            if event.error.HasField("act_id"):
                future, _ = self._take(event.error.act_id)
                if future is not None:
                    future.set_exception(failed)
            else:
                self._keep(self.message_errors, failed)
        elif kind == "notice":
            self._keep(self.notices, event.notice.message)

    def _take(self, act_id: int) -> tuple[Future[types.Actions] | None, float]:
        with self._lock:
            return self._waiting.pop(act_id, (None, 0.0))

    @staticmethod
    def _keep(items: list, item: object) -> None:  # type: ignore[type-arg]
        items.append(item)
        del items[:-100]
