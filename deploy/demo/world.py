"""Driving world, instructions and success tests (highway-env 1.12.1).

Interface of the policy (5 Hz):
  image   224x224 RGB, bird's-eye view, ego centred (4 px per metre, 42 m ahead, 14 m behind, 3 lanes)
  text    "<instruction>, speed <integer m/s>"
  action  5 future (steer, accel) pairs, 0.2 s apart.
          steer = heading set-point relative to the road [rad], tracked at 15 Hz by the car's inner steering
          loop (the last stage of highway-env's own ControlledVehicle); accel in m/s^2.
Orange cars are slow (about 17 m/s), blue ones ordinary (about 23 m/s), the green one is the ego car.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from typing import Any, ClassVar

os.environ.pop(
    "SDL_VIDEODRIVER", None
)  # highway-env draws nothing with the dummy driver; offscreen needs none
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # SDL complains without one
import numpy as np
import view
from highway_env.envs.highway_env import HighwayEnv
from highway_env.road.road import Road, RoadNetwork
from highway_env.vehicle.behavior import IDMVehicle
from highway_env.vehicle.kinematics import Vehicle

LANES, WIDTH = 3, 4.0
DT, SUB = 0.2, 3  # policy period, simulation steps per period
STEER_MAX, ACC_LO, ACC_HI = 0.12, -5.0, 3.0
CARLEN = 5.0
START_X = 500.0  # where the ego car starts, m
FAR = 20.0  # cars whose places along the road differ by more do not touch
SLOW, NORMAL = (240, 150, 20), (90, 160, 255)
LINES = view.lane_lines(LANES, WIDTH)
PAINTERS = {"top": view.Painter(4.0), "wide": view.Painter(2.0)}  # px per metre
T_STEPS = 40  # 8 s episodes (evaluation gives overtake 12 s and also reports 8 s)
T_EVAL = {"overtake": 60}


def instruction(phrase: str, speed: float) -> str:
    """What the driver is told; the speed is part of the text."""
    return f"{phrase}, speed {round(speed)}"


# ------------------------------------------------------------------------------------------- vehicles, environment
def inner_steering(psi_cmd: float, psi: float, v: float) -> float:
    """Wheel angle [rad] that turns the heading psi to psi_cmd at speed v."""
    rate = 5.0 * (psi_cmd - psi)
    slip = math.asin(max(-1.0, min(1.0, CARLEN / 2 / max(v, 1.0) * rate)))
    return max(-math.pi / 3, min(math.pi / 3, math.atan(2 * math.tan(slip))))


class EgoVehicle(Vehicle):
    """action 'steering' is a heading set-point; the wheel angle is recomputed at every simulation step."""

    cmd: ClassVar[dict[str, float]] = {"steering": 0.0, "acceleration": 0.0}

    def act(self, action: dict[str, float] | None = None) -> None:
        if action:
            self.cmd = dict(action)  # type: ignore[misc]  # per car from here on
        acc = self.cmd["acceleration"]
        if self.speed <= 0.0 and acc < 0.0:
            acc = 0.0
        super().act(
            {
                "steering": inner_steering(self.cmd["steering"], self.heading, self.speed),
                "acceleration": acc,
            }
        )


class StraightNetwork(RoadNetwork):
    """Parallel lanes along x, lane i at y = WIDTH i: what highway-env answers, found without a search."""

    def get_closest_lane_index(
        self, position: Any, heading: float | None = None
    ) -> tuple[str, str, int]:
        y, lanes = float(position[1]), len(self.graph["0"]["1"])
        return "0", "1", min(range(lanes), key=lambda lane: abs(y - lane * WIDTH))


class StraightRoad(Road):
    """A Road over a StraightNetwork; the same neighbours and collisions, several times faster."""

    def neighbour_vehicles(
        self, vehicle: Any, lane_index: tuple[str, str, int] | None = None
    ) -> tuple[Any, Any]:
        centre = (lane_index or vehicle.lane_index)[2] * WIDTH
        x = float(vehicle.position[0])
        ahead = behind = None
        x_ahead, x_behind = math.inf, -math.inf
        for other in self.vehicles:
            if other is vehicle or abs(float(other.position[1]) - centre) > WIDTH / 2 + 1:
                continue
            at = float(other.position[0])
            if x <= at <= x_ahead:
                x_ahead, ahead = at, other
            if x_behind < at < x:
                x_behind, behind = at, other
        return ahead, behind

    def step(self, dt: float) -> None:
        for vehicle in self.vehicles:
            vehicle.step(dt)
        for i, vehicle in enumerate(self.vehicles):
            for other in self.vehicles[i + 1 :]:
                if abs(vehicle.position[0] - other.position[0]) < FAR:
                    vehicle.handle_collisions(other, dt)


class DriveEnv(HighwayEnv):
    """Three lanes, one ego car; start and traffic depend on config["group"]."""

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        c: dict[str, Any] = super().default_config()
        c.update(
            {
                "observation": {"type": "Kinematics", "vehicles_count": 1, "features": ["x"]},
                "action": {
                    "type": "ContinuousAction",
                    "acceleration_range": [ACC_LO, ACC_HI],
                    "steering_range": [-STEER_MAX, STEER_MAX],
                },
                "simulation_frequency": SUB / DT,
                "policy_frequency": 1 / DT,
                "duration": T_STEPS,
                "lanes_count": LANES,
                "screen_width": 224,
                "screen_height": 224,
                "scaling": 4.0,
                "centering_position": [0.25, 0.5],
                "offscreen_rendering": True,
                "show_trajectories": False,
                "group": "keep",
            }
        )
        c["simulation_frequency"], c["policy_frequency"] = 15, 5
        return c

    def _reward(self, action: Any) -> float:
        return 0.0

    def _rewards(self, action: Any) -> dict[str, float]:
        return {}

    def _create_road(self) -> None:
        net = StraightNetwork.straight_road_network(
            LANES, start=0, length=5000, speed_limit=40, net=StraightNetwork()
        )
        self.road = StraightRoad(network=net, np_random=self.np_random, record_history=False)

    def _create_vehicles(self) -> None:
        r, g = self.np_random, self.config["group"]

        def u(a: float, b: float) -> float:
            return float(r.uniform(a, b))

        lane = {"left": int(r.integers(1, 3)), "right": int(r.integers(0, 2))}.get(
            g, int(r.integers(0, 3))
        )
        v = {"follow": u(21, 27), "fast": u(18, 24)}.get(g, u(19, 27))
        ego = EgoVehicle(
            self.road, [START_X, lane * WIDTH + u(-1.3, 1.3)], heading=u(-0.06, 0.06), speed=v
        )
        self.vehicle = ego
        ego.color = (50, 200, 0)
        self.controlled_vehicles = [ego]
        self.road.vehicles.append(ego)
        cars: list[tuple[int, float, bool]] = []  # (lane, dx, slow?)
        wait = (
            g in ("left", "right") and r.random() < 0.35
        )  # a slow car alongside must be passed first
        if wait:
            ego.speed = u(22.5, 27)

        def add(ln: int, dx: float, slow: bool) -> None:
            if 0 <= ln < LANES and all(c[0] != ln or abs(c[1] - dx) > 13 for c in cars):
                cars.append((ln, dx, slow))

        if g in ("overtake", "follow"):
            add(lane, u(20, 32), True)
        elif g != "fast" and not wait and r.random() < 0.6:
            add(lane, u(24, 60), r.random() < 0.6)
        if r.random() < 0.5:
            add(lane, -u(14, 30), False)
        adj = [other for other in (lane - 1, lane + 1) if 0 <= other < LANES]
        free = adj[int(r.integers(len(adj)))]  # at least one side is open
        for other in range(LANES):
            if other == lane:
                continue
            blocked = g == "overtake" and other in adj and other != free and r.random() < 0.8
            if blocked:
                add(other, u(-5, 16), r.random() < 0.7)
                add(other, u(20, 45), r.random() < 0.5)
            elif g == "overtake" and other == free:
                if r.random() < 0.5:
                    add(other, -u(14, 30), False)
                if r.random() < 0.4:
                    add(other, u(60, 90), False)
            elif g in ("left", "right"):
                if wait and other in adj:
                    add(other, u(-6, 4), True)
                for _ in range(2):
                    if r.random() < 0.5:
                        add(other, u(22, 80), not wait and r.random() < 0.3)
                if r.random() < 0.5:
                    add(other, -u(18, 40), False)
            else:
                if r.random() < 0.35:
                    add(other, u(-7, 7), True)
                for _ in range(2):
                    if r.random() < 0.5:
                        add(other, u(-35, 70), r.random() < 0.4)
        for ln, dx, slow in cars:
            if g == "fast" and ln == lane and dx > 0:
                continue
            self.add_car(IDMVehicle, ln, dx, u(16, 18) if slow else u(22, 24), slow)
        self.start_lane = lane
        lead = [
            c
            for c in self.road.vehicles[1:]
            if abs(c.position[1] - lane * WIDTH) < 2 and c.position[0] > START_X
        ]
        self.lead0 = min(lead, key=lambda c: c.position[0]) if lead else None

    def add_car(
        self, kind: type[IDMVehicle], lane: int, dx: float, speed: float, slow: bool
    ) -> Any:
        """A car that follows its lane, dx [m] ahead of the start."""
        car = kind(
            self.road,
            [START_X + dx, lane * WIDTH],
            speed=speed,
            target_speed=speed,
            target_lane_index=("0", "1", lane),
            enable_lane_change=False,
        )
        car.color = SLOW if slow else NORMAL
        car.slow = slow
        self.road.vehicles.append(car)
        return car

    def snapshot(self) -> view.Snapshot:
        """What there is to see now."""
        cars = tuple(
            view.Car(float(c.position[0]), float(c.position[1]), float(c.heading), c.color)
            for c in self.road.vehicles
        )
        return view.Snapshot(cars, LINES)

    def frame(self) -> view.Array:
        """The picture, [224, 224, 3] RGB."""
        return PAINTERS["top"].paint(self.snapshot())

    def drive(self, steer: float, acc: float) -> None:
        """Carries out one action for one policy period: heading set-point [rad], acceleration [m/s^2]."""
        a = np.array(
            [
                2 * (np.clip(acc, ACC_LO, ACC_HI) - ACC_LO) / (ACC_HI - ACC_LO) - 1,
                np.clip(steer, -STEER_MAX, STEER_MAX) / STEER_MAX,
            ],
            np.float32,
        )
        self._simulate(a)  # not step(): nobody reads its observation, which costs more than driving

    def off_road(self) -> bool:
        """Half the car's width beyond an edge line."""
        y = float(self.vehicle.position[1])
        return y < -WIDTH / 2 + 0.5 or y > (LANES - 0.5) * WIDTH - 0.5


def make_env(group: str, seed: int) -> DriveEnv:
    """A scene of that instruction group; the same seed gives the same scene."""
    env = DriveEnv(render_mode="rgb_array", config={"group": group})
    env.config["group"] = group
    env.reset(seed=seed)
    return env


# --------------------------------------------------------------------------------------------------------- success
@dataclass(frozen=True)
class Limits:
    """What counts as achieved."""

    centre_m: float = 0.8  # from the lane's centre, all of the last second
    drift_m: float = (
        2.0  # from the start lane's centre after the first second, where the lane is to be kept
    )
    follow_mps: tuple[float, float] = (13.0, 19.5)
    fast_mps: float = 27.5


BASE = Limits()


class Judge:
    """Success tests over an episode. All need: no collision, never off the road."""

    def __init__(self, env: DriveEnv, group: str, limits: Limits = BASE) -> None:
        self.env, self.g = env, group
        self.limits = limits
        self.lane = env.start_lane
        self.lead = env.lead0
        self.y: list[float] = []
        self.v: list[float] = []
        self.reason = ""
        self.passed = False
        self.pass_steps = 0  # when passed: after so many

    def step(self) -> bool:
        """Call after every drive(); True when the episode is over early."""
        e = self.env.vehicle
        self.y.append(float(e.position[1]))
        self.v.append(float(e.speed))
        if (
            self.lead is not None
            and not self.passed
            and e.position[0] > self.lead.position[0] + CARLEN
        ):
            self.passed, self.pass_steps = True, len(self.y)
        if e.crashed:
            self.reason = "collision"
        elif self.env.off_road():
            self.reason = "off road"
        return bool(self.reason)

    def verdict(self) -> tuple[bool, str]:
        """Success, and why not."""
        if self.reason or not self.y:
            return False, self.reason or "not achieved"
        y, v, c = np.array(self.y), np.array(self.v), self.lane * WIDTH
        last, near = y[-5:], self.limits.centre_m  # the last second
        low, high = self.limits.follow_mps
        inlane = bool(
            np.all(np.abs(last - c) < near) and np.all(np.abs(y[5:] - c) < self.limits.drift_m)
        )
        g = self.g
        ok = {
            "keep": inlane,
            "left": bool(np.all(np.abs(last) < near)),
            "right": bool(np.all(np.abs(last - (LANES - 1) * WIDTH) < near)),
            "overtake": self.passed,
            "follow": inlane and low <= v[-1] <= high and not self.passed,
            "fast": inlane and v[-1] >= self.limits.fast_mps,
        }[g]
        return bool(ok), "" if ok else "not achieved"
