"""One episode over one session: what is seen and asked, what is carried out, what is noted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from saccade import aio, errors, images, types
from saccade.eval.realtime import RealClock, budget_s
from saccade.eval.settings import REPLAN_STEPS, Setting
from saccade.eval.world import Episode, Picture, World

PROBE_EVERY = 4
"""Of so many seeds one is driven with full recompute asked in the same states, too. What the cache saves is counted on the
others: their pictures are known from no other request."""
ANSWER_TIMEOUT_S = 60.0
_PASSING = (errors.Late, errors.Expired, errors.QueueFull, errors.RateLimited)
"""A request may end so on a busy server; anything else is wrong, and ends the run."""


class Clock(Protocol):
    """How an episode's time passes."""

    lead_s: float
    """How long before the step begins ``tick`` returns."""

    async def tick(self, step: int) -> None:
        """Returns when the step begins."""

    async def answer(self, asked: asyncio.Future[types.Actions]) -> types.Actions | None:
        """Waits for it as long as the step allows; None: not there yet, the last chunk goes on."""

    def notes(self) -> Mapping[str, float]:
        """What is to be known of the time that passed, for the record."""


class FastClock:
    """Faster than real time: a step lasts until its answer is there."""

    lead_s = 0.0

    def __init__(self, dt_s: float, budget_s: float) -> None:
        pass

    async def tick(self, step: int) -> None:
        """At once."""

    async def answer(self, asked: asyncio.Future[types.Actions]) -> types.Actions | None:
        """Always there, but of a server that hangs."""
        try:
            return await asyncio.wait_for(asked, ANSWER_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise errors.SaccadeError(f"no answer within {ANSWER_TIMEOUT_S:g} s") from None

    def notes(self) -> Mapping[str, float]:
        """Nothing."""
        return {}


CLOCKS: dict[str, Callable[[float, float], Clock]] = {"fast": FastClock, "real": RealClock}
"""By a setting's pace; made, one for each episode, with the seconds of a step and those that an answer has."""


@dataclass
class Record:
    """One finished episode; a line of the run's file."""

    setting: str
    group: str
    seed: int
    ok: bool = False
    why: str = ""
    calls: int = 0
    """Act requests, without those that measure the action error."""
    probes: int = 0
    """Those."""
    met: int = 0
    late: int = 0
    refused: int = 0
    """Answered with an error: refused as late, expired, a full queue."""
    continued: int = 0
    """Steps on which an answer was due and not there: the last chunk went on."""
    degraded: int = 0
    round_trip_ms: list[float] = field(default_factory=list)
    server_ms: list[float] = field(default_factory=list)
    """Arrival to answer."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """By modality: prompt tokens, and how many of them were cached."""
    patches: dict[str, dict[str, int]] = field(default_factory=dict)
    """By camera of the model: its tokens by where their K/V came from (``types.TokenRun``)."""
    errors: list[float] = field(default_factory=list)
    """Carried out against what full recompute would have, largest of the action's values as the
    model was trained with them (its range is about -1..1)."""
    world: dict[str, float | str] = field(default_factory=dict)
    """The world's own record."""


@dataclass(frozen=True)
class _Plan:
    step: int
    values: npt.NDArray[np.float64]
    normalized: npt.NDArray[np.float32]

    def row(self, step: int) -> int:
        """Its action for that step; the last one goes on."""
        return min(max(0, step - self.step), len(self.values) - 1)


@dataclass(frozen=True)
class _Seen:
    pictures: Mapping[str, Picture]
    age_s: float
    at_ns: int


class _Link:
    """A session and how an episode is told to its model."""

    def __init__(self, session: aio.Session, cameras: tuple[str, ...], jpeg: bool) -> None:
        model = session.model
        self.session = session
        self._jpeg = jpeg
        self._state_dim = model.state_dim
        self._asked_of = 0
        self.told: dict[str, Picture] = {}
        """The newest pictures, by camera of the model."""
        self._names = {c.name: _world_camera(c.name, cameras) for c in model.cameras}

    @property
    def cameras(self) -> tuple[str, ...]:
        """Of the world."""
        return tuple(self._names.values())

    def tell(self, episode: Episode, seen: _Seen) -> None:
        """The observation of a request: these pictures; all else as it is now."""
        text = episode.instruction()
        if not self._state_dim:
            text = f"{text}, speed {round(episode.speed())}"
        self.session.set_instruction(text)
        if self._state_dim:
            self.session.set_state(episode.state()[: self._state_dim])
        self._asked_of = seen.at_ns
        for name, camera in self._names.items():
            picture = self.told[name] = seen.pictures[camera]
            self.session.send_frame(
                images.to_jpeg(picture) if self._jpeg else picture,
                camera=name,
                capture_time_ns=seen.at_ns,
                age_s=seen.age_s,
            )

    def check(self, answer: types.Actions) -> None:
        """Nothing that was told was refused, and the answer is of these pictures."""
        if self.session.message_errors:
            raise self.session.message_errors[0]
        if any(frame.capture_time_ns != self._asked_of for frame in answer.frames):
            raise errors.SaccadeError("an answer is of other pictures than it was asked for")

    def ask(self, setting: Setting, episode: Episode) -> asyncio.Future[types.Actions]:
        """The noise of a model that denoises follows from the episode and the step alone."""
        asked = self.session.act_async(
            latency_class=setting.latency_class,
            seed=episode.seed * 1000 + episode.step if self.session.model.flow_steps else 0,
            flow=types.Flow(setting.flow_steps, least_steps=setting.least_flow_steps)
            if setting.flow_steps or setting.least_flow_steps
            else None,
        )
        # Of a drive that is ended nobody takes it: no reason to speak of.
        asked.add_done_callback(lambda f: f.cancelled() or f.exception())
        return asked


def _world_camera(name: str, cameras: tuple[str, ...]) -> str:
    """The world's camera of that name (``observation.images.top`` is ``top``); else its first."""
    last = name.rpartition(".")[2]
    return last if last in cameras else cameras[0]


class Watcher(Protocol):
    """Sees every step of a drive, for pictures of it."""

    def step(
        self,
        episode: Episode,
        pictures: Mapping[str, Picture],
        answer: types.Actions | None,
        of: Mapping[str, Picture],
        action: npt.NDArray[np.float64],
    ) -> None:
        """Before the action is carried out; ``answer`` is what came in this step, ``of`` the pictures that it, or the
        next one, is asked of, by camera of the model."""


async def drive(
    client: aio.Client,
    world: World,
    setting: Setting,
    group: str,
    seed: int,
    model: str,
    jpeg: bool = False,
    watch: Watcher | None = None,
) -> Record:
    """Drives one episode; raises what ends a session."""
    record = Record(setting.name, group, seed)
    episode = world.Episode(
        group, seed, level=setting.level, stress=setting.stress, mode=setting.mode
    )
    cameras = tuple(world.CAMERAS)
    clock = CLOCKS[setting.pace](episode.dt_s, budget_s(setting.stale_ms, episode.dt_s))
    try:
        async with client.session(setting.model or model) as session:
            link = _Link(session, cameras, jpeg)
            # Without a common clock, or with another picture, no state is the same state.
            probed = seed % PROBE_EVERY == 0 and setting != setting.scene
            if probed and setting.pace == "fast":
                async with client.session(model) as other:
                    probe = _Probe(_Link(other, cameras, jpeg), setting.scene)
                    await _loop(episode, setting, link, clock, record, probe, watch)
            else:
                await _loop(episode, setting, link, clock, record, None, watch)
        record.ok, record.why = episode.verdict()
        record.world = {**episode.record(), **clock.notes()}
    finally:
        episode.close()
    return record


class _Probe:
    """What full recompute would do in the same states."""

    def __init__(self, link: _Link, scene: Setting) -> None:
        self.cameras = link.cameras
        self._link = link
        self._scene = scene
        self._plan: _Plan | None = None
        self._asked: asyncio.Future[types.Actions] | None = None

    def is_due(self, step: int) -> bool:
        """Whether full recompute is asked at that step."""
        return step % REPLAN_STEPS == 0

    def ask(self, episode: Episode, seen: _Seen) -> None:
        """Now, without waiting."""
        self._link.tell(episode, seen)
        self._asked = self._link.ask(self._scene, episode)

    async def error(self, step: int, done: npt.NDArray[np.float32] | None) -> float | None:
        """Of what is carried out in this step."""
        if self._asked is not None:
            answer = await self._asked
            self._asked = None
            self._link.check(answer)
            self._plan = _Plan(step, answer.values, answer.samples[0].normalized)
        if self._plan is None or done is None or step - self._plan.step >= REPLAN_STEPS:
            return None
        return float(np.abs(self._plan.normalized[self._plan.row(step)] - done).max())


async def _loop(
    episode: Episode,
    setting: Setting,
    link: _Link,
    clock: Clock,
    record: Record,
    probe: _Probe | None,
    watch: Watcher | None,
) -> None:
    plan: _Plan | None = None
    asked: asyncio.Future[types.Actions] | None = None
    asked_at = 0
    over = False
    while not over:
        step = episode.step
        await clock.tick(step)
        due = step % setting.replan == 0
        if due and asked is None:
            seen = _look(episode, link.cameras, setting.stale_ms * 1e-3, clock.lead_s)
            link.tell(episode, seen)
            asked, asked_at = link.ask(setting, episode), step
            record.calls += 1
        if probe is not None and probe.is_due(step):
            probe.ask(episode, _look(episode, probe.cameras))
            record.probes += 1
        answer = None
        if asked is not None:
            try:
                answer = await clock.answer(asked)
                record.continued += answer is None
            except _PASSING:
                record.refused += 1
                record.continued += 1
                asked = None
        if answer is not None:
            asked = None
            link.check(answer)
            _note(record, answer)
            plan = _Plan(asked_at, answer.values, answer.samples[0].normalized)
        action = (
            plan.values[plan.row(step)]
            if plan is not None
            else np.zeros(link.session.action_space.dim)
        )
        if probe is not None:
            error = await probe.error(step, plan.normalized[plan.row(step)] if plan else None)
            if error is not None:
                record.errors.append(round(error, 5))
        if watch is not None:
            now = _look(episode, link.cameras).pictures
            watch.step(episode, now, answer, link.told, action)
        over = episode.drive([float(value) for value in action])
    if asked is not None:
        asked.cancel()


def _look(
    episode: Episode, cameras: tuple[str, ...], stale_s: float = 0.0, lead_s: float = 0.0
) -> _Seen:
    """Pictures of so long ago, or of the start; they are asked of the step's beginning, ``lead_s`` before it."""
    age_s = min(stale_s, episode.step * episode.dt_s)
    pictures = episode.frames(tuple(dict.fromkeys(cameras)), age_s)
    held_s = age_s + episode.frame_age_s() - lead_s
    return _Seen(pictures, max(0.0, held_s), time.monotonic_ns())


def _note(record: Record, answer: types.Actions) -> None:
    record.met += answer.deadline_met
    record.late += answer.late
    record.degraded += bool(answer.degradation)
    record.round_trip_ms.append(round(answer.round_trip_s * 1e3, 3))
    record.server_ms.append(round(answer.timings.total_s * 1e3, 3))
    for modality, count in answer.tokens.items():
        sums = record.tokens.setdefault(modality, [0, 0])
        sums[0] += count.total
        sums[1] += count.cached
    for frame in answer.frames:
        sources = record.patches.setdefault(frame.camera, {})
        for run in frame.runs:
            sources[run.source] = sources.get(run.source, 0) + run.count


def as_line(record: Record) -> dict[str, Any]:
    """For JSON."""
    return dict(vars(record))
