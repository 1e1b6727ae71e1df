"""The session without its transport: what is kept, what is sent again, when it reconnects; by a manual clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from saccade import _core, errors, types
from saccade.v1 import error_pb2, inference_pb2, models_pb2
from saccade.v1 import inference_pb2 as pb

LOST = errors.ConnectionLost("gone", code="UNAVAILABLE")


class Harness:
    """A core, its clock, and what it wrote to the stream that is open."""

    def __init__(
        self,
        policy: types.Reconnect | None = types.DEFAULT_RECONNECT,
        retry_acts: bool = False,
        class_deadline_us: int = 0,
        instruction: str = "first",
    ) -> None:
        self.now = 100.0
        self.written: list[pb.SessionRequest | None] = []
        self.first: list[errors.SaccadeError | None] = []
        self.reconnected: list[types.Reconnected] = []
        self.class_deadline_us = class_deadline_us
        self.core = _core.Core(
            pb.Open(model="m", instruction=instruction),
            policy,
            retry_acts,
            None,
            self.reconnected.append,
            self.first.append,
            clock=lambda: self.now,
        )

    def connect(self, open_it: bool = True) -> list[pb.SessionRequest | None]:
        """A new stream; its messages."""
        self.written = []
        self.core.connect(self.written.append)
        if open_it:
            opened = pb.Opened(session_id=len(self.reconnected) + 1)
            opened.latency_class.name = "control"
            opened.latency_class.deadline_us = self.class_deadline_us
            opened.model.CopyFrom(models_pb2.Model(name="m", fingerprint="f"))
            self.core.handle(pb.SessionResponse(opened=opened))
        return self.written

    def act(self, **fields: object) -> list[_core.Outcome]:
        """Asks; the list gets the outcome."""
        outcomes: list[_core.Outcome] = []
        self.core.act(pb.ActRequest(**fields), outcomes.append)  # type: ignore[arg-type]
        return outcomes

    def frame(self, data: bytes, camera: str = "", age_us: int = 0) -> None:
        vision = pb.VisionFrame(camera=camera, encoded=data, age_us=age_us)
        self.core.send(pb.SessionRequest(vision=vision))

    def text(self, text: str) -> None:
        self.core.send(pb.SessionRequest(text=pb.TextInput(instruction=text)))

    def refuse(self, number: int) -> None:
        error = pb.RequestError(code=3, message="no", message_number=number)
        self.core.handle(pb.SessionResponse(error=error))

    def drain(self) -> None:
        notice = pb.Notice(kind=inference_pb2.NOTICE_KIND_DRAINING, message="shutting down")
        self.core.handle(pb.SessionResponse(notice=notice))

    def answer(self, act_id: int) -> None:
        chunk = pb.ActionChunk(act_id=act_id)
        chunk.action_space.steps = chunk.action_space.dim = 1
        chunk.samples.add(values=[1.0], normalized=[0.5], token_ids=[3])
        self.core.handle(pb.SessionResponse(chunk=chunk))


def kinds(written: list[pb.SessionRequest | None]) -> list[str | None]:
    return [m.WhichOneof("message") if m is not None else None for m in written]


def test_a_session_is_resumed_with_the_newest_of_everything() -> None:
    h = Harness()
    h.connect()
    h.frame(b"old", "a")
    h.frame(b"a", "a", age_us=1000)
    h.frame(b"b", "b")
    h.core.send(pb.SessionRequest(state=pb.StateInput(values=[1.0])))
    h.core.send(pb.SessionRequest(state=pb.StateInput(values=[2.0])))
    h.text("second")
    h.core.send(pb.SessionRequest(executed=pb.ExecutedActions()))
    assert h.core.ended(LOST) is not None
    h.now += 2.5
    written = h.connect()
    assert kinds(written) == ["open", "text", "state", "vision", "vision"]
    opened, text, state, a, b = (m for m in written if m is not None)
    assert (opened.open.model, opened.open.instruction) == ("m", "")  # replaced by the text
    assert text.text.instruction == "second" and list(state.state.values) == [2.0]
    assert (a.vision.encoded, a.vision.age_us) == (b"a", 2_501_000)  # it has aged meanwhile
    assert (b.vision.encoded, b.vision.age_us) == (b"b", 2_500_000)
    (event,) = h.reconnected
    assert (event.cause, event.attempts, event.same_model) == (
        "UNAVAILABLE (unspecified): gone",
        1,
        True,
    )
    assert event.down_s == pytest.approx(2.5) and h.core.reconnects == 1
    # A second loss: the frame has aged from when it was taken, not from the first resumption.
    h.core.ended(LOST)
    h.now += 1.0
    assert [m.vision.age_us for m in h.connect() if m is not None][3:] == [3_501_000, 3_500_000]


def test_what_is_sent_while_down_is_there_after_the_reconnect() -> None:
    h = Harness()
    h.connect()
    h.frame(b"1")
    h.core.ended(LOST)
    h.frame(b"2")
    written = h.connect()
    assert kinds(written) == ["open", "vision"]
    assert written[0] is not None and written[0].open.instruction == "first"
    assert written[1] is not None and written[1].vision.encoded == b"2"


def test_a_refused_message_is_not_repeated_and_the_one_before_is() -> None:
    h = Harness()
    h.connect()
    h.text("good")  # message 2
    h.text("bad")  # 3
    h.frame(b"bad")  # 4
    h.refuse(3)
    h.refuse(4)
    h.core.ended(LOST)
    written = h.connect()
    assert kinds(written) == ["open", "text"]
    assert written[1] is not None and written[1].text.instruction == "good"
    # Its number is that of the new stream now: refused there, it is gone too.
    h.refuse(2)
    h.core.ended(LOST)
    assert kinds(h.connect()) == ["open"]


def test_a_reset_forgets_what_would_be_sent_again() -> None:
    for keep, expected in ((True, ["open", "text"]), (False, ["open"])):
        h = Harness()
        h.connect()
        h.text("second")
        h.frame(b"x")
        h.core.send(pb.SessionRequest(reset=pb.Reset(keep_instruction=keep)))
        h.core.ended(LOST)
        written = h.connect()
        assert kinds(written) == expected
        assert written[0] is not None and written[0].open.instruction == ""


def test_acts_in_flight_fail_and_are_not_repeated() -> None:
    h = Harness()
    h.connect()
    before = h.act()
    h.core.ended(LOST)
    during = h.act()
    for (failed,) in (before, during):
        assert isinstance(failed, errors.ConnectionLost) and failed.retriable
    assert before[0] is not LOST
    assert kinds(h.connect()) == ["open"]


def test_acts_are_repeated_with_what_is_left_of_their_deadline() -> None:
    h = Harness(retry_acts=True, class_deadline_us=3_000_000)
    h.connect()
    own, by_class, short = h.act(deadline_us=5_000_000), h.act(), h.act(deadline_us=1_000_000)
    elsewhere = h.act(latency_class="other")  # its deadline is known to the server alone
    h.now += 0.5
    h.core.ended(LOST)
    assert isinstance(elsewhere[0], errors.ConnectionLost)
    h.core.expire()
    assert short == []
    h.now += 0.6
    h.core.expire()
    assert isinstance(short[0], errors.Expired) and short[0].deadline_s == pytest.approx(1.0)
    written = h.connect()
    assert kinds(written) == ["open", "act", "act"]
    assert [m.act.deadline_us for m in written if m is not None][1:] == [3_900_000, 1_900_000]
    h.core.ended(LOST)  # and once more, counted from the beginning
    h.now += 1.0
    assert [m.act.deadline_us for m in h.connect() if m is not None][1:] == [2_900_000, 900_000]
    assert own == by_class == []
    h.answer(1)
    assert isinstance(own[0], types.Actions) and own[0].round_trip_s == pytest.approx(2.1)


def test_a_withdrawn_act_is_cancelled_at_the_server_and_not_repeated() -> None:
    h = Harness(retry_acts=True)
    written = h.connect()
    act_id = h.core.act(pb.ActRequest(), lambda _: pytest.fail("nobody waits"))
    h.core.cancel(act_id)
    assert written[-1] is not None and written[-1].cancel.act_id == act_id
    h.core.cancel(act_id)
    assert len(written) == 3
    h.core.ended(LOST)
    waiting = h.act()
    h.core.cancel_all()
    assert isinstance(waiting[0], errors.Cancelled)
    assert kinds(h.connect()) == ["open"]


def test_a_drain_finishes_what_is_in_flight_then_reconnects() -> None:
    h = Harness()
    written = h.connect()
    first, second = h.act(), h.act()
    h.drain()
    refused = h.act()
    assert isinstance(refused[0], errors.Draining) and refused[0].retriable
    h.frame(b"newest")
    h.answer(1)
    assert written[-1] is not None  # one is still in flight
    h.answer(2)
    assert written[-1] is None  # half closed
    assert isinstance(first[0], types.Actions) and isinstance(second[0], types.Actions)
    assert kinds(written) == ["open", "act", "act", None]
    assert h.core.ended(None) is not None
    assert kinds(h.connect()) == ["open", "vision"]
    assert h.reconnected[0].cause == "UNAVAILABLE (draining): the server is shutting down"


def test_an_act_that_a_draining_server_refused_goes_to_the_next() -> None:
    h = Harness(retry_acts=True)
    written = h.connect()
    asked = h.act()
    detail = error_pb2.ErrorDetail(reason=error_pb2.ERROR_REASON_DRAINING)
    error = pb.RequestError(act_id=1, code=14, message="shutting down", detail=detail)
    h.core.handle(pb.SessionResponse(error=error))
    assert asked == [] and written[-1] is None
    h.core.ended(None)
    assert kinds(h.connect()) == ["open", "act"]


def test_an_idle_session_leaves_a_draining_server_at_once() -> None:
    h = Harness()
    written = h.connect()
    h.drain()
    assert written[-1] is None


def test_pauses_double_up_to_the_cap_with_jitter() -> None:
    h = Harness(types.Reconnect(initial_s=0.1, cap_s=1.0))
    h.connect()
    pauses = [h.core.ended(LOST) for _ in range(8)]
    for pause, whole in zip(pauses, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], strict=True):
        assert pause is not None and whole / 2 <= pause <= whole
    assert len(set(pauses)) == 8
    h.connect()
    h.now += 0.5  # gone again at once: the pauses go on from where they were
    pause = h.core.ended(LOST)
    assert pause is not None and pause >= 0.5
    h.connect()
    h.now += 60
    pause = h.core.ended(LOST)
    assert pause is not None and pause <= 0.1


def test_a_server_may_ask_for_a_longer_pause() -> None:
    h = Harness()
    h.connect()
    h.core.ended(LOST)
    loading = errors.WorkerFailed("loading", code="UNAVAILABLE", retry_after_s=7.0)
    assert h.core.ended(loading) == 7.0


@pytest.mark.parametrize(
    ("error", "again_live", "again_down"),
    [
        (LOST, True, True),
        (errors.RequestFailed("x", code="CANCELLED"), True, True),
        (errors.RequestFailed("x", code="INTERNAL"), True, True),
        (errors.Internal("x", code="INTERNAL", reason="INTERNAL"), False, False),
        (errors.Draining("x", code="UNAVAILABLE", reason="DRAINING"), True, True),
        (errors.RateLimited("x", code="RESOURCE_EXHAUSTED", reason="RATE_LIMITED"), False, True),
        (errors.TimedOut("x", code="DEADLINE_EXCEEDED", reason="EXPIRED"), False, True),
        (errors.InvalidInput("x", code="NOT_FOUND", reason="INVALID_INPUT"), False, False),
        (errors.RequestFailed("x", code="UNAUTHENTICATED"), False, False),
        (errors.RequestFailed("too large", code="RESOURCE_EXHAUSTED"), False, False),
        (None, False, False),
    ],
)
def test_which_ends_are_worth_another_try(
    error: errors.SaccadeError | None, again_live: bool, again_down: bool
) -> None:
    h = Harness()
    h.connect()
    assert (h.core.ended(error) is not None) == again_live
    h = Harness(retry_acts=True)
    h.connect()
    waiting = h.act()
    h.core.ended(LOST)
    assert (h.core.ended(error) is not None) == again_down
    if not again_down:
        assert isinstance(waiting[0], errors.SessionClosed)
        with pytest.raises(errors.SessionClosed):
            h.act()


def test_it_gives_up_when_told_to() -> None:
    h = Harness(types.Reconnect(give_up_s=3.0))
    h.connect()
    assert h.core.ended(LOST) is not None
    h.now += 2.9
    assert h.core.ended(LOST) is not None
    h.now += 0.2
    assert h.core.ended(LOST) is None
    with pytest.raises(errors.SessionClosed, match=r"not reached again in 3\.1 s"):
        h.frame(b"x")


def close(core: _core.Core) -> None:
    core.begin_close()


@pytest.mark.parametrize("policy", [None, types.DEFAULT_RECONNECT])
def test_without_a_policy_or_when_closing_it_just_ends(policy: types.Reconnect | None) -> None:
    prepare: Callable[[_core.Core], None] = close if policy else lambda _: None
    h = Harness(policy)
    h.connect()
    waiting = h.act()
    prepare(h.core)
    assert h.core.ended(LOST) is None
    assert isinstance(waiting[0], errors.SessionClosed)


def test_a_first_opening_that_fails_is_told_and_not_repeated() -> None:
    h = Harness()
    h.connect(open_it=False)
    assert h.core.ended(LOST) is None
    assert h.first == [LOST]


def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    h = Harness()

    def bad(_: types.Reconnected) -> None:
        raise RuntimeError("mine")

    h.core._on_reconnect = bad
    h.connect()
    h.core.ended(LOST)
    h.connect()
    assert h.core.reconnects == 1 and "a callback of a session raised" in caplog.text


def test_a_malformed_answer_fails_its_request() -> None:
    h = Harness()
    h.connect()
    asked = h.act()
    chunk = pb.ActionChunk(act_id=1)
    chunk.samples.add(values=[1.0, 2.0])
    h.core.handle(pb.SessionResponse(chunk=chunk))
    assert isinstance(asked[0], errors.RequestFailed) and "malformed" in str(asked[0])


def test_a_policy_is_checked() -> None:
    for initial_s, cap_s in ((0.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="initial_s"):
            types.Reconnect(initial_s, cap_s)
