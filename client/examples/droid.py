"""DROID: a Franka arm at 15 Hz; several samples of each chunk, of which the most typical one is driven.

State: 7 joint angles in rad and the gripper, 0 open to 1 closed. Action: 7 joint velocities, normalised to
[-1, 1], and the position of the gripper. Velocities are neither absolute nor relative targets, so the
action space's reference does not matter here. Of each chunk the first 8 actions are carried out.
"""

from __future__ import annotations

import numpy as np
import robot

from saccade import Actions, Client, RequestFailed

CAMERAS = {
    "exterior_image_1_left": ("exterior_1_left", "base_0_rgb"),
    "wrist_image_left": ("wrist_left", "wrist_0_rgb", "left_wrist_0_rgb"),
}
STATE = ACTION = 8
OPEN_LOOP = 8
CONTROL_HZ = 15.0
MOST_RAD = 0.2  # of a joint in one step at velocity 1


class Arm:
    """In the place of the real one."""

    def __init__(self) -> None:
        self.joints = np.array([0.0, -0.63, 0.0, -2.5, 0.0, 1.88, 0.0])
        self.gripper = 0.0

    def state(self) -> list[float]:
        """What the model takes."""
        return [*self.joints.tolist(), self.gripper]

    def drive(self, action: robot.Rows) -> None:
        """Velocities within their range; the gripper is open or closed."""
        self.joints += MOST_RAD * np.clip(action[:7], -1.0, 1.0)
        self.gripper = 1.0 if action[7] > 0.5 else 0.0


def most_typical(actions: Actions) -> tuple[robot.Rows, float]:
    """The sample nearest to the mean of all, and how far they are apart: a measure of doubt."""
    chunks = np.stack([sample.values for sample in actions.samples])
    distance = np.abs(chunks - chunks.mean(axis=0)).mean(axis=(1, 2))
    return chunks[int(distance.argmin())], float(distance.mean())


def main(argv: list[str] | None = None) -> int:
    """0: every chunk was answered."""
    parser = robot.arguments(__doc__, "put the marker in the mug", steps=60, hz=CONTROL_HZ)
    parser.add_argument("--samples", type=int, default=4, help="of each chunk (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first chunk (%(default)s)")
    args = parser.parse_args(argv)
    frames, arm, plan = robot.Frames(args.frames), Arm(), robot.Plan()
    chunks = failed = 0
    with (
        Client(args.address) as client,
        client.session(
            model=args.model,
            statistics_key=args.statistics,
            instruction=args.instruction,
            latency_class=args.latency_class,
        ) as session,
    ):
        robot.check(session.model, STATE, session.action_space.dim, ACTION)
        cameras = robot.bind(session.model, CAMERAS)
        # Samples of a model that denoises differ by their noise, those of tokens by a temperature.
        temperature = 0.0 if session.model.flow_steps else 0.5
        pace = robot.Pace(args.hz)
        for step in range(args.steps):
            if plan.at(step) is None:
                session.set_state(arm.state())
                for camera, name in cameras.items():
                    session.send_frame(frames.shot(camera, step), camera=name)
                try:
                    # The same seed and observation give the same samples again.
                    actions = session.act(
                        samples=args.samples, seed=args.seed + step, temperature=temperature
                    )
                    rows, doubt = most_typical(actions)
                    plan.put(step, rows[:OPEN_LOOP])
                    chunks += 1
                    print(
                        f"step {step}: {len(actions.samples)} samples in"
                        f" {actions.round_trip_s * 1e3:.1f} ms, {doubt:.3f} apart"
                    )
                except RequestFailed as error:
                    failed += 1
                    print(f"step {step}: {error}")
            action = plan.at(step)
            if action is not None:
                arm.drive(action)
            pace.wait()
    print(f"{args.steps} steps, {chunks} chunks, {failed} failed")
    print("arm at " + np.array2string(np.array(arm.state()), precision=3, max_line_width=100))
    return 0 if chunks and not failed else 1


if __name__ == "__main__":
    robot.run(main)
