"""Closed-loop success of the served policy on held-out episodes, over the server's API.

8 s episodes (overtake 12 s), 5 Hz, replanning every 2 steps, as fast as the server answers. Modes: policy; shuffled (the
instruction of another group); blank (a grey image). Writes one JSON file with every episode.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import world
from phrases import GROUPS, PHRASES

from saccade import Actions, Client, Session
from saccade.images import to_jpeg

SEED = 5_000_000
MODES = ("policy", "shuffled", "blank")
REASONS = ("collision", "off road", "not achieved")


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a proportion."""
    if n == 0:
        return 0.0, 0.0
    p, d = successes / n, 1 + z * z / n
    c = (p + z * z / (2 * n)) / d
    h = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / d
    return max(0.0, float(c - h)), min(1.0, float(c + h))


def run_group(
    sessions: list[Session], mode: str, group: str, n: int, seed0: int, replan: int, jpeg: bool
) -> list[dict[str, Any]]:
    """n episodes side by side, one session each."""
    envs, judges, phrases = [], [], []
    for s in range(n):
        env = world.make_env(group, seed0 + s)
        rng = np.random.default_rng(seed0 + s)
        spoken = group
        if mode == "shuffled":
            spoken = [g for g in GROUPS if g != group][rng.integers(5)]
        envs.append(env)
        judges.append(world.Judge(env, group))
        phrases.append(PHRASES[spoken][rng.integers(6)])
        sessions[s].reset()
    alive = list(range(n))
    plans: dict[int, np.ndarray[Any, Any]] = {}
    for k in range(world.T_EVAL.get(group, world.T_STEPS)):
        if k % replan == 0:
            asked: list[tuple[int, Future[Actions]]] = []
            for i in alive:
                picture = (
                    np.full((224, 224, 3), 100, np.uint8) if mode == "blank" else envs[i].frame()
                )
                sessions[i].set_instruction(world.instruction(phrases[i], envs[i].vehicle.speed))
                sessions[i].send_frame(to_jpeg(picture) if jpeg else picture)
                asked.append((i, sessions[i].act_async(latency_class="best_effort")))
            for i, future in asked:
                plans[i] = future.result(60).values
        for i in list(alive):
            envs[i].drive(*map(float, plans[i][k % replan]))
            if judges[i].step():
                alive.remove(i)
        if not alive:
            break
    episodes = []
    for s in range(n):
        good, why = judges[s].verdict()
        episodes.append(
            {
                "seed": seed0 + s,
                "phrase": phrases[s],
                "ok": good,
                "why": why,
                "steps": len(judges[s].y),
            }
        )
        envs[s].close()
    return episodes


def evaluate(
    address: str, model: str, mode: str, n: int, seed0: int, replan: int = 2, jpeg: bool = False
) -> dict[str, Any]:
    """All six groups, n episodes each."""
    result: dict[str, Any] = {"mode": mode, "n": n, "seed0": seed0, "groups": {}}
    with Client(address) as client:
        sessions = [client.session(model) for _ in range(n)]
        try:
            for group in GROUPS:
                begin = time.monotonic()
                episodes = run_group(sessions, mode, group, n, seed0, replan, jpeg)
                good = sum(e["ok"] for e in episodes)
                low, high = wilson(good, n)
                result["groups"][group] = {
                    "ok": good,
                    "n": n,
                    "why": {w: sum(e["why"] == w for e in episodes) for w in REASONS},
                    "episodes": episodes,
                }
                print(
                    f"{mode:<9} {group:<9} {good}/{n} [{100 * low:.0f}-{100 * high:.0f} %]"
                    f" {time.monotonic() - begin:.0f} s",
                    flush=True,
                )
        finally:
            for session in sessions:
                session.close()
    result["ok"] = sum(g["ok"] for g in result["groups"].values())
    result["episodes"] = n * len(GROUPS)
    return result


def main() -> int:
    """Runs one mode; prints a table and writes --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--model", default="highway_demo")
    parser.add_argument("--n", type=int, default=50, help="episodes of each of the six groups")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--replan", type=int, default=2, help="steps between two requests")
    parser.add_argument("--jpeg", action="store_true", help="send JPEG instead of raw pixels")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    result = evaluate(
        args.address, args.model, args.mode, args.n, args.seed, args.replan, args.jpeg
    )
    low, high = wilson(result["ok"], result["episodes"])
    print(
        f"{args.mode}: {result['ok']} of {result['episodes']} episodes succeeded"
        f" ({100 * result['ok'] / result['episodes']:.1f} % [{100 * low:.0f}-{100 * high:.0f}])"
    )
    if args.out:
        with open(args.out, "w", encoding="utf-8") as out:
            json.dump(result, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
