"""Episodes for evaluation: a scene, what the driver sees and is told, and the verdict.

An Episode follows from its arguments alone: the traffic's random stream depends neither on the stress, nor on the mode,
nor on what is asked of it, so that two settings driven on the same seed meet the same world until their actions differ.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import hard
import numpy as np
import phrases
import view
import world

GROUPS: tuple[str, ...] = tuple(phrases.GROUPS)
LEVELS = ("base", "hard")
MODES = ("policy", "shuffled", "blank")
STRESSES = ("none",)
CAMERAS = ("top", "wide", "before")
CHATTY_SHARE = 0.3  # of hard episodes: the instruction has a courtesy or a remark around it
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
        self.kind = "plain"
        self.told = group  # the group of what the driver is told now
        self.dt_s = world.DT
        self.limit_steps = world.T_EVAL.get(group, world.T_STEPS)
        self.step = 0
        rng = np.random.default_rng(seed)
        spoken = group
        if mode == "shuffled":
            spoken = [g for g in GROUPS if g != group][rng.integers(5)]
        self.env: world.DriveEnv
        self.judge: world.Judge
        if level == "base":
            self._phrase = phrases.PHRASES[spoken][rng.integers(6)]
            self.env = world.make_env(group, seed)
            self.judge = world.Judge(self.env, group)
        else:
            said = phrases.CHATTY if rng.random() < CHATTY_SHARE else phrases.UNSEEN
            self._phrase = said[spoken][rng.integers(6)]
            scene = hard.make_env(group, seed)
            self.env, self.judge = scene, hard.Judge(scene, group)
            self.kind = scene.kind
            self.limit_steps = hard.LIMIT_STEPS.get(group, world.T_STEPS)
        self._over = False
        self._shots: deque[view.Snapshot] = deque(maxlen=BEFORE_STEPS + 2)
        self._look()

    def _look(self) -> None:
        self._shots.append(self.env.snapshot())

    def instruction(self) -> str:
        """What the driver is told now, without the speed."""
        return self._phrase

    def speed(self) -> float:
        """The car's, m/s."""
        return float(self.env.vehicle.speed)

    def frames(self, cameras: Sequence[str], age_s: float = 0.0) -> dict[str, Array]:
        """RGB pictures [224, 224, 3] by camera: "top", "wide" (half the scale), "before" (top, 0.4 s ago).

        All of them age_s ago, which is less than a step.
        """
        pictures: dict[str, Array] = {}
        for camera in cameras:
            if camera not in CAMERAS:
                raise ValueError(f"camera {camera!r} is none of {', '.join(CAMERAS)}")
            if self.mode == "blank":
                pictures[camera] = view.blank()
            else:
                shot = self._shot(BEFORE_STEPS if camera == "before" else 0, age_s)
                pictures[camera] = world.PAINTERS["wide" if camera == "wide" else "top"].paint(shot)
        return pictures

    def _shot(self, steps: int, age_s: float) -> view.Snapshot:
        """Of that long ago; the first one before there was any."""
        last = len(self._shots) - 1
        later, earlier = max(0, last - steps), max(0, last - steps - 1)
        if not age_s or later == earlier:
            return self._shots[later]
        return view.between(self._shots[earlier], self._shots[later], 1 - age_s / self.dt_s)

    def state(self) -> list[float]:
        """Speed [m/s], heading [rad], lateral offset to the nearest lane's centre [m]."""
        car = self.env.vehicle
        y = float(car.position[1])
        lane = min(world.LANES - 1, max(0, round(y / world.WIDTH)))
        return [float(car.speed), float(car.heading), y - lane * world.WIDTH]

    def drive(self, action: Sequence[float]) -> bool:
        """Carries out (steer [rad], acceleration [m/s^2]) for dt_s; True when the episode is over."""
        if self._over:
            raise ValueError("the episode is over")
        self.env.drive(float(action[0]), float(action[1]))
        self.step += 1
        self._over = self.judge.step() or self.step >= self.limit_steps
        self._look()
        return self._over

    def verdict(self) -> tuple[bool, str]:
        """Success; otherwise why not: "collision", "off road" or "not achieved"."""
        return self.judge.verdict()

    def record(self) -> dict[str, float | str]:
        """The episode in numbers, for a table of episodes."""
        good, why = self.verdict()
        y = np.array(self.judge.y)
        off = np.abs(y - np.clip(np.round(y / world.WIDTH), 0, world.LANES - 1) * world.WIDTH)
        return {
            "group": self.group,
            "seed": float(self.seed),
            "level": self.level,
            "stress": self.stress,
            "mode": self.mode,
            "kind": self.kind,
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
        self.env.close()
