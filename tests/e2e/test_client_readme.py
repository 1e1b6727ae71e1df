"""What client/README.md shows runs as it stands, against the real server."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DATA
from conftest import ROOT, RunningServer
from test_security import SECURITY

import saccade
from saccade import cli, images

README = (ROOT / "client" / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
COMMANDS = re.findall(r"^    (saccade .*)$", README, re.M)
FRAME = np.random.default_rng(3).integers(0, 256, (64, 64, 3), np.uint8)


def make_files(folder: Path) -> None:
    """Certificates and tokens, as SECURITY.md makes them."""
    for script in re.findall(r"```sh\n(.*?)```", SECURITY, re.DOTALL):
        subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, check=True)


def here(text: str, server: RunningServer) -> str:
    """With the addresses of the test's server."""
    for shown, real in (("127.0.0.1:50051", server.address), ("127.0.0.1:9090", server.metrics)):
        text = text.replace(shown, real)
    return text


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) == 7 and "Credentials" in PYTHON[-1]
    shown = {shlex.split(c)[1] for c in COMMANDS}
    assert shown == {
        "models",
        "status",
        "predict",
        "generate",
        "stream",
        "top",
        "admin",
        "eval",
        "report",
    }


@pytest.fixture(scope="module")
def flow_server() -> Iterator[RunningServer]:
    running = RunningServer(
        models=f"  - {{name: pi0, path: {DATA}/pi0/checkpoint, default_class: best_effort}}"
    )
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()


@pytest.mark.parametrize("number", range(len(PYTHON) - 1))
def test_a_block_of_python(
    server: RunningServer,
    flow_server: RunningServer,
    number: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = flow_server if 'model="pi0"' in PYTHON[number] else server
    block = compile(here(PYTHON[number], served), f"README block {number}", "exec")
    exec(block, {"jpeg_bytes": images.to_jpeg(FRAME), "__name__": "readme"})
    expected = {
        0: r"\[\[",
        1: r"not seen yet: \w+",
        2: r"0 reconnects",
        3: r"0 9 \d+",
        4: r"10 actions of 6 values, unspecified computed from \(0\.0, 0\.0",
        5: r"\[.* .*\] 0\.\d+",
    }[number]
    assert re.search(expected, capsys.readouterr().out)


def test_the_block_with_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path)
    keys = f"""
  tls: {{certificate: {tmp_path}/server.pem, key: {tmp_path}/server.key}}
  tokens_file: {tmp_path}/tokens"""
    running = RunningServer(server_keys=keys)
    try:
        files = saccade.Credentials(
            tls_ca=f"{tmp_path}/ca.pem", token_file=f"{tmp_path}/robot-7.token"
        )
        with saccade.Client(running.address, credentials=files) as client:
            client.wait_ready(30)
        monkeypatch.chdir(tmp_path)
        block = PYTHON[-1].replace("robot.example:50051", running.address)
        exec(compile(block.replace("...", "client.models()"), "README credentials", "exec"), {})
    finally:
        running.close()


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command(
    server: RunningServer,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if " eval " in line and not importlib.util.find_spec("highway_env"):
        pytest.skip("highway-env is missing")
    monkeypatch.chdir(tmp_path)
    if " report " in line:  # on what an eval left
        folder = tmp_path / shlex.split(line)[2]
        folder.mkdir(parents=True)
        (folder / "run.json").write_text('{"model": "highway_demo"}')
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    line = line.replace("6000067", "6000001")
    (tmp_path / "frames").mkdir()
    for name in ("frame.jpg", "frames/0.jpg", "frames/1.jpg"):
        (tmp_path / name).write_bytes(images.to_jpeg(FRAME))
    words = shlex.split(here(line, server))[1:]
    assert cli.main(["--address", server.address, *words]) == 0
    assert capsys.readouterr().out


def test_every_error_class_is_explained() -> None:
    errors = [
        name
        for name in saccade.__all__
        if isinstance(getattr(saccade, name), type)
        and issubclass(getattr(saccade, name), saccade.SaccadeError)
    ]
    assert len(errors) > 15
    assert [name for name in errors if f"`{name}`" not in README] == []
