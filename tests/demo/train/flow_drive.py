"""Drives the world with a policy that is still in training: to collect more data where it goes, or to see how it does.

    flow_drive.py RUN collect FOLDER FRAMES SEED [--hard]     DAgger: the policy drives, the expert labels
    flow_drive.py RUN success EPISODES SEED [--mode blank|shuffled]   of each group, without a server

RUN: what flow_train.py wrote. --hard: more of the groups that meet traffic, in the judge's harder scenes.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import collect
import flow
import hard
import numpy as np
import torch
import world
from flow_train import Batches, halve
from phrases import GROUPS, PHRASES
from scenes import BEFORE_STEPS, Episode
from tokenizers import Tokenizer

CARS = 16  # side by side
REPLAN = 2  # steps between two decisions


class Driver:
    """The policy of a run, in the units of the world."""

    def __init__(self, run: Path, seed: int = 0) -> None:
        torch.set_num_threads(1)
        policy = flow.new_policy(run.resolve())
        policy.load_state_dict(torch.load(run / "last.pt", map_location="cpu")["mean"])
        self.fast = flow.Fast(policy.eval())
        self.tokenizer = Tokenizer.from_file(str(run / "vlm/tokenizer.json"))
        self.batches = Batches.of(run, self.tokenizer)
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(
        self, pictures: list[list[Any]], texts: list[str], states: list[list[float]]
    ) -> np.ndarray[Any, Any]:
        """[n, chunk, action]"""
        ids = [self.tokenizer.encode(t + "\n").ids for t in texts]
        tokens = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.long)
        kept = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, x in enumerate(ids):
            tokens[row, : len(x)] = torch.tensor(x)
            kept[row, : len(x)] = True
        flat = halve(np.stack([p for of_car in pictures for p in of_car]))
        batch = {
            "pixels": torch.from_numpy(flat).unflatten(0, (len(ids), -1)),
            "tokens": tokens,
            "kept": kept,
            "state": self.batches.normal("observation.state", np.array(states, np.float32)),
        }
        noise = torch.randn(len(ids), collect.CHUNK, flow.ACTION, generator=self.generator)
        mean, std = self.batches.stats["action"]
        return self.fast.act(batch, noise).numpy() * std + mean


@dataclass
class Car:
    """One of those side by side."""

    env: world.DriveEnv
    episode: int
    text: str
    steps: int
    shots: deque[Any]
    rows: list[Any]


def gather(driver: Driver, folder: Path, frames: int, seed: int, harder: bool = False) -> None:
    """Shards like collect.py's."""
    weights = [0.05, 0.25, 0.2, 0.3, 0.15, 0.05] if harder else [1 / 6] * 6
    slow = 0.1 if harder else 0.25
    rng = np.random.default_rng(seed)
    shards = collect.Shards(folder, str(seed))
    episode = seed

    def phrase(group: str) -> str:
        return PHRASES[group][rng.integers(6)]

    def start() -> Car:
        nonlocal episode
        group = GROUPS[rng.choice(6, p=weights)]
        env = (hard if harder else world).make_env(group, episode)
        episode += 1
        if rng.random() < slow:
            env.vehicle.speed = float(rng.uniform(0, 18))
        spoken = group if rng.random() < 0.8 else GROUPS[rng.integers(6)]
        shots = deque([env.snapshot()], maxlen=BEFORE_STEPS + 1)
        return Car(
            env, episode, phrase(spoken), int(rng.integers(12, world.T_STEPS + 1)), shots, []
        )

    cars = [start() for _ in range(CARS)]
    while shards.total < frames:
        pictures, states = [], []
        for car in cars:
            if rng.random() < 0.04:
                car.text = phrase(GROUPS[rng.integers(6)])
            row = collect.row(car.env, car.episode)
            before = world.PAINTERS["top"].paint(car.shots[0])
            pictures.append([row[0], before, row[1]])
            states.append(row[3])
            car.rows.append(row)
        for i, plan in enumerate(driver(pictures, [c.text for c in cars], states)):
            car = cars[i]
            for action in plan[:REPLAN]:
                car.env.drive(*map(float, action))
                car.shots.append(car.env.snapshot())
            car.steps -= REPLAN
            if car.steps <= 0 or car.env.vehicle.crashed or car.env.off_road():
                shards.add(car.rows)
                car.env.close()
                cars[i] = start()
        shards.flush(collect.SHARD)
    shards.flush(1)


def success(driver: Driver, episodes: int, seed: int, **settings: str) -> None:
    """Prints the share of each group's episodes that succeed."""
    good = 0
    for group in GROUPS:
        begin = time.monotonic()
        drives = [Episode(group, seed + i, **settings) for i in range(episodes)]  # type: ignore[arg-type]
        alive = list(drives)
        while alive:
            pictures = [list(e.frames(flow.CAMERAS).values()) for e in alive]
            plans = driver(
                pictures,
                [e.instruction() for e in alive],
                [e.state()[: flow.STATE] for e in alive],
            )
            alive = [
                e
                for e, plan in zip(alive, plans, strict=True)
                if not any(e.drive(action) for action in plan[:REPLAN].tolist())
            ]
        verdicts = [e.verdict() for e in drives]
        here = sum(ok for ok, _ in verdicts)
        good += here
        why = {w: sum(x == w for _, x in verdicts) for _, w in verdicts if w}
        print(f"{group:<9} {here}/{episodes} {why} {time.monotonic() - begin:.0f} s", flush=True)
        for e in drives:
            e.close()
    print(f"{good} of {episodes * len(GROUPS)}")


def main() -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("collect")
    one.add_argument("folder", type=Path)
    one.add_argument("frames", type=int)
    one.add_argument("seed", type=int)
    one.add_argument("--hard", action="store_true")
    two = kinds.add_parser("success")
    two.add_argument("episodes", type=int)
    two.add_argument("seed", type=int)
    two.add_argument("--mode", default="policy")
    two.add_argument("--level", default="base")
    two.add_argument("--stress", default="none")
    args = parser.parse_args()
    driver = Driver(args.run, args.seed)
    if args.kind == "success":
        settings = {"mode": args.mode, "level": args.level, "stress": args.stress}
        success(driver, args.episodes, args.seed, **settings)
        return
    gather(driver, args.folder, args.frames, args.seed, args.hard)


if __name__ == "__main__":
    main()
