"""Episodes for evaluation: a scene, what the driver sees and is told, and the verdict.

An Episode follows from its arguments and the actions alone: the traffic's random stream depends neither on the stress,
nor on the mode, nor on what is asked of it, so that two settings driven on the same seed meet the same world until their
actions differ.

Seeds from 9 000 000 up are for results only; training used 100000.. to 400000.., validation 900000.., and these scenes
were made with 6000000.. to 6099999.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import hard
import numpy as np
import phrases
import view
import world
from stress import STRESSES as STRESSES
from stress import Stress

GROUPS: tuple[str, ...] = tuple(phrases.GROUPS)
LEVELS = ("base", "hard")
MODES = ("policy", "shuffled", "blank")  # as is; told another group's instruction; shown grey
CAMERAS = ("top", "wide", "before")
CHATTY_SHARE = 0.3  # of hard episodes: the instruction has a courtesy or a remark around it
BEFORE_STEPS = 2  # how much older "before" is

Array = view.Array


class Episode:
    """One drive; everything in it follows from its arguments and the actions."""

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
        self.step = 0
        self._trouble = Stress(stress, seed)
        rng = np.random.default_rng(seed)  # draws as the first evaluation of the policy did
        spoken = group
        if mode == "shuffled":
            spoken = [g for g in GROUPS if g != group][rng.integers(5)]
        number = int(rng.integers(6))
        said = phrases.PHRASES
        if level == "hard":
            said = phrases.CHATTY if rng.random() < CHATTY_SHARE else phrases.UNSEEN
        self._phrases = {g: said[g][number] for g in GROUPS}
        self._phrases[group] = said[spoken][number]
        self.env: world.DriveEnv
        self.judge: world.Judge
        if level == "hard":
            scene = hard.make_env(group, seed)
            self.env, self.judge, self.kind = scene, hard.Judge(scene, group), scene.kind
            self.limit_steps = hard.LIMIT_STEPS.get(group, world.T_STEPS)
        else:
            self.env, self.kind = world.make_env(group, seed), "plain"
            self.judge = world.Judge(self.env, group)
            self.limit_steps = world.T_EVAL.get(group, world.T_STEPS)
        self.limit_steps += self._trouble.more_steps(group)
        self._shots = [self.env.snapshot()]  # of every step
        self._over = False

    @property
    def told(self) -> str:
        """The group of the instruction in force; the group that is judged, but before a switch."""
        return self._trouble.told(self.group, self.step)

    def instruction(self) -> str:
        """What the driver is told now, without the speed."""
        return self._trouble.say(self._phrases[self.told])

    def speed(self) -> float:
        """The car's, m/s."""
        return float(self.env.vehicle.speed)

    def frames(self, cameras: Sequence[str], age_s: float = 0.0) -> dict[str, Array]:
        """RGB pictures [224, 224, 3] by camera: "top" (4 px per metre), "wide" (2), "before" (top, 0.4 s ago).

        All of them as they were age_s ago, between two steps as well.
        """
        return {camera: self._frame(camera, age_s) for camera in cameras}

    def frame_age_s(self) -> float:
        """How old the newest picture is: not 0 where a stress holds it back."""
        return (self.step - self._trouble.shown_step(self.step)) * self.dt_s

    def state(self) -> list[float]:
        """Speed [m/s], heading [rad], lateral offset to the nearest lane's centre [m]."""
        car = self.env.vehicle
        return [float(car.speed), float(car.heading), _offset(float(car.position[1]))]

    def drive(self, action: Sequence[float]) -> bool:
        """Carries out (steer [rad], acceleration [m/s^2]) for dt_s; True when the episode is over."""
        if self._over:
            raise ValueError("the episode is over")
        self.env.drive(float(action[0]), float(action[1]))
        self.step += 1
        self._over = self.judge.step() or self.step >= self.limit_steps
        self._shots.append(self.env.snapshot())
        return self._over

    def verdict(self) -> tuple[bool, str]:
        """Success; otherwise why not: "collision", "off road", "missed the exit", "not achieved"."""
        return self.judge.verdict()

    def record(self) -> dict[str, float | str]:
        """The episode in numbers, for a table of episodes; what does not apply is left out."""
        good, why = self.verdict()
        record: dict[str, float | str] = {
            "group": self.group,
            "seed": self.seed,
            "level": self.level,
            "stress": self.stress,
            "mode": self.mode,
            "kind": self.kind,
            "phrase": self._trouble.say(self._phrases[self.group]),
            "ok": float(good),
            "why": why,
            "steps": self.step,
            "end_speed_mps": self.speed(),
        }
        last = [_offset(y) for y in self.judge.y[-5:]]  # the last second
        if last:
            record["lateral_error_m"] = math.sqrt(sum(o * o for o in last) / len(last))
        if self.judge.passed:  # the car that was ahead at the start
            record["seconds_to_pass"] = self.judge.pass_steps * self.dt_s
        return record

    def close(self) -> None:
        """Frees the scene."""
        self._shots.clear()
        self.env.close()

    def _frame(self, camera: str, age_s: float) -> Array:
        if camera not in CAMERAS:
            raise ValueError(f"camera {camera!r} is none of {', '.join(CAMERAS)}")
        if self.mode == "blank":
            return view.blank()
        ago = age_s / self.dt_s + (BEFORE_STEPS if camera == "before" else 0)
        steps = math.floor(ago + 1e-9)
        later, earlier = self._moment(steps), self._moment(steps + 1)
        shot = self._trouble.see(self._shots[later], later)
        if ago - steps > 1e-9 and later != earlier:
            old = self._trouble.see(self._shots[earlier], earlier)
            shot = view.between(old, shot, 1 - (ago - steps))
        painter = world.PAINTERS["wide" if camera == "wide" else "top"]
        return self._trouble.expose(painter.paint(shot), later, painter.scaling)

    def _moment(self, steps_ago: int) -> int:
        """The step of the picture that was there then; the first one before there was any."""
        return self._trouble.shown_step(max(0, self.step - steps_ago))


def _offset(y: float) -> float:
    """From the nearest lane's centre, m; positive to the right."""
    return y - min(world.LANES - 1, max(0, round(y / world.WIDTH))) * world.WIDTH
