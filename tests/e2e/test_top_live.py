"""`saccade top` against the real server: its figures under a known load, and its manners on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import ROOT, RunningServer

from saccade import Client, Late, SaccadeError

FRAME = np.random.default_rng(2).integers(0, 256, (64, 64, 3), np.uint8)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "client"), "TERM": "xterm"}


def command(server: RunningServer, *arguments: str) -> list[str]:
    top = ["top", "--metrics", server.metrics, *arguments]
    return [sys.executable, "-m", "saccade", "--address", server.address, *top]


@pytest.fixture(scope="module")
def busy(server: RunningServer) -> Iterator[RunningServer]:
    """The server with one robot in `planning`, every fourth of whose requests cannot be in time."""
    stop = threading.Event()

    def robot() -> None:
        with Client(server.address) as client:
            session = client.session(instruction="keep your lane", latency_class="planning")
            number = 0
            while not stop.is_set():
                number += 1
                session.send_frame(np.roll(FRAME, number, axis=0))
                with contextlib.suppress(SaccadeError):
                    session.act(deadline_s=30 if number % 4 else 1e-6)
                time.sleep(0.005)
            session.close()

    thread = threading.Thread(target=robot)
    thread.start()
    yield server
    stop.set()
    thread.join()


def test_one_frame_as_json_has_the_figures_of_the_load(busy: RunningServer) -> None:
    ran = subprocess.run(
        command(busy, "--once", "--json", "--interval", "1.5"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    view = json.loads(ran.stdout)
    assert view["status"]["ready"] and view["status_error"] == view["metrics_error"] == ""
    classes = {c["name"]: c for c in view["classes"]}
    assert list(classes) == ["control", "perception", "planning", "best_effort"]
    planning = classes["planning"]
    assert planning["deadline_s"] == pytest.approx(0.1)
    assert planning["answered_per_s"] > 1
    assert 0.5 < planning["met"] < 0.95  # three of four
    assert 0 < planning["p50"]["s"] <= planning["p99"]["s"]
    assert classes["control"]["met"] is None and classes["control"]["p99"] is None
    assert any(r["outcome"] == "refused" and r["total"] > 0 for r in view["reasons"])
    assert {p["name"] for p in view["partitions"]} == {"action", "state", "text", "vision"}
    assert all(p["free"] > 0 for p in view["partitions"])
    assert any(s["kind"] == "decode" and s["taken_s"] > 0 for s in view["steps"])
    (model,) = view["models"]
    assert model["model"] == "highway_demo" and model["sessions"] == 1
    assert model["frames_per_s"] > planning["answered_per_s"] and model["batch_mean"] > 0


def test_without_a_terminal_it_prints_one_plain_frame(busy: RunningServer) -> None:
    ran = subprocess.run(
        command(busy, "--interval", "0.3"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0 and ran.stderr == ""
    assert "\x1b" not in ran.stdout and "planning" in ran.stdout


def test_json_lines_end_quietly_with_their_reader(busy: RunningServer) -> None:
    with subprocess.Popen(
        command(busy, "--json", "--interval", "0.1"),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        first, second = (json.loads(running.stdout.readline()) for _ in range(2))
        assert first["window_s"] is None and second["window_s"] > 0
        running.stdout.close()
        assert running.wait(20) == 0
        assert running.stderr.read() == b""


class Terminal:
    """`saccade top` on a terminal of the test's own."""

    def __init__(self, server: RunningServer, rows: int, columns: int) -> None:
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        environment = {
            k: v for k, v in ENVIRONMENT.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            command(server, "--interval", "0.3"),
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # A test run in the background has it ignored, and hands that down.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(slave)
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, pattern: bytes) -> None:
        end = time.monotonic() + 20
        while not re.search(pattern, self.seen):
            assert time.monotonic() < end, self.seen[-3000:]
            self.read()

    def read(self) -> bool:
        if not select.select([self.master], [], [], 0.1)[0]:
            return True
        try:
            self.seen += os.read(self.master, 65536)
        except OSError:  # the other side is closed
            return False
        return True

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


def frames(seen: bytes) -> list[list[str]]:
    """The complete frames, without styles."""
    found = []
    for frame in seen.decode().split("\x1b[H")[1:]:
        if "\x1b[J" in frame:
            text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame.split("\x1b[J")[0])
            found.append(text.split("\r\n"))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_is_redrawn_resized_and_left_as_it_was(
    busy: RunningServer, number: signal.Signals
) -> None:
    terminal = Terminal(busy, 50, 120)
    try:
        terminal.read_until(rb"over \d[\s\S]*\x1b\[J")
        assert terminal.seen.startswith(b"\x1b[?1049h\x1b[?25l")
        assert b"\x1b[1;36mclasses" in terminal.seen
        full = frames(terminal.seen)[-1]
        assert any("planning" in line for line in full) and 20 < len(full) <= 50
        terminal.seen = b""
        terminal.resize(12, 40)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        terminal.read_until(rb"more lines[\s\S]*\x1b\[J")
        small = frames(terminal.seen)[-1]
        assert len(small) <= 12 and max(len(line) for line in small) <= 40
        os.kill(terminal.process.pid, number)
        end = time.monotonic() + 20
        while terminal.process.poll() is None and terminal.read() and time.monotonic() < end:
            pass
        assert terminal.process.wait(20) == 0
        while terminal.read() and not terminal.seen.rstrip().endswith(b"\x1b[?1049l"):
            pass
        assert terminal.seen.endswith(b"\x1b[?25h\x1b[?1049l")
        assert b"Traceback" not in terminal.seen
    finally:
        terminal.close()


def test_a_server_that_goes_away_is_shown_as_gone() -> None:
    running = RunningServer()
    terminal = None
    try:
        running.wait_ready()
        terminal = Terminal(running, 50, 140)
        terminal.read_until(rb"over \d[\s\S]*\x1b\[J")
        running.process.kill()
        terminal.read_until(rb"no answer: UNAVAILABLE[\s\S]*\x1b\[J")
        gone = frames(terminal.seen)[-1]
        assert "K/V blocks  no data: no metrics" in gone
    finally:
        if terminal is not None:
            terminal.close()
        running.close()


def test_refused_requests_are_counted_by_reason(server: RunningServer) -> None:
    with Client(server.address) as client, client.session(latency_class="control") as session:
        session.set_instruction("keep your lane")
        session.send_frame(FRAME)
        session.act(deadline_s=30)
        for _ in range(5):
            with pytest.raises(SaccadeError) as refused:
                session.act(deadline_s=1e-6)
            assert isinstance(refused.value, Late) or refused.value.reason == "EXPIRED"
    ran = subprocess.run(
        command(server, "--once", "--interval", "0.2"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    counted = re.findall(r"refused +(?:late|expired) +[\d.]+ +(\d+)", ran.stdout)
    assert sum(int(n) for n in counted) >= 5, ran.stdout
