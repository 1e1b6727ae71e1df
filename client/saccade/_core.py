"""A session without its transport: what was sent, what is unanswered, when and how to reconnect.

Both clients drive one of these. The owner opens streams (``connect``), hands in every event
(``handle``) and every end (``ended``); it is told whether to open another one, and when. Safe from
any thread; callers are answered and called back outside the lock.
"""

from __future__ import annotations

import enum
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from saccade import errors, images, types
from saccade.v1 import inference_pb2 as pb

LOG = logging.getLogger("saccade")
OPEN_TIMEOUT_S = 10.0
EXPIRE_EVERY_S = 0.05
"""How often requests that wait for a connection are held against their deadlines."""
_MAX_AGE_US = 3_600_000_000
_KEPT = 2  # per input: the newest, and the one before it in case the newest is refused
_NOTES = 100
_RESUME_ORDER = ("text", "state", "vision", "push")
_PUSH_IDS = 1 << 40
"""Numbers of requests that the server makes by itself, from here on; the session's own are below."""

Outcome = types.Actions | errors.SaccadeError
OnToken = Callable[[int, int, int, int], None]
OnActions = Callable[[Outcome], None]
OnReconnect = Callable[[types.Reconnected], None]


class GenerateCall(Protocol):
    """What gRPC gives for a call that is answered by a stream."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        """The events."""

    def cancel(self) -> object:
        """Ends the call."""


class _State(enum.Enum):
    NEW = enum.auto()  # never opened
    LIVE = enum.auto()
    DRAINING = enum.auto()  # the server shuts down; what is in flight is finished
    DOWN = enum.auto()  # to be opened again
    OVER = enum.auto()


@dataclass
class _Act:
    request: pb.ActRequest
    resolve: Callable[[Outcome], None]
    on_token: Callable[[types.Token], None] | None
    asked: float
    in_flight: bool = False  # on the stream that is open now


@dataclass
class _Kept:
    message: pb.SessionRequest
    number: int  # in the stream that is open now; 0: not sent there
    sent: float


def open_message(
    model: str,
    instruction: str,
    cameras: Sequence[str],
    statistics_key: str,
    latency_class: str,
    supersede: bool,
    stream_tokens: bool,
    refresh_class: str = "",
) -> pb.Open:
    """What opens a session."""
    return pb.Open(
        model=model,
        instruction=instruction,
        cameras=cameras,
        statistics_key=statistics_key,
        latency_class=latency_class,
        options=pb.SessionOptions(
            supersede=supersede, stream_tokens=stream_tokens, refresh_class=refresh_class
        ),
    )


def act_request(
    deadline_s: float,
    max_frame_age_s: float,
    latency_class: str,
    samples: int,
    seed: int,
    temperature: float,
    flow: types.Flow | None,
) -> pb.ActRequest:
    """What asks for actions; its number is given when it is sent."""
    request = pb.ActRequest(
        latency_class=latency_class,
        deadline_us=round(deadline_s * 1e6),
        max_frame_age_us=round(max_frame_age_s * 1e6),
        samples=samples,
        seed=seed,
        temperature=temperature,
    )
    if flow is not None:
        request.flow_steps = flow.steps
        request.least_flow_steps = flow.least_steps
        if flow.noise is not None:
            request.noise.extend(np.asarray(flow.noise, dtype=np.float32).ravel().tolist())
        if flow.committed is not None:
            committed = np.asarray(flow.committed, dtype=np.float32).ravel()
            request.committed.normalized.extend(committed.tolist())
            if flow.per_action_time:
                request.committed.mode = pb.COMMIT_MODE_PER_ACTION_TIME
    return request


def predict_request(
    images_by_camera: images.ImageLike | Mapping[str, images.ImageLike],
    instruction: str,
    model: str,
    statistics_key: str,
    state: Sequence[float] | None,
    act: pb.ActRequest,
) -> pb.PredictRequest:
    """A complete question."""
    if not isinstance(images_by_camera, Mapping):
        images_by_camera = {"": images_by_camera}
    request = pb.PredictRequest(
        model=model,
        text=pb.TextInput(instruction=instruction),
        frames=[images.frame(image, camera) for camera, image in images_by_camera.items()],
        statistics_key=statistics_key,
        act=act,
    )
    if state is not None:
        request.state.values.extend(state)
    return request


def generate_request(
    prompt: str | Sequence[int],
    images_by_camera: images.ImageLike | Mapping[str, images.ImageLike] | None,
    model: str,
    latency_class: str,
    deadline_s: float,
    options: types.TextOptions,
) -> pb.GenerateRequest:
    """A text wanted."""
    if images_by_camera is None:
        images_by_camera = {}
    elif not isinstance(images_by_camera, Mapping):
        images_by_camera = {"": images_by_camera}
    request = pb.GenerateRequest(
        model=model,
        frames=[images.frame(image, camera) for camera, image in images_by_camera.items()],
        latency_class=latency_class,
        deadline_us=round(deadline_s * 1e6),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        num_sequences=options.num_sequences,
        num_beams=options.num_beams,
        length_penalty=options.length_penalty,
        early_stopping=options.early_stopping,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def timed_out(what: str, timeout_s: float) -> errors.TimedOut:
    """The error of a wait that the client itself gave up."""
    return errors.TimedOut(
        f"{what} after {timeout_s:g} s",
        code="DEADLINE_EXCEEDED",
        reason="EXPIRED",
        deadline_s=timeout_s,
    )


class Core:
    """See the module."""

    def __init__(
        self,
        message: pb.Open,
        policy: types.Reconnect | None,
        retry_acts: bool,
        on_token: OnToken | None,
        on_reconnect: OnReconnect | None,
        on_first: Callable[[errors.SaccadeError | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_first`` is called once: with None when the session is open, else with why not."""
        self._lock = threading.Lock()
        self._effects: list[Callable[[], None]] = []
        self._open = message
        self._policy = policy
        self._retry_acts = retry_acts
        self._on_token = on_token
        self._on_reconnect = on_reconnect
        self._on_first: Callable[[errors.SaccadeError | None], None] | None = on_first
        self._clock = clock

        self._state = _State.NEW
        self._closing = False
        self._over: errors.SaccadeError | None = None
        self._write: Callable[[pb.SessionRequest | None], None] | None = None
        self._number = 0
        self._next_act = 1
        self._acts: dict[int, _Act] = {}
        self._on_actions: OnActions | None = None
        self._kept: dict[tuple[str, str], list[_Kept]] = {}  # by kind and camera, oldest first
        self._attempts = 0
        self._opened_at = 0.0
        self._lost_at = 0.0
        self._cause: errors.SaccadeError | None = None

        self.opened: pb.Opened | None = None
        self.reconnects = 0
        self.notices: list[str] = []
        self.message_errors: list[errors.RequestFailed] = []

    # ----------------------------------------------------------------------------- for the caller
    def send(self, message: pb.SessionRequest) -> None:
        """Sends a message that is no act request, or keeps it for the next stream."""
        with self._change():
            self._check()
            live = self._state is _State.LIVE
            self._remember(message, self._number + 1 if live else 0)
            if live:
                self._put(message)

    def push(self, hz: float, request: pb.ActRequest, on_actions: OnActions | None) -> None:
        """The server asks from now on; ``on_actions`` gets what comes of it."""
        with self._change():
            self._on_actions = on_actions
        request.id = _PUSH_IDS
        self.send(pb.SessionRequest(push=pb.Push(hz=hz, act=request)))

    def act(
        self,
        request: pb.ActRequest,
        resolve: Callable[[Outcome], None],
        on_token: Callable[[types.Token], None] | None = None,
    ) -> int:
        """Asks; ``resolve`` is called once, unless the request is withdrawn by ``cancel``."""
        with self._change():
            self._check()
            act = _Act(request, resolve, on_token, self._clock())
            request.id = self._next_act
            self._next_act += 1
            if self._state is _State.LIVE:
                self._ask(act)
            elif self._state is _State.NEW or self._retry_acts:
                self._acts[request.id] = act
            else:
                self._resolve(act, self._absent())
            return request.id

    def cancel(self, act_id: int) -> None:
        """Withdraws one request, whose caller no longer waits."""
        with self._change():
            act = self._acts.pop(act_id, None)
            if act is not None and act.in_flight and self._write is not None:
                self._put(pb.SessionRequest(cancel=pb.Cancel(act_id=act_id)))
            self._finish_drain()

    def cancel_all(self) -> None:
        """Withdraws every request; each fails with Cancelled."""
        with self._change():
            self._check()
            for act_id in [i for i, a in self._acts.items() if not a.in_flight]:
                cancelled = errors.Cancelled(
                    "cancelled while not connected", code="CANCELLED", reason="CANCELLED"
                )
                self._resolve(self._acts.pop(act_id), cancelled)
            if self._write is not None and self._state in (_State.LIVE, _State.DRAINING):
                self._put(pb.SessionRequest(cancel=pb.Cancel(all=True)))

    def deadline_s(self, request: pb.ActRequest) -> float | None:
        """Seconds from its arrival by which it is judged; inf: none; None: only the server knows."""
        if request.deadline_us:
            return float(request.deadline_us) * 1e-6
        klass = self.opened.latency_class if self.opened is not None else None
        if klass is None or request.latency_class not in ("", klass.name):
            return None
        return klass.deadline_us * 1e-6 if klass.deadline_us else math.inf

    def begin_close(self) -> bool:
        """No more is sent, and no stream opened. False: there is no stream that could end well."""
        with self._change():
            self._closing = True
            if self._state not in (_State.LIVE, _State.DRAINING):
                return False
            self._half_close()
            return True

    # -------------------------------------------------------------------------- for the transport
    def connect(self, write: Callable[[pb.SessionRequest | None], None]) -> None:
        """A stream begins; ``write`` takes its messages, in order, and None as the last."""
        with self._change():
            self._write = write
            self._number = 0
            message = pb.Open()
            message.CopyFrom(self._open)
            if any(kind == "text" for kind, _ in self._kept):
                message.instruction = ""  # replaced since; the newest follows
            self._put(pb.SessionRequest(open=message))

    def handle(self, event: pb.SessionResponse) -> None:
        """An event of the stream."""
        kind = event.WhichOneof("event")
        with self._change():
            if kind == "opened":
                self._handle_opened(event.opened)
            elif kind == "token":
                self._handle_token(event.token)
            elif kind == "chunk":
                act = self._acts.pop(event.chunk.act_id, None)
                if act is not None:
                    self._resolve(act, self._answer(event.chunk, act.asked))
                elif event.chunk.act_id >= _PUSH_IDS and self._on_actions is not None:
                    self._later(self._on_actions, self._answer(event.chunk, math.nan))
            elif kind == "error":
                self._handle_error(event.error)
            elif kind == "notice":
                self._note(self.notices, event.notice.message)
                if event.notice.kind == pb.NOTICE_KIND_STALE_FRAME:
                    self._forget(event.notice.message_number)
                elif event.notice.kind == pb.NOTICE_KIND_DRAINING:
                    self._drain()
            self._finish_drain()

    def ended(self, error: errors.SaccadeError | None) -> float | None:
        """The stream is over (None: with OK). Seconds until the next one; None: there is none."""
        with self._change():
            now = self._clock()
            self._write = None
            if self._state is _State.OVER or self._policy is None or not self._passing(error):
                self._finish(error)
                return None
            if self._state is not _State.DOWN:
                self._lost_at = now
                if now - self._opened_at > self._policy.cap_s:
                    self._attempts = 0  # a server that dies right after each opening is not healthy
                self._cause = error or self._absent()
                self._state = _State.DOWN
                self._drop_acts()
            if self._policy.give_up_s is not None and now - self._lost_at >= self._policy.give_up_s:
                self._finish(
                    errors.SessionClosed(
                        f"not reached again in {now - self._lost_at:.1f} s: {error}"
                    )
                )
                return None
            step = self._policy.initial_s * 2.0 ** min(self._attempts, 60)
            self._attempts += 1
            delay = min(step, self._policy.cap_s) * random.uniform(0.5, 1.0)
            return max(delay, (error.retry_after_s or 0.0) if error is not None else 0.0)

    def expire(self) -> None:
        """Fails requests that wait for a connection past their deadline."""
        with self._change():
            now = self._clock()
            for act in list(self._acts.values()):
                deadline = self.deadline_s(act.request)
                if not act.in_flight and deadline is not None and now - act.asked >= deadline:
                    self._expired(act, deadline)

    def fail(self, error: errors.SaccadeError) -> None:
        """The session is over, whatever its state."""
        with self._change():
            self._finish(error)

    # ------------------------------------------------------------------------------------ internal
    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._lock:
            yield
            effects, self._effects = self._effects, []
        for effect in effects:
            effect()

    def _later(self, callback: Callable[..., None], *arguments: object) -> None:
        """A callback of the user's own, whose exceptions are no business of the session."""

        def call() -> None:
            try:
                callback(*arguments)
            except Exception:
                LOG.exception("a callback of a session raised")

        self._effects.append(call)

    def _resolve(self, act: _Act, outcome: Outcome) -> None:
        self._effects.append(lambda: act.resolve(outcome))

    def _check(self) -> None:
        if self._over is not None:
            raise errors.SessionClosed(str(self._over))
        if self._closing:
            raise errors.SessionClosed("the session is closed")

    def _put(self, message: pb.SessionRequest) -> None:
        assert self._write is not None
        self._number += 1
        self._write(message)

    def _ask(self, act: _Act) -> None:
        act.in_flight = True
        self._acts[act.request.id] = act
        self._put(pb.SessionRequest(act=act.request))

    def _half_close(self) -> None:
        if self._write is not None:
            self._write(None)
            self._write = None

    def _absent(self) -> errors.SaccadeError:
        if self._state is _State.DRAINING:
            return errors.Draining(
                "the server is shutting down", code="UNAVAILABLE", reason="DRAINING"
            )
        return errors.ConnectionLost(f"not connected: {self._cause}", code="UNAVAILABLE")

    # What the next stream begins with.
    def _remember(self, message: pb.SessionRequest, number: int) -> None:
        kind = message.WhichOneof("message")
        if kind == "reset":
            keep = message.reset.keep_instruction
            self._kept = {k: v for k, v in self._kept.items() if keep and k[0] == "text"}
            if not keep:
                self._open.instruction = ""
        elif kind in _RESUME_ORDER:
            items = self._kept.pop(key := (kind, message.vision.camera), [])
            items.append(_Kept(message, number, self._clock()))
            self._kept[key] = items[-_KEPT:]

    def _forget(self, number: int) -> None:
        """The server did not take this message: the one before it is in force."""
        for key in list(self._kept):
            self._kept[key] = [k for k in self._kept[key] if k.number != number or number == 0]
            if not self._kept[key]:
                del self._kept[key]

    def _resume(self) -> None:
        now = self._clock()
        for items in sorted(self._kept.items(), key=lambda item: _RESUME_ORDER.index(item[0][0])):
            for kept in items[1]:
                kept.number = 0
            newest = items[1][-1]
            newest.number = self._number + 1
            message = newest.message
            if items[0][0] == "vision":  # it has aged here
                message = pb.SessionRequest()
                message.CopyFrom(newest.message)
                aged = message.vision.age_us + round((now - newest.sent) * 1e6)
                message.vision.age_us = min(aged, _MAX_AGE_US)
            self._put(message)
        for act in list(self._acts.values()):
            deadline = self.deadline_s(act.request)
            if deadline is not None and math.isfinite(deadline):
                left = deadline - (now - act.asked)
                if left <= 0:
                    self._expired(act, deadline)
                    continue
                # `act.request` keeps the whole deadline: it may have to be repeated once more.
                again = pb.ActRequest()
                again.CopyFrom(act.request)
                again.deadline_us = max(1, round(left * 1e6))
                act.in_flight = True
                self._put(pb.SessionRequest(act=again))
            else:
                self._ask(act)

    def _expired(self, act: _Act, deadline_s: float) -> None:
        del self._acts[act.request.id]
        error = errors.Expired(
            f"its deadline passed without a connection: {self._cause or 'not open yet'}",
            code="DEADLINE_EXCEEDED",
            reason="EXPIRED",
            deadline_s=deadline_s,
        )
        self._resolve(act, error)

    # Events.
    def _handle_opened(self, opened: pb.Opened) -> None:
        now = self._clock()
        before, self.opened = self.opened, opened
        self._state = _State.LIVE
        self._opened_at = now
        self._resume()
        if self._closing:
            self._half_close()
        if self._on_first is not None:
            self._first(None)
        if before is not None:
            self.reconnects += 1
            if self._on_reconnect is not None:
                event = types.Reconnected(
                    cause=str(self._cause),
                    attempts=self._attempts,
                    down_s=now - self._lost_at,
                    session_id=opened.session_id,
                    same_model=opened.model.fingerprint == before.model.fingerprint,
                )
                self._later(self._on_reconnect, event)

    def _answer(self, chunk: pb.ActionChunk, asked: float) -> Outcome:
        try:
            return types.actions(chunk, self._clock() - asked)
        except ValueError as error:
            return errors.RequestFailed(f"the answer is malformed: {error}", code="INTERNAL")

    def _handle_token(self, token: pb.ActionToken) -> None:
        act = self._acts.get(token.act_id)
        if act is not None and act.on_token is not None:
            self._later(act.on_token, types.Token(token.sample, token.index, token.token))
        if self._on_token is not None:
            self._later(self._on_token, token.act_id, token.sample, token.index, token.token)

    def _handle_error(self, error: pb.RequestError) -> None:
        failed = errors.from_detail(error.code, error.message, error.detail)
        if not error.HasField("act_id"):
            self._forget(error.message_number)
            self._note(self.message_errors, failed)
            return
        if error.act_id >= _PUSH_IDS:
            if self._on_actions is not None:
                self._later(self._on_actions, failed)
            return
        act = self._acts.get(error.act_id)
        if isinstance(failed, errors.Draining):
            self._drain()
            if act is not None and self._retry_acts and self._state is _State.DRAINING:
                act.in_flight = False  # it did not run: the next server gets it
                return
        if act is not None:
            del self._acts[error.act_id]
            self._resolve(act, failed)

    def _drain(self) -> None:
        if self._state is _State.LIVE and self._policy is not None and not self._closing:
            self._state = _State.DRAINING

    def _finish_drain(self) -> None:
        if self._state is _State.DRAINING and not any(a.in_flight for a in self._acts.values()):
            self._half_close()

    # Ends.
    def _passing(self, error: errors.SaccadeError | None) -> bool:
        """Whether another stream may do better."""
        if self._closing or self._state is _State.NEW:
            return False
        if error is None:
            return self._state is _State.DRAINING
        if isinstance(
            error,
            (errors.ConnectionLost, errors.Draining, errors.WorkerFailed, errors.ModelUnloaded),
        ):
            return True
        if self._state is _State.DOWN and isinstance(error, (errors.RateLimited, errors.TimedOut)):
            return True  # RateLimited: the server may not have noticed yet that the old one is gone
        # Without a reason they are gRPC's own words for a broken stream; the server gives reasons.
        return error.reason == "UNSPECIFIED" and error.code in ("CANCELLED", "UNKNOWN", "INTERNAL")

    def _drop_acts(self) -> None:
        for act_id, act in list(self._acts.items()):
            known = self.deadline_s(act.request) is not None
            if self._retry_acts and (known or not act.in_flight):
                act.in_flight = False
                continue
            del self._acts[act_id]
            cause = self._cause
            assert cause is not None
            if not cause.retriable:  # one of gRPC's own words
                cause = errors.ConnectionLost(cause.message, code="UNAVAILABLE")
            self._resolve(act, cause.again())

    def _finish(self, error: errors.SaccadeError | None) -> None:
        if self._state is _State.OVER:
            return
        self._state = _State.OVER
        self._write = None
        self._over = error or errors.SessionClosed("the stream has ended")
        for act in self._acts.values():
            self._resolve(act, errors.SessionClosed(str(self._over)))
        self._acts.clear()
        if self._on_first is not None:
            self._first(self._over)

    def _first(self, error: errors.SaccadeError | None) -> None:
        on_first, self._on_first = self._on_first, None
        assert on_first is not None
        self._effects.append(lambda: on_first(error))

    @staticmethod
    def _note(items: list, item: object) -> None:  # type: ignore[type-arg]
        items.append(item)
        del items[:-_NOTES]


class SessionBase:
    """What both sessions have in common: everything that does not wait."""

    def __init__(self, core: Core, stream_tokens: bool) -> None:
        self._core = core
        self._streams_tokens = stream_tokens

    @property
    def _opened(self) -> pb.Opened:
        if self._core.opened is None:
            raise errors.SessionClosed("the session is not open yet")
        return self._core.opened

    @property
    def session_id(self) -> int:
        """The server's number of this session; another one after a reconnect."""
        return int(self._opened.session_id)

    @property
    def model(self) -> types.ModelInfo:
        """The model and what it expects."""
        return types.model_info(self._opened.model)

    @property
    def statistics_key(self) -> str:
        """The set of statistics in use."""
        return str(self._opened.statistics_key)

    @property
    def action_space(self) -> types.ActionSpace:
        """The actions it leads to."""
        return types.action_space(self._opened.action_space)

    @property
    def deadline_s(self) -> float:
        """Default deadline of this session's latency class; 0: none."""
        return float(self._opened.latency_class.deadline_us) * 1e-6

    @property
    def reconnects(self) -> int:
        """How often the session was opened again."""
        return self._core.reconnects

    @property
    def notices(self) -> list[str]:
        """What the server told in passing, newest last; at most 100 are kept."""
        return self._core.notices

    @property
    def message_errors(self) -> list[errors.RequestFailed]:
        """Errors of messages other than act requests (a refused frame, say); at most 100."""
        return self._core.message_errors

    def send_frame(
        self,
        image: images.ImageLike,
        camera: str = "",
        capture_time_ns: int | None = None,
        age_s: float = 0.0,
    ) -> None:
        """Sends a frame; the newest of each camera is used."""
        frame = images.frame(image, camera, capture_time_ns, age_s)
        self._core.send(pb.SessionRequest(vision=frame))

    def set_instruction(self, instruction: str) -> None:
        """Replaces the instruction for act requests that follow."""
        self._core.send(pb.SessionRequest(text=pb.TextInput(instruction=instruction)))

    def set_prompt_tokens(self, ids: Sequence[int]) -> None:
        """Replaces the instruction by token ids of the whole prompt, BOS first."""
        tokens = pb.TokenIds(ids=ids)
        self._core.send(pb.SessionRequest(text=pb.TextInput(token_ids=tokens)))

    def set_state(self, values: Sequence[float], capture_time_ns: int = 0) -> None:
        """Replaces the state of the robot."""
        state = pb.StateInput(values=values, capture_time_ns=capture_time_ns)
        self._core.send(pb.SessionRequest(state=state))

    def report_executed(self, actions: Sequence[Sequence[float]], time_ns: int = 0) -> None:
        """Tells what the robot really did; not told again after a reconnect."""
        executed = [pb.ExecutedAction(values=a, time_ns=time_ns) for a in actions]
        self._core.send(pb.SessionRequest(executed=pb.ExecutedActions(actions=executed)))

    def reset(self, keep_instruction: bool = True) -> None:
        """Starts a new episode: frames, state and executed actions are forgotten."""
        self._core.send(pb.SessionRequest(reset=pb.Reset(keep_instruction=keep_instruction)))

    def push(
        self,
        hz: float,
        on_actions: OnActions,
        deadline_s: float = 0.0,
        max_frame_age_s: float = 0.0,
        latency_class: str = "",
        samples: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        flow: types.Flow | None = None,
    ) -> None:
        """From now on the server asks for actions by itself, ``hz`` times a second.

        ``on_actions`` gets each answer, or what a turn failed with, from the thread that reads the
        stream. A turn whose predecessor is not answered is left out. A new push takes the place of
        the last one; after a reconnect it goes on.
        """
        request = act_request(
            deadline_s, max_frame_age_s, latency_class, samples, seed, temperature, flow
        )
        self._core.push(hz, request, on_actions)

    def stop_push(self) -> None:
        """The server does not ask any more; what is on its way is dropped."""
        self._core.push(0.0, pb.ActRequest(), None)

    def cancel_all(self) -> None:
        """Withdraws every unanswered act request; each then fails with Cancelled."""
        self._core.cancel_all()

    def _bounded(self, request: pb.ActRequest, timeout_s: float | None) -> pb.ActRequest:
        """A caller that stops waiting at ``timeout_s`` has no use for an answer after that."""
        if timeout_s is not None:
            deadline = self._core.deadline_s(request)
            if deadline is not None and timeout_s < deadline:
                request.deadline_us = max(1, round(timeout_s * 1e6))
        return request

    def _check_tokens(self) -> None:
        if not self._streams_tokens:
            raise ValueError("tokens are streamed only in a session opened with stream_tokens=True")
