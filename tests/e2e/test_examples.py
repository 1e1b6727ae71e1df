"""The examples of client/examples, each as a process of its own against the real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import for_robot, openvla_for, robot_statistics
from conftest import ROOT, RunningServer
from PIL import Image
from test_server import recorded

from saccade import Actions, ActionSample, ActionSpace, Client, Flow, InvalidInput, Timings

EXAMPLES = ROOT / "client" / "examples"
sys.path.insert(0, str(EXAMPLES))

import libero  # noqa: E402
import robot  # noqa: E402

PI = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
ALOHA = [f"{arm}_joint_{i}" for arm in ("left", "right") for i in range(6)]
ALOHA = [*ALOHA[:6], "left_gripper", *ALOHA[6:], "right_gripper"]


def dims(names: list[str], unit: str) -> str:
    return ", ".join(f"{{name: {name}, unit: {unit}}}" for name in names)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("robots")
    aloha = dict(zip(PI, ("cam_high", "cam_left_wrist", "cam_right_wrist"), strict=True))
    folders = {
        "aloha": for_robot("pi0", root / "aloha", aloha, 14, 14, relative_names=ALOHA),
        "droid": for_robot("pi05", root / "droid", {}, 8, 8),
        "libero": for_robot("smolvla", root / "libero", {"top": "image", "wrist": "image2"}, 8, 7),
        "openvla": openvla_for("bridge_orig", root / "openvla"),
    }
    spaces = {
        "aloha": f"{{steps: 10, dt_s: 0.02, dims: [{dims(ALOHA, 'rad')}]}}",
        "droid": f"{{steps: 10, dt_s: 0.0667, dims: [{dims([f'v{i}' for i in range(8)], '1')}]}}",
        "openvla": f"{{steps: 1, dt_s: 0.2, relative: true, dims: [{dims(list('abcdefg'), '1')}]}}",
    }
    models = "\n".join(
        f"  - {{name: {name}, path: {folder}, default_class: best_effort, kv: {{memory_mb: 16}}"
        + (f", action_space: {spaces[name]}}}" if name in spaces else "}")
        for name, folder in folders.items()
    )
    running = RunningServer(models=models)
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()


def command(name: str, address: str, *arguments: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), "--address", address, *arguments]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "client")}


def run(name: str, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(name, address, *arguments),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_aloha_follows_pushed_actions(server: RunningServer) -> None:
    done = run(
        "aloha",
        server.address,
        "--model",
        "aloha",
        "--steps",
        "100",
        "--refresh-class",
        "best_effort",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"100 steps at ([\d.]+) Hz, (\d+) of them .* from (\d+) sets", done.stdout)
    assert found, done.stdout
    assert int(found[2]) > 0
    # Ten sets of three frames: a prefix may be of some of a set, but never of one frame twice.
    assert 1 <= int(found[3]) <= 30


def test_the_server_makes_relative_actions_absolute(server: RunningServer) -> None:
    """The folder says that joints are changes: the state is added, but not to grippers."""
    flow = Flow(noise=np.zeros((1, 10, 32)))
    frame = np.zeros((48, 48, 3), np.uint8)
    state = np.linspace(-1, 1, 14)
    with Client(server.address) as client:
        (model,) = (m for m in client.models() if m.name == "aloha")
        assert model.statistics["default"].reference == "absolute"
        answer = client.predict(
            {"cam_high": frame}, "go", model="aloha", state=state.tolist(), flow=flow
        )
    statistics = robot_statistics(14, 14)
    changes = answer.samples[0].normalized * statistics["action.std"] + statistics["action.mean"]
    joints = np.array(([True] * 6 + [False]) * 2)
    np.testing.assert_allclose(answer.values, changes + np.where(joints, state, 0), atol=1e-5)
    assert robot.targets(answer, [True] * 14) is answer.values


def test_relative_actions_of_another_state_cannot_be_committed(server: RunningServer) -> None:
    """They would be added to the new state: the robot would jump by what it has moved."""
    frames = {"cam_high": np.zeros((48, 48, 3), np.uint8)}
    with Client(server.address) as client:
        first = client.predict(frames, "go", model="aloha", state=[0.0] * 14, seed=1)
        with pytest.raises(InvalidInput, match="relative") as refused:
            client.predict(
                frames,
                "go",
                model="aloha",
                state=[0.5] * 14,
                flow=Flow(committed=first.samples[0].normalized[:3]),
            )
        assert refused.value.field == "act.committed.normalized"
        # A policy whose actions are absolute takes them, whatever the state.
        first = client.predict({"image": frames["cam_high"]}, "go", model="libero", state=[0.0] * 8)
        ahead = first.samples[0].normalized[:3]
        for per_action_time in (False, True):
            flow = Flow(committed=ahead, per_action_time=per_action_time)
            again = client.predict(
                {"image": frames["cam_high"]}, "go", model="libero", state=[0.5] * 8, flow=flow
            )
            np.testing.assert_allclose(again.values[:3], first.values[:3], atol=1e-5)


def test_a_state_that_comes_later_does_not_move_relative_actions(server: RunningServer) -> None:
    frame = np.zeros((48, 48, 3), np.uint8)
    flow = Flow(steps=300, noise=np.zeros((1, 10, 32)))
    with Client(server.address) as client:
        expected = client.predict(
            {"cam_high": frame}, "go", model="aloha", state=[0.0] * 14, flow=flow
        )
        with client.session(model="aloha", instruction="go") as session:
            session.send_frame(frame, "cam_high")
            session.set_state([0.0] * 14, capture_time_ns=1)
            asked = session.act_async(flow=flow)
            session.set_state([1.0] * 14, capture_time_ns=2)
            answer = asked.result(30)
            assert answer.state_capture_time_ns == 1
            np.testing.assert_array_equal(answer.values, expected.values)
            assert session.act(flow=flow).state_capture_time_ns == 2


def test_droid_takes_the_most_typical_sample(server: RunningServer) -> None:
    arguments = (
        "--model",
        "droid",
        "--steps",
        "20",
        "--hz",
        "200",
        "--samples",
        "3",
        "--seed",
        "5",
    )
    first, again, other = (
        run("droid", server.address, *arguments[:-1], seed) for seed in ("5", "5", "6")
    )
    assert first.returncode == 0, first.stdout + first.stderr
    assert "20 steps, 3 chunks, 0 failed" in first.stdout and "3 samples in" in first.stdout
    arm = [done.stdout.rstrip().splitlines()[-1] for done in (first, again, other)]
    assert arm[0] == arm[1] != arm[2]


@pytest.mark.parametrize(("model", "replan"), (("libero", 5), ("openvla", 1)))
def test_libero_does_what_its_evaluation_does(
    server: RunningServer, model: str, replan: int
) -> None:
    done = run("libero", server.address, "--model", model, "--steps", "22")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"22 steps, {-(-12 // replan)} chunks, 0 failed" in done.stdout


def test_libero_grippers_and_angles() -> None:
    rows = np.zeros((3, 7))
    rows[:, 6] = (0.0, 0.9, 1.0)  # closed, open, open
    assert libero.for_the_simulator(rows, "openvla")[:, 6].tolist() == [1, -1, -1]
    rows[:, 6] = (-1.1, 0.3, 1.0)
    assert libero.for_the_simulator(rows, "smolvla")[:, 6].tolist() == [-1, 0.3, 1]
    half = np.array([0.0, np.sin(0.25), 0.0, np.cos(0.25)])
    np.testing.assert_allclose(libero.axis_angle(half), [0, 0.5, 0], atol=1e-12)
    assert libero.axis_angle(np.array([0.0, 0, 0, 1.0])).tolist() == [0, 0, 0]


def answer(reference: str) -> Actions:
    values = np.arange(6, dtype=np.float64).reshape(2, 3)
    return Actions(
        samples=(ActionSample(values, values.astype(np.float32), np.zeros(0, np.int32)),),
        space=ActionSpace(2, 3, (), reference, 0.1),
        frames=(),
        timings=Timings(0, 0, 0, 0, 0, 0),
        tokens={},
        frames_cached=False,
        deadline_s=0,
        deadline_met=True,
        late=False,
        latency_class="control",
        statistics_key="",
        state=(10.0, 20.0, 30.0),
    )


def test_targets_follow_the_action_space() -> None:
    mask = [True, False, True]
    assert robot.targets(answer("absolute"), mask).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert robot.targets(answer("relative"), mask).tolist() == [[10, 1, 32], [13, 4, 35]]
    with pytest.raises(SystemExit, match="action_space"):
        robot.targets(answer("unspecified"), mask)


def test_a_plan_skips_what_has_passed() -> None:
    plan = robot.Plan()
    assert plan.at(0) is None
    plan.put(7, np.arange(6, dtype=np.float64).reshape(3, 2))
    assert [None if row is None else row[0] for row in map(plan.at, (6, 7, 9, 10))] == [
        None,
        0,
        4,
        None,
    ]


def test_a_robot_of_another_kind_is_told_so(server: RunningServer) -> None:
    for name, model, said in (
        ("droid", "aloha", "14 values of state"),
        ("aloha", "droid", "no prefix outlives a state"),
        ("libero", "droid", "this robot has 8 and 7"),
    ):
        done = run(name, server.address, "--model", model)
        assert done.returncode == 1 and said in done.stderr, done.stderr


def test_driving_goes_on_when_the_server_restarts(tmp_path: Path) -> None:
    frames, _, _ = recorded()
    for i in range(4):
        Image.fromarray(frames[i]).save(tmp_path / f"{i}.png")
    running = RunningServer()
    driving: subprocess.Popen[str] | None = None
    try:
        running.wait_ready()
        arguments = ("--frames", str(tmp_path), "--steps", "35", "--hz", "5")
        driving = subprocess.Popen(
            command("driving", running.address, *arguments),
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert driving.stdout is not None
        lines = []
        for line in driving.stdout:
            lines.append(line)
            if line.startswith("step 5:"):
                running.process.kill()
                running.process.wait()
                time.sleep(0.5)
                running.start()
        assert driving.wait(60) == 0, "".join(lines)
        text = "".join(lines)
        assert re.search(r"back after .* the same model", text), text
        assert re.search(r"\d+ answered, \d+ failed, 1 reconnects", text), text
    finally:
        if driving is not None and driving.poll() is None:
            driving.kill()
        running.close()
