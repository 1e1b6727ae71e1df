"""`saccade top` from recorded and made-up metrics: the right figures, and none where there are none."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from saccade import Client, cli, exposition, terminal, top, types
from saccade.exposition import Quantile, Window, parse, quantile

DATA = Path(__file__).parent / "data"
STATUS = types.ServerStatus(
    version="0.1.0",
    uptime_s=7200,
    ready=True,
    draining=False,
    sessions=4,
    models=("highway_demo",),
    classes=(
        types.LatencyClass("control", 0.02, 0, False),
        types.LatencyClass("best_effort", 0.0, 2, True),
    ),
    max_message_bytes=1,
)


# ------------------------------------------------------------------------------------------ parsing
def test_names_labels_values_and_time_stamps() -> None:
    scrape = parse(
        "# HELP a text with {braces}\n\n"
        "a 1\n"
        'b_total{x="1",y="a \\"quoted\\", \\\\ and\\nnew"} 2.5e3 1700000000000\n'
        'b_total{ x = "2" , } +Inf\n'
        "c{} Nan\n"
    )
    assert scrape.samples["a"] == {frozenset(): 1.0}
    escaped = frozenset({("x", "1"), ("y", 'a "quoted", \\ and\nnew')})
    assert scrape.samples["b_total"][escaped] == 2500.0
    assert math.isinf(scrape.samples["b_total"][frozenset({("x", "2")})])
    assert math.isnan(scrape.samples["c"][frozenset()])


@pytest.mark.parametrize(
    "wrong",
    [
        "<html>",
        "a",
        "a b",
        "a 1 2 3",
        "{x='1'} 1",
        'a{x="1" 1',
        'a{x="1"y="2"} 1',
        'a{x="1',
        "a{x=1} 1",
        'a{x="\\',
        "1a 1",
    ],
)
def test_another_format_is_refused_with_its_line(wrong: str) -> None:
    with pytest.raises(ValueError, match="line 2 is no sample"):
        parse(f"good 1\n{wrong}\n")


def test_what_is_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MAX_SAMPLES", 3)
    assert len(parse("a 1\nb 1\nc 1\n# d\n").samples) == 3
    with pytest.raises(ValueError, match="more than 3 samples"):
        parse("a 1\nb 1\nc 1\nd 1\n")


# ------------------------------------------------------------------------------- rates and quantiles
def test_rates_are_of_the_window_and_survive_a_restart() -> None:
    before = parse('c_total{k="a"} 100\nc_total{k="b"} 50\n', at=10.0)
    now = parse('c_total{k="a"} 130\nc_total{k="b"} 4\nc_total{k="new"} 6\n', at=12.0)
    window = Window(now, before)
    assert window.rate("c_total", k="a") == 15.0
    assert window.rate("c_total", k="b") == 2.0  # it counts from 0 again
    assert window.rate("c_total") == 20.0
    assert window.rate("c_total", k="other") is None and window.rate("other") is None
    alone = Window(now, None)
    assert alone.rate("c_total") is None and alone.gauge("c_total") == 140.0


def test_quantiles_are_interpolated_within_their_bucket() -> None:
    buckets = [(0.1, 10.0), (0.2, 30.0), (0.4, 40.0), (math.inf, 40.0)]
    assert quantile(0.5, buckets) == Quantile(pytest.approx(0.15))  # type: ignore[arg-type]
    assert quantile(0.25, buckets) == Quantile(pytest.approx(0.1))  # type: ignore[arg-type]
    assert quantile(0.125, buckets) == Quantile(pytest.approx(0.05))  # type: ignore[arg-type]
    assert quantile(1.0, buckets) == Quantile(0.4)
    assert quantile(0.99, [*buckets[:3], (math.inf, 50.0)]) == Quantile(0.4, over=True)
    gap = [(0.1, 0.0), (0.2, 0.0), (0.4, 10.0), (math.inf, 10.0)]
    assert quantile(0.0, gap) == Quantile(0.2) and quantile(1.0, gap) == Quantile(0.4)
    for nothing in ([], [(math.inf, 5.0)], [(0.1, 0.0), (math.inf, 0.0)], [(0.1, 1.0), (0.2, 1.0)]):
        assert quantile(0.5, nothing) is None


def test_a_histogram_is_that_of_the_window_alone() -> None:
    text = 'h_bucket{{m="x",le="1"}} {}\nh_bucket{{m="x",le="2"}} {}\nh_bucket{{m="x",le="+Inf"}} {}\nh_sum{{m="x"}} {}\nh_count{{m="x"}} {}\n'
    before = parse(text.format(1000, 1000, 1000, 10, 1000), at=0.0)
    now = parse(text.format(1000, 1010, 1010, 25, 1010), at=1.0)
    window = Window(now, before)
    assert window.quantile(0.5, "h", m="x") == Quantile(1.5)
    assert window.mean("h", m="x") == 1.5
    idle = Window(dataclasses.replace(before, at=1.0), before)
    assert idle.quantile(0.5, "h") is None and idle.mean("h") is None


# ---------------------------------------------------------------------------------- recorded metrics
def recorded(n: int, at: float) -> exposition.Scrape:
    return parse((DATA / f"scrape{n}.txt").read_text(), at)


def view(before: exposition.Scrape | None = None) -> top.Snapshot:
    return top.snapshot("host:1", "http://m", STATUS, "", recorded(2, 12.0), before, "")


def test_the_figures_of_a_recorded_server() -> None:
    shown = view(recorded(1, 10.0))
    assert shown.window_s == 2.0 and shown.streams == 4 and shown.workers_up == 1
    control, best_effort = shown.classes
    assert (control.name, control.deadline_s) == ("control", 0.02)
    assert control.admitted_per_s == pytest.approx((387 - 260) / 2)
    assert control.answered_per_s == pytest.approx((351 - 231) / 2)
    assert control.unanswered == 387 - 351 - 35
    assert control.met == pytest.approx(120 / (120 + 6 + 64 + 33))
    # 120 answers; 57 of them within 7.5 ms, 90 within 10 ms, 112 within 15 ms, all within 20 ms.
    assert control.p50 is not None and control.p99 is not None
    assert control.p50.s == pytest.approx(0.0075 + 0.0025 * (60 - 57) / (90 - 57))
    assert control.p99.s == pytest.approx(0.015 + 0.005 * (118.8 - 112) / (120 - 112))
    assert best_effort.met is None and best_effort.p99 is None and best_effort.admitted_per_s == 0
    assert shown.reasons == [
        top.ReasonRow("refused", "late", 32.0, 689),
        top.ReasonRow("refused", "expired", 16.5, 179),
    ]
    partitions = {p.name: p for p in shown.partitions}
    assert list(partitions) == ["action", "state", "text", "vision"]
    vision = partitions["vision"]
    assert (vision.free, vision.held, vision.idle) == (2872, 32, 816)
    assert vision.hit_ratio == pytest.approx(0.99350767895175)
    assert partitions["action"].hit_ratio is None  # nothing was looked up there
    (model,) = shown.models
    assert model.frames_per_s == (1391 - 1119) / 2
    assert model.vision_hit_ratio == pytest.approx(11 / 26)
    assert {s.kind for s in shown.steps} == {"decode", "prefill"}
    decode = shown.steps[0]
    assert decode.per_s == (2583 - 1733) / 2
    assert decode.taken_s == pytest.approx((0.995321 - 0.680126) / 850)
    assert decode.predicted_s == pytest.approx((0.663278 - 0.428809) / 850)
    assert model.batch_mean == pytest.approx((5042 - 3283) / (3471 - 2318))
    json.dumps(dataclasses.asdict(shown), allow_nan=False)


def text(shown: top.Snapshot, width: int | None = None) -> list[str]:
    return [terminal.paint(line, width, False) for line in top.lines(shown)]


def test_a_frame_says_it_all() -> None:
    frame = text(view(recorded(1, 10.0)))
    assert frame[0].startswith("saccade top  host:1  ready  version 0.1.0, up 2 h  sessions 4")
    control = next(line for line in frame if line.startswith("  control"))
    assert control.split()[1:6] == ["20", "63.5", "60.0", "1", "53.8"]
    best_effort = next(line for line in frame if line.startswith("  best_effort"))
    assert best_effort.split()[1:] == ["none", "0.0", "0.0", "0", "-", "-", "-", "-"]
    assert any(line.split() == ["refused", "late", "32.0", "689"] for line in frame)
    assert all(line == line.rstrip() for line in frame)


def test_the_first_scrape_has_no_rates_and_says_so() -> None:
    frame = text(view())
    assert "rates and latencies come with the next scrape" in frame
    control = next(line for line in frame if line.startswith("  control"))
    assert control.split()[1:] == ["20", "-", "-", "1", "-", "-", "-", "-"]


def test_nothing_there_is_said_not_shown_as_zero() -> None:
    shown = top.snapshot("host:1", "http://m", None, "refused", None, None, "no route")
    frame = text(shown)
    assert frame[0] == "saccade top  host:1  no answer: refused"
    assert frame[1] == "http://m: no data: no route"
    assert "classes  no data: no metrics" in frame and "K/V blocks  no data: no metrics" in frame
    other = top.snapshot("h", "http://m", STATUS, "", parse("up 1\n"), None, "")
    assert other.metrics_error == "no metric of a saccade server is there"


def test_classes_without_a_status_come_from_the_metrics() -> None:
    shown = top.snapshot("h", "m", None, "x", recorded(2, 1.0), None, "")
    assert [(c.name, c.deadline_s) for c in shown.classes] == [
        ("best_effort", None),
        ("control", None),
    ]


def test_a_frame_is_cut_to_the_terminal_and_coloured_only_there() -> None:
    shown = view(recorded(1, 10.0))
    for width in (1, 20, 80):
        assert max(len(line) for line in text(shown, width)) <= width
    assert "\x1b" not in "".join(text(shown))
    coloured = [terminal.paint(line, 30, True) for line in top.lines(shown)]
    assert any("\x1b[1;36m" in line for line in coloured)
    plain = [line.replace("\x1b[0m", "") for line in coloured]
    assert all(
        len("".join(p.split("m", 1)[1] if i else p for i, p in enumerate(x.split("\x1b[")))) <= 30
        for x in plain
    )


def test_no_name_steers_the_terminal() -> None:
    evil = 'saccade_requests_admitted_total{class="\x1b[2J\x07x"} 1\n'
    shown = top.snapshot("h", "m", None, "\x1b]0;t\x07", parse(evil), None, "")
    assert not any("\x1b" in line or "\x07" in line for line in text(shown))


def test_an_unbounded_latency_is_marked() -> None:
    row = 'saccade_end_to_end_seconds_bucket{{class="control",le="{}"}} {}\n'
    base = 'saccade_requests_admitted_total{class="control"} 5\n'
    before = parse(base + row.format("5", 0) + row.format("+Inf", 0), 0.0)
    now = parse(base + row.format("5", 1) + row.format("+Inf", 4), 1.0)
    frame = text(top.snapshot("h", "m", STATUS, "", now, before, ""))
    assert next(x for x in frame if x.startswith("  control")).split()[6:8] == [">5000", ">5000"]


# --------------------------------------------------------------------------------------- the command
def test_addresses_of_metrics() -> None:
    assert top.metrics_url("h:9") == "http://h:9/metrics"
    assert top.metrics_url("https://h:9") == "https://h:9/metrics"
    assert top.metrics_url("http://h:9/other") == "http://h:9/other"
    for wrong in ("file:///etc/passwd", "ftp://h/", "http://"):
        with pytest.raises(ValueError, match="--metrics"):
            top.metrics_url(wrong)


class Recorded(BaseHTTPRequestHandler):
    """Serves the recorded scrapes in turn, and another thing under /other."""

    asked = 0

    def do_GET(self) -> None:
        Recorded.asked += 1
        body = (DATA / f"scrape{2 - Recorded.asked % 2}.txt").read_bytes()
        if self.path == "/other":
            body = b"<html>hello</html>"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metrics() -> Iterator[str]:
    """Where the recorded metrics are."""
    Recorded.asked = 0
    server = HTTPServer(("127.0.0.1", 0), Recorded)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_once_is_a_window_of_two_scrapes(metrics: str) -> None:
    out = io.StringIO()
    with Client("127.0.0.1:1") as nobody:
        assert top.run(nobody, metrics, 0.05, once=True, as_json=True, out=out) == 0
        answer = json.loads(out.getvalue())
        assert answer["status"] is None and "UNAVAILABLE" in answer["status_error"]
        assert answer["window_s"] >= 0.05 and Recorded.asked == 2
        control = next(c for c in answer["classes"] if c["name"] == "control")
        assert control["met"] == pytest.approx(120 / 223)
        out = io.StringIO()  # no terminal: one frame, without asking for it
        assert top.run(nobody, metrics, 0.05, once=False, as_json=False, out=out) == 0
        assert "highway_demo" in out.getvalue() and "\x1b" not in out.getvalue()


def test_nobody_there_exits_1_and_another_page_is_named(
    metrics: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--address", "127.0.0.1:1", "top", "--once", "--interval", "0.05", "--metrics"]
    assert cli.main([*common, "127.0.0.1:1"]) == 1
    assert "no data" in capsys.readouterr().out
    assert cli.main([*common, f"{metrics}/other"]) == 1
    assert "line 1 is no sample" in capsys.readouterr().out
    assert cli.main([*common, "file:///etc/hostname"]) == 2
    assert cli.main([*common, metrics, "--interval", "0"]) == 2
    assert cli.main([*common, metrics, "--interval", "nan"]) == 2
