"""Against the wall clock: an answer that is late is not there, and others ask meanwhile.

A step's action counts from the step's beginning. Its pictures are taken, and it is asked for, ``budget_s`` before that; an
answer that is there by then is carried out, and where it is not, the last chunk goes on. So the world of ``pace=real``
never waits, and latency, load and refusals cost what they cost a robot.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade import aio, errors, types
from saccade.credentials import Credentials
from saccade.eval.settings import REPLAN_STEPS

LOAD_CLASSES = ("planning", "best_effort")
"""What others ask in, in turns, of those that the server has."""
LOAD_SESSIONS = 8


def budget_s(stale_ms: int, dt_s: float) -> float:
    """Seconds from a request to the beginning of its step.

    As old as the setting's pictures are, within a step; half a step where they are of the step's beginning itself, which
    is then kinder than a robot's life: what the answer took is not seen in them.
    """
    within = stale_ms * 1e-3 % dt_s
    return within if within > 1e-6 else dt_s / 2


class RealClock:
    """Steps begin when they do."""

    def __init__(self, dt_s: float, budget_s: float) -> None:
        self._dt_s = dt_s
        self.lead_s = budget_s
        self._begin = 0.0
        self._slipped_s = 0.0

    async def tick(self, step: int) -> None:
        """``lead_s`` before the step's beginning.

        A world that could not be computed by then slips: it is this machine's fault, not the server's, and is noted.
        """
        if step == 0:
            # Cars that are started together do not all ask at the same moment.
            await asyncio.sleep(random.uniform(0, REPLAN_STEPS * self._dt_s))
            self._begin = time.monotonic() + self.lead_s
            return
        now = time.monotonic()
        self._begin += self._dt_s
        behind = now - (self._begin - self.lead_s)
        if behind > self.lead_s / 4:
            self._slipped_s += behind
            self._begin += behind
        elif behind < 0:
            await asyncio.sleep(-behind)

    async def answer(self, asked: asyncio.Future[types.Actions]) -> types.Actions | None:
        """By the step's beginning."""
        await asyncio.wait([asked], timeout=max(0.0, self._begin - time.monotonic()))
        return asked.result() if asked.done() else None

    def notes(self) -> Mapping[str, float]:
        """``slipped_s``: how much longer than it should the drive took because the world was slow."""
        return {"slipped_s": round(self._slipped_s, 4)}


# ---------------------------------------------------------------------------------- background load
@dataclass
class Heard:
    """What others asked and got."""

    asked: int = 0
    answered: int = 0
    late: int = 0
    """Of the answered."""
    failed: dict[str, int] = field(default_factory=dict)
    """By reason."""
    server_ms: dict[str, list[float]] = field(default_factory=dict)
    """By latency class, of the answered: arrival to answer."""


class Load:
    """Others, in a process of their own: ``per_s`` act requests a second in all, whatever is answered.

    Each has a picture of its own, so that nothing of it is cached. `with` ends them; then ``heard`` says how they fared.
    """

    def __init__(self, address: str, model: str, per_s: float, credentials: Credentials) -> None:
        self._context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
        self._arguments = (address, model, per_s, credentials)
        self.heard = Heard()

    def __enter__(self) -> Load:
        self._link, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=_ask, args=(theirs, *self._arguments), daemon=True
        )
        self._process.start()
        theirs.close()
        self._receive()  # they have begun
        return self

    def __exit__(self, *reason: object) -> None:
        try:
            self._link.send("end")
            self.heard = self._receive()
        finally:
            self._link.close()
            self._process.join(5)
            if self._process.is_alive():
                self._process.terminate()

    def _receive(self) -> Any:
        try:
            got = self._link.recv()
        except (EOFError, OSError):
            raise errors.SaccadeError("the load of others died") from None
        if isinstance(got, BaseException):
            raise got
        return got


def _ask(
    link: Connection, address: str, model: str, per_s: float, credentials: Credentials
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    with suppress(OSError):
        try:
            asyncio.run(_ask_all(link, address, model, per_s, credentials))
        except Exception as error:
            link.send(errors.SaccadeError(f"the load of others: {type(error).__name__}: {error}"))


async def _ask_all(
    link: Connection, address: str, model: str, per_s: float, credentials: Credentials
) -> None:
    heard = Heard()
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(link.fileno(), over.set)
    async with aio.Client(address, credentials=credentials) as client:
        known = {c.name for c in (await client.status()).classes}
        classes = [c for c in LOAD_CLASSES if c in known] or [""]
        sessions = [client.session(model) for _ in range(LOAD_SESSIONS)]
        for session in sessions:
            await session.__aenter__()
        running: set[asyncio.Task[None]] = set()
        rng = np.random.default_rng(0)
        link.send("begun")
        start = time.monotonic()
        while not over.is_set():
            session = sessions[heard.asked % len(sessions)]
            task = asyncio.ensure_future(
                _ask_once(session, classes[heard.asked % len(classes)], rng, heard)
            )
            running.add(task)
            task.add_done_callback(running.discard)
            heard.asked += 1
            with suppress(asyncio.TimeoutError):
                due = start + heard.asked / per_s - time.monotonic()
                await asyncio.wait_for(over.wait(), max(0.0, due))
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for session in sessions:
            await session.close()
    link.send(heard)


def noise(rng: np.random.Generator, width: int, height: int) -> npt.NDArray[np.uint8]:
    """A picture that no other one equals."""
    coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
    return np.ascontiguousarray(
        coarse.repeat(height // 8 + 1, 0).repeat(width // 8 + 1, 1)[:height, :width]
    )


async def _ask_once(
    session: aio.Session, latency_class: str, rng: np.random.Generator, heard: Heard
) -> None:
    model = session.model
    try:
        session.set_instruction("keep your lane, speed 24")
        if model.state_dim:
            session.set_state([0.0] * model.state_dim)
        for camera in model.cameras:
            session.send_frame(noise(rng, camera.width, camera.height), camera=camera.name)
        answer = await session.act_async(latency_class=latency_class)
    except errors.RequestFailed as error:
        heard.failed[error.reason] = heard.failed.get(error.reason, 0) + 1
        return
    heard.answered += 1
    heard.late += answer.late
    heard.server_ms.setdefault(answer.latency_class, []).append(
        round(answer.timings.total_s * 1e3, 3)
    )


def as_entry(heard: Heard) -> dict[str, Any]:
    """For JSON."""
    entry: dict[str, Any] = json.loads(json.dumps(vars(heard)))
    return entry
