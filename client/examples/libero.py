"""LIBERO: what its evaluation does around a model, which is the client's work and not the server's.

The simulator's pictures are upside down for a model: both are turned by 180 degrees. State: position of the
end effector in m, its orientation as axis times angle in rad, the two fingers in m. Action: changes of
position and orientation, normalised to [-1, 1], and the gripper, -1 open to +1 closed. OpenVLA models say
0 closed to 1 open instead, which is made a sign and turned round here. Ten idle steps let things fall into
place, then five actions of each chunk are carried out; the simulation waits for the next one.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
import robot

from saccade import Client, RequestFailed

CAMERAS = {
    "agentview": ("image", "base_0_rgb"),
    "robot0_eye_in_hand": ("image2", "wrist_image", "left_wrist_0_rgb", "wrist"),
}
STATE, ACTION = 8, 7
IDLE = np.array([0.0] * 6 + [-1.0])
IDLE_STEPS = 10
REPLAN = 5


class Observation(TypedDict):
    """Of LIBERO's environment, under its own names."""

    agentview_image: robot.Rgb
    robot0_eye_in_hand_image: robot.Rgb
    robot0_eef_pos: robot.Rows
    robot0_eef_quat: robot.Rows
    robot0_gripper_qpos: robot.Rows


class Environment:
    """In the place of LIBERO's `OffScreenRenderEnv`."""

    def __init__(self, frames: robot.Frames) -> None:
        self._frames = frames
        self._step = 0
        self._position = np.array([-0.2, 0.0, 1.17])
        self._angle = np.pi
        self._finger = 0.04

    def step(self, action: robot.Rows) -> Observation:
        """Carries out an action of 7 values."""
        if action.shape != (ACTION,) or abs(action[6]) > 1:
            raise ValueError(f"no action of LIBERO: {action}")
        self._position += 0.05 * np.clip(action[:3], -1, 1)
        self._angle += 0.1 * float(np.clip(action[3], -1, 1))
        self._finger = float(np.clip(self._finger - 0.01 * action[6], 0.0, 0.04))
        self._step += 1
        turned = [  # the simulator's first row is the bottom
            np.ascontiguousarray(self._frames.shot(camera, self._step)[::-1, ::-1])
            for camera in CAMERAS
        ]
        return {
            "agentview_image": turned[0],
            "robot0_eye_in_hand_image": turned[1],
            "robot0_eef_pos": self._position.copy(),
            "robot0_eef_quat": np.array([np.sin(self._angle / 2), 0, 0, np.cos(self._angle / 2)]),
            "robot0_gripper_qpos": np.array([self._finger, -self._finger]),
        }


def axis_angle(quaternion: robot.Rows) -> robot.Rows:
    """Axis times angle of a rotation x, y, z, w; no rotation is zeros."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = np.sqrt(1 - w * w)
    return np.zeros(3) if sine < 1e-8 else quaternion[:3] * (2 * np.arccos(w) / sine)


def state(observation: Observation) -> list[float]:
    """The 8 values."""
    parts = (
        observation["robot0_eef_pos"],
        axis_angle(observation["robot0_eef_quat"]),
        observation["robot0_gripper_qpos"],
    )
    return [float(value) for value in np.concatenate(parts)]


def for_the_simulator(rows: robot.Rows, family: str) -> robot.Rows:
    """Actions with the gripper as the simulator takes it."""
    out = rows.copy()
    if family.startswith("openvla"):
        out[:, 6] = -np.sign(2 * rows[:, 6] - 1)
    else:
        out[:, 6] = np.clip(rows[:, 6], -1, 1)
    return out


def main(argv: list[str] | None = None) -> int:
    """0: every chunk was answered."""
    task = "put the white mug on the plate"
    args = robot.arguments(__doc__, task, steps=60, hz=1000).parse_args(argv)
    environment, plan = Environment(robot.Frames(args.frames, 256, 256)), robot.Plan()
    observation = environment.step(IDLE)
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
        pace = robot.Pace(args.hz)
        for step in range(args.steps):
            action = IDLE
            if step >= IDLE_STEPS and plan.at(step) is None:
                for camera, name in cameras.items():
                    picture = (
                        observation["agentview_image"]
                        if camera == "agentview"
                        else observation["robot0_eye_in_hand_image"]
                    )
                    session.send_frame(np.ascontiguousarray(picture[::-1, ::-1]), camera=name)
                if session.model.state_dim:
                    session.set_state(state(observation))
                try:
                    actions = session.act()
                    rows = for_the_simulator(actions.values, session.model.family)
                    plan.put(step, rows[:REPLAN])
                    chunks += 1
                except RequestFailed as error:
                    failed += 1
                    print(f"step {step}: {error}")
            planned = plan.at(step)
            if planned is not None:
                action = planned
            observation = environment.step(action)
            pace.wait()
    print(f"{args.steps} steps, {chunks} chunks, {failed} failed")
    print("state " + np.array2string(np.array(state(observation)), precision=3, max_line_width=100))
    return 0 if chunks and not failed else 1


if __name__ == "__main__":
    robot.run(main)
