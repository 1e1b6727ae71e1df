"""``saccade top``: what a server does, live."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from saccade import errors, exposition, types
from saccade.client import Client
from saccade.exposition import Quantile, Scrape, Window
from saccade.terminal import Cell, number, paint, plain, screen, table

DEFAULT_METRICS = "http://127.0.0.1:9090/metrics"
_BY_CLIENT = {
    "cancelled",
    "superseded",
    "invalid_input",
    "missing_input",
    "no_frame",
    "stale_frame",
    "never_fits",
}
"""Ends that say nothing about whether a server keeps up."""
_OUTCOMES = {  # of the counters by reason
    "refused": ("saccade_requests_rejected_total", "saccade_requests_refused_total"),
    "failed": ("saccade_requests_failed_total",),
    "frame refused": ("saccade_frames_rejected_total",),
}


# ------------------------------------------------------------------------------------ what there is
# A figure that is None is not known: no such metric, or nothing happened in the window.
@dataclass(frozen=True)
class ClassRow:
    """A latency class."""

    name: str
    deadline_s: float | None
    admitted_per_s: float | None
    answered_per_s: float | None
    unanswered: float | None
    """Admitted and neither answered nor failed: queued or running."""
    met: float | None
    """On time, of those that ended in the window but for the client's own doing."""
    p50: Quantile | None
    """Arrival to answer."""
    p99: Quantile | None
    queue_p99: Quantile | None


@dataclass(frozen=True)
class ReasonRow:
    """One way to get no answer."""

    outcome: str
    reason: str
    per_s: float | None
    total: float


@dataclass(frozen=True)
class PartitionRow:
    """A partition of a model's K/V cache."""

    model: str
    name: str
    free: float | None
    held: float | None
    idle: float | None
    hit_ratio: float | None
    """The server's moving average."""
    evicted_per_s: float | None


@dataclass(frozen=True)
class StepRow:
    """One kind of model steps."""

    model: str
    kind: str
    per_s: float | None
    predicted_s: float | None
    taken_s: float | None
    taken_p99: Quantile | None


@dataclass(frozen=True)
class ModelRow:
    """Batches, sessions and frames of a model."""

    model: str
    sessions: float | None
    batch_mean: float | None
    batch_p99: Quantile | None
    rows_mean: float | None
    frames_per_s: float | None
    frames_superseded_per_s: float | None
    frames_stale_per_s: float | None
    vision_hit_ratio: float | None
    frame_age_p50: Quantile | None
    frame_age_p99: Quantile | None


@dataclass(frozen=True)
class Snapshot:
    """One frame of the view."""

    address: str
    metrics: str
    window_s: float | None
    status: types.ServerStatus | None
    status_error: str
    metrics_error: str
    streams: float | None = None
    workers_up: float | None = None
    classes: list[ClassRow] = field(default_factory=list)
    reasons: list[ReasonRow] = field(default_factory=list)
    partitions: list[PartitionRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    models: list[ModelRow] = field(default_factory=list)


def snapshot(
    address: str,
    metrics: str,
    status: types.ServerStatus | None,
    status_error: str,
    scrape: Scrape | None,
    before: Scrape | None,
    metrics_error: str,
) -> Snapshot:
    """From what two scrapes and the server say."""
    if scrape is None:
        return Snapshot(address, metrics, None, status, status_error, metrics_error)
    w = Window(scrape, before)
    deadlines = {c.name: c.deadline_s for c in status.classes} if status is not None else {}
    admitted = "saccade_requests_admitted_total"
    names = list(deadlines) + [n for n in w.values(admitted, "class") if n not in deadlines]
    models = sorted(
        {*w.values("saccade_batch_rows_count", "model"), *w.values("saccade_sessions", "model")}
    )
    if not any(name.startswith("saccade_") for name in scrape.samples):
        metrics_error = "no metric of a saccade server is there"
    return Snapshot(
        address=address,
        metrics=metrics,
        window_s=w.seconds if before is not None else None,
        status=status,
        status_error=status_error,
        metrics_error=metrics_error,
        streams=w.gauge("saccade_streams"),
        workers_up=w.gauge("saccade_worker_up"),
        classes=[_class_row(w, n, deadlines.get(n)) for n in names],
        reasons=_reason_rows(w),
        partitions=[
            PartitionRow(
                model=m,
                name=p,
                free=w.gauge("saccade_kv_blocks", model=m, partition=p, state="free"),
                held=w.gauge("saccade_kv_blocks", model=m, partition=p, state="held"),
                idle=w.gauge("saccade_kv_blocks", model=m, partition=p, state="idle"),
                hit_ratio=_hit_ratio(w, m, p),
                evicted_per_s=w.rate("saccade_kv_evicted_blocks_total", model=m, partition=p),
            )
            for m in w.values("saccade_kv_blocks", "model")
            for p in w.values("saccade_kv_blocks", "partition")
        ],
        steps=[
            StepRow(
                model=m,
                kind=k,
                per_s=w.rate("saccade_step_taken_seconds_count", model=m, kind=k),
                predicted_s=w.mean("saccade_step_predicted_seconds", model=m, kind=k),
                taken_s=w.mean("saccade_step_taken_seconds", model=m, kind=k),
                taken_p99=w.quantile(0.99, "saccade_step_taken_seconds", model=m, kind=k),
            )
            for m in w.values("saccade_step_taken_seconds_count", "model")
            for k in w.values("saccade_step_taken_seconds_count", "kind")
        ],
        models=[_model_row(w, m) for m in models],
    )


def _class_row(w: Window, name: str, deadline_s: float | None) -> ClassRow:
    def ended(of: str, reasons: bool = False) -> float | None:
        metric = f"saccade_requests_{of}_total"
        if not reasons:
            return w.increase(metric, **{"class": name})
        found = [
            w.increase(metric, **{"class": name, "reason": reason})
            for reason in w.values(metric, "reason")
            if reason not in _BY_CLIENT
        ]
        return sum(f for f in found if f is not None)

    met, missed = ended("met"), ended("missed")
    offered = sum(n or 0.0 for n in (met, missed, ended("failed", True), ended("rejected", True)))
    totals = {
        of: w.total(f"saccade_requests_{of}_total", **{"class": name})
        for of in ("admitted", "met", "missed", "failed")
    }
    admitted = totals.pop("admitted")
    answered = w.rate("saccade_end_to_end_seconds_count", **{"class": name})
    return ClassRow(
        name=name,
        deadline_s=deadline_s,
        admitted_per_s=w.rate("saccade_requests_admitted_total", **{"class": name}),
        answered_per_s=answered,
        # The counters are read one after the other: a request may have ended in between.
        unanswered=max(0.0, admitted - sum(t or 0.0 for t in totals.values()))
        if admitted is not None
        else None,
        met=met / offered if met is not None and offered > 0 else None,
        p50=w.quantile(0.5, "saccade_end_to_end_seconds", **{"class": name}),
        p99=w.quantile(0.99, "saccade_end_to_end_seconds", **{"class": name}),
        queue_p99=w.quantile(0.99, "saccade_queue_seconds", **{"class": name}),
    )


def _hit_ratio(w: Window, model: str, partition: str) -> float | None:
    looked_up = [
        w.total(f"saccade_kv_{of}_tokens_total", model=model, partition=partition)
        for of in ("hit", "miss")
    ]
    if not any(looked_up):
        return None  # the gauge says 0 where nothing was ever looked up
    return w.gauge("saccade_kv_hit_ratio", model=model, partition=partition)


def _reason_rows(w: Window) -> list[ReasonRow]:
    rows = []
    for outcome, metrics in _OUTCOMES.items():
        for reason in sorted({r for m in metrics for r in w.values(m, "reason")}):
            totals = [w.total(m, reason=reason) for m in metrics]
            rates = [w.rate(m, reason=reason) for m in metrics]
            total = sum(t for t in totals if t is not None)
            known = [r for r in rates if r is not None]
            if total > 0:
                rows.append(ReasonRow(outcome, reason, sum(known) if known else None, total))
    return sorted(rows, key=lambda row: (-(row.per_s or 0.0), -row.total))


def _model_row(w: Window, model: str) -> ModelRow:
    hits = w.increase("saccade_vision_cache_hits_total", model=model)
    misses = w.increase("saccade_vision_cache_misses_total", model=model)
    looked_up = (hits or 0.0) + (misses or 0.0)
    return ModelRow(
        model=model,
        sessions=w.gauge("saccade_sessions", model=model),
        batch_mean=w.mean("saccade_batch_sequences", model=model),
        batch_p99=w.quantile(0.99, "saccade_batch_sequences", model=model),
        rows_mean=w.mean("saccade_batch_rows", model=model),
        frames_per_s=w.rate("saccade_frames_received_total", model=model),
        frames_superseded_per_s=w.rate("saccade_frames_superseded_total", model=model),
        frames_stale_per_s=w.rate("saccade_frames_stale_total", model=model),
        vision_hit_ratio=(hits or 0.0) / looked_up if looked_up else None,
        frame_age_p50=w.quantile(0.5, "saccade_frame_age_seconds", model=model),
        frame_age_p99=w.quantile(0.99, "saccade_frame_age_seconds", model=model),
    )


# ---------------------------------------------------------------------------------- how it is shown
def _ms(value: float | Quantile | None) -> Cell:
    if value is None:
        return ("-", "dim")
    if isinstance(value, Quantile):
        return (f">{value.s * 1e3:.0f}", "bad") if value.over else (f"{value.s * 1e3:.1f}", "")
    return (f"{value * 1e3:.2f}", "")


def _percent(value: float | None, good: float = 0.0, warn: float = 0.0) -> Cell:
    if value is None:
        return ("-", "dim")
    style = "" if not good else "good" if value >= good else "warn" if value >= warn else "bad"
    return (f"{value * 100:.1f}", style)


def _since(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def lines(view: Snapshot) -> list[list[Cell]]:
    """The whole frame."""
    head: list[Cell] = [("saccade top", "title"), (f"  {view.address}  ", "")]
    if view.status is not None:
        s = view.status
        state: Cell = (
            ("draining", "warn")
            if s.draining
            else ("ready", "good")
            if s.ready
            else ("not ready", "bad")
        )
        head += [state, (f"  version {plain(s.version)}, up {_since(s.uptime_s)}", "")]
        head.append((f"  sessions {s.sessions}", ""))
    else:
        head.append((f"no answer: {plain(view.status_error)}", "bad"))
    if view.streams is not None:
        head.append((f"  streams {view.streams:.0f}", ""))
    if view.workers_up is not None:
        head.append((f"  workers up {view.workers_up:.0f}", "" if view.workers_up else "bad"))
    if view.window_s is not None:
        head.append((f"  over {view.window_s:.1f} s", "dim"))
    out = [head]
    if view.metrics_error:
        out.append([(f"{view.metrics}: no data: {plain(view.metrics_error)}", "bad")])
    elif view.window_s is None:
        out.append([("rates and latencies come with the next scrape", "dim")])
    absent = "no metrics" if view.metrics_error else "the server exports none"

    out += table(
        "classes",
        [
            "",
            "deadline ms",
            "admitted/s",
            "answered/s",
            "open",
            "met %",
            "p50 ms",
            "p99 ms",
            "queue p99",
        ],
        [
            [
                (plain(c.name), ""),
                ("none", "dim")
                if c.deadline_s == 0
                else number(c.deadline_s and c.deadline_s * 1e3, 0),
                number(c.admitted_per_s),
                number(c.answered_per_s),
                number(c.unanswered, 0),
                _percent(c.met, 0.999, 0.95),
                _ms(c.p50),
                _ms(c.p99),
                _ms(c.queue_p99),
            ]
            for c in view.classes
        ],
        absent,
    )
    out += table(
        "refused and failed",
        ["", "reason", "/s", "since start"],
        [
            [
                (r.outcome, ""),
                (plain(r.reason), "bad" if r.per_s else ""),
                number(r.per_s),
                number(r.total, 0),
            ]
            for r in view.reasons
        ],
        absent if view.metrics_error else "none since the server started",
    )
    out += table(
        "K/V blocks",
        ["", "partition", "free", "held", "idle", "hit %", "evicted/s"],
        [
            [
                (plain(p.model), ""),
                (plain(p.name), ""),
                number(p.free, 0),
                number(p.held, 0),
                number(p.idle, 0),
                _percent(p.hit_ratio),
                number(p.evicted_per_s),
            ]
            for p in view.partitions
        ],
        absent,
    )
    out += table(
        "steps",
        ["", "kind", "/s", "predicted ms", "taken ms", "p99 ms"],
        [
            [
                (plain(s.model), ""),
                (plain(s.kind), ""),
                number(s.per_s),
                _ms(s.predicted_s),
                _ms(s.taken_s),
                _ms(s.taken_p99),
            ]
            for s in view.steps
        ],
        absent,
    )
    out += table(
        "models",
        [
            *("", "sessions", "batch", "batch p99", "rows", "frames/s", "superseded/s", "stale/s"),
            *("vision hit %", "age p50 ms", "age p99 ms"),
        ],
        [
            [
                (plain(m.model), ""),
                number(m.sessions, 0),
                number(m.batch_mean),
                number(m.batch_p99.s if m.batch_p99 else None),
                number(m.rows_mean),
                number(m.frames_per_s),
                number(m.frames_superseded_per_s),
                number(m.frames_stale_per_s),
                _percent(m.vision_hit_ratio),
                _ms(m.frame_age_p50),
                _ms(m.frame_age_p99),
            ]
            for m in view.models
        ],
        absent,
    )
    return out


# --------------------------------------------------------------------------------------- the command
def metrics_url(text: str) -> str:
    """``host:port`` will do. Raises ValueError on another scheme."""
    url = text if "://" in text else f"http://{text}"
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ValueError(f"--metrics takes an http address, not {text!r}")
    return url if "/" in rest else url + "/metrics"


class Source:
    """Asks a server and its metrics, and remembers the scrape before."""

    def __init__(self, client: Client, metrics: str, timeout_s: float) -> None:
        self._client = client
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._before: Scrape | None = None

    def look(self) -> Snapshot:
        """Never raises for a server that does not answer: that is a thing to show."""
        status, status_error, scrape, metrics_error = None, "", None, ""
        try:
            status = self._client.status(timeout_s=self._timeout_s)
        except errors.SaccadeError as error:
            status_error = str(error)
        try:
            scrape = exposition.fetch(self._metrics, self._timeout_s)
        except (OSError, ValueError) as error:
            metrics_error = str(error)
        view = snapshot(
            self._client.address,
            self._metrics,
            status,
            status_error,
            scrape,
            self._before,
            metrics_error,
        )
        self._before = scrape
        return view


class _Awake:
    """Pauses that a signal ends; SIGTERM and SIGHUP end the view as Ctrl-C does."""

    def __init__(self, wake: socket.socket) -> None:
        self._wake = wake

    def pause(self, seconds: float) -> bool:
        """True: the terminal has another size."""
        readable, _, _ = select.select([self._wake], [], [], max(0.0, seconds))
        if readable:
            self._wake.recv(4096)
        return bool(readable)


@contextmanager
def _awake() -> Iterator[_Awake]:
    woken, waker = socket.socketpair()
    woken.setblocking(False)
    waker.setblocking(False)
    before: dict[int, Any] = {}
    for name, handler in (
        ("SIGWINCH", lambda *_: None),  # its which arrives at `woken`
        ("SIGTERM", signal.default_int_handler),
        ("SIGHUP", signal.default_int_handler),
    ):
        which = getattr(signal, name, None)
        if which is not None:
            before[which] = signal.signal(which, handler)
    fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    try:
        yield _Awake(woken)
    finally:
        signal.set_wakeup_fd(fd)
        for which, handler in before.items():
            signal.signal(which, handler)
        woken.close()
        waker.close()


def _as_json(view: Snapshot) -> str:
    return json.dumps(dataclasses.asdict(view), allow_nan=False)


def run(
    client: Client, metrics: str, interval_s: float, once: bool, as_json: bool, out: TextIO
) -> int:
    """0; 1 when one frame was asked for and nothing answered. Ctrl-C ends it well."""
    terminal = out.isatty()
    colour = terminal and "NO_COLOR" not in os.environ
    source = Source(client, metrics_url(metrics), timeout_s=max(1.0, interval_s))
    try:
        if once or not (terminal or as_json):
            first = source.look()
            if not first.metrics_error:  # rates need a second one
                time.sleep(interval_s)
            view = first if first.metrics_error else source.look()
            frame = [_as_json(view)] if as_json else [paint(x, None, colour) for x in lines(view)]
            print("\n".join(frame), file=out, flush=True)
            return 1 if view.status is None and view.metrics_error else 0
        if as_json:
            while True:
                print(_as_json(source.look()), file=out, flush=True)
                time.sleep(interval_s)
        with _awake() as awake, screen(out) as shown:
            while True:
                due = time.monotonic() + interval_s
                view = source.look()
                shown.show(lines(view), colour)
                while (left := due - time.monotonic()) > 0:
                    if awake.pause(left):
                        shown.show(lines(view), colour)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # its reader has seen enough; the interpreter would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        return 0
