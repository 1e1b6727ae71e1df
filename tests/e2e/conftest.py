"""A real server on loopback, one per test module."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client"))

from saccade import Client  # noqa: E402

BINARY = os.environ.get("SACCADE_SERVER", str(ROOT / "build" / "release" / "saccade-server"))


SANITIZER_REPORT = re.compile(r"\b(Address|Leak|Thread)Sanitizer\b|: runtime error: ")


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def tool(name: str) -> str:
    """A program of the package prometheus: installed, or unpacked by tests/run.sh."""
    found = shutil.which(name) or shutil.which(name, path=ROOT / "build" / "tools" / "usr" / "bin")
    assert found, f"{name} is neither installed nor unpacked; tests/run.sh does the latter"
    return found


def load_yaml(path: Path) -> Any:
    """A YAML file as plain data, read by the system's Python: deploy/setup.sh gives it python3-yaml."""
    script = "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1])), sys.stdout)"
    read = subprocess.run(
        ["/usr/bin/python3", "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert read.returncode == 0, f"{path}: {read.stderr}"
    return json.loads(read.stdout)


class RunningServer:
    """saccade-server with a configuration of the test's own; ended with the test whatever happens."""

    def __init__(self, extra: str = "", wrapper: Sequence[str] = (), **overrides: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.metrics = f"127.0.0.1:{free_port()}"
        drain_s = overrides.get("drain_s", "5")
        limits = overrides.get("limits", "{}")
        self.config = f"""
server:
  listen: "{self.address}"
  metrics_listen: "{self.metrics}"
  drain_s: {drain_s}{overrides.get("server_keys", "")}
limits: {limits}
models:
{overrides.get("models") or self._demo(overrides)}
{extra}
"""
        self.folder = tempfile.TemporaryDirectory(prefix="saccade-e2e-")
        path = Path(self.folder.name) / "server.yaml"
        path.write_text(self.config)
        self.log_path = Path(self.folder.name) / "log"
        self._command = [*wrapper, BINARY, "serve", "--config", str(path)]
        self.start()

    def start(self) -> None:
        """Starts it (again)."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    @staticmethod
    def _demo(overrides: Mapping[str, str]) -> str:
        """The entry of the shipped driving policy."""
        return f"""  - name: highway_demo
    path: {overrides.get("path", str(ROOT / "deploy" / "demo" / "checkpoint"))}
    default_class: {overrides.get("default_class", "best_effort")}
    action_space:
      steps: 5
      dt_s: 0.2
      relative: false
      dims:
        - {{name: steer, unit: rad}}
        - {{name: accel, unit: m/s^2}}"""

    def wait_ready(self) -> None:
        """Waits until requests are admitted; fails with the log when the server ends instead."""
        with Client(self.address) as client:
            try:
                client.wait_ready(30)
            except TimeoutError:
                pytest.fail(f"the server is not ready:\n{self.log()}")

    def log(self) -> str:
        """What it wrote so far."""
        return self.log_path.read_text(errors="replace")

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def close(self) -> None:
        """Ends it for sure. Fails when a sanitizer it was built with had something to report."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        log = self.log()
        self.folder.cleanup()
        assert not SANITIZER_REPORT.search(log), log


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A ready server that lives as long as the test module."""
    running = RunningServer()
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()
