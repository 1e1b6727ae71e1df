"""Collects frames with the expert's chunk for EVERY instruction group, under a noisy, instruction-switching driver.

    collect.py FOLDER FRAMES SEED [--slow] [--hard]

Shards of about 1000 frames, one every 0.4 s, whole episodes: "top" and "wide" [n, 224, 224, 3], "actions"
[n, 6 groups, 8, 2], "state" [n, speed and heading], "scene" [n, 11] (facts), "episode" [n].
The driver follows the expert of a random group, switches the group at random times and gets Ornstein-Uhlenbeck noise on
both actions; starts are perturbed; so that labels exist for half-done lane changes, bad headings and short gaps.
--slow: most episodes start at 0..18 m/s. --hard: the judge's harder scenes, on the training's seeds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import demo  # noqa: F401
import expert
import hard
import numpy as np
import world
from phrases import GROUPS

CHUNK = 8  # actions of a label
EVERY = 2  # steps between two frames
SHARD = 1000


Row = tuple[Any, ...]


def facts(scene: expert.Scene) -> list[float]:
    """What the picture should tell: place on the road, and per lane the gaps and whether the leader is slow."""
    out = [scene.y / 4 - 1, scene.heading * 8]
    for lane in range(world.LANES):
        cars = [o for o in scene.others if abs(o.y - lane * world.WIDTH) < 2]
        mine = [(o.x - scene.x, o.slow) for o in cars]
        ahead, slow = min(
            [(d, s) for d, s in mine if 0 < d < expert.AHEAD], default=(expert.AHEAD, False)
        )
        behind = min([-d for d, _ in mine if 0 <= -d < -expert.BEHIND], default=-expert.BEHIND)
        out += [ahead / 20 - 1, float(slow), behind / 7 - 1]
    return out


def row(env: world.DriveEnv, episode: int) -> Row:
    """The scene as it is now."""
    scene = expert.scene_of(env)
    shot = env.snapshot()
    top, wide = (world.PAINTERS[camera].paint(shot) for camera in ("top", "wide"))
    labels = [expert.chunk(scene, group, CHUNK) for group in GROUPS]
    return top, wide, labels, [scene.speed, scene.heading], facts(scene), episode


class Shards:
    """Frames on their way to disk."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name = folder, name
        self.number = self.total = 0
        self.rows: list[Row] = []
        self.begin = time.monotonic()

    def add(self, rows: list[Row]) -> None:
        """One whole episode."""
        self.rows += rows
        self.total += len(rows)

    def flush(self, least: int) -> None:
        """Writes a shard if it has `least` frames. Call between episodes."""
        if not self.rows or len(self.rows) < least:
            return
        top, wide, actions, state, scene, episode = zip(*self.rows, strict=True)
        file = self.folder / f"s_{self.name}_{self.number:03d}.npz"
        partial = file.with_name(f"tmp_{file.name}")
        np.savez_compressed(
            partial,
            top=np.stack(top),
            wide=np.stack(wide),
            actions=np.array(actions, np.float32),
            state=np.array(state, np.float32),
            scene=np.array(scene, np.float32),
            episode=np.array(episode),
        )
        partial.rename(file)
        self.rows, self.number = [], self.number + 1
        print(f"{self.total} frames, {time.monotonic() - self.begin:.0f} s", flush=True)


def collect(folder: Path, frames: int, seed: int, slow: bool = False, harder: bool = False) -> None:
    """Writes at least that many frames; follows from its arguments."""
    rng = np.random.default_rng(seed)
    shards = Shards(folder, str(seed))
    env = (hard if harder else world).make_env("keep", seed)
    episode = seed
    while shards.total < frames:
        env.config["group"] = scenery = GROUPS[rng.integers(6)]
        env.reset(seed=episode)
        episode += 1
        if slow and rng.random() < 0.8:
            env.vehicle.speed = float(rng.uniform(0, 18))
        group = scenery if rng.random() < 0.5 else GROUPS[rng.integers(6)]
        steer_noise = acc_noise = 0.0
        amplitude = rng.choice([0.0, 0.5, 1.0, 1.5])
        rows = []
        for step in range(world.T_STEPS):
            if step % EVERY == 0:
                rows.append(row(env, episode))
            if rng.random() < 0.07:
                group = GROUPS[rng.integers(6)]
            steer, acc = expert.decide(expert.scene_of(env), group)
            steer_noise = 0.75 * steer_noise + 0.66 * rng.normal() * 0.035 * amplitude
            acc_noise = 0.75 * acc_noise + 0.66 * rng.normal() * amplitude
            env.drive(steer + steer_noise, acc + acc_noise)
            if env.vehicle.crashed or env.off_road():
                break
        shards.add(rows)
        shards.flush(SHARD)
    shards.flush(1)


def main() -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("frames", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--hard", action="store_true")
    args = parser.parse_args()
    collect(args.folder, args.frames, args.seed, args.slow, args.hard)


if __name__ == "__main__":
    main()
