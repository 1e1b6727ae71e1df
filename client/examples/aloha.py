"""ALOHA: two arms, three cameras, 14 joints at 50 Hz, while vision is computed at 5 Hz.

Frames are sent five times a second. The server makes each set of them into a prefix at once, by requests
of the class `--refresh-class`, and by itself asks for actions 50 times a second, each from the newest
prefix and the newest state. For models whose state is no part of their text (pi0, SmolVLA).

State and action: 7 values of the left arm, then 7 of the right: six joint angles in rad (waist, shoulder,
elbow, forearm roll, wrist angle, wrist rotate) and the gripper, 0 closed to 1 open. Models that were
trained on the joint directions of openpi's pi0 (`adapt_to_pi`) want them converted first.
"""

from __future__ import annotations

import time

import numpy as np
import robot

from saccade import Actions, Client, SaccadeError
from saccade.images import to_jpeg

CAMERAS = {
    "cam_high": ("top", "base_0_rgb"),
    "cam_left_wrist": ("left_wrist_0_rgb",),
    "cam_right_wrist": ("right_wrist_0_rgb",),
}
JOINTS = 14
RELATIVE = ([True] * 6 + [False]) * 2  # grippers are absolute in every ALOHA model
VISION_HZ = 5.0
MOST_RAD = 0.05  # of one joint in one step, whatever a model says


class Arms:
    """In the place of the real ones."""

    def __init__(self) -> None:
        self.position = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5] * 2)

    def follow(self, target: robot.Rows) -> None:
        """One step towards the target."""
        self.position += np.clip(target - self.position, -MOST_RAD, MOST_RAD)


def main(argv: list[str] | None = None) -> int:
    """0: the arms followed chunks."""
    parser = robot.arguments(__doc__, "pick up the cube and hand it over", steps=250, hz=50)
    parser.add_argument("--refresh-class", default="perception", help="of prefixes (%(default)s)")
    args = parser.parse_args(argv)
    frames, arms, plan = robot.Frames(args.frames), Arms(), robot.Plan()
    every = max(1, round(args.hz / VISION_HZ))
    prefixes: set[int] = set()
    failures: dict[str, int] = {}

    def on_actions(outcome: Actions | SaccadeError) -> None:  # called by the session's thread
        if isinstance(outcome, SaccadeError):
            why = getattr(outcome, "reason", "") or str(outcome)
            failures[why] = failures.get(why, 0) + 1
            return
        prefixes.add(outcome.observation_version)
        # Times count steps here, so the state's is the step that the chunk begins with.
        plan.put(outcome.state_capture_time_ns, robot.targets(outcome, RELATIVE))

    followed = 0
    with (
        Client(args.address) as client,
        client.session(
            model=args.model,
            statistics_key=args.statistics,
            instruction=args.instruction,
            latency_class=args.latency_class,
            refresh_class=args.refresh_class,
        ) as session,
    ):
        robot.check(session.model, JOINTS, session.action_space.dim, JOINTS)
        cameras = robot.bind(session.model, CAMERAS)
        pace, start = robot.Pace(args.hz), time.monotonic()
        for step in range(args.steps):
            session.set_state(arms.position.tolist(), capture_time_ns=step)
            if step % every == 0:
                for camera, name in cameras.items():
                    session.send_frame(to_jpeg(frames.shot(camera, step)), camera=name)
            if step == 0:
                session.push(args.hz, on_actions)
            target = plan.at(step)
            if target is not None:
                arms.follow(target)
                followed += 1
            pace.wait()
        took = time.monotonic() - start
        session.stop_push()
    print(
        f"{args.steps} steps at {args.steps / took:.1f} Hz, {followed} of them by a chunk, the others held"
        f" still; actions from {len(prefixes)} sets of frames; failed: {failures or 'none'}"
    )
    print("arms at " + np.array2string(arms.position, precision=3, max_line_width=100))
    return 0 if followed else 1


if __name__ == "__main__":
    robot.run(main)
