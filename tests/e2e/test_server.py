"""The real binary, the real client, the shipped demo checkpoint."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from conftest import BINARY, ROOT, RunningServer, free_port
from PIL import Image

from saccade import Client, RequestFailed, SessionClosed
from saccade.v1 import inference_pb2, inference_pb2_grpc

FRAMES = ROOT / "tests" / "golden" / "data" / "demo_frames"


def recorded() -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Frames, the reference's tokens, instructions."""
    meta = json.loads((FRAMES / "frames.json").read_text())
    with np.load(FRAMES / "frames.npz") as data:
        return data["frames"], data["tokens"], meta["instructions"]


def jpeg(frame: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "JPEG", quality=95, subsampling=0)
    return out.getvalue()


def cli(server: RunningServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "saccade", "--address", server.address, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "client")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def metric(server: RunningServer, name: str, label: str = "") -> float:
    """Sum of a metric's samples that carry `label`, of which there must be one."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if re.match(rf"{name}[{{ ]", line) and label in line]
    assert found, f"no {name} with {label}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_answers_equal_the_reference(server: RunningServer) -> None:
    frames, tokens, instructions = recorded()
    with Client(server.address) as client:
        for i in range(0, 60, 12):
            got = client.predict(frames[i], instructions[i]).samples[0].token_ids.reshape(-1)
            assert np.abs(got - tokens[i]).max() <= 1


def test_session_and_predict_agree_and_the_cache_is_hit(server: RunningServer) -> None:
    frames, _, instructions = recorded()
    with Client(server.address) as client, client.session(instruction=instructions[1]) as session:
        alone = client.predict(frames[1], instructions[1])
        session.send_frame(frames[1], capture_time_ns=123)
        first = session.act()
        second = session.act()
    assert np.array_equal(alone.samples[0].token_ids, first.samples[0].token_ids)
    assert np.array_equal(first.values, second.values)
    assert first.frames[0].capture_time_ns == 123
    assert second.frames_cached
    assert second.tokens["vision"].cached == second.tokens["vision"].total == 256
    assert first.space.steps == 5 and first.space.dim == 2


def test_a_bad_frame_or_request_does_not_end_the_stream(server: RunningServer) -> None:
    frames, _, instructions = recorded()
    with Client(server.address) as client, client.session(instruction=instructions[0]) as session:
        with pytest.raises(RequestFailed) as no_frame:
            session.act()
        assert no_frame.value.reason == "NO_FRAME"
        session.send_frame(b"no image at all")
        session.send_frame(jpeg(frames[0])[:500])
        session.send_frame(frames[0], camera="elsewhere")
        session.send_frame(frames[0])
        with pytest.raises(RequestFailed) as unknown:
            session.act(latency_class="no_such_class")
        assert unknown.value.code == "INVALID_ARGUMENT"
        assert session.act().samples[0].token_ids.size == 10
        assert len(session.message_errors) == 3


def test_what_is_missing_or_wrong_is_named(server: RunningServer) -> None:
    frames, _, instructions = recorded()
    with Client(server.address) as client, client.session() as session:
        session.send_frame(frames[0])
        with pytest.raises(RequestFailed) as missing:
            session.act()
        assert (missing.value.code, missing.value.reason, missing.value.field) == (
            "FAILED_PRECONDITION",
            "MISSING_INPUT",
            "text",
        )
        session.set_instruction(instructions[0])
        first = session.act().samples[0].token_ids
        session.set_instruction("x" * 4000)  # within the limit of bytes, too long for the model
        # The earlier instruction stays in force.
        assert np.array_equal(session.act().samples[0].token_ids, first)
        (refused,) = session.message_errors
        assert (refused.code, refused.reason, refused.field) == (
            "INVALID_ARGUMENT",
            "NEVER_FITS",
            "text.instruction",
        )


def test_many_clients_at_once_get_the_answer_each_would_get_alone(server: RunningServer) -> None:
    frames, _, instructions = recorded()
    alone = []
    with Client(server.address) as client:
        for i in range(8):
            alone.append(client.predict(frames[i], instructions[i]).samples[0].token_ids)
        errors: list[str] = []

        def run(i: int) -> None:
            with client.session(instruction=instructions[i]) as session:
                for _ in range(5):
                    session.send_frame(frames[i])
                    if not np.array_equal(session.act().samples[0].token_ids, alone[i]):
                        errors.append(f"client {i} got another answer")

        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert errors == []


def test_samples_differ_by_seed_only(server: RunningServer) -> None:
    frames, _, instructions = recorded()
    with Client(server.address) as client:
        ask = {"samples": 4, "temperature": 1.0}
        a = client.predict(frames[3], instructions[3], seed=1, **ask)
        b = client.predict(frames[3], instructions[3], seed=1, **ask)
        c = client.predict(frames[3], instructions[3], seed=2, **ask)
    ids = [[s.token_ids.tolist() for s in x.samples] for x in (a, b, c)]
    assert ids[0] == ids[1] != ids[2]
    assert len({json.dumps(s) for s in ids[0]}) > 1


def test_a_late_request_is_refused_not_shown_as_on_time(server: RunningServer) -> None:
    frames, _, instructions = recorded()
    with Client(server.address) as client, client.session(latency_class="control") as session:
        session.set_instruction(instructions[0])
        session.send_frame(frames[0])
        with pytest.raises(RequestFailed) as late:
            session.act(deadline_s=1e-6)
        assert late.value.code == "DEADLINE_EXCEEDED"
        assert late.value.reason in ("LATE", "EXPIRED")


def test_a_grpc_deadline_is_the_requests_deadline(server: RunningServer) -> None:
    frames, _, instructions = recorded()
    with Client(server.address) as client:
        with pytest.raises(RequestFailed) as expired:
            client.predict(frames[0], instructions[0], timeout_s=0.001)
        assert expired.value.code == "DEADLINE_EXCEEDED"
        assert client.predict(frames[0], instructions[0], timeout_s=20).deadline_s <= 21


def test_bytes_that_are_no_message_are_an_error_and_no_line_in_the_log(
    server: RunningServer,
) -> None:
    before = server.log()
    with grpc.insecure_channel(server.address) as channel:
        predict = channel.unary_unary("/saccade.v1.Inference/Predict")
        for payload in (b"\xff", b"\x0a\x02\xff\xfe"):  # the second: a name that is not UTF-8
            with pytest.raises(grpc.RpcError) as refused:
                predict(payload, timeout=20)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "no message of this call" in refused.value.details()
    assert server.log() == before


def test_a_vanished_client_frees_everything(server: RunningServer) -> None:
    frames, _, instructions = recorded()
    channel = grpc.insecure_channel(server.address)
    stub = inference_pb2_grpc.InferenceStub(channel)

    def requests() -> object:
        yield inference_pb2.SessionRequest(open=inference_pb2.Open(instruction=instructions[0]))
        vision = inference_pb2.VisionFrame(encoded=jpeg(frames[0]))
        yield inference_pb2.SessionRequest(vision=vision)
        for i in range(1, 9):
            yield inference_pb2.SessionRequest(act=inference_pb2.ActRequest(id=i))
        time.sleep(60)

    call = stub.Session(requests())
    next(call)
    channel.close()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        held = metric(server, "saccade_kv_blocks", 'state="held"')
        sessions = metric(server, "saccade_sessions")
        if held == 0 and sessions == 0:
            break
        time.sleep(0.05)
    assert held == 0 and sessions == 0


def test_command_line(server: RunningServer, tmp_path: Path) -> None:
    frames, _, instructions = recorded()
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(frames[i]))
    models = cli(server, "models")
    assert models.returncode == 0 and "highway_demo" in models.stdout
    status = cli(server, "status")
    assert status.returncode == 0 and "ready" in status.stdout
    predict = cli(
        server, "predict", "--image", str(tmp_path / "0.jpg"), "--instruction", instructions[0]
    )
    assert predict.returncode == 0 and "step 4" in predict.stdout, predict.stderr
    stream = cli(
        server,
        *("stream", "--frames", str(tmp_path), "--hz", "20", "--instruction", instructions[0]),
        "--json",
    )
    assert stream.returncode == 0 and len(stream.stdout.splitlines()) == 3
    missing = cli(server, "predict", "--image", "/no/such.jpg", "--instruction", "x")
    assert missing.returncode == 2 and "no/such.jpg" in missing.stderr


def test_metrics_pass_promtool(server: RunningServer) -> None:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5) as answer:
        text = answer.read()
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr.decode() + checked.stdout.decode()


def test_health_subcommand(server: RunningServer) -> None:
    healthy = subprocess.run([BINARY, "health", "--address", server.address], check=False)
    assert healthy.returncode == 0
    nobody = subprocess.run([BINARY, "health", "--address", "127.0.0.1:1"], check=False)
    assert nobody.returncode == 1


def test_sigterm_drains_and_exits_0() -> None:
    frames, _, instructions = recorded()
    running = RunningServer()
    try:
        running.wait_ready()
        with Client(running.address) as client:
            session = client.session(instruction=instructions[0])
            session.send_frame(frames[0])
            futures = [session.act_async() for _ in range(4)]
            futures[0].result(20)
            running.process.send_signal(signal.SIGTERM)
            answered = 0
            for future in futures:
                try:
                    future.result(20)
                    answered += 1
                except (RequestFailed, SessionClosed) as error:
                    assert "shutting down" in str(error) or "DRAINING" in str(error), error
            assert answered >= 1
        assert running.process.wait(20) == 0, running.log()
    finally:
        running.close()


def blocks_sigterm(pid: int) -> bool:
    """Whether the process, once it runs our binary, waits for SIGTERM itself."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_sigterm_while_starting_exits_0() -> None:
    for delay_s in (0.0, 0.01, 0.03, 0.1):
        running = RunningServer()
        try:
            end = time.monotonic() + 10
            while not blocks_sigterm(running.process.pid) and time.monotonic() < end:
                pass
            time.sleep(delay_s)
            assert running.terminate() == 0, running.log()
        finally:
            running.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("- name: highway_demo\n", "expected a section"),
        ("models: [{name: a, path: a}]\nlimits: {acts_per_sec: 5}\n", "acts_per_s"),
        ("models: [{name: a, path: a}]\nserver: {drain_s: -1}\n", "drain_s"),
    ],
)
def test_a_bad_configuration_names_the_key_and_exits_2(
    tmp_path: Path, change: str, named: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(change)
    for command in ("check-config", "serve"):
        ended = subprocess.run(
            [BINARY, command, "--config", str(path)], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 2
        assert named in ended.stderr and str(path) in ended.stderr, ended.stderr


def test_a_port_in_use_is_said_and_exits_1(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "same.yaml"
    path.write_text(server.config)
    ended = subprocess.run(
        [BINARY, "serve", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert server.address in ended.stderr or server.metrics in ended.stderr
    path.write_text(server.config.replace(server.metrics, f"127.0.0.1:{free_port()}"))
    ended = subprocess.run(
        [BINARY, "serve", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    # One clear line of ours, none of gRPC's.
    assert ended.stderr.splitlines() == [
        f"saccade-server: server.listen: cannot listen on {server.address}"
    ]
