"""The scripted driver that the policies imitate: one Markov decision from what the picture shows."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

DEMO = Path(__file__).resolve().parents[3] / "deploy/demo"
sys.path.insert(0, str(DEMO))
import world  # noqa: E402
from phrases import GROUPS  # noqa: E402

AHEAD, BEHIND = 42.0, -14.0  # what the picture shows, m
CHUNK = 8  # actions of one label
TARGET_SPEED = {
    "keep": 24.0,
    "left": 24.0,
    "right": 24.0,
    "overtake": 30.0,
    "follow": 17.0,
    "fast": 30.0,
}
HEADWAY_S = {"follow": 1.3, "overtake": 0.7}

Car = tuple[float, float, float, bool]  # x, y, speed, slow
State = tuple[float, float, float, float, list[Car]]  # x, y, heading, speed; the others


def state_of(env: world.DriveEnv) -> State:
    """Everything there is, SI units."""
    ego = env.vehicle
    cars = [
        (float(c.position[0]), float(c.position[1]), float(c.speed), bool(c.slow))
        for c in env.road.vehicles
        if c is not ego
    ]
    x, y = ego.position
    return float(x), float(y), float(ego.heading), float(ego.speed), cars


def _idm(v: float, v0: float, lead: Sequence[tuple[float, float]], headway: float) -> float:
    free = 2.5 * (1 - (max(v, 0.0) / v0) ** 4)
    a = free if v <= v0 else max(-3.0, -1.5 * (v - v0))
    for gap, other in lead:
        wanted = 3.0 + max(0.0, v * headway + v * (v - other) / (2 * math.sqrt(2.5 * 3.0)))
        pull = free if v <= v0 else 0.0
        a = min(a, pull - 2.5 * (wanted / max(gap, 0.5)) ** 2)
    return max(world.ACC_LO, min(world.ACC_HI, a))


def _safe(x: float, v: float, cars: Sequence[Car], lane: int) -> bool:
    for cx, cy, cv, _ in cars:
        d = cx - x
        if abs(cy - lane * world.WIDTH) > 2.0 or d < BEHIND or d > AHEAD:
            continue
        if d >= 0 and d < 8.5 + max(0.0, v - cv):
            return False
        if d < 0 and -d < 8.5 + max(0.0, cv - v) * 0.8:
            return False
    return True


def _gap(x: float, cars: Sequence[Car], lane: int) -> float:
    ahead = [
        cx - x
        for cx, cy, _, _ in cars
        if abs(cy - lane * world.WIDTH) < 2.0 and -4 < cx - x < AHEAD
    ]
    return min([*ahead, AHEAD])


def _lane(x: float, v: float, cars: Sequence[Car], near: int, group: str) -> int:
    if group == "left" and near > 0 and _safe(x, v, cars, near - 1):
        return near - 1
    if group == "right" and near < world.LANES - 1 and _safe(x, v, cars, near + 1):
        return near + 1
    if group == "overtake" and any(
        slow and abs(cy - near * world.WIDTH) < 2.0 and -2 < cx - x < AHEAD
        for cx, cy, _, slow in cars
    ):
        best, best_gap = near, _gap(x, cars, near) + 8.0
        for lane in (near - 1, near + 1):
            if 0 <= lane < world.LANES and _safe(x, v, cars, lane):
                gap = _gap(x, cars, lane)
                if gap > best_gap:
                    best, best_gap = lane, gap + 2.0
        return best
    return near


def decide(
    x: float, y: float, psi: float, v: float, cars: Sequence[Car], group: str
) -> tuple[float, float]:
    """(heading set-point [rad], acceleration [m/s^2]). Uses nothing outside of the picture."""
    near = min(world.LANES - 1, max(0, round(y / world.WIDTH)))
    target = _lane(x, v, cars, near, group)
    lateral = max(-2.4, min(2.4, 1.1 * (target * world.WIDTH - y)))
    steer = max(-world.STEER_MAX, min(world.STEER_MAX, lateral / max(v, 12.0)))
    lead = []
    for cx, cy, cv, _ in cars:
        d = cx - x
        if not 0 < d < AHEAD:
            continue
        own = abs(cy - y) < (1.9 if target != near else 2.3)
        if own or (target != near and abs(cy - target * world.WIDTH) < 1.0):
            lead.append((d - world.CARLEN, cv))
    return steer, _idm(v, TARGET_SPEED[group], lead, HEADWAY_S.get(group, 1.0))


def _advance(
    x: float, y: float, psi: float, v: float, steer: float, acc: float
) -> tuple[float, float, float, float]:
    h = world.DT / world.SUB
    if v <= 0 and acc < 0:
        acc = 0.0
    beta = math.atan(0.5 * math.tan(world.inner_steering(steer, psi, v)))
    x, y = x + v * math.cos(psi + beta) * h, y + v * math.sin(psi + beta) * h
    return x, y, psi + v * math.sin(beta) / (world.CARLEN / 2) * h, v + acc * h


def chunk(state: State, group: str, steps: int = CHUNK) -> list[tuple[float, float]]:
    """The next decisions: the car simulated under the expert, the others at constant speed."""
    x, y, psi, v, cars = state
    out = []
    for _ in range(steps):
        steer, acc = decide(x, y, psi, v, cars, group)
        out.append((steer, acc))
        for _ in range(world.SUB):
            x, y, psi, v = _advance(x, y, psi, v, steer, acc)
        cars = [(cx + cv * world.DT, cy, cv, slow) for cx, cy, cv, slow in cars]
    return out


def scene(state: State) -> list[float]:
    """What the picture should tell: place on the road, and per lane the gaps and whether the leader is slow."""
    x, y, psi, _, cars = state
    out = [y / 4 - 1, psi * 8]
    for lane in range(world.LANES):
        mine = [(cx - x, slow) for cx, cy, _, slow in cars if abs(cy - lane * world.WIDTH) < 2]
        ahead, slow = min([(d, s) for d, s in mine if 0 < d < AHEAD], default=(AHEAD, False))
        behind = min([-d for d, _ in mine if 0 <= -d < -BEHIND], default=-BEHIND)
        out += [ahead / 20 - 1, float(slow), behind / 7 - 1]
    return out


__all__ = ["CHUNK", "GROUPS", "State", "chunk", "decide", "scene", "state_of"]
