"""Drives the demo world in a closed loop over the server's API, in real time.

Five times a second: render the bird's-eye view, send it as JPEG with the instruction and the speed, ask for actions,
carry out the first one. Prints every action with its latency, its deadline and the time of the frame it came from, then
the server's cache and latency metrics. Exits 0 when actions came; with --strict only when every action met its deadline
and every episode succeeded (a busy machine misses some).
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request

import numpy as np
import world
from phrases import GROUPS, PHRASES

from saccade import Client, RequestFailed, SaccadeError, Session
from saccade.images import to_jpeg

SEED = 5_000_000  # held out: training used 100000.., 200000.., 300000.., validation 900000..


class Tally:
    """What happened over all episodes."""

    def __init__(self) -> None:
        self.latencies_ms: list[float] = []
        self.missed = 0
        self.episodes = 0
        self.succeeded = 0

    def summary(self) -> str:
        """One paragraph for a person."""
        if not self.latencies_ms:
            return "no action was answered"
        p50, p99 = np.percentile(self.latencies_ms, [50, 99])
        return (
            f"{len(self.latencies_ms)} actions, latency p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst"
            f" {max(self.latencies_ms):.1f} ms; deadlines missed: {self.missed};"
            f" episodes succeeded: {self.succeeded} of {self.episodes}"
        )


def drive_episode(
    session: Session, group: str, phrase: str, seed: int, end: float, start: float, tally: Tally
) -> None:
    """One episode in real time; stops early at `end` (monotonic seconds) without a verdict."""
    env = world.make_env(group, seed)
    judge = world.Judge(env, group)
    session.reset()
    steps = world.T_EVAL.get(group, world.T_STEPS)
    next_step = time.monotonic()
    finished = False
    for step in range(steps):
        if time.monotonic() >= end:
            break
        speed = env.vehicle.speed
        captured_ns = time.monotonic_ns()
        picture = env.frame()
        session.set_instruction(world.instruction(phrase, speed))
        session.send_frame(
            to_jpeg(picture),
            capture_time_ns=captured_ns,
            age_s=(time.monotonic_ns() - captured_ns) * 1e-9,
        )
        action = (0.0, 0.0)
        try:
            answer = session.act()
            steer, accel = (float(v) for v in answer.values[0])
            action = (steer, accel)
            latency_ms = answer.round_trip_s * 1e3
            tally.latencies_ms.append(latency_ms)
            deadline_ms = answer.deadline_s * 1e3
            met = answer.deadline_met
            tally.missed += not met
            cached = sum(m.cached for m in answer.tokens.values())
            total = sum(m.total for m in answer.tokens.values())
            frame_s = answer.frames[0].capture_time_ns * 1e-9 - start
            print(
                f"[{time.monotonic() - start:6.2f} s] {phrase:<28} {speed:5.1f} m/s | steer {steer:+.4f} rad"
                f" accel {accel:+.2f} m/s2 | latency {latency_ms:5.1f} ms, deadline {deadline_ms:.0f} ms"
                f" {'met ' if met else 'LATE'} | frame of {frame_s:6.2f} s,"
                f" {answer.frames[0].age_s * 1e3:4.1f} ms old | cached {cached}/{total}",
                flush=True,
            )
        except RequestFailed as error:
            tally.missed += error.reason in ("LATE", "EXPIRED")
            print(f"[{time.monotonic() - start:6.2f} s] {phrase:<28} {error}", flush=True)
        env.drive(*action)
        finished = judge.step() or step == steps - 1
        if finished:
            break
        next_step += world.DT
        time.sleep(max(0.0, next_step - time.monotonic()))
    if finished:
        good, why = judge.verdict()
        tally.episodes += 1
        tally.succeeded += good
        print(f"    episode '{phrase}': {'achieved' if good else why}", flush=True)
    env.close()


def print_metrics(address: str) -> None:
    """The server's own view: K/V partitions, deadlines, latency."""
    wanted = (
        "saccade_kv_",
        "saccade_vision_cache",
        "saccade_requests_",
        "saccade_end_to_end_seconds_sum",
        "saccade_end_to_end_seconds_count",
        "saccade_queue_seconds_sum",
        "saccade_queue_seconds_count",
        "saccade_frame_age",
    )
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    print(f"\nfrom http://{address}/metrics (what is not 0):")
    for line in lines:
        shown = line.startswith(wanted) and "_bucket" not in line and not line.endswith(" 0")
        if shown:
            print("  " + line)


def main() -> int:
    """Runs the loop; see the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--metrics", default="127.0.0.1:9090", help="empty: no metrics at the end")
    parser.add_argument("--model", default="highway_demo")
    parser.add_argument("--latency-class", default="", help="default: the model's")
    parser.add_argument("--seconds", type=float, default=20.0, help="of driving")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--strict", action="store_true", help="any miss or failed episode: exit 1")
    args = parser.parse_args()
    tally = Tally()
    try:
        with Client(args.address) as client:
            client.wait_ready()
            with client.session(args.model, latency_class=args.latency_class) as session:
                space = session.action_space
                print(
                    f"session {session.session_id} on {session.model.name}: {space.steps} x {space.dim}"
                    f" actions, {space.dt_s:g} s apart; deadline {session.deadline_s * 1e3:.0f} ms"
                )
                start = time.monotonic()
                number = 0
                while time.monotonic() - start < args.seconds:
                    group = GROUPS[number % len(GROUPS)]
                    phrase = PHRASES[group][(number // len(GROUPS)) % len(PHRASES[group])]
                    drive_episode(
                        session,
                        group,
                        phrase,
                        args.seed + number,
                        start + args.seconds,
                        start,
                        tally,
                    )
                    number += 1
                for notice in session.notices:
                    print(f"notice: {notice}")
    except (SaccadeError, TimeoutError) as error:
        print(f"drive: {error}", file=sys.stderr)
        return 1
    if args.metrics:
        print_metrics(args.metrics)
    print("\n" + tally.summary())
    flawless = tally.missed == 0 and tally.succeeded == tally.episodes
    return 0 if tally.latencies_ms and (flawless or not args.strict) else 1


if __name__ == "__main__":
    sys.exit(main())
