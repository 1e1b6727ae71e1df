"""The real binary with TLS and tokens, made by the very commands that SECURITY.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import BINARY, ROOT, RunningServer

from saccade import Client, Credentials, RequestFailed

SECURITY = (ROOT / "SECURITY.md").read_text()


class Secured:
    """A server with everything on, and the files of its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for script in re.findall(r"```sh\n(.*?)```", SECURITY, re.DOTALL):
            subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, check=True)
        self.server = RunningServer(
            server_keys=f"""
  tls:
    certificate: {folder}/server.pem
    key: {folder}/server.key
    client_ca: {folder}/ca.pem
  tokens_file: {folder}/tokens
  log: {{level: trace}}"""
        )
        self.token = (folder / "robot-7.token").read_text()

    def files(self, **changes: str) -> Credentials:
        files = {
            "tls_ca": "ca.pem",
            "tls_cert": "client.pem",
            "tls_key": "client.key",
            "token_file": "robot-7.token",
            **changes,
        }
        return Credentials(**{k: str(self.folder / v) if v else "" for k, v in files.items()})


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    with tempfile.TemporaryDirectory(prefix="saccade-security-") as folder:
        made = Secured(Path(folder))
        try:
            with Client(made.server.address, credentials=made.files()) as client:
                client.wait_ready(30)
            yield made
        finally:
            made.server.close()


def code(secured: Secured, credentials: Credentials | None) -> str:
    with (
        Client(secured.server.address, credentials=credentials, timeout_s=5) as client,
        pytest.raises(RequestFailed) as failed,
    ):
        client.status()
    return failed.value.code


def test_who_has_everything_is_served(secured: Secured) -> None:
    frame = np.zeros((64, 64, 3), np.uint8)
    with Client(secured.server.address, credentials=secured.files()) as client:
        alone = client.predict(frame, "speed 24")
        with client.session(instruction="speed 24") as session:
            session.send_frame(frame)
            assert np.array_equal(session.act().values, alone.values)
        assert len(client.generate("speed 24").result().sequences) == 1
        assert [m.name for m in client.models()] == ["highway_demo"]


def test_who_lacks_something_is_not(secured: Secured) -> None:
    assert code(secured, None) == "UNAVAILABLE"
    assert code(secured, secured.files(tls_cert="", tls_key="")) == "UNAVAILABLE"
    assert code(secured, secured.files(token_file="")) == "UNAUTHENTICATED"
    (secured.folder / "other.token").write_text("0" * 64)
    assert code(secured, secured.files(token_file="other.token")) == "UNAUTHENTICATED"
    with (
        Client(secured.server.address, credentials=secured.files(token_file="")) as client,
        pytest.raises(RequestFailed) as refused,
        client.session(instruction="speed 24") as session,
    ):
        session.act()
    assert (refused.value.code, refused.value.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")


def test_the_command_line_and_the_health_command(secured: Secured) -> None:
    tls = ["--tls-ca", "ca.pem", "--tls-cert", "client.pem", "--tls-key", "client.key"]
    where = ["--address", secured.server.address]
    status = subprocess.run(
        [sys.executable, "-m", "saccade", *where, *tls, "--token-file", "robot-7.token", "status"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "client")},
        cwd=secured.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert status.returncode == 0 and "ready" in status.stdout, status.stderr
    for options, exit_code in ((tls, 0), ([], 1)):
        health = subprocess.run(
            [BINARY, "health", *where, *options],
            cwd=secured.folder,
            capture_output=True,
            check=False,
        )
        assert health.returncode == exit_code, health.stderr


@pytest.mark.parametrize(("version", "accepted"), [("1_1", False), ("1_2", True), ("1_3", True)])
def test_old_tls_is_refused(secured: Secured, version: str, accepted: bool) -> None:
    # Security level 0: the client would take the old versions, were they offered.
    tried = subprocess.run(
        [
            *("openssl", "s_client", "-connect", secured.server.address, f"-tls{version}"),
            *("-cipher", "ALL:@SECLEVEL=0", "-alpn", "h2", "-CAfile", "ca.pem"),
            *("-cert", "client.pem", "-key", "client.key", "-verify_return_error"),
        ],
        cwd=secured.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",  # the frames that the server sends
        timeout=20,
        check=False,
    )
    agreed = "Cipher is (NONE)" not in tried.stdout and "ALPN protocol: h2" in tried.stdout
    assert agreed == accepted, tried.stdout + tried.stderr


def test_secrets_are_written_nowhere(secured: Secured) -> None:
    """Last: the log holds the whole module, at its finest level."""
    with urllib.request.urlopen(f"http://{secured.server.metrics}/metrics", timeout=5) as answer:
        metrics = answer.read().decode()
    log = secured.server.log()
    assert "session opened" in log
    assert 'saccade_requests_refused_total{reason="unauthenticated"}' in metrics
    key = (secured.folder / "server.key").read_text().splitlines()[1]
    for secret in (secured.token, "0" * 64, key, secured.token[:16]):
        assert secret not in log
        assert secret not in metrics


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("listen: '0.0.0.0:1'", "beyond loopback; set server.tls and server.tokens_file"),
        ("tls: {certificate: none.pem, key: none.key}", "server.tls.certificate: "),
        ("tokens_file: none", "server.tokens_file: "),
    ],
)
def test_the_start_ends_with_what_is_wrong(tmp_path: Path, keys: str, said: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"server:\n  metrics_listen: ''\n  {keys}\nmodels:\n- {{name: m, path: p}}\n")
    ended = subprocess.run(
        [BINARY, "serve", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == 2
    assert said in ended.stderr
