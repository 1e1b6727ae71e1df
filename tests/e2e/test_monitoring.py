"""deploy/prometheus and deploy/grafana against the real server and a real Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, RunningServer, free_port, load_yaml, tool

from saccade import Client, RequestFailed

PROMETHEUS = ROOT / "deploy" / "prometheus"
BOARD = ROOT / "deploy" / "grafana" / "dashboards" / "saccade.json"
FRAME = np.full((64, 64, 3), 128, np.uint8)
Series = tuple[str, frozenset[tuple[str, str]]]
"""A metric's name and labels."""


def promtool(*arguments: str) -> None:
    ran = subprocess.run(
        [tool("promtool"), *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def rules() -> list[dict[str, Any]]:
    groups = load_yaml(PROMETHEUS / "alerts.yml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(BOARD.read_text())
    return loaded


def board_queries() -> list[tuple[str, str, str]]:
    """Panel, PromQL with Grafana's variables filled in, legend; of every panel, and of the annotations."""
    found = [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in board()["panels"]
        for target in panel.get("targets", [])
    ]
    found += [(a["name"], a["expr"], a["textFormat"]) for a in board()["annotations"]["list"]]

    def fill(expr: str) -> str:
        for variable in board()["templating"]["list"]:
            expr = expr.replace(f'"${variable["name"]}"', '".*"')
        return expr.replace("$__rate_interval", "1m")

    return [(title, fill(expr), legend) for title, expr, legend in found]


def exposition(server: RunningServer) -> dict[Series, float]:
    """What the server exports now, without what the exposer says of itself."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("saccade_"):
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or "")
            found[series(name, dict(pairs))] = float(value)
    return found


def series(name: str, labels: dict[str, str]) -> Series:
    """Bounds as numbers: Prometheus may write 1 as 1.0."""
    return name, frozenset((k, str(float(v)) if k == "le" else v) for k, v in labels.items())


def names_in(expr: str) -> set[str]:
    """The metrics that a query reads (every name of ours begins the same way)."""
    return set(re.findall(r"\bsaccade[_:][\w:]+", re.sub(r'"[^"]*"', '""', expr)))


class RunningPrometheus:
    """The shipped configuration, scraping one server every second; ended with the test."""

    def __init__(self, target: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.folder = tempfile.TemporaryDirectory(prefix="saccade-prometheus-")
        folder = Path(self.folder.name)
        config = load_yaml(PROMETHEUS / "prometheus.yml")
        config["global"] = {
            "scrape_interval": "1s",
            "scrape_timeout": "1s",  # all of it: a busy machine is not a target that is down
            "evaluation_interval": "500ms",
        }
        config["rule_files"] = [str(PROMETHEUS / file) for file in config["rule_files"]]
        (folder / "targets").mkdir()
        (folder / "targets" / "test.yml").write_text(json.dumps([{"targets": [target]}]))
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.log_path = folder / "log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    tool("prometheus"),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.address}",
                ],
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of the HTTP API."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise ConnectionError("it is starting") from error
            pytest.fail(f"{url}: {error.read().decode()}")

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Samples of an instant query."""
        result: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return result

    def value(self, expr: str) -> float:
        """The sample of a query that has exactly one."""
        (sample,) = self.query(expr)
        return float(sample["value"][1])

    def rules(self) -> list[dict[str, Any]]:
        """Every rule as loaded, with its health."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        """Until something holds: a hundred looks, whatever time they take on a machine that stalls."""
        for _ in range(100):
            assert self.process.poll() is None, self.log_path.read_text()
            try:
                if holds():
                    return
            except (OSError, ValueError):
                pass  # it does not answer yet, or has no sample yet
            time.sleep(0.1)
        pytest.fail(f"never came true: {what}\n{self.log_path.read_text()}")

    def close(self) -> None:
        """Ends it for sure."""
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


@pytest.fixture
def watched() -> Iterator[tuple[RunningServer, RunningPrometheus]]:
    """A ready server, and a Prometheus that watches it."""
    server = RunningServer()
    try:
        server.wait_ready()
        prometheus = RunningPrometheus(server.metrics)
        try:
            yield server, prometheus
        finally:
            prometheus.close()
    finally:
        server.close()


def test_prometheus_sees_what_the_server_counts(
    watched: tuple[RunningServer, RunningPrometheus],
) -> None:
    server, prometheus = watched
    # Rates need a sample from before the traffic.
    prometheus.wait("a first scrape", lambda: bool(prometheus.query("saccade_ready == 1")))
    with Client(server.address) as client, client.session(instruction="speed 24") as session:
        for age_s in (0.0, 0.0, 0.0, 0.0, 1.5, 1.5, 1.5):
            session.send_frame(FRAME, age_s=age_s)
            session.act()
        session.send_frame(b"no image at all")
        with pytest.raises(RequestFailed):
            session.act(latency_class="control", deadline_s=1e-6)
        session.act()

    def recorded() -> dict[Series, float]:
        samples = prometheus.query('{__name__=~"saccade_.+"}')
        for sample in samples:
            assert sample["metric"].pop("job") == "saccade"
            assert sample["metric"].pop("instance") == server.metrics
        return {
            series(s["metric"].pop("__name__"), s["metric"]): float(s["value"][1]) for s in samples
        }

    prometheus.wait("the sessions are over", lambda: prometheus.value("saccade_streams") == 0)
    prometheus.wait("every series is recorded", lambda: recorded() == exposition(server))

    assert prometheus.value('up{job="saccade"}') == 1
    assert prometheus.value("sum(saccade_worker_up)") == 1
    met = 'saccade_requests_met_total{class="best_effort"}'
    assert prometheus.value(met) == 8
    assert prometheus.value('saccade_end_to_end_seconds_count{class="best_effort"}') == 8
    assert prometheus.value("sum(saccade_requests_met_total)") == 8
    late = 'sum({__name__=~"saccade_requests_(rejected|missed)_total", class="control"})'
    assert prometheus.value(late) == 1
    assert prometheus.value("saccade_frames_received_total") == 8  # the refused one, too
    assert prometheus.value('saccade_frames_rejected_total{reason="invalid_input"}') == 1
    # Four actions come from new frames; three, and the last, from frames that were 1.5 s old on arrival.
    assert prometheus.value('saccade_frame_age_seconds_bucket{le=~"1|1.0"}') == 4
    assert prometheus.value("saccade_frame_age_seconds_count") == 8
    assert prometheus.value("saccade_sessions") == 0
    assert prometheus.value('sum(saccade_kv_blocks{state="held"})') == 0

    assert len(prometheus.rules()) == len(rules())
    prometheus.wait(
        "every rule is evaluated", lambda: all(r["health"] == "ok" for r in prometheus.rules())
    )

    def alerts() -> set[tuple[str, str]]:
        found = prometheus.get("alerts")["alerts"]
        return {(alert["labels"]["alertname"], alert["state"]) for alert in found}

    prometheus.wait("old frames are seen", lambda: ("SaccadeFrameAge", "pending") in alerts())
    assert {name for name, _ in alerts()} <= {
        "SaccadeFrameAge",
        "SaccadeDeadlineMisses",  # the late request was the only one of its class
        "SaccadeDeadlineMissesMany",
        "SaccadeOverload",
        "SaccadeStepPrediction",  # on a machine as busy as those that run tests
    }

    for panel, expr, legend in board_queries():
        samples = prometheus.query(expr.removesuffix(" > 0"))
        if expr.startswith("ALERTS"):
            continue  # nothing fires
        assert samples, f"{panel}: no data for {expr}"
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            assert all(label in sample["metric"] for sample in samples), f"{panel}: no {label}"

    assert server.terminate() == 0
    prometheus.wait("it is gone", lambda: ("SaccadeTargetDown", "pending") in alerts())


def test_rules_pass_promtool_and_their_unit_tests() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")


def test_every_alert_says_what_how_bad_and_after_how_long_and_is_tested() -> None:
    cases = [
        case
        for test in load_yaml(PROMETHEUS / "alerts_test.yml")["tests"]
        for case in test["alert_rule_test"]
    ]
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    for rule in alerts:
        name = rule["alert"]
        assert re.fullmatch(r"\d+[sm]", rule["for"]), name
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert set(rule["annotations"]) == {"summary", "description"}, name
        assert any(case["alertname"] == name and case["exp_alerts"] for case in cases), name


def test_the_board_is_well_formed() -> None:
    panels = board()["panels"]
    assert board()["uid"] == "saccade" and board()["title"] and board()["schemaVersion"] >= 36
    assert board().get("id") is None  # an id belongs to one Grafana's database
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        assert at["w"] > 0 and at["h"] > 0 and at["x"] >= 0, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert panel["type"] in ("row", "stat", "timeseries")
        if panel["type"] == "row":
            assert panel["panels"] == [] and not panel["collapsed"]
            continue
        assert panel["description"] and panel["targets"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), panel["title"]
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
    for one, other in combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one['title']} and {other['title']} overlap"


def test_the_queries_of_the_board_parse(tmp_path: Path) -> None:
    made = [
        {"record": f"board:query{i}", "expr": expr}
        for i, (_, expr, _) in enumerate(board_queries())
    ]
    assert "$" not in json.dumps(made)
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "board", "rules": made}]}))
    promtool("check", "rules", str(path))


def test_board_and_rules_name_only_metrics_that_exist_and_the_board_shows_all(
    server: RunningServer,
) -> None:
    exported = {name for name, _ in exposition(server)}
    known = exported | {rule["record"] for rule in rules() if "record" in rule}
    shown: set[str] = set()
    for where, expr, _ in board_queries():
        assert names_in(expr) <= known, f"{where}: {names_in(expr) - known}"
        shown |= names_in(expr)
    for rule in rules():
        names = names_in(rule["expr"])
        assert names <= known, f"{rule}: {names - known}"
    variables = [v["query"]["query"] for v in board()["templating"]["list"] if v["type"] == "query"]
    assert set().union(*(names_in(query) for query in variables)) <= known
    parts = re.compile(r"_(bucket|sum|count)$")
    assert {parts.sub("", name) for name in exported} == {
        parts.sub("", name) for name in shown if name in exported
    }
