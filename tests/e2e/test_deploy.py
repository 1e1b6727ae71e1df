"""What deploy/compose.yaml, deploy/grafana/provisioning and deploy/systemd promise, as far as files can show it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BINARY, ROOT, RunningServer, load_yaml

from saccade import Client

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "saccade-server.service"
DRAIN_S = max(
    load_yaml(ROOT / "config" / name)["server"]["drain_s"]
    for name in ("service.yaml", "container.yaml")
)


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = load_yaml(DEPLOY / "compose.yaml")
    return loaded


def cost_file(name: str) -> Path:
    """Where a shipped configuration keeps learned step times."""
    return Path(load_yaml(ROOT / "config" / name)["scheduler"]["cost_file"])


@pytest.mark.parametrize("name", ["service.yaml", "container.yaml"])
def test_a_deployed_server_serves_what_the_default_one_does(name: str) -> None:
    path = ROOT / "config" / name
    checked = subprocess.run(
        [BINARY, "check-config", "--config", str(path)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    config, default = load_yaml(path), load_yaml(ROOT / "config" / "server.yaml")
    for model in (config["models"][0], default["models"][0]):
        del model["default_class"]  # the default has one of its own
    assert config["models"] == default["models"]
    assert config["backends"][0]["kind"] == default["backends"][0]["kind"]


def defaulted(text: str) -> str:
    """Variables replaced by their defaults."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("name", ["server", "prometheus", "grafana"])
def test_a_service_is_hardened_and_limited(name: str) -> None:
    service = compose()["services"][name]
    # A key that is not listed could take back what the others give: it has to be looked at here first.
    assert set(service) <= {
        *("image", "user", "command", "environment", "volumes", "tmpfs", "ports", "networks"),
        *("restart", "read_only", "cap_drop", "security_opt", "logging", "stop_grace_period"),
        *("pids_limit", "cpus", "mem_limit", "healthcheck", "depends_on"),
    }
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    user, group = service["user"].split(":")
    assert int(user) > 0 and int(group) > 0
    assert int(service["pids_limit"]) > 0
    assert float(defaulted(str(service["cpus"]))) > 0
    assert re.fullmatch(r"\d+[mg]", defaulted(service["mem_limit"]))
    assert service["restart"] == "unless-stopped"
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    # An image by variable, with a fixed version as the default.
    assert re.fullmatch(r"\$\{[A-Z]+_IMAGE:-[\w./-]+:v?\d+\.\d+\.\d+\}", service["image"])
    check = service["healthcheck"]
    assert check["test"][0] == "CMD" and {"interval", "timeout", "retries"} <= set(check)
    for port in service["ports"]:
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), f"{port} is not on loopback"
    assert set(service["networks"]) <= set(compose()["networks"])


def test_what_is_mounted_is_there_and_cannot_be_written() -> None:
    volumes = []
    for name, service in compose()["services"].items():
        for mount in service["volumes"]:
            if mount["type"] == "volume":
                volumes.append(mount["source"])
                continue
            assert mount["type"] == "bind" and mount["read_only"] is True, f"{name}: {mount}"
            source = defaulted(mount["source"])
            assert (DEPLOY / source).exists() and not source.startswith("/"), f"{name}: {mount}"
    assert sorted(volumes) == sorted(compose()["volumes"])


def test_the_services_fit_the_image_and_each_other() -> None:
    services = compose()["services"]
    server = services["server"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"\nUSER {server['user'].split(':')[0]}\n" in dockerfile
    assert server["healthcheck"]["test"][1] in dockerfile
    assert int(server["stop_grace_period"].removesuffix("s")) > DRAIN_S
    config = server["command"][-1]
    assert config in [mount["target"] for mount in server["volumes"]]
    listens = load_yaml(ROOT / "config" / "container.yaml")["server"]
    assert server["ports"] == [f"127.0.0.1:50051:{listens['listen'].split(':')[1]}"]
    # What is kept lies on a volume that is the server's user's from the start.
    kept = cost_file("container.yaml")
    volumes = [mount["target"] for mount in server["volumes"] if mount["type"] == "volume"]
    assert volumes == [str(kept.parent)]
    assert f"install -d -o {server['user'].split(':')[0]} -m 0700 {kept.parent}\n" in dockerfile
    metrics_port = listens["metrics_listen"].split(":")[1]
    targets = load_yaml(DEPLOY / "prometheus" / "compose_targets.yml")
    assert targets == [{"targets": [f"server:{metrics_port}"]}]
    assert "metrics" in server["networks"]  # shared with whoever scrapes, which is not published

    scraped = load_yaml(DEPLOY / "prometheus" / "prometheus.yml")
    mounted = {m["target"] for m in services["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{file}" for file in scraped["rule_files"]} <= mounted
    (pattern,) = scraped["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert any(Path(target).match(f"/etc/prometheus/{pattern}") for target in mounted)

    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = load_yaml(provisioning / "datasources" / "prometheus.yml")["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"] is True
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    (provider,) = load_yaml(provisioning / "dashboards" / "saccade.yml")["providers"]
    grafana = services["grafana"]
    boards = next(m for m in grafana["volumes"] if m["source"] == "./grafana/dashboards")
    assert provider["options"]["path"] == boards["target"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{boards['target']}/saccade.json"
    # No password is shipped: compose asks for one.
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")


def test_docker_compose_accepts_the_file() -> None:
    command = ["docker", "compose"]
    if (
        shutil.which("docker") is None
        or subprocess.run([*command, "version"], capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("docker compose is not installed")
    checked = subprocess.run(
        [*command, "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"],
        env={**os.environ, "GRAFANA_PASSWORD": "x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def unit() -> dict[str, list[str]]:
    """Settings of the systemd unit; a name may come more than once."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_stops_the_server_gently_and_finds_what_cmake_installs() -> None:
    settings = unit()
    assert settings["KillSignal"] == ["SIGTERM"]
    assert int(settings["TimeoutStopSec"][0]) > DRAIN_S
    binary, *arguments = settings["ExecStart"][0].split()
    assert binary == "/opt/saccade/bin/saccade-server"
    assert arguments == ["serve", "--config", "${SACCADE_CONFIG}"]
    assert settings["Environment"] == [
        "SACCADE_CONFIG=/opt/saccade/share/saccade/config/service.yaml"
    ]
    assert settings["CapabilityBoundingSet"] == settings["AmbientCapabilities"] == [""]
    assert cost_file("service.yaml").parent == Path("/var/lib", settings["StateDirectory"][0])
    assert settings["StateDirectoryMode"] == ["0700"]
    for name in ("DynamicUser", "NoNewPrivileges", "MemoryDenyWriteExecute", "PrivateDevices"):
        assert settings[name] == ["yes"], name
    assert settings["ProtectSystem"] == ["strict"]
    assert settings["SystemCallFilter"][0] == "@system-service"


def test_systemd_accepts_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / UNIT.name
    # The check wants the binary where the unit says.
    copy.write_text(UNIT.read_text().replace("/opt/saccade/bin/saccade-server", BINARY))
    verified = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0 and verified.stderr == "", verified.stderr
    rated = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    level = re.search(r"exposure level for saccade-server.service: ([\d.]+)", rated.stdout)
    assert level, rated.stdout + rated.stderr
    assert float(level.group(1)) <= 1.2, rated.stdout  # 0 is best, 10 worst; systemd 252 says 0.9


def test_the_server_runs_without_writable_code_and_without_new_privileges() -> None:
    """Two promises of the unit that can be kept without systemd: the kernel takes both from a process for ever."""
    set_no_new_privs, set_mdwe, refuse_exec_gain = 38, 65, 1
    lock = (
        "import ctypes, os, sys\n"
        "prctl = ctypes.CDLL(None).prctl\n"
        f"if prctl({set_no_new_privs}, 1, 0, 0, 0) or prctl({set_mdwe}, {refuse_exec_gain}, 0, 0, 0):\n"
        "    sys.exit(77)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    tried = subprocess.run([sys.executable, "-c", lock, "/bin/true"], check=False)
    if tried.returncode == 77:
        pytest.skip("the kernel is older than 6.3")
    running = RunningServer(wrapper=(sys.executable, "-c", lock))
    try:
        running.wait_ready()
        frame = np.zeros((64, 64, 3), np.uint8)
        with Client(running.address) as client:
            assert client.predict(frame, "speed 24").values.shape == (5, 2)
        assert running.terminate() == 0
    finally:
        running.close()
