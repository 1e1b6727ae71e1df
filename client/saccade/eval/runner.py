"""Many episodes side by side: worker processes with several sessions each, one file that a rerun goes on from.

A run lives in a folder: ``run.json`` says of what it is, ``episodes.jsonl`` has a line for every finished episode, and one
(with ``window``) for what the server's metrics say of each block of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

from saccade import aio, errors, exposition
from saccade.client import Client
from saccade.credentials import Credentials
from saccade.eval import drive as driving
from saccade.eval import realtime, served
from saccade.eval import world as worlds
from saccade.eval.settings import Setting
from saccade.exposition import Scrape, Window

METRICS_LAG_S = 0.15
"""What a server counts shows in its metrics within a tenth of a second."""
BLOCK_SEEDS = 10
"""Settings take turns after so many seeds: what a run that is cut short has is paired all the same."""


@dataclass(frozen=True)
class Job:
    """What is to be driven."""

    address: str
    model: str
    """The baseline's; settings may name others."""
    world: str
    """Path of the file."""
    settings: Sequence[Setting]
    groups: Sequence[str]
    seeds: range
    sessions: int = 8
    processes: int = 0
    """0: one per two sessions, at most one per core but one, which is the server's."""
    metrics: str = ""
    """URL of the server's metrics; empty: none are read."""
    jpeg: bool = False
    limit_s: float = 0.0
    """Begins no episode after that; 0: no limit."""
    credentials: Credentials = field(default_factory=Credentials)

    @property
    def workers(self) -> int:
        """Processes."""
        cores = len(os.sched_getaffinity(0))
        return self.processes or max(1, min((self.sessions + 1) // 2, cores - 1))


@dataclass(frozen=True)
class Task:
    """One episode."""

    setting: Setting
    group: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        """As a finished one is known."""
        return self.setting.name, self.group, self.seed


@dataclass
class Log:
    """What a run's folder holds."""

    run: dict[str, Any]
    episodes: list[dict[str, Any]]
    windows: list[dict[str, Any]]

    @property
    def done(self) -> set[tuple[str, str, int]]:
        """Finished episodes."""
        return {(e["setting"], e["group"], e["seed"]) for e in self.episodes}


def read(folder: Path) -> Log:
    """A run as far as it got; a line that was cut short by an end counts as not written."""
    log = Log(json.loads((folder / "run.json").read_text()), [], [])
    path = folder / "episodes.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        (log.windows if "window" in entry else log.episodes).append(entry)
    return log


class Progress:
    """One line that is rewritten on a terminal, one every ten seconds elsewhere."""

    def __init__(self, out: TextIO, total: int, done: int) -> None:
        self._out = out
        self._live = out.isatty()
        self._total, self._before, self._done = total, done, done
        self._start = time.monotonic()
        self._shown = 0.0 if self._live else self._start
        self._calls = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """One more."""
        self._done += 1
        self._calls += record["calls"] + record["probes"]
        now = time.monotonic()
        if now - self._shown >= (0.2 if self._live else 10.0):
            self._shown = now
            self._show(str(record["setting"]), now)

    def end(self) -> None:
        """The last state."""
        if self._done > self._before:
            self._show("", time.monotonic())
        if self._live:
            print(file=self._out)

    def _show(self, setting: str, now: float) -> None:
        seconds = max(1e-9, now - self._start)
        rate = (self._done - self._before) / seconds
        left = (self._total - self._done) / rate
        filled = round(24 * self._done / max(1, self._total))
        line = (
            f"[{'#' * filled}{'.' * (24 - filled)}] {self._done}/{self._total} episodes,"
            f" {self._calls / seconds:.0f} calls/s, {left:.0f} s left {setting}"
        )
        print(f"\r\x1b[K{line[:118]}" if self._live else line, end="", file=self._out)
        print(end="" if self._live else "\n", file=self._out, flush=True)


def run(job: Job, folder: Path, out: TextIO = sys.stderr) -> Log:
    """Drives what is missing in the folder and returns all of it.

    Raises ValueError where the folder is of another run, SaccadeError where the server fails.
    """
    claim(job, folder)
    log = read(folder)
    tasks = [
        [t for t in block if t.key not in log.done]
        for block in blocks(job.settings, job.groups, job.seeds)
    ]
    total = len(job.settings) * len(job.groups) * len(job.seeds)
    missing = sum(map(len, tasks))
    if not missing:
        return log
    progress = Progress(out, total, total - missing)
    end = time.monotonic() + job.limit_s if job.limit_s else float("inf")
    with _Workers(job) as workers, (folder / "episodes.jsonl").open("a") as file:

        def write(entry: dict[str, Any]) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        for block in filter(None, tasks):
            if time.monotonic() >= end:
                break
            setting = block[0].setting
            window: dict[str, Any] = {"setting": setting.name}
            requests = 0
            with _load(job, setting) as load:
                before = scrape(job.metrics)
                start = time.monotonic()
                for record in workers.drive(block, end):
                    write(record)
                    requests += record["calls"] + record["probes"]
                    progress.add(record)
                window["seconds"] = time.monotonic() - start
                after = scrape(job.metrics)
            if load is not None:
                window["load"] = realtime.as_entry(load.heard)
            if before is not None and after is not None:
                window.update(measure(Window(after, before)))
            write({"window": {**window, "requests": requests}})
        progress.end()
    return read(folder)


def blocks(
    settings: Sequence[Setting], groups: Sequence[str], seeds: range
) -> Iterator[list[Task]]:
    """Episodes of one setting each, that are driven side by side."""
    for first in range(0, len(seeds), BLOCK_SEEDS):
        for setting in settings:
            yield [Task(setting, g, s) for s in seeds[first : first + BLOCK_SEEDS] for g in groups]


def claim(job: Job, folder: Path) -> None:
    """Makes the folder, or holds that what is in it was driven in the same world by the same models."""
    with Client(job.address, credentials=job.credentials) as client:
        served = {m.name: m for m in client.models()}
        status = client.status()
    if unknown := sorted({s.pace for s in job.settings} - set(driving.CLOCKS)):
        raise ValueError(f"no pace {', '.join(unknown)}, but {', '.join(driving.CLOCKS)}")
    if any(s.load and s.pace == "fast" for s in job.settings):
        raise ValueError("a load needs a pace: where every answer is waited for, none is late")
    names = {s.model or job.model for s in job.settings} | {job.model}
    if unknown := sorted(names - set(served)):
        raise ValueError(f"the server has no model {', '.join(unknown)}, but {', '.join(served)}")
    models = {
        name: {
            "fingerprint": served[name].fingerprint,
            "family": served[name].family,
            "dtype": served[name].compute_type,
            "parameters": served[name].parameters,
        }
        for name in sorted(names)
    }
    want = {
        "world": Path(job.world).name,
        "world_digest": worlds.digest(job.world),
        "model": job.model,
        "models": models,
        "server": status.version,
        "deadlines_ms": {c.name: c.deadline_s * 1e3 for c in status.classes},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    if path.exists():
        have = json.loads(path.read_text())
        have_models = have.get("models", {})
        same = all(
            have_models.get(n, m)["fingerprint"] == m["fingerprint"] for n, m in models.items()
        )
        if not same or any(have.get(k) != want[k] for k in ("world_digest", "model")):
            raise ValueError(f"{folder} is of another world or model; give another folder")
        want["models"] = {**have_models, **models}
    path.write_text(json.dumps(want, indent=1) + "\n")


def _load(job: Job, setting: Setting) -> AbstractContextManager[realtime.Load | None]:
    if not setting.load:
        return nullcontext()
    return realtime.Load(job.address, setting.model or job.model, setting.load, job.credentials)


def scrape(metrics: str) -> Scrape | None:
    """None: there is no such server, or no URL."""
    if not metrics:
        return None
    time.sleep(METRICS_LAG_S)
    try:
        return exposition.fetch(metrics, 5.0)
    except (OSError, ValueError):
        return None


def measure(window: Window) -> dict[str, Any]:
    """Sums over a block, each with how many: sequences and rows of steps, seconds of steps by kind; CPU seconds."""

    def total(metric: str, **labels: str) -> list[float]:
        return [window.increase(f"{metric}_{part}", **labels) or 0.0 for part in ("sum", "count")]

    metric = "saccade_step_taken_seconds"
    found: dict[str, Any] = {
        "sequences": total("saccade_batch_sequences"),
        "rows": total("saccade_batch_rows"),
        "steps": {k: total(metric, kind=k) for k in window.values(f"{metric}_count", "kind")},
    }
    found["served"] = served.measure(window)
    cpu = window.increase("process_cpu_seconds_total")
    if cpu is not None:
        found["cpu_s"] = cpu
    return found


# ------------------------------------------------------------------------------------------- workers
class _Workers:
    """The processes, and what each of them is busy with."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
        self._links: list[tuple[Connection, Any]] = []
        self._slots: list[int] = []

    def __enter__(self) -> _Workers:
        job = dataclasses.replace(self._job, settings=())
        n = self._job.workers
        for i in range(n):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            self._links.append((ours, process))
            self._slots.append(self._job.sessions // n + (i < self._job.sessions % n))
        return self

    def __exit__(self, *reason: object) -> None:
        for connection, _ in self._links:
            connection.close()
        for _, process in self._links:
            process.join(5)
            if process.is_alive():
                process.terminate()

    def drive(self, tasks: list[Task], end: float) -> Iterator[dict[str, Any]]:
        """Records as they come."""
        waiting = list(reversed(tasks))
        busy = dict.fromkeys(range(len(self._links)), 0)

        def feed(i: int) -> None:
            while waiting and busy[i] < self._slots[i] and time.monotonic() < end:
                self._links[i][0].send(waiting.pop())
                busy[i] += 1

        for slot in range(max(self._slots)):  # evenly, should there be few
            for i in busy:
                if waiting and busy[i] == slot < self._slots[i]:
                    self._links[i][0].send(waiting.pop())
                    busy[i] += 1
        while any(busy.values()):
            ready = wait([self._links[i][0] for i, n in busy.items() if n])
            for i, (connection, _) in enumerate(self._links):
                if connection not in ready:
                    continue
                try:
                    answer = connection.recv()
                except EOFError:
                    raise errors.SaccadeError("a worker of the evaluation died") from None
                if isinstance(answer, BaseException):
                    raise answer
                busy[i] -= 1
                feed(i)
                yield answer


def _work(job: Job, link: Connection) -> None:
    """A worker process: drives what it is sent until the other end closes."""
    with suppress(KeyboardInterrupt):  # the parent handles it
        asyncio.run(_serve(job, link))


async def _serve(job: Job, link: Connection) -> None:
    world = worlds.load(job.world)
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    running: set[asyncio.Task[None]] = set()

    async with aio.Client(job.address, credentials=job.credentials) as client:

        async def one(task: Task) -> None:
            try:
                record = await driving.drive(
                    client, world, task.setting, task.group, task.seed, job.model, job.jpeg
                )
                link.send(driving.as_line(record))
            except Exception as error:
                link.send(errors.SaccadeError(f"{task.key}: {type(error).__name__}: {error}"))

        def receive() -> None:
            try:
                task = loop.create_task(one(link.recv()))
            except (EOFError, OSError):
                loop.remove_reader(link.fileno())
                closed.set()
                return
            running.add(task)
            task.add_done_callback(running.discard)

        loop.add_reader(link.fileno(), receive)
        await closed.wait()
        for task in list(running):
            task.cancel()
