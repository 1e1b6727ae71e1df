"""What goes wrong between the world and the driver: with the camera, with what it sees, with the line, with what is asked.

A stress changes what is shown or told and nothing else. It draws from a generator of its own, anew for every moment, so
that a picture depends neither on which pictures were asked for before nor on how often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import view

STRESSES = (
    "none",
    "exposure",  # the camera's gain wanders
    "noise",  # the sensor's, on every pixel
    "shake",  # the camera's: the picture moves by some pixels
    "jump",  # now and then another car is shown metres from where it is
    "distractor",  # something that is no car crosses the picture
    "switch",  # another instruction first; the last one counts
    "remark",  # a long irrelevant remark around the instruction
    "drop",  # pictures are lost, several in a row: the last one stays
    "repeat",  # a picture comes a second time instead of the next
    "late",  # pictures come some steps late
)
EXPOSURE = 0.12  # of the camera's gain, either way
LEVELS_OF_NOISE = 20.0  # grey levels, one standard deviation
SHAKE_PX = 3
JUMP_M = (5.0, 10.0)
BIRD = (90, 40, 120)
# What may be asked first, so that the start lane is still the one to keep, or nothing is decided yet.
FIRST = {
    "keep": ("follow", "fast"),
    "left": ("keep", "right"),
    "right": ("keep", "left"),
    "overtake": ("keep",),
    "follow": ("keep",),
    "fast": ("keep", "follow"),
}
MORE_STEPS = {
    "left": 15,
    "right": 15,
    "overtake": 15,
}  # after a switch: the start is worse than its own
REMARKS = (
    "the weather is nice today, {}",
    "{}, and tell me a story",
    "my friend said that we have time, {}",
    "{}, this song is good",
    "I like the colour of this road, {}",
    "{}, I am a little tired",
)


class Stress:
    """One kind of trouble over one episode."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self._key = (seed, STRESSES.index(kind))
        rng = self._rng()
        self._phase = float(rng.uniform(0, 2 * math.pi))
        self._period = float(rng.uniform(18, 34))  # steps
        self._lag = int(rng.integers(1, 3))
        self.switch_step = int(rng.integers(5, 15)) if kind == "switch" else 0
        self._choice = int(rng.integers(2**31))

    def _rng(self, *moment: int) -> np.random.Generator:
        return np.random.default_rng([*self._key, *moment])

    def more_steps(self, group: str) -> int:
        """How much longer an episode of that group is."""
        return self.switch_step + MORE_STEPS.get(group, 0) if self.kind == "switch" else 0

    # ------------------------------------------------------------------------------------ the line
    def shown_step(self, step: int) -> int:
        """Which moment's picture is there at that step."""
        if self.kind == "late":
            jitter = int(self._rng(step).integers(0, 2))
            return max(0, step - self._lag - jitter)
        if self.kind == "repeat":
            return max(0, step - int(self._rng(step).random() < 0.35))
        if self.kind == "drop":
            for begin in range(max(1, step - 3), step + 1):  # a gap that covers this step
                rng = self._rng(begin)
                if rng.random() < 0.12 and begin + int(rng.integers(2, 5)) > step:
                    return self.shown_step(begin - 1)
        return step

    # --------------------------------------------------------------------------------- the picture
    def see(self, shot: view.Snapshot, step: int) -> view.Snapshot:
        """What is seen of the world at that moment."""
        if self.kind == "jump" and len(shot.cars) > 1:
            rng = self._rng(step // 3)  # each lasts three steps
            if rng.random() < 0.4:
                near = sorted(range(1, len(shot.cars)), key=lambda i: self._far(shot, i))[:3]
                i = near[int(rng.integers(len(near)))]
                away = float(rng.uniform(*JUMP_M)) * (1 if rng.random() < 0.5 else -1)
                cars = list(shot.cars)
                cars[i] = replace(cars[i], x=cars[i].x + away)
                return replace(shot, cars=tuple(cars))
        if self.kind == "distractor":
            ego = shot.cars[0]
            turn = 2 * math.pi * step / self._period + self._phase
            x = ego.x + 14.0 + 16.0 * math.cos(turn)
            y = 4.0 + 11.0 * math.sin(1.7 * turn)
            return replace(shot, things=(view.Thing(x, y, 1.4, BIRD),))
        return shot

    def expose(self, picture: view.Array, step: int, scaling: float) -> view.Array:
        """What the camera makes of it."""
        if self.kind == "exposure":
            gain = 1 + EXPOSURE * math.sin(2 * math.pi * step / self._period + self._phase)
            return _clipped(picture * np.float32(gain))
        if self.kind == "noise":
            rng = self._rng(step, round(scaling))
            grain = rng.standard_normal(picture.shape, np.float32) * np.float32(LEVELS_OF_NOISE)
            return _clipped(picture + grain)
        if self.kind == "shake":
            most = max(1, round(SHAKE_PX * scaling / 4))
            dx, dy = (int(v) for v in self._rng(step).integers(-most, most + 1, 2))
            wide = np.pad(picture, ((most, most), (most, most), (0, 0)), mode="edge")
            top, left = most - dy, most - dx
            return wide[top : top + len(picture), left : left + picture.shape[1]].copy()
        return picture

    # ------------------------------------------------------------------------------- what is asked
    def told(self, group: str, step: int) -> str:
        """The group whose instruction is in force."""
        if self.kind == "switch" and step < self.switch_step:
            return self._pick(FIRST[group])
        return group

    def say(self, phrase: str) -> str:
        """How the instruction is put."""
        return self._pick(REMARKS).format(phrase) if self.kind == "remark" else phrase

    def _pick(self, of: Sequence[str]) -> str:
        return of[self._choice % len(of)]

    @staticmethod
    def _far(shot: view.Snapshot, i: int) -> float:
        return abs(shot.cars[i].x - shot.cars[0].x - 12.0)


def _clipped(values: np.ndarray[Any, np.dtype[np.float32]]) -> view.Array:
    picture: view.Array = np.clip(values, 0, 255).astype(np.uint8)
    return picture
