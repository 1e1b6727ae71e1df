"""Episodes for evaluation: a scene, what the driver sees and is told, and the verdict.

An Episode follows from its arguments alone: the traffic's random stream depends neither on the stress, nor on the mode,
nor on what is asked of it, so that two settings driven on the same seed meet the same world until their actions differ.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import phrases
import view
import world

GROUPS: tuple[str, ...] = tuple(phrases.GROUPS)
LEVELS = ("base", "hard")
MODES = ("policy", "shuffled", "blank")
STRESSES = ("none",)
CAMERAS = ("top", "wide", "before")
BEFORE_STEPS = 2  # how much older "before" is

Array = view.Array


class Episode:
    """One drive; everything in it follows from its arguments."""

    def __init__(
        self,
        group: str,
        seed: int,
        *,
        level: str = "base",
        stress: str = "none",
        mode: str = "policy",
    ) -> None:
        for value, known in ((group, GROUPS), (level, LEVELS), (stress, STRESSES), (mode, MODES)):
            if value not in known:
                raise ValueError(f"{value!r} is none of {', '.join(known)}")
        self.group, self.seed, self.level, self.stress, self.mode = group, seed, level, stress, mode
        self.dt_s = world.DT
        self.limit_steps = world.T_EVAL.get(group, world.T_STEPS)
        self.step = 0
        rng = np.random.default_rng(seed)
        spoken = group
        if mode == "shuffled":
            spoken = [g for g in GROUPS if g != group][rng.integers(5)]
        self._phrase = phrases.PHRASES[spoken][rng.integers(6)]
        self._env = world.make_env(group, seed)
        self._judge = world.Judge(self._env, group)
        self._over = False
        self._shots: deque[view.Snapshot] = deque(maxlen=BEFORE_STEPS + 1)
        self._look()

    def _look(self) -> None:
        self._shots.append(self._env.snapshot())

    def instruction(self) -> str:
        """What the driver is told now, without the speed."""
        return self._phrase

    def speed(self) -> float:
        """The car's, m/s."""
        return float(self._env.vehicle.speed)

    def frames(self, cameras: Sequence[str]) -> dict[str, Array]:
        """RGB pictures [224, 224, 3] by camera: "top", "wide" (half the scale), "before" (top, 0.4 s ago)."""
        pictures: dict[str, Array] = {}
        for camera in cameras:
            if camera not in CAMERAS:
                raise ValueError(f"camera {camera!r} is none of {', '.join(CAMERAS)}")
            if self.mode == "blank":
                pictures[camera] = view.blank()
            else:
                shot = self._shots[0 if camera == "before" else -1]
                pictures[camera] = world.PAINTERS["wide" if camera == "wide" else "top"].paint(shot)
        return pictures

    def state(self) -> list[float]:
        """Speed [m/s], heading [rad], lateral offset to the nearest lane's centre [m]."""
        car = self._env.vehicle
        y = float(car.position[1])
        lane = min(world.LANES - 1, max(0, round(y / world.WIDTH)))
        return [float(car.speed), float(car.heading), y - lane * world.WIDTH]

    def drive(self, action: Sequence[float]) -> bool:
        """Carries out (steer [rad], acceleration [m/s^2]) for dt_s; True when the episode is over."""
        if self._over:
            raise ValueError("the episode is over")
        self._env.drive(float(action[0]), float(action[1]))
        self.step += 1
        self._over = self._judge.step() or self.step >= self.limit_steps
        self._look()
        return self._over

    def verdict(self) -> tuple[bool, str]:
        """Success; otherwise why not: "collision", "off road" or "not achieved"."""
        return self._judge.verdict()

    def record(self) -> dict[str, float | str]:
        """The episode in numbers, for a table of episodes."""
        good, why = self.verdict()
        y = np.array(self._judge.y)
        off = np.abs(y - np.clip(np.round(y / world.WIDTH), 0, world.LANES - 1) * world.WIDTH)
        return {
            "group": self.group,
            "seed": float(self.seed),
            "level": self.level,
            "stress": self.stress,
            "mode": self.mode,
            "phrase": self._phrase,
            "ok": float(good),
            "why": why,
            "steps": float(self.step),
            "lateral_error_m": float(np.sqrt(np.mean(off[-5:] ** 2))) if len(off) else math.nan,
            "end_speed_mps": self.speed(),
            "seconds_to_pass": math.nan,
        }

    def close(self) -> None:
        """Frees the scene."""
        self._env.close()
