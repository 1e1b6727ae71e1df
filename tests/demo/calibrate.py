"""Success of one driver over the demo's episodes, by group: what the harder scenes are calibrated with.

The real evaluation is `saccade eval`; this is a thin loop over Episode and one server, or the scripted expert.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from concurrent.futures import Future
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "demo"))

import expert
import scenes

from saccade import Actions, Client, Session

Record = dict[str, float | str]


def drive_expert(episode: scenes.Episode) -> None:
    """The scripted driver, at every step."""
    while not episode.drive(expert.decide(expert.scene_of(episode.env), episode.told)):
        pass


def drive_served(episodes: list[scenes.Episode], sessions: list[Session], replan: int) -> None:
    """Side by side, one session each, replanning every so many steps."""
    alive = list(zip(episodes, sessions, strict=False))
    for _, session in alive:
        session.reset()
    while alive:
        asked: list[tuple[scenes.Episode, Session, Future[Actions]]] = []
        for episode, session in alive:
            session.set_instruction(f"{episode.instruction()}, speed {round(episode.speed())}")
            session.send_frame(episode.frames(("top",))["top"])
            asked.append((episode, session, session.act_async(latency_class="best_effort")))
        alive = []
        for episode, session, future in asked:
            plan = future.result(60).values
            if not any(episode.drive(plan[k].tolist()) for k in range(replan)):
                alive.append((episode, session))


def main() -> int:
    """Runs one level, stress and mode; prints a line per group and writes --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="", help="of a server; default: the expert drives")
    parser.add_argument("--model", default="highway_demo")
    parser.add_argument("--n", type=int, default=50, help="episodes of each group")
    parser.add_argument("--seed", type=int, default=6_000_000)
    parser.add_argument("--level", default="hard", choices=scenes.LEVELS)
    parser.add_argument("--stress", default="none", choices=scenes.STRESSES)
    parser.add_argument("--mode", default="policy", choices=scenes.MODES)
    parser.add_argument("--groups", nargs="*", default=list(scenes.GROUPS))
    parser.add_argument("--replan", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    records: list[Record] = []
    client = Client(args.address) if args.address else None
    sessions = [client.session(args.model) for _ in range(args.sessions)] if client else []
    for group in args.groups:
        some: list[Record] = []
        for first in range(0, args.n, args.sessions):
            episodes = [
                scenes.Episode(
                    group, args.seed + k, level=args.level, stress=args.stress, mode=args.mode
                )
                for k in range(first, min(args.n, first + args.sessions))
            ]
            if client:
                drive_served(episodes, sessions, args.replan)
            else:
                for episode in episodes:
                    drive_expert(episode)
            for episode in episodes:
                some.append(episode.record())
                episode.close()
        why = collections.Counter(str(r["why"]) for r in some if not r["ok"])
        kinds = collections.Counter(str(r["kind"]) for r in some if not r["ok"])
        ok = sum(float(r["ok"]) for r in some)
        print(f"{group:<9} {ok:.0f}/{len(some)} {dict(why)} {dict(kinds)}", flush=True)
        records += some
    ok = sum(float(r["ok"]) for r in records)
    print(
        f"{args.level} {args.stress} {args.mode}: {ok:.0f}/{len(records)} = {ok / len(records):.3f}"
    )
    if args.out:
        Path(args.out).write_text(json.dumps(records), encoding="utf-8")
    for session in sessions:
        session.close()
    if client:
        client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
