"""Driving: one bird's-eye camera at 5 Hz, on the checkpoint of `deploy/demo`; goes on when the server restarts.

The speed in m/s is part of the instruction. Action: heading relative to the road in rad and acceleration in
m/s^2, five steps of 0.2 s. Without an answer in time the car follows its last chunk as long as that lasts,
then brakes. While there is no connection every act fails at once with ConnectionLost; the session comes
back by itself, with the newest frame and instruction.
"""

from __future__ import annotations

import numpy as np
import robot

from saccade import Client, ConnectionLost, Reconnect, Reconnected, RequestFailed
from saccade.images import to_jpeg

CAMERAS = {"birdseye": ("image",)}
BRAKE = np.array([0.0, -3.0])


def main(argv: list[str] | None = None) -> int:
    """0: chunks were answered, the last one after the last reconnect."""
    args = robot.arguments(__doc__, "keep your lane", steps=50, hz=5).parse_args(argv)
    frames, plan = robot.Frames(args.frames, 224, 224), robot.Plan()
    speed, answered, failed, answered_last = 24.0, 0, 0, False

    def on_reconnect(event: Reconnected) -> None:  # called by the session's thread
        same = "the same model" if event.same_model else "another model"
        print(f"back after {event.down_s:.1f} s, {event.attempts} attempts, {same}", flush=True)

    with (
        Client(args.address) as client,
        client.session(
            model=args.model,
            statistics_key=args.statistics,
            latency_class=args.latency_class,
            reconnect=Reconnect(initial_s=0.1, cap_s=1.0),
            on_reconnect=on_reconnect,
        ) as session,
    ):
        robot.check(session.model, 0, session.action_space.dim, len(BRAKE))
        (camera,) = robot.bind(session.model, CAMERAS).values()
        pace = robot.Pace(args.hz)
        for step in range(args.steps):
            session.set_instruction(f"{args.instruction}, speed {speed:.0f}")
            session.send_frame(to_jpeg(frames.shot("birdseye", step)), camera=camera)
            answered_last = False
            try:
                # An answer that comes after the next step is of no use to anybody.
                actions = session.act(timeout_s=1 / args.hz)
                plan.put(step, actions.values)
                answered, answered_last = answered + 1, True
            except ConnectionLost:
                failed += 1
            except RequestFailed as error:
                failed += 1
                print(f"step {step}: {error}")
            action = plan.at(step)
            steer, accel = BRAKE if action is None else action
            speed = float(np.clip(speed + accel / args.hz, 0.0, 40.0))
            session.report_executed([[float(steer), float(accel)]])
            print(
                f"step {step}: steer {steer:+.3f} rad, {accel:+.2f} m/s^2, {speed:.1f} m/s",
                flush=True,
            )
            pace.wait()
    print(f"{answered} answered, {failed} failed, {session.reconnects} reconnects")
    return 0 if answered_last else 1


if __name__ == "__main__":
    robot.run(main)
