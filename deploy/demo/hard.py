"""The harder scenes: more cars, cars that cut in, an on-ramp that ends, an exit to reach, ground that moves.

A scene is the ordinary one of that seed with more in it. Each is made so that the scripted expert can solve it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import view
import world
from highway_env.road.lane import LineType, StraightLane
from highway_env.vehicle.behavior import IDMVehicle

EDGE = (world.LANES - 0.5) * world.WIDTH  # y of the right edge
RAMP = world.LANES  # the lane beyond the rightmost one
KINDS = {
    "keep": ("dense", "cut_in", "cut_in", "merge"),
    "left": ("dense", "cut_in", "merge"),
    "right": ("dense", "cut_in", "exit", "exit"),
    "overtake": ("dense", "cut_in", "merge"),
    "follow": ("dense", "cut_in"),
    "fast": ("dense", "dense", "merge"),
}
LIMITS = world.Limits(centre_m=0.45, drift_m=1.6, follow_mps=(11.0, 19.0), fast_mps=27.5)
LIMIT_STEPS = {"overtake": 70}
OWN_LANE_M = 75.0  # ahead in the ego's lane nobody is added nearer
GAP_M = 13.0  # between cars of one lane at the start
ROOM_M, ROOM_S = 9.0, 1.6  # that a cut-in leaves, and for every m/s of difference
GROUND_DEPTH = 16  # grey levels to either side
GROUND_CELL_M = 2.0


class CutIn(IDMVehicle):
    """Follows its lane until its moment has come and there is room, then changes lanes."""

    DISTANCE_WANTED, TIME_WANTED = (
        7.0,
        0.6,
    )  # close behind: it does not brake hard for where it goes
    target_lane_index: tuple[str, str, int]
    goal = 0  # the lane it wants
    moment_s = 0.0
    give_up_s = 8.0
    clock_s = 0.0

    def act(self, action: Any = None) -> None:
        waiting = self.target_lane_index[2] != self.goal
        if waiting and self.moment_s <= self.clock_s < self.give_up_s and self._room():
            self.target_lane_index = ("0", "1", self.goal)
        super().act(action)

    def step(self, dt: float) -> None:
        self.clock_s += dt
        super().step(dt)

    def _room(self) -> bool:
        """Nobody who is in the wanted lane, or on the way to it, is brought into need."""
        for other in self.road.vehicles:
            if other is self or abs(other.position[1] - self.goal * world.WIDTH) > 2.6:
                continue
            ahead = float(self.position[0] - other.position[0])
            closing = float(other.speed - self.speed)
            if ahead >= 0 and ahead < ROOM_M + ROOM_S * max(0.0, closing):
                return False
            if ahead < 0 and -ahead < ROOM_M + ROOM_S * max(0.0, -closing):
                return False
        return True


class HardEnv(world.DriveEnv):
    """An ordinary scene with more in it."""

    kind = "dense"
    ramp: tuple[float, float] | None = None  # x where the lane beyond the right edge begins, ends
    exit_x: float | None = None  # to be in the rightmost lane by here

    def _create_vehicles(self) -> None:
        super()._create_vehicles()
        group, r = self.config["group"], self.np_random
        self.ramp = self.exit_x = None
        self.kind = str(KINDS[group][int(r.integers(len(KINDS[group])))])
        if self.kind == "merge" and group in ("overtake", "fast") and self.start_lane != 0:
            self.kind = "dense"  # its only way may be the lane that fills
        if self.kind == "merge":
            begin = world.START_X + self._u(-60, 20)
            self._open_ramp(begin, begin + self._u(150, 220))
            for _ in range(2):
                self._cut_in(RAMP, world.LANES - 1, self._u(6, 45), group)
        elif self.kind == "cut_in":
            self._cut_into_the_way(group)
        elif self.kind == "exit":
            self.exit_x = world.START_X + self._u(150, 185)
            self._open_ramp(self.exit_x, self.exit_x + 400.0)
        self._fill(group)
        tile = np.random.default_rng([int(r.integers(2**31)), 7]).integers(
            -GROUND_DEPTH, GROUND_DEPTH + 1, (64, 64)
        )
        self.ground = view.Ground(
            (view.GREY[0] + tile).astype(np.uint8),
            GROUND_CELL_M,
            top=-world.WIDTH / 2,
            bottom=EDGE,
            paved=None if self.ramp is None else (*self.ramp, EDGE, EDGE + world.WIDTH),
        )

    def snapshot(self) -> view.Snapshot:
        shot = super().snapshot()
        lines = shot.lines if self.ramp is None else _ramp_lines(*self.ramp)
        return replace(shot, lines=lines, ground=self.ground)

    def _u(self, low: float, high: float) -> float:
        return float(self.np_random.uniform(low, high))

    def _open_ramp(self, begin: float, end: float) -> None:
        self.ramp = (begin, end)
        y = RAMP * world.WIDTH
        lines = (LineType.STRIPED, LineType.CONTINUOUS_LINE)
        lane = StraightLane([0.0, y], [5000.0, y], line_types=lines, speed_limit=40)
        self.road.network.add_lane("0", "1", lane)

    def _is_free(self, lane: int, dx: float) -> bool:
        return all(
            abs(c.position[1] - lane * world.WIDTH) > 2.5
            or abs(float(c.position[0]) - world.START_X - dx) > GAP_M
            for c in self.road.vehicles
        )

    def _cut_in(self, lane: int, goal: int, dx: float, group: str) -> None:
        """A car of ordinary speed that changes from the lane to the goal."""
        if not self._is_free(lane, dx):
            return
        car = self.add_car(CutIn, lane, dx, self._u(21, 24), slow=False)
        car.goal = goal
        car.moment_s = self._u(0.4, 3.0)

    def _cut_into_the_way(self, group: str) -> None:
        """From a lane beside into the ego's, or into the one it is told to go to."""
        mine = self.start_lane
        if group in ("left", "right"):
            goal = mine + (-1 if group == "left" else 1)
            beside = [lane for lane in (goal - 1, goal + 1) if 0 <= lane < world.LANES]
            beside = [lane for lane in beside if lane != mine] or [mine]
            near = (12.0, 40.0)
        else:
            goal = mine
            beside = [lane for lane in (mine - 1, mine + 1) if 0 <= lane < world.LANES]
            near = (11.0, self._lead_dx() - 9.0 if group == "follow" else 28.0)
        for _ in range(2):
            start = beside[int(self.np_random.integers(len(beside)))]
            self._cut_in(start, goal, self._u(*near), group)

    def _lead_dx(self) -> float:
        return float(self.lead0.position[0]) - world.START_X if self.lead0 else 40.0

    def _fill(self, group: str) -> None:
        """More cars where they do not shut the only way."""
        mine = self.start_lane
        for lane in range(world.LANES):
            for _ in range(3):
                dx, slow = self._u(-45, 110), bool(self.np_random.random() < 0.35)
                if lane == mine and (group == "fast" or dx < OWN_LANE_M) and dx > -18:
                    continue
                if dx > 0 and (lane == mine or group == "overtake"):
                    slow = False  # it would hold up whom to follow, or shut the way past
                if group in ("left", "right", "overtake") and lane != mine and -22 < dx < 45:
                    continue
                if self._is_free(lane, dx):
                    speed = self._u(16, 18) if slow else self._u(22, 24)
                    self.add_car(IDMVehicle, lane, dx, speed, slow)


def make_env(group: str, seed: int) -> HardEnv:
    """A hard scene of that instruction group; the same seed gives the same scene."""
    env = HardEnv(render_mode="rgb_array", config={"group": group})
    env.reset(seed=seed)
    return env


class Judge(world.Judge):
    """As in the ordinary scenes with tighter limits, and the exit must be reached in its lane."""

    def __init__(self, env: HardEnv, group: str) -> None:
        super().__init__(env, group, LIMITS)
        self._exit_x = env.exit_x

    def step(self) -> bool:
        over = super().step()
        ego = self.env.vehicle
        if self._exit_x is not None and float(ego.position[0]) >= self._exit_x:
            self._exit_x = None
            if abs(float(ego.position[1]) - (world.LANES - 1) * world.WIDTH) > world.WIDTH / 2:
                self.reason = self.reason or "missed the exit"
        return over or bool(self.reason)


def _ramp_lines(begin: float, end: float) -> tuple[view.Line, ...]:
    """The right edge is broken where the lane beyond it is."""
    left, *inner, edge = world.LINES
    return (
        left,
        *inner,
        view.Line(edge.y, striped=False, x1=begin),
        view.Line(edge.y, striped=True, x0=begin, x1=end),
        view.Line(edge.y, striped=False, x0=end),
    )
