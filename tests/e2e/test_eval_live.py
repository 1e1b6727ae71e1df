"""`saccade eval` against a real server: a world of noise in worker processes, runs that go on, and the demo's own world."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import BINARY, ROOT, RunningServer

sys.path.insert(0, str(ROOT / "deploy" / "demo"))
import eval_table

SCRIPT = str(ROOT / "deploy" / "demo" / "evaluation.py")
WORLD = """
import numpy as np

GROUPS = ("even", "odd")
CAMERAS = ("top",)


class Episode:
    dt_s, limit_steps = 0.2, 12

    def __init__(self, group, seed, *, level="base", stress="none", mode="policy"):
        self.group, self.seed, self.mode, self.step = group, seed, mode, 0
        self._total = 0.0

    def instruction(self):
        return "keep your lane"

    def speed(self):
        return 20.0

    def frames(self, cameras, age_s=0.0):
        step = self.step - round(age_s / 0.2)
        rng = np.random.default_rng([self.seed, step // 4])  # four steps look the same
        return {c: rng.integers(0, 256, (224, 224, 3), np.uint8) for c in cameras}

    def frame_age_s(self):
        return 0.0

    def state(self):
        return []

    def drive(self, action):
        self.step += 1
        self._total += abs(action[0])
        return self.step >= self.limit_steps

    def verdict(self):
        good = self.mode == "policy" and (self.seed + (self.group == "odd")) % 3 != 0
        return good, "" if good else "not achieved"

    def record(self):
        return {"total": self._total}

    def close(self):
        pass
"""


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Its own folder, so that its digest is of nothing else."""
    folder = tmp_path / "world"
    folder.mkdir()
    (folder / "noise_world.py").write_text(WORLD)
    return folder / "noise_world.py"


def evaluate(
    server: RunningServer, world: Path, out: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    """The command, as a person runs it."""
    command = [sys.executable, "-m", "saccade", "--address", server.address, "eval"]
    command += ["--world", str(world), "--out", str(out), *more]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT / "client")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def lines(out: Path, key: str) -> list[dict[str, Any]]:
    """Of the run's file."""
    entries = map(json.loads, (out / "episodes.jsonl").read_text().splitlines())
    return [e for e in entries if key in e]


def test_a_run_is_paired_and_goes_on(server: RunningServer, world: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    metrics = ("--metrics", f"http://{server.metrics}/metrics")
    settings = ("--settings", "stale=400,mode=blank", "--sessions", "4", "--processes", "2")
    first = evaluate(server, world, out, "--seeds", "10:13", *settings, *metrics, "--json")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert result == json.loads((out / "results.json").read_text())
    full, stale, blank = result["settings"]
    assert [s["name"] for s in result["settings"]] == ["full", "stale=400", "mode=blank"]
    assert (full["n"], full["ok"], blank["ok"]) == (6, 4, 0)
    assert (stale["paired"]["n"], stale["paired"]["only_base"]) == (6, 0)
    assert blank["paired"]["only_base"] == 4
    assert full["work"]["calls"] == 6 * 6
    assert full["work"]["tokens"]["vision"]["cached"] > 0  # every second picture is known
    assert full["deadlines"]["met_share"] == 1
    assert full["latency_ms"]["p50"] > 0
    assert stale["action_error"]["n"] == 2 * 12  # seed 12 alone
    assert full["server"]["batch_sequences"] >= 1
    assert full["server"]["cpu_s"] > 0
    assert result["models"]["highway_demo"]["family"] == "openvla"
    assert len(lines(out, "setting")) == 18

    again = evaluate(server, world, out, "--seeds", "10:13", *settings)
    assert again.returncode == 0, again.stderr
    assert len(lines(out, "setting")) == 18  # nothing was left to drive
    assert "stale=400" in again.stdout
    assert "6 pairs, 0 disagree" in again.stdout
    more = evaluate(server, world, out, "--seeds", "10:14", "--json")
    assert json.loads(more.stdout)["settings"][0]["n"] == 8
    assert len(lines(out, "setting")) == 20
    seeds = [(e["setting"], e["group"], e["seed"]) for e in lines(out, "setting")]
    assert len(set(seeds)) == 20


def test_two_runs_drive_the_same(server: RunningServer, world: Path, tmp_path: Path) -> None:
    driven = []
    for name, sessions in (("a", "1"), ("b", "6")):
        done = evaluate(
            server, world, tmp_path / name, "--seeds", "30:32", "--sessions", sessions, "--json"
        )
        assert done.returncode == 0, done.stderr
        driven.append(
            {(e["group"], e["seed"]): e["world"] for e in lines(tmp_path / name, "setting")}
        )
    assert driven[0] == driven[1]


def test_a_limit_leaves_the_rest_for_later(
    server: RunningServer, world: Path, tmp_path: Path
) -> None:
    some = evaluate(server, world, tmp_path / "run", "--seeds", "0:400", "--limit-s", "2")
    assert some.returncode == 3, some.stderr
    assert "goes on" in some.stderr
    assert 0 < len(lines(tmp_path / "run", "setting")) < 800


def test_what_cannot_be_evaluated_is_said(
    server: RunningServer, world: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert evaluate(server, world, out, "--seeds", "1:2").returncode == 0
    world.write_text(WORLD + "# changed\n")
    for more, said in (
        (("--seeds", "1:3"), "another world"),
        (("--groups", "odd,none"), "no group none"),
        (("--settings", "stale=soon"), "no number"),
        (("--settings", "model=unknown", "--out", str(tmp_path / "x")), "no model unknown"),
        (("--settings", "pace=slow", "--out", str(tmp_path / "x")), "no pace slow"),
        (("--settings", "load=5", "--out", str(tmp_path / "x")), "needs a pace"),
        (("--seeds", "5:5"), "no seeds"),
        (("--world", str(tmp_path / "no.py")), "no world"),
    ):
        done = evaluate(server, world, out, *more)
        assert done.returncode == 2, more
        assert said in done.stderr, done.stderr
    world.write_text(WORLD.replace("self._total += abs", "1 / 0 + abs"))
    done = evaluate(server, world, tmp_path / "y", "--seeds", "1:2")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_the_table_goes_between_its_markers(
    server: RunningServer, world: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = evaluate(
        server, world, out, "--seeds", "1:4", "--settings", "replan=3,mode=blank", "--json"
    )
    result = json.loads(done.stdout)
    result["settings"][1]["paired"]["ratio"] = 0.9
    readme = tmp_path / "README.md"
    readme.write_text("# kv\n\nbefore\n")
    eval_table.write({"highway_demo": result}, readme, 0.01)
    once = readme.read_text()
    assert once.startswith("# kv\n\nbefore\n\n## ")
    assert "| replan=3 |" in once
    assert "off by default: `replan=3`." in once  # a control is no setting to be on or off
    assert "seeds 1 to 3" in once
    readme.write_text(once + "\nafter\n")
    result["settings"][1]["paired"]["ratio"] = 0.99
    eval_table.write({"highway_demo": result}, readme, 0.01)
    again = readme.read_text()
    assert "off by default: none." in again
    assert again.replace("none.", "`replan=3`.") == once + "\nafter\n"


def test_a_server_that_does_not_start_is_said() -> None:
    for binary, said in (("/bin/false", "saccade-server ended with 1"), ("/none", "No such file")):
        done = subprocess.run(
            [sys.executable, SCRIPT, "--binary", binary],
            env={**os.environ, "PYTHONPATH": str(ROOT / "client")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr


needs_highway = pytest.mark.skipif(
    not importlib.util.find_spec("highway_env"), reason="highway-env is missing"
)


@needs_highway
def test_an_evaluation_that_is_ended_leaves_no_server() -> None:
    with subprocess.Popen(
        [sys.executable, SCRIPT, "--seeds", "5000000:5001000", "--binary", BINARY],
        env={**os.environ, "PYTHONPATH": str(ROOT / "client")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        children: list[str] = []

        def wait_until(what: Callable[[], bool]) -> None:
            end = time.monotonic() + 30
            while not what():
                assert time.monotonic() < end
                time.sleep(0.05)

        def drives() -> bool:
            listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            children[:] = listed.read_text().split()
            return len(children) >= 3  # the server, a world, what multiprocessing has beside them

        wait_until(drives)
        process.terminate()
        assert process.wait(40) == 143
    wait_until(lambda: not any(Path(f"/proc/{c}").exists() for c in children))


@needs_highway
def test_pictures_of_between_two_steps() -> None:
    import scenes

    episode = scenes.Episode("overtake", 6_000_001)
    first = episode.frames(["top"])["top"]
    assert (episode.frames(["top"], 0.1)["top"] == first).all()  # there is none before
    seen = []
    for _ in range(4):
        episode.drive((0.0, 0.0))
        seen.append({age: episode.frames(["top", "before"], age) for age in (0.0, 0.1)})
    assert (seen[3][0.0]["before"] == seen[1][0.0]["top"]).all()
    assert (seen[3][0.1]["before"] == seen[1][0.1]["top"]).all()
    assert (seen[3][0.1]["top"] != seen[3][0.0]["top"]).any()
    assert (seen[3][0.1]["top"] != seen[2][0.0]["top"]).any()
    episode.close()


@needs_highway
def test_the_demo_drives_and_prints_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seeds", "5000000:5000001", "--json", "--mode", "shuffled"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "client"), "SACCADE_SERVER": BINARY},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["setting"], result["n"], len(result["groups"])) == ("mode=shuffled", 6, 6)
    assert result["collision_free"] >= 0.5
    assert result["groups"]["left"]["ok"] == 0
    assert result["latency_ms"]["p99"] > 0
    assert result["model_calls_per_s"] > 0
