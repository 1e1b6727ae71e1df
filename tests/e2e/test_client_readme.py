"""What client/README.md shows runs as it stands, against the real server."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, RunningServer

import saccade
from saccade import cli, images

README = (ROOT / "client" / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
COMMANDS = re.findall(r"^    (saccade .*)$", README, re.M)
FRAME = np.random.default_rng(3).integers(0, 256, (64, 64, 3), np.uint8)


def here(text: str, server: RunningServer) -> str:
    """With the addresses of the test's server."""
    for shown, real in (("127.0.0.1:50051", server.address), ("127.0.0.1:9090", server.metrics)):
        text = text.replace(shown, real)
    return text


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) == 4
    assert {shlex.split(c)[1] for c in COMMANDS} == {"models", "status", "predict", "stream", "top"}


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_a_block_of_python(
    server: RunningServer, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    block = compile(here(PYTHON[number], server), f"README block {number}", "exec")
    exec(block, {"jpeg_bytes": images.to_jpeg(FRAME), "__name__": "readme"})
    expected = {0: r"\[\[", 1: r"not seen yet: \w+", 2: r"0 reconnects", 3: r"0 9 \d+"}[number]
    assert re.search(expected, capsys.readouterr().out)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command(
    server: RunningServer,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
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
