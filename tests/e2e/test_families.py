"""Flow and FAST policies behind the real server: what they say of themselves, answers, and errors."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import Golden, golden, rewrite
from conftest import BINARY, RunningServer
from PIL import Image
from test_server import cli, metric

from saccade import (
    Actions,
    Client,
    Expired,
    Flow,
    InvalidActionToken,
    InvalidInput,
    Late,
    MissingInput,
    NoFrame,
    images,
)

FLOW = ("smolvla", "pi0", "pi05")
FAMILIES = (*FLOW, "pi0_fast")
GOLDEN = {name: golden(name) for name in FAMILIES}
DIMS = "".join(f", {{name: j{i}, unit: rad}}" for i in range(6))[2:]


def entry(name: str) -> str:
    """Of one family in a configuration."""
    return f"""  - name: {name}
    path: {GOLDEN[name].checkpoint}
    default_class: best_effort
    kv: {{memory_mb: 8}}
    action_space: {{steps: 10, dt_s: 0.05, dims: [{DIMS}]}}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(models="\n".join(entry(name) for name in FAMILIES))
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.address, timeout_s=30) as made:
        yield made


def ask(client: Client, case: Golden, **act: object) -> Actions:
    """The golden's question, or a variation of it."""
    defaults: dict[str, object] = {
        "images_by_camera": case.frames,
        "instruction": case.task,
        "model": case.name,
        "state": case.state,
    }
    return client.predict(**{**defaults, **act})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_says_what_it_expects(client: Client, name: str) -> None:
    pi = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    with client.session(model=name) as session:
        model, space = session.model, session.action_space
    assert [m for m in client.models() if m.name == name] == [model]
    assert (model.family, model.state_dim, model.compute_type) == (name, 7, "f32")
    assert tuple(c.name for c in model.cameras) == (("top", "wrist") if name == "smolvla" else pi)
    size = 128 if name == "smolvla" else 56
    assert {(c.width, c.height, c.required) for c in model.cameras} == {(size, size, False)}
    assert (model.flow_steps, model.flow_width) == ((0, 0) if name == "pi0_fast" else (10, 32))
    assert (space.steps, space.dim, space.reference, space.dt_s) == (10, 6, "absolute", 0.05)
    assert [(d.name, d.unit) for d in space.dimensions] == [(f"j{i}", "rad") for i in range(6)]
    # SmolVLA: two of four layers are cached twice, for the trunk and for the expert.
    expected = {"smolvla": 6 * 2 * 2 * 16 * 4}.get(name, 3 * 2 * 1 * 16 * 4)
    assert model.kv_bytes_per_token == expected


@pytest.mark.parametrize("name", FLOW)
def test_answers_equal_the_reference(client: Client, name: str) -> None:
    case = GOLDEN[name]
    noise = case.tensors["noise"]
    expected = case.tensors["actions"][0]
    alone = ask(client, case, flow=Flow(noise=noise))
    np.testing.assert_allclose(alone.values, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(
        alone.samples[0].normalized, case.tensors["actions_normalized"][0], rtol=0, atol=2e-6
    )
    assert alone.samples[0].token_ids.size == 0
    assert [f.camera for f in alone.frames] == list(case.frames)
    with client.session(model=name, instruction=case.task) as session:
        session.set_state(case.state, capture_time_ns=77)
        for camera, pixels in case.frames.items():
            session.send_frame(pixels, camera, capture_time_ns=5)
        actions = session.act(flow=Flow(noise=noise))
        np.testing.assert_array_equal(actions.values, alone.values)
        assert actions.state == pytest.approx(case.state) and actions.state_capture_time_ns == 77
        # Two samples: the second begins with other noise, the first keeps its bits.
        both = session.act(samples=2, flow=Flow(noise=np.concatenate([noise, -noise])))
        np.testing.assert_array_equal(both.samples[0].values, alone.values)
        assert np.abs(both.samples[1].values - alone.values).max() > 0.01
        assert both.tokens["vision"].cached == both.tokens["vision"].total > 0


def test_a_class_that_degrades_answers_with_fewer_steps_in_time() -> None:
    classes = """classes:
  - {name: best_effort, tier: 1, on_late: run_late}
  - {name: squeezed, tier: 0, on_late: degrade}"""
    running = RunningServer(models=entry("pi05"), extra=classes)
    try:
        running.wait_ready()
        with Client(running.address, timeout_s=30) as client:
            assert [c.degrades for c in client.status().classes] == [False, True]
            case, most, samples = GOLDEN["pi05"], 200, {"samples": 16, "seed": 1}
            whole = 0.0
            for _ in range(3):  # its step times are learned
                answer = ask(client, case, flow=Flow(most), **samples)
                assert (answer.flow_steps, answer.degradation) == (most, ())
                whole = answer.timings.total_s
            squeezed = {**samples, "latency_class": "squeezed", "deadline_s": whole / 2}
            # Nothing says that it may have fewer.
            with pytest.raises(Late):
                ask(client, case, flow=Flow(most), **squeezed)
            cut: list[Actions] = []
            for _ in range(10):  # a busy machine may miss a deadline all the same
                with contextlib.suppress(Late, Expired):
                    cut.append(ask(client, case, flow=Flow(most, least_steps=2), **squeezed))
                    break
                # What it takes now may be longer than it was.
                whole = ask(client, case, flow=Flow(most), **samples).timings.total_s
                squeezed["deadline_s"] = whole / 2
            (answer,) = cut
            assert answer.degradation == ("fewer_flow_steps",) and answer.deadline_met
            assert 2 <= answer.flow_steps < most
            # As good as if it had been asked for so many.
            same = ask(client, case, flow=Flow(answer.flow_steps), **samples)
            np.testing.assert_array_equal(answer.values, same.values)
            degraded = 'saccade_requests_degraded_total{class="squeezed"}'
            assert metric(running, degraded) >= 1
            with pytest.raises(InvalidInput, match="least_flow_steps"):
                ask(client, case, flow=Flow(least_steps=1001))
    finally:
        running.close()


@pytest.mark.parametrize("name", FLOW)
def test_cameras_are_bound_by_name(client: Client, name: str) -> None:
    """In whatever order they come; one picture for two cameras is as good as two."""
    case = GOLDEN[name]
    flow = Flow(noise=case.tensors["noise"])
    expected = ask(client, case, flow=flow).values
    (first, one), (second, other) = case.frames.items()
    with client.session(model=name, instruction=case.task) as session:
        session.set_state(case.state)
        for camera, pixels in ((second, other), (first, one)):
            session.send_frame(pixels, camera)
        np.testing.assert_array_equal(session.act(flow=flow).values, expected)
        session.send_frame(one, second)
        same = session.act(flow=flow).values
        session.send_frame(other, second)
        np.testing.assert_array_equal(session.act(flow=flow).values, expected)
    backwards = ask(client, case, images_by_camera={second: other, first: one}, flow=flow)
    np.testing.assert_array_equal(backwards.values, expected)
    twice = ask(client, case, images_by_camera={first: one, second: one}, flow=flow)
    np.testing.assert_array_equal(twice.values, same)
    swapped = ask(client, case, images_by_camera={first: other, second: one}, flow=flow)
    assert len({a.tobytes() for a in (expected, same, swapped.values)}) == 3


def test_a_policy_that_serves_the_first_actions_of_its_chunk(tmp_path: Path) -> None:
    """Noise and committed actions are of the whole chunk: as the reference, which denoises it all."""
    case = GOLDEN["smolvla"]
    folder = tmp_path / "checkpoint"
    shutil.copytree(case.checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    rewrite(folder / "config.json", {**config, "n_action_steps": 4})
    running = RunningServer(
        models=f"  - {{name: smolvla, path: {folder}, default_class: best_effort}}"
    )
    try:
        running.wait_ready()
        with Client(running.address, timeout_s=30) as client:
            (model,) = client.models()
            assert (model.flow_actions, model.flow_width) == (10, 32)
            assert model.statistics["default"].steps == 4
            noise = case.tensors["noise"]
            answer = ask(client, case, flow=Flow(noise=noise))
            expected = case.tensors["actions"][0][:4]
            np.testing.assert_allclose(answer.values, expected, rtol=0, atol=2e-6)
            with pytest.raises(InvalidInput, match="320"):
                ask(client, case, flow=Flow(noise=noise[:, :4]))
            # Nine of ten may be committed: all that is answered is, then.
            ahead = case.tensors["actions_normalized"][0][:9]
            again = ask(client, case, seed=3, flow=Flow(committed=ahead))
            np.testing.assert_allclose(again.values, expected, rtol=0, atol=1e-5)
            with pytest.raises(InvalidInput, match="below 60"):
                ask(client, case, flow=Flow(committed=case.tensors["actions_normalized"][0]))
    finally:
        running.close()


def test_tokens_that_are_no_actions_fail_and_never_become_zeros(client: Client) -> None:
    """The weights of the golden are random: what they write is no whole chunk."""
    case = GOLDEN["pi0_fast"]
    with pytest.raises(InvalidActionToken) as failed:
        ask(client, case)
    assert (failed.value.code, failed.value.reason) == ("INTERNAL", "INVALID_ACTION_TOKEN")


@pytest.mark.parametrize("name", FLOW)
def test_a_camera_more_changes_the_answer_and_none_is_refused(client: Client, name: str) -> None:
    case = GOLDEN[name]
    flow = Flow(noise=case.tensors["noise"])
    first, second = case.frames
    fewer = ask(client, case, images_by_camera={first: case.frames[first]}, flow=flow)
    assert [f.camera for f in fewer.frames] == [first]
    assert np.abs(fewer.values - case.tensors["actions"][0]).max() > 1e-4
    if name != "smolvla":
        more = {**case.frames, "right_wrist_0_rgb": case.frames[second]}
        assert (
            np.abs(
                ask(client, case, images_by_camera=more, flow=flow).values
                - case.tensors["actions"][0]
            ).max()
            > 1e-4
        )
    with pytest.raises(NoFrame):
        ask(client, case, images_by_camera={}, flow=flow)
    with pytest.raises(InvalidInput, match="cam_high") as unknown:
        ask(client, case, images_by_camera={"cam_high": case.frames[first]})
    assert first in unknown.value.message  # it lists those there are


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrong_state_names_the_field(client: Client, name: str) -> None:
    case = GOLDEN[name]
    with pytest.raises(MissingInput) as missing:
        ask(client, case, state=None)
    assert missing.value.field == "state"
    for wrong in (case.state[:-1], [*case.state, 0.0], [float("nan"), *case.state[1:]]):
        with pytest.raises(InvalidInput) as refused:
            ask(client, case, state=wrong)
        assert refused.value.field.startswith("state"), refused.value
    with client.session(model=name, instruction=case.task) as session:
        for camera, pixels in case.frames.items():
            session.send_frame(pixels, camera)
        with pytest.raises(MissingInput) as missing:
            session.act()
        assert missing.value.field == "state"
        session.set_state([float("inf")] * 7)
        with pytest.raises(MissingInput):
            session.act()
        assert [e.field.partition(".")[0] for e in session.message_errors] == ["state"]
    with pytest.raises(InvalidInput):
        ask(client, case, flow=Flow(steps=3) if name == "pi0_fast" else Flow(steps=1001))


def test_wrong_flow_parameters_name_the_field(client: Client) -> None:
    case = GOLDEN["pi0"]
    noise = case.tensors["noise"].copy()
    with pytest.raises(InvalidInput) as short:
        ask(client, case, flow=Flow(noise=noise[:, :-1]))
    assert short.value.field == "act.noise" and "320" in short.value.message
    noise[0, 3, 4] = np.nan
    with pytest.raises(InvalidInput) as nan:
        ask(client, case, flow=Flow(noise=noise))
    assert nan.value.field == "act.noise"
    with pytest.raises(InvalidInput) as warm:
        ask(client, case, temperature=0.5)
    assert warm.value.field == "act.temperature"


def test_many_clients_get_the_bits_they_get_alone(server: RunningServer, client: Client) -> None:
    """Other seeds, steps, samples and states at once, on three models in the same server."""
    questions = [(name, seed, 1 + seed % 4 * 3, 1 + seed % 3) for name in FLOW for seed in range(6)]

    def answer(own: Client, question: tuple[str, int, int, int]) -> list[npt.NDArray[np.float64]]:
        name, seed, steps, samples = question
        case = GOLDEN[name]
        state = [x + 0.01 * seed for x in case.state]
        actions = ask(own, case, state=state, seed=seed, samples=samples, flow=Flow(steps=steps))
        return [sample.values for sample in actions.samples]

    alone = [answer(client, question) for question in questions]
    assert len({values.tobytes() for samples in alone for values in samples}) == sum(
        len(samples) for samples in alone
    )
    wrong: list[tuple[str, int, int, int]] = []
    ready = threading.Barrier(6)

    def drive(offset: int) -> None:
        with Client(server.address, timeout_s=60) as own:
            ready.wait()
            for i in range(len(questions)):
                at = (offset * 5 + i) % len(questions)
                if any(
                    not np.array_equal(a, b)
                    for a, b in zip(answer(own, questions[at]), alone[at], strict=True)
                ):
                    wrong.append(questions[at])

    threads = [threading.Thread(target=drive, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert client.admin.broken_invariant() == ""


@pytest.mark.parametrize("name", ("smolvla", "pi0"))
def test_acts_read_refreshed_prefixes(client: Client, name: str) -> None:
    case = GOLDEN[name]
    flow = Flow(noise=case.tensors["noise"])
    with client.session(model=name, instruction=case.task, refresh_class="best_effort") as session:
        session.set_state(case.state)
        for camera, pixels in case.frames.items():
            session.send_frame(pixels, camera)
        np.testing.assert_allclose(
            session.act(flow=flow).values, case.tensors["actions"][0], rtol=0, atol=2e-6
        )
        # The state is no part of a prefix: it is the newest one's answer that comes.
        other = [x + 0.25 for x in case.state]
        session.set_state(other)
        moved = session.act(flow=flow)
        np.testing.assert_array_equal(
            moved.values, ask(client, case, state=other, flow=flow).values
        )
        pushed: list[object] = []
        three = threading.Event()

        def on_actions(outcome: object) -> None:
            pushed.append(outcome)
            if len(pushed) >= 3:
                three.set()

        session.push(hz=50, on_actions=on_actions, flow=flow)
        assert three.wait(20)
        session.stop_push()
    for outcome in pushed:
        assert isinstance(outcome, Actions), outcome
        np.testing.assert_array_equal(outcome.values, moved.values)


@pytest.mark.parametrize("name", ("pi05", "pi0_fast"))
def test_a_state_in_the_text_has_no_refreshed_prefix(client: Client, name: str) -> None:
    with (
        pytest.raises(InvalidInput, match="state") as refused,
        client.session(model=name, refresh_class="best_effort"),
    ):
        pass
    assert refused.value.field.endswith("refresh_class")


@pytest.mark.parametrize("name", FLOW)
def test_a_picture_is_the_same_in_any_container(client: Client, name: str) -> None:
    case = GOLDEN[name]
    flow = Flow(noise=case.tensors["noise"])
    files = {camera: images.to_jpeg(pixels) for camera, pixels in case.frames.items()}
    from_jpeg = ask(client, case, images_by_camera=files, flow=flow)

    decoded = {camera: np.asarray(Image.open(io.BytesIO(data))) for camera, data in files.items()}
    np.testing.assert_array_equal(
        ask(client, case, images_by_camera=decoded, flow=flow).values, from_jpeg.values
    )
    difference = np.abs(from_jpeg.values - case.tensors["actions"][0]).max()
    assert 0 < difference < 0.2  # JPEG loses something, not everything


def test_a_reload_leaves_the_others_alone(client: Client) -> None:
    case = GOLDEN["smolvla"]
    expected = ask(client, case, seed=4)
    stop = threading.Event()
    answers: list[bool] = []

    def keep_asking() -> None:
        with client.session(model="smolvla", instruction=case.task) as session:
            session.set_state(case.state)
            for camera, pixels in case.frames.items():
                session.send_frame(pixels, camera)
            while not stop.is_set():
                answers.append(np.array_equal(session.act(seed=4).values, expected.values))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    before = {m.name: m.fingerprint for m in client.models()}
    for name in ("pi0", "pi05"):
        reloaded = client.admin.reload(name, grace_s=1)
        assert reloaded.fingerprint == before[name]
        again = ask(client, GOLDEN[name], flow=Flow(noise=GOLDEN[name].tensors["noise"]))
        np.testing.assert_allclose(
            again.values, GOLDEN[name].tensors["actions"][0], rtol=0, atol=2e-6
        )
    stop.set()
    asking.join()
    assert len(answers) > 0 and all(answers)
    assert client.admin.broken_invariant() == ""


def test_the_command_line(server: RunningServer, tmp_path: Path) -> None:
    case = GOLDEN["pi0"]
    (tmp_path / "frames").mkdir()
    for camera, pixels in case.frames.items():
        Image.fromarray(pixels).save(tmp_path / f"{camera}.png")
        Image.fromarray(pixels).save(tmp_path / "frames" / f"{camera}.png")
    listed = cli(server, "models").stdout
    assert "denoises in 10 steps; noise of 32 values an action" in listed
    assert "base_0_rgb 56x56 (may be missing)" in listed
    request = ["--model", "pi0", "--instruction", case.task, "--json"]
    state = "--state=" + ",".join(repr(value) for value in case.state)
    pictures = [f"--image={camera}={tmp_path / camera}.png" for camera in case.frames]
    done = cli(server, "predict", *request, state, *pictures, "--seed", "3", "--flow-steps", "4")
    assert done.returncode == 0, done.stderr
    with Client(server.address) as client:
        expected = ask(client, case, seed=3, flow=Flow(steps=4))
    assert json.loads(done.stdout)["values"][0] == expected.values.tolist()
    folder = ["--frames", str(tmp_path / "frames"), "--camera", "base_0_rgb", "--hz", "50"]
    streamed = cli(server, "stream", *request, state, *folder)
    assert streamed.returncode == 0 and len(streamed.stdout.splitlines()) == 2, streamed.stderr
    assert "state" in cli(server, "predict", *request, *pictures).stderr
    nameless = cli(server, "stream", *request, state, *folder[:2], "--hz", "50")
    assert nameless.returncode == 1 and 'no camera ""' in nameless.stdout


def test_inspect_and_check_config_say_what_serving_will_take(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("models:\n" + "\n".join(entry(name) for name in FAMILIES) + "\n")
    checked = subprocess.run(
        [BINARY, "check-config", "--config", str(config)],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in FAMILIES:
        assert re.search(rf"#   model {name}: weights \d.*kv_cache \d", checked.stdout)
        described = subprocess.run(
            [BINARY, "inspect", str(GOLDEN[name].checkpoint)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        head = "FAST, 10 actions in at most 24" if name == "pi0_fast" else "10 actions in 10 steps"
        for said in (name, head, "may be missing", "default, 6 action values", " B per token"):
            assert said in described


@pytest.mark.parametrize("name", [*FAMILIES, "openvla", "openvla_oft"])
@pytest.mark.parametrize(
    "command", [["inspect", "--json"], ["bench", "--repetitions", "1", "--model"]]
)
def test_standard_output_of_a_command_is_json_alone(name: str, command: list[str]) -> None:
    folder = Path(__file__).parents[1] / "golden" / "data" / name / "checkpoint"
    run = subprocess.run(
        [BINARY, *command, folder], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(run.stdout)["family"] == name
