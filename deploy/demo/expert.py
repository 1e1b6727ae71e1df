"""The scripted driver that the policies were trained from: nothing outside the picture is used.

Scenes are calibrated with it (each must be solvable), and it labels training data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from world import (
    ACC_HI,
    ACC_LO,
    CARLEN,
    DT,
    LANES,
    STEER_MAX,
    SUB,
    WIDTH,
    inner_steering,
)

CHUNK = 5
AHEAD, BEHIND = 42.0, -14.0  # what the picture shows, m
WANTED_SPEED = {
    "keep": 24.0,
    "left": 24.0,
    "right": 24.0,
    "overtake": 30.0,
    "follow": 17.0,
    "fast": 30.0,
}
HEADWAY_S = {"follow": 1.3, "overtake": 0.7}


@dataclass(frozen=True)
class Other:
    """Another car: place [m], speed [m/s], whether it is a slow (orange) one."""

    x: float
    y: float
    speed: float
    slow: bool

    def later(self, seconds: float) -> Other:
        """Where it is then at constant speed."""
        return Other(self.x + self.speed * seconds, self.y, self.speed, self.slow)


@dataclass(frozen=True)
class Scene:
    """The ego car and the others."""

    x: float
    y: float
    heading: float
    speed: float
    others: tuple[Other, ...]


def scene_of(env: Any) -> Scene:
    """The scene of a DriveEnv as it is now."""
    ego = env.vehicle
    others = tuple(
        Other(float(c.position[0]), float(c.position[1]), float(c.speed), bool(c.slow))
        for c in env.road.vehicles
        if c is not ego
    )
    return Scene(
        float(ego.position[0]), float(ego.position[1]), float(ego.heading), float(ego.speed), others
    )


def decide(scene: Scene, group: str) -> tuple[float, float]:
    """One Markov decision: (steer set-point [rad], acceleration [m/s^2])."""
    near = min(LANES - 1, max(0, round(scene.y / WIDTH)))
    target = near
    if group == "left" and near > 0 and _is_free(scene, near - 1):
        target = near - 1
    elif group == "right" and near < LANES - 1 and _is_free(scene, near + 1):
        target = near + 1
    elif group == "overtake" and _slow_ahead(scene, near):
        best_gap = _gap(scene, near) + 8.0
        for lane in (near - 1, near + 1):
            if 0 <= lane < LANES and _is_free(scene, lane) and _gap(scene, lane) > best_gap:
                target, best_gap = lane, _gap(scene, lane) + 2.0
    sideways = max(-2.4, min(2.4, 1.1 * (target * WIDTH - scene.y)))  # m/s
    steer = max(-STEER_MAX, min(STEER_MAX, sideways / max(scene.speed, 12.0)))
    leaders = []
    for other in scene.others:
        ahead = other.x - scene.x
        mine = abs(other.y - scene.y) < (1.9 if target != near else 2.3)
        coming = target != near and abs(other.y - target * WIDTH) < 1.0
        if 0 < ahead < AHEAD and (mine or coming):
            leaders.append((ahead - CARLEN, other.speed))
    headway_s = HEADWAY_S.get(group, 1.0)
    return steer, _follow(scene.speed, WANTED_SPEED[group], leaders, headway_s)


def chunk(scene: Scene, group: str, steps: int = CHUNK) -> list[tuple[float, float]]:
    """Future actions: the ego simulated under the expert, the others at constant speed."""
    actions = []
    for _ in range(steps):
        steer, accel = decide(scene, group)
        actions.append((steer, accel))
        x, y, heading, speed = scene.x, scene.y, scene.heading, scene.speed
        for _ in range(SUB):
            x, y, heading, speed = _substep(x, y, heading, speed, steer, accel)
        scene = Scene(x, y, heading, speed, tuple(o.later(DT) for o in scene.others))
    return actions


def _follow(
    speed: float, wanted: float, leaders: list[tuple[float, float]], headway_s: float
) -> float:
    """IDM: towards the wanted speed, behind each leader (gap [m], speed)."""
    free = 2.5 * (1 - (max(speed, 0.0) / wanted) ** 4)
    accel = free if speed <= wanted else max(-3.0, -1.5 * (speed - wanted))
    for gap, leader in leaders:
        closing = speed * (speed - leader) / (2 * math.sqrt(2.5 * 3.0))
        desired = 3.0 + max(0.0, speed * headway_s + closing)
        behind = (free if speed <= wanted else 0.0) - 2.5 * (desired / max(gap, 0.5)) ** 2
        accel = min(accel, behind)
    return max(ACC_LO, min(ACC_HI, accel))


def _is_free(scene: Scene, lane: int) -> bool:
    for other in scene.others:
        ahead = other.x - scene.x
        if abs(other.y - lane * WIDTH) > 2.0 or not (BEHIND <= ahead <= AHEAD):
            continue
        if ahead >= 0 and ahead < 8.5 + max(0.0, scene.speed - other.speed) * 1.0:
            return False
        if ahead < 0 and -ahead < 8.5 + max(0.0, other.speed - scene.speed) * 0.8:
            return False
    return True


def _gap(scene: Scene, lane: int) -> float:
    gaps = [o.x - scene.x for o in scene.others if abs(o.y - lane * WIDTH) < 2.0]
    return min([g for g in gaps if -4 < g < AHEAD] + [AHEAD])


def _slow_ahead(scene: Scene, lane: int) -> bool:
    return any(
        o.slow and abs(o.y - lane * WIDTH) < 2.0 and -2 < o.x - scene.x < AHEAD
        for o in scene.others
    )


def _substep(
    x: float, y: float, heading: float, speed: float, steer: float, accel: float
) -> tuple[float, float, float, float]:
    """One simulation step of the ego car."""
    h = DT / SUB
    if speed <= 0 and accel < 0:
        accel = 0.0
    beta = math.atan(0.5 * math.tan(inner_steering(steer, heading, speed)))
    return (
        x + speed * math.cos(heading + beta) * h,
        y + speed * math.sin(heading + beta) * h,
        heading + speed * math.sin(beta) / (CARLEN / 2) * h,
        speed + accel * h,
    )
