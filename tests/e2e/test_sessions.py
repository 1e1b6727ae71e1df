"""The client against the real server: reconnecting, asyncio, tokens as they come. The blocking and the asyncio
client are held to the same."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from conftest import BINARY, RunningServer
from test_security import Secured

from saccade import (
    Actions,
    Client,
    ConnectionLost,
    Draining,
    Expired,
    InvalidInput,
    NoFrame,
    Reconnect,
    Reconnected,
    SessionClosed,
    TimedOut,
    Unauthenticated,
    aio,
)

FRAME = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
TEXT = "keep your lane, speed 24"
QUICK = Reconnect(initial_s=0.05, cap_s=0.2)


class Restartable(RunningServer):
    """A server that can come back on its port."""

    def start_again(self) -> None:
        path = Path(self.folder.name) / "server.yaml"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [BINARY, "serve", "--config", str(path)], stdout=log, stderr=log
            )

    def signal(self, number: int) -> None:
        """SIGSTOP holds everything that is sent from now on in flight."""
        os.kill(self.process.pid, number)
        stat = Path(f"/proc/{self.process.pid}/stat")
        until(lambda: number != signal.SIGSTOP or stat.read_text().rsplit(")", 1)[1][1] == "T")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def mortal() -> Iterator[Restartable]:
    """A ready server of the test's own, to be killed."""
    running = Restartable()
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def steady() -> Iterator[Restartable]:
    """A ready server that may be stopped but must be let go on."""
    running = Restartable()
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "waited 20 s in vain"
        time.sleep(0.01)


async def until_async(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "waited 20 s in vain"
        await asyncio.sleep(0.01)


def total(server: RunningServer, name: str, label: str = "") -> float:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and label in line
    )


def ids(actions: Actions) -> list[int]:
    return [int(i) for i in actions.samples[0].token_ids.reshape(-1)]


# ------------------------------------------------------------------------------------------ SIGKILL
def test_a_session_survives_a_killed_server(mortal: Restartable) -> None:
    events: list[Reconnected] = []
    with (
        Client(mortal.address) as client,
        client.session(instruction="a", reconnect=QUICK, on_reconnect=events.append) as session,
    ):
        session.set_instruction(TEXT)
        session.send_frame(FRAME, capture_time_ns=7)
        before = session.act()
        first_id = session.session_id
        mortal.signal(signal.SIGSTOP)
        asked = [session.act_async() for _ in range(3)]
        mortal.kill()
        for future in asked:
            with pytest.raises(ConnectionLost) as lost:
                future.result(10)
            assert lost.value.retriable
        with pytest.raises(ConnectionLost, match="not connected"):
            session.act(timeout_s=10)
        mortal.start_again()
        until(lambda: session.reconnects == 1)
        after = session.act(timeout_s=10)
        assert ids(after) == ids(before) and after.frames[0].capture_time_ns == 7
        assert after.frames[0].age_s > before.frames[0].age_s
        assert total(mortal, "saccade_requests_admitted_total") == 1  # none was repeated
        (event,) = events
        assert event.attempts >= 1 and event.down_s > 0 and event.same_model
        assert event.session_id == session.session_id and first_id >= 1


def test_an_async_session_survives_a_killed_server(mortal: Restartable) -> None:
    async def run() -> None:
        events: list[Reconnected] = []
        async with (
            aio.Client(mortal.address) as client,
            client.session(instruction="a", reconnect=QUICK, on_reconnect=events.append) as session,
        ):
            session.set_instruction(TEXT)
            session.send_frame(FRAME, capture_time_ns=7)
            before = await session.act()
            mortal.signal(signal.SIGSTOP)
            asked = [session.act_async() for _ in range(3)]
            await asyncio.sleep(0.05)
            mortal.kill()
            for future in asked:
                with pytest.raises(ConnectionLost):
                    await asyncio.wait_for(future, 10)
            with pytest.raises(ConnectionLost, match="not connected"):
                await session.act()
            mortal.start_again()
            await until_async(lambda: session.reconnects == 1)
            after = await session.act(timeout_s=10)
            assert ids(after) == ids(before) and after.frames[0].capture_time_ns == 7
            assert total(mortal, "saccade_requests_admitted_total") == 1
            assert len(events) == 1 and events[0].same_model

    asyncio.run(run())


def test_acts_are_repeated_when_asked_to_and_in_time(mortal: Restartable) -> None:
    with (
        Client(mortal.address) as client,
        client.session(instruction=TEXT, reconnect=QUICK, retry_acts=True) as session,
    ):
        session.send_frame(FRAME)
        before = session.act()
        mortal.signal(signal.SIGSTOP)
        asked = [session.act_async(deadline_s=30) for _ in range(3)]
        short = session.act_async(deadline_s=0.2)
        mortal.kill()
        down = session.act_async(deadline_s=30)
        with pytest.raises(Expired, match="without a connection"):
            short.result(10)
        mortal.start_again()
        for future in [*asked, down]:
            answer = future.result(20)
            assert ids(answer) == ids(before)
            assert 0.2 < answer.round_trip_s < 30 and answer.deadline_s < 30
        assert total(mortal, "saccade_requests_admitted_total") == 4


def test_async_acts_are_repeated_when_asked_to(mortal: Restartable) -> None:
    async def run() -> None:
        async with (
            aio.Client(mortal.address) as client,
            client.session(
                instruction=TEXT, reconnect=QUICK, retry_acts=True, stream_tokens=True
            ) as session,
        ):
            session.send_frame(FRAME)
            before = await session.act()
            mortal.signal(signal.SIGSTOP)
            stream = session.act_stream(deadline_s=30)
            asked = session.act_async(deadline_s=30)
            short = session.act_async(deadline_s=0.2)
            await asyncio.sleep(0.05)
            mortal.kill()
            with pytest.raises(Expired, match="without a connection"):
                await asyncio.wait_for(short, 10)
            mortal.start_again()
            assert [t.token async for t in stream] == ids(before)
            assert ids(await asked) == ids(await stream.actions()) == ids(before)

    asyncio.run(run())


def test_held_acts_expire_while_a_silent_server_is_tried(mortal: Restartable) -> None:
    """Something takes the connection and never says a word: no deadline waits for that."""
    policy = {"instruction": TEXT, "reconnect": QUICK, "retry_acts": True}

    async def run() -> None:
        async with aio.Client(mortal.address) as client, client.session(**policy) as session:
            session.send_frame(FRAME)
            await session.act()
            mortal.kill()
            with silent(mortal):
                await asyncio.sleep(0.5)  # it hangs in an attempt
                started = time.monotonic()
                with pytest.raises(Expired):
                    await session.act(deadline_s=0.3)
                assert 0.25 < time.monotonic() - started < 1.5

    asyncio.run(run())
    mortal.start_again()
    mortal.wait_ready()
    with Client(mortal.address) as client, client.session(**policy) as session:
        session.send_frame(FRAME)
        session.act()
        mortal.kill()
        with silent(mortal):
            time.sleep(0.5)
            started = time.monotonic()
            with pytest.raises(Expired):
                session.act(deadline_s=0.3)
            assert 0.25 < time.monotonic() - started < 1.5
            closing = time.monotonic()
            session.close()
            assert time.monotonic() - closing < 2


@contextmanager
def silent(server: RunningServer) -> Iterator[None]:
    """A listener on the server's port that never answers."""
    host, port = server.address.rsplit(":", 1)
    with socket.create_server((host, int(port))):
        yield


def test_a_stream_of_frames_goes_on_through_a_crash(mortal: Restartable) -> None:
    """A robot's loop: nothing but retriable errors, and answers again afterwards."""
    answered_after = 0
    with (
        Client(mortal.address) as client,
        client.session(instruction=TEXT, reconnect=QUICK) as session,
    ):
        kill = threading.Timer(0.3, lambda: (mortal.kill(), mortal.start_again()))
        kill.start()
        end = time.monotonic() + 20
        while answered_after < 20 and time.monotonic() < end:
            session.send_frame(FRAME)
            try:
                session.act(timeout_s=5)
                answered_after += session.reconnects
            except ConnectionLost:
                time.sleep(0.01)
        kill.join()
        assert answered_after >= 20 and session.reconnects == 1
        assert session.message_errors == []


# ------------------------------------------------------------------------------------------ SIGTERM
def count(futures: list[Future[Actions]]) -> int:
    """Answered ones; the others were refused by a server that drains."""
    answered = 0
    for future in futures:
        try:
            future.result(20)
            answered += 1
        except Draining as error:
            assert error.retriable
    return answered


def test_a_drain_is_finished_and_the_session_moves_on(mortal: Restartable) -> None:
    with (
        Client(mortal.address) as client,
        client.session(instruction=TEXT, reconnect=QUICK) as session,
    ):
        session.send_frame(FRAME)
        before = session.act()
        asked = [session.act_async(samples=8, temperature=1.0, seed=i) for i in range(6)]
        asked[0].result(10)
        assert mortal.terminate() == 0, mortal.log()
        assert count(asked) >= 1
        assert any("shutting down" in notice for notice in session.notices)
        mortal.start_again()
        until(lambda: session.reconnects == 1)
        assert ids(session.act(timeout_s=10)) == ids(before)


def test_an_async_drain_is_finished_and_its_acts_go_to_the_next_server(mortal: Restartable) -> None:
    async def run() -> None:
        async with (
            aio.Client(mortal.address) as client,
            client.session(instruction=TEXT, reconnect=QUICK, retry_acts=True) as session,
        ):
            session.send_frame(FRAME)
            before = await session.act()
            asked = [session.act_async(samples=4, temperature=1.0, seed=i) for i in range(6)]
            await asked[0]
            mortal.signal(signal.SIGTERM)
            await until_async(lambda: bool(session.notices))
            late = session.act_async()  # not sent to the old one
            await until_async(lambda: mortal.process.poll() is not None)
            assert mortal.process.returncode == 0, mortal.log()
            assert not late.done()
            mortal.start_again()
            await asyncio.gather(*asked)
            assert ids(await late) == ids(before) and session.reconnects == 1

    asyncio.run(run())


def test_an_idle_session_does_not_hold_up_a_drain(mortal: Restartable) -> None:
    with Client(mortal.address) as client, client.session(instruction=TEXT) as session:
        session.send_frame(FRAME)
        session.act()
        started = time.monotonic()
        assert mortal.terminate() == 0
        assert time.monotonic() - started < 4, "it waited for its drain_s of 5 s"


# ---------------------------------------------------------------------------------------- endings
def test_closing_while_disconnected_is_prompt(mortal: Restartable) -> None:
    client = Client(mortal.address)
    session = client.session(instruction=TEXT, retry_acts=True)
    session.send_frame(FRAME)
    session.act()
    mortal.kill()
    waiting = session.act_async()
    time.sleep(0.3)
    started = time.monotonic()
    client.close()
    with pytest.raises(SessionClosed):
        waiting.result(5)
    session.close()
    assert time.monotonic() - started < 2
    with pytest.raises(SessionClosed):
        session.send_frame(FRAME)


def test_async_closing_while_disconnected_leaves_no_task(mortal: Restartable) -> None:
    async def run() -> None:
        async with aio.Client(mortal.address) as client:
            session = await client.session(instruction=TEXT, retry_acts=True)
            session.send_frame(FRAME)
            await session.act()
            mortal.kill()
            await asyncio.sleep(0.3)
            waiting = session.act_async()
        with pytest.raises(SessionClosed):
            await waiting
        await until_async(lambda: len(asyncio.all_tasks()) == 1)  # gRPC's own end a moment later

    asyncio.run(run())


def test_without_reconnect_a_lost_session_is_over(mortal: Restartable) -> None:
    with Client(mortal.address) as client:
        session = client.session(instruction=TEXT, reconnect=None)
        mortal.kill()
        with pytest.raises(SessionClosed):
            for _ in range(1000):
                session.send_frame(FRAME)
                time.sleep(0.01)
        session.close()


def test_it_gives_up_after_its_time(mortal: Restartable) -> None:
    policy = Reconnect(initial_s=0.05, cap_s=0.1, give_up_s=0.5)
    with Client(mortal.address) as client:
        session = client.session(instruction=TEXT, reconnect=policy)
        mortal.kill()
        with pytest.raises(SessionClosed, match="not reached again"):
            for _ in range(1000):
                session.send_frame(FRAME)
                time.sleep(0.01)


# ------------------------------------------------------------------------------------------ asyncio
def test_async_calls_answer_as_the_blocking_ones(steady: Restartable) -> None:
    async def run() -> None:
        with Client(steady.address) as blocking:
            expected = blocking.predict(FRAME, TEXT)
            models, status = blocking.models(), blocking.status()
        async with aio.Client(steady.address) as client:
            await client.wait_ready(5)
            assert await client.models() == models
            assert (await client.status()).classes == status.classes
            assert ids(await client.predict(FRAME, TEXT)) == ids(expected)
            steady.signal(signal.SIGSTOP)  # so that no answer can win the race
            try:
                with pytest.raises(TimedOut):
                    await client.predict(FRAME, TEXT, timeout_s=0.05)
            finally:
                steady.signal(signal.SIGCONT)
            with pytest.raises(InvalidInput) as unknown:
                await client.session(model="no such model")
            assert unknown.value.code == "NOT_FOUND"
            async with client.session(instruction=TEXT) as session:
                assert session.model == models[0] and session.session_id > 0
                with pytest.raises(NoFrame):
                    await session.act()
                session.send_frame(FRAME)
                assert ids(await session.act()) == ids(expected)

    asyncio.run(run())


def test_many_async_sessions_get_their_own_answers(steady: Restartable) -> None:
    async def run() -> None:
        async with aio.Client(steady.address) as client:

            async def robot(i: int) -> None:
                frame = np.roll(FRAME, i, axis=0)
                alone = ids(await client.predict(frame, TEXT))
                async with client.session(instruction=TEXT) as session:
                    for _ in range(4):
                        session.send_frame(frame)
                        assert ids(await session.act()) == alone

            await asyncio.gather(*(robot(i) for i in range(12)))

    asyncio.run(run())


def test_a_cancelled_task_withdraws_its_request(steady: Restartable) -> None:
    async def run() -> None:
        async with (
            aio.Client(steady.address) as client,
            client.session(instruction=TEXT) as session,
        ):
            session.send_frame(FRAME)
            await session.act()
            cancelled = total(steady, "saccade_requests_failed_total", 'reason="cancelled"')
            steady.signal(signal.SIGSTOP)  # so that it is not answered before
            try:
                others = [session.act_async(samples=8, temperature=1.0, seed=i) for i in range(4)]
                task = asyncio.create_task(session.act(samples=8, temperature=1.0))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            finally:
                steady.signal(signal.SIGCONT)
            await asyncio.gather(*others)
            await until_async(
                lambda: (
                    total(steady, "saccade_requests_failed_total", 'reason="cancelled"')
                    == cancelled + 1
                )
            )
            await session.act()

    asyncio.run(run())


def test_a_timeout_is_a_deadline_and_withdraws(steady: Restartable) -> None:
    async def run() -> None:
        async with (
            aio.Client(steady.address) as client,
            client.session(instruction=TEXT) as session,
        ):
            session.send_frame(FRAME)
            assert (await session.act(timeout_s=20)).deadline_s == pytest.approx(20)
            assert (await session.act(5, timeout_s=20)).deadline_s == pytest.approx(5)
            steady.signal(signal.SIGSTOP)
            try:
                started = time.monotonic()
                with pytest.raises(TimedOut):
                    await session.act(timeout_s=0.1)
                assert 0.09 < time.monotonic() - started < 2
            finally:
                steady.signal(signal.SIGCONT)
            await session.act()

    asyncio.run(run())


def test_a_blocking_timeout_is_a_deadline_and_withdraws(steady: Restartable) -> None:
    with Client(steady.address) as client, client.session(instruction=TEXT) as session:
        session.send_frame(FRAME)
        assert session.act(timeout_s=20).deadline_s == pytest.approx(20)
        steady.signal(signal.SIGSTOP)
        try:
            with pytest.raises(TimedOut) as late:
                session.act(timeout_s=0.1)
            assert isinstance(late.value, TimeoutError)
            future = session.act_async()
            assert future.cancel()
        finally:
            steady.signal(signal.SIGCONT)
        session.act()


def test_tokens_come_one_by_one(steady: Restartable) -> None:
    async def run() -> None:
        async with (
            aio.Client(steady.address) as client,
            client.session(instruction=TEXT, stream_tokens=True) as session,
        ):
            session.send_frame(FRAME)
            stream = session.act_stream()
            tokens = [t async for t in stream]
            actions = await stream.actions()
            assert [t.token for t in tokens] == ids(actions)
            assert [(t.sample, t.index) for t in tokens] == [(0, i) for i in range(10)]
            assert [t async for t in stream] == []  # at its end, and stays there
            failed = session.act_stream(latency_class="no such class")
            with pytest.raises(InvalidInput):
                async for _ in failed:
                    pytest.fail("no token")
        async with aio.Client(steady.address) as client, client.session() as session:
            with pytest.raises(ValueError, match="stream_tokens"):
                session.act_stream()

    asyncio.run(run())
    with (
        Client(steady.address) as client,
        client.session(instruction=TEXT, stream_tokens=True) as session,
    ):
        session.send_frame(FRAME)
        stream = session.act_stream()
        assert [t.token for t in stream] == ids(stream.actions(10))
        with pytest.raises(InvalidInput):
            list(session.act_stream(latency_class="no such class"))


def test_an_exception_in_the_block_ends_the_session_at_once(steady: Restartable) -> None:
    async def run() -> None:
        with pytest.raises(KeyError):
            async with (
                aio.Client(steady.address) as client,
                client.session(instruction=TEXT) as session,
            ):
                session.send_frame(FRAME)
                waiting = session.act_async()
                raise KeyError("mine")
        with pytest.raises(SessionClosed):
            await waiting
        await until_async(lambda: len(asyncio.all_tasks()) == 1)  # gRPC's own end a moment later

    asyncio.run(run())
    until(lambda: total(steady, "saccade_sessions") == 0)


def test_closing_answers_what_was_asked(steady: Restartable) -> None:
    async def run() -> None:
        async with (
            aio.Client(steady.address) as client,
            client.session(instruction=TEXT) as session,
        ):
            session.send_frame(FRAME)
            asked = [session.act_async() for _ in range(3)]
        for future in asked:
            assert len(ids(await future)) == 10

    asyncio.run(run())


# --------------------------------------------------------------------------------- TLS and tokens
def test_async_calls_carry_certificate_and_token_through_a_reconnect(tmp_path: Path) -> None:
    secured = Secured(tmp_path)
    path = Path(secured.server.folder.name) / "server.yaml"
    try:

        async def run() -> None:
            address = secured.server.address
            async with aio.Client(address, credentials=secured.files()) as client:
                await client.wait_ready(30)
                assert [m.name for m in await client.models()] == ["highway_demo"]
                alone = ids(await client.predict(FRAME, TEXT))
                async with client.session(instruction=TEXT, reconnect=QUICK) as session:
                    session.send_frame(FRAME)
                    assert ids(await session.act()) == alone
                    secured.server.process.kill()
                    secured.server.process.wait(10)
                    secured.server.process = subprocess.Popen(
                        [BINARY, "serve", "--config", str(path)], stderr=subprocess.DEVNULL
                    )
                    await until_async(lambda: session.reconnects == 1)
                    assert ids(await session.act()) == alone
            nobody = secured.files(token_file="")
            async with aio.Client(address, credentials=nobody) as client:
                with pytest.raises(Unauthenticated):
                    await client.status()
                for _ in range(20):  # whether the refusal or the opening is first is a race
                    with pytest.raises(Unauthenticated):
                        await client.session(instruction=TEXT)

        asyncio.run(run())
    finally:
        secured.server.close()


def test_vision_and_actions_at_rates_of_their_own(server: RunningServer) -> None:
    """Frames at their rate, pushed actions at another, both clients."""

    def check(got: list[Actions]) -> None:
        versions = [a.observation_version for a in got]
        assert versions == sorted(versions)
        assert len(set(versions)) > 1
        assert any(a.frames_cached for a in got)

    def blocking() -> None:
        got: list[Actions] = []
        with (
            Client(server.address) as client,
            client.session(instruction=TEXT, refresh_class="best_effort") as session,
        ):
            session.send_frame(FRAME)
            session.push(50, lambda a: got.append(a) if isinstance(a, Actions) else None)
            for i in range(200):
                time.sleep(0.02)
                session.send_frame(np.roll(FRAME, i, axis=0))
                if len(got) > 20 and got[-1].observation_version > 3:
                    break
            session.stop_push()
            own = session.act()
            assert own.observation_version >= got[0].observation_version
        check(got)

    async def asynchronous() -> None:
        got: list[Actions] = []
        async with (
            aio.Client(server.address) as client,
            client.session(instruction=TEXT, refresh_class="best_effort") as session,
        ):
            session.send_frame(FRAME)
            session.push(50, lambda a: got.append(a) if isinstance(a, Actions) else None)
            for i in range(200):
                await asyncio.sleep(0.02)
                session.send_frame(np.roll(FRAME, i, axis=0))
                if len(got) > 20 and got[-1].observation_version > 3:
                    break
            session.stop_push()
        check(got)

    blocking()
    asyncio.run(asynchronous())
