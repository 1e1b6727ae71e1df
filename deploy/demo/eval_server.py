"""A saccade-server of its own for eval.sh: the demo's policies on free loopback ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade import Client

DEMO = Path(__file__).resolve().parent
ROOT = DEMO.parents[1]
CAUSAL, FLOW = "highway_demo", "highway_flow"


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def policies() -> dict[str, Path]:
    """The checkpoints that are there, by the name they are served under."""
    folders = {CAUSAL: DEMO / "checkpoint", FLOW: DEMO / "flow"}
    return {name: path for name, path in folders.items() if (path / "config.json").exists()}


class Server:
    """A saccade-server on loopback with the demo's policies, each in F32 and BF16; `with` ends it."""

    def __init__(
        self,
        models: Sequence[str] = (CAUSAL,),
        binary: str = "",
        threads: int = 0,
        dtype: str = "f32",
    ) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.metrics = f"http://127.0.0.1:{free_port()}/metrics"
        self._folder = tempfile.TemporaryDirectory(prefix="saccade-eval-")
        config = Path(self._folder.name) / "server.yaml"
        config.write_text(self._config(models, threads, dtype))
        binary = (
            binary
            or os.environ.get("SACCADE_SERVER")
            or str(ROOT / "build" / "release" / "saccade-server")
        )
        self._process = subprocess.Popen(
            [binary, "serve", "--config", str(config)], stdout=sys.stderr
        )
        try:
            self._wait_ready(60.0)
        except BaseException:
            self.kill()
            raise

    def _wait_ready(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        with Client(self.address) as client:
            while True:
                if self._process.poll() is not None:
                    raise OSError(f"saccade-server ended with {self._process.returncode}")
                try:
                    return client.wait_ready(1.0)
                except TimeoutError:
                    if time.monotonic() > end:
                        raise

    def _config(self, models: Sequence[str], threads: int, dtype: str) -> str:
        entries = []
        for model in models:
            base = model.removesuffix("_bf16")
            entry = {
                "name": model,
                "path": str(policies()[base]),
                "dtype": "bf16" if model != base else dtype,
                "default_class": "driving",
                "kv": {"memory_mb": 64},
                "action_space": {
                    "steps": 5,
                    "dt_s": 0.2,
                    "dims": [{"name": "steer", "unit": "rad"}, {"name": "accel", "unit": "m/s^2"}],
                },
            }
            if base == FLOW:
                del entry["action_space"]  # its own folder says it
            entries.append(entry)
        # JSON is YAML. The classes are those of config/server.yaml, and one that degrades.
        return json.dumps(
            {
                "server": {
                    "listen": self.address,
                    "metrics_listen": self.metrics.split("/")[2],
                    "log": {"level": "warn"},
                },
                "backends": [{"name": "cpu", "kind": "cpu", "threads": threads}],
                "classes": [
                    _latency_class("control", 20, 0),
                    _latency_class("driving", 100, 0),
                    {**_latency_class("driving_degrades", 100, 0), "on_late": "degrade"},
                    _latency_class("perception", 50, 1),
                    _latency_class("planning", 100, 1),
                    {**_latency_class("best_effort", 0, 2), "on_late": "run_late"},
                ],
                "models": entries,
            },
            indent=1,
        )

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(30)
        finally:
            self.kill()

    def kill(self) -> None:
        """For sure."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.stop()
        self.kill()


def _latency_class(name: str, deadline_ms: int, tier: int) -> dict[str, Any]:
    return {
        "name": name,
        "deadline_ms": deadline_ms,
        "tier": tier,
        "on_late": "reject",
        "max_queued": 256,
    }
