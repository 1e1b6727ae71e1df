"""The page on a run: what is in it, and that it needs nothing from elsewhere. A browser looks at it in tests/e2e."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from saccade.cli import main
from saccade.eval import plots
from saccade.eval.report.page import render

RUN = {
    "world": "scenes.py",
    "world_digest": "0123",
    "model": "demo",
    "models": {
        "demo": {"fingerprint": "ab", "family": "openvla", "dtype": "f32", "parameters": 1_440_000}
    },
    "server": "0.1.0",
    "deadlines_ms": {"driving": 100.0, "best_effort": 0.0},
}


def episode(setting: str, group: str, seed: int, ok: bool) -> dict[str, Any]:
    return {
        "setting": setting,
        "group": group,
        "seed": seed,
        "ok": ok,
        "why": "" if ok else "collision",
        "calls": 4,
        "probes": 0,
        "met": 3,
        "late": 1,
        "refused": 0,
        "continued": 1,
        "degraded": 0,
        "round_trip_ms": [9.0, 10.0, 11.0, 130.0],
        "server_ms": [8.0, 9.0, 10.0, 120.0],
        "tokens": {"vision": [1024, 256], "text": [100, 4]},
        "patches": {"image": {"computed": 700, "reused": 256, "evicted": 68}},
        "errors": [] if setting == "full" else [0.0, 0.25],
        "world": {"slipped_s": 0.01},
    }


WINDOW: dict[str, Any] = {
    "setting": "pace=real+class=driving+load=5",
    "seconds": 2.0,
    "requests": 40,
    "sequences": [30.0, 10.0],
    "rows": [300.0, 10.0],
    "steps": {"decode": [0.2, 6.0]},
    "load": {
        "asked": 10,
        "answered": 9,
        "late": 0,
        "failed": {"EXPIRED": 1},
        "server_ms": {"planning": [5.0, 6.0, 7.0]},
    },
    "served": {
        "classes": {
            "driving": {
                "buckets": [[0.01, 5.0], [0.1, 9.0], [None, 10.0]],
                "met": 9.0,
                "missed": 1.0,
                "failed": 0.0,
                "rejected": 2.0,
            },
            "control": {
                "buckets": [[0.01, 4.0], [0.1, 4.0], [None, 4.0]],
                "met": 4.0,
                "missed": 0.0,
                "failed": 0.0,
                "rejected": 0.0,
            },
        },
        "tokens": {"vision": [256.0, 768.0]},
        "evicted": {"vision": 12.0},
    },
}


def make_run(folder: Path, episodes: list[dict[str, Any]], window: dict[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(RUN))
    lines = [json.dumps(e) for e in episodes]
    if window is not None:
        lines.append(json.dumps({"window": window}))
    (folder / "episodes.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def full_run(folder: Path) -> Path:
    names = ("full", WINDOW["setting"], "pace=real")
    episodes = [
        episode(name, group, seed, ok=seed % 5 != 0 or name == "full")
        for name in names
        for group in ("keep", "left")
        for seed in range(10)
    ]
    return make_run(folder, episodes, WINDOW)


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.S)]


def test_the_page_says_what_the_run_holds(tmp_path: Path) -> None:
    folder = full_run(tmp_path / "run")
    (folder / "drive.gif").write_bytes(b"GIF89a")
    page = render(folder)
    titles = [element.attrib["aria-label"] for element in svgs(page)]
    assert titles == [
        "Success by setting",
        "Success by instruction",
        "Latency by class",
        "Deadlines",
        "Hit rates by modality",
        "Patches by source",
    ]
    assert "100.0\u00a0%</b>" in page  # full recompute's success is the first figure
    assert "80.0 % [" in page
    assert "-20.0 [" in page  # of the pairs
    assert "driving, 80 answers (dashed: deadline 100 ms)" in page
    assert "control (histogram), 4 answers" in page  # nobody wrote its answers down
    assert "planning, 3 answers" in page
    assert "EXPIRED 1" in page
    assert "25.0\u00a0% of 1\u202f024" in page  # vision tokens found
    assert "12 blocks were evicted" in page
    assert 'src="data:image/gif;base64,R0lGODlh"' in page
    assert "openvla, 1.44 million parameters, F32, saccade-server 0.1.0" in page
    assert "the world itself was late by 0.60 s" in page


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = render(full_run(tmp_path / "run"))
    assert not re.findall(r"https?://|url\(|<script|<link|@import|srcset", page)
    assert all(source.startswith("data:") for source in re.findall(r'src="(.*?)"', page))
    assert "prefers-color-scheme:dark" in page
    used = set(re.findall(r"var\((--[\w]+)\)", page))
    for block in re.findall(r":root\{(.*?)\}", page, re.S)[:1]:
        assert used <= set(re.findall(r"(--[\w]+):", block))


def test_names_are_text(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    folder = full_run(tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    run["model"] = evil
    run["models"] = {evil: run["models"]["demo"]}
    (folder / "run.json").write_text(json.dumps(run))
    lines = (folder / "episodes.jsonl").read_text().replace("keep", "<b>keep")
    (folder / "episodes.jsonl").write_text(lines)
    page = render(folder)
    assert "<script" not in page
    assert "<b>keep" not in page
    svgs(page)


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("driven", [False, True])
def test_what_is_not_there_is_left_out(tmp_path: Path, metrics: bool, driven: bool) -> None:
    episodes = [episode("full", "keep", 1, True)] if driven else []
    page = render(make_run(tmp_path / "run", episodes, WINDOW if metrics else None))
    titles = [element.attrib["aria-label"] for element in svgs(page)]
    assert ("Success by setting" in titles) == driven
    assert ("Latency by class" in titles) == (driven or metrics)
    assert ("Deadlines" in titles) == (driven or metrics)
    assert not re.search(r"\b(nan|None|inf)\b", page)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = full_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(folder), "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").exists()
    assert main(["report", str(tmp_path / "none")]) == 2


# --------------------------------------------------------------------------------------------- plots
def test_a_cdf_is_monotone_and_inside_its_frame() -> None:
    curve = plots.Curve("a", [(1.0, 0.1), (10.0, 0.6), (1000.0, 1.0)], mark=50.0)
    root = ElementTree.fromstring(plots.cdf([curve], "ms", "t"))
    (path,) = [e for e in root if e.attrib.get("class") == "curve" and e.tag == "path"]
    points = [tuple(map(float, p.split(","))) for p in re.split("[ML]", path.attrib["d"])[1:]]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert all(0 <= x <= plots.WIDTH for x, _ in points)
    (mark,) = [e for e in root if e.attrib.get("class") == "mark"]
    assert points[2][0] < float(mark.attrib["x1"]) < points[3][0]
    assert plots.cdf([], "ms", "t") == ""
    assert plots.cdf([plots.Curve("a", [])], "ms", "t") == ""


def test_intervals_lie_in_order_and_the_axis_shows_all() -> None:
    rows = [
        plots.Estimate("a", 0.97, 0.95, 0.99, "388 of 400", True),
        plots.Estimate("b", 0.6, 0.55, 0.65, "240 of 400"),
    ]
    root = ElementTree.fromstring(plots.intervals(rows, "share", "t"))
    ranges = [e for e in root if e.attrib.get("class") == "range"]
    dots = [e for e in root if e.tag == "circle"]
    for whole, dot in zip(ranges, dots, strict=True):
        assert float(whole.attrib["x1"]) < float(dot.attrib["cx"]) < float(whole.attrib["x2"])
    assert all(0 <= float(e.attrib["x1"]) <= plots.WIDTH for e in ranges)
    assert float(dots[1].attrib["cx"]) < float(dots[0].attrib["cx"])


def test_stacks_fill_their_bars() -> None:
    rows = [plots.Stack("a", [3, 1], "75 %"), plots.Stack("nothing", [0, 0], "")]
    root = ElementTree.fromstring(plots.stacks(rows, ["x", "y"], ["--good", "--bad"], "t"))
    bars = [e for e in root if e.tag == "rect" and e.attrib["height"] == "14"]
    widths = [float(e.attrib["width"]) for e in bars]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert plots.stacks(rows[1:], ["x", "y"], ["--good", "--bad"], "t") == ""
