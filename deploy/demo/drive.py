"""Drives the demo world in a closed loop over the server's API, in real time.

Five times a second: render the bird's-eye view, send it as JPEG with the instruction and the speed, ask for actions,
carry out what came in time. On a terminal it shows the drive, and what is typed becomes the cars' instruction; elsewhere it
prints a line for every action. With --out it leaves a film, the episodes and a report in a folder. Exits 0 when actions
came; with --strict only when every action met its deadline and every episode succeeded (a busy machine misses some).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from live import View

from saccade import Actions, Client, SaccadeError, aio
from saccade.credentials import Credentials
from saccade.eval import drive as driving
from saccade.eval import film, realtime, runner
from saccade.eval.report import page
from saccade.eval.settings import Setting
from saccade.eval.world import Episode, MakeEpisode, Picture, World, load
from saccade.exposition import Window
from saccade.terminal import screen
from saccade.top import metrics_url

SEED = 5_000_000  # held out: training used 100000.., 200000.., 300000.., validation 900000..
WORLD = Path(__file__).with_name("scenes.py")


class Told:
    """An episode whose instruction may be changed, and which is over when the time is up."""

    def __init__(self, episode: Episode, car: Car) -> None:
        self._episode = episode
        self._car = car
        self.cut = False
        self.by_hand = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    def instruction(self) -> str:
        """By hand, or the world's own."""
        self.by_hand |= bool(self._car.told)
        return self._car.told or self._episode.instruction()

    def drive(self, action: Sequence[float]) -> bool:
        """Cut short at the end of the time."""
        over = self._episode.drive(action)
        self.cut = not over and time.monotonic() >= self._car.end
        return over or self.cut


@dataclass
class Scenes:
    """A world with other episodes."""

    GROUPS: Sequence[str]
    CAMERAS: Sequence[str]
    Episode: MakeEpisode


class Car:
    """Drives one episode after the other, and watches its drives."""

    def __init__(self, number: int, world: World, view: View, shots: film.Film | None) -> None:
        self.told = ""
        self.end = 0.0
        self.records: list[driving.Record] = []
        self._number = number
        self._world = world
        self._view = view
        self._film = shots
        self._current: Told | None = None

    def _make(self, group: str, seed: int, *, level: str, stress: str, mode: str) -> Episode:
        episode = self._world.Episode(group, seed, level=level, stress=stress, mode=mode)
        self._current = Told(episode, self)
        return cast(Episode, self._current)

    def step(
        self,
        episode: Episode,
        pictures: Mapping[str, Picture],
        answer: Actions | None,
        of: Mapping[str, Picture],
        action: npt.NDArray[np.float64],
    ) -> None:
        """Shows it."""
        self._view.cars[self._number].by_hand = bool(self.told)
        self._view.step(self._number, episode, pictures, answer, action)
        if self._film is not None:
            self._film.step(episode, pictures, answer, of, action)

    async def run(self, address: str, model: str, setting: Setting, args: Any) -> None:
        """Until the time is up; a client of its own."""
        world = Scenes(self._world.GROUPS, self._world.CAMERAS, self._make)
        async with aio.Client(address) as client:
            number = self._number
            while time.monotonic() < self.end:
                group = world.GROUPS[number % len(world.GROUPS)]
                seed = args.seed + number
                record = await driving.drive(
                    client, world, setting, group, seed, model, jpeg=True, watch=self
                )
                told = self._current
                assert told is not None
                judged = not (told.cut or told.by_hand)
                self._view.end(self._number, record, judged)
                # What was not driven to its end by its own instruction says nothing of success.
                if judged:
                    self.records.append(record)
                number += args.cars


async def typed(cars: Sequence[Car], view: View) -> None:
    """Takes the keys until it is cancelled."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def take() -> None:
        data = os.read(descriptor, 1024)
        if not data:
            loop.remove_reader(descriptor)
        for line in view.keys.take(data.decode(errors="replace")):
            tell(cars, line)
        view.draw(now=True)

    loop.add_reader(descriptor, take)
    try:
        await asyncio.Event().wait()
    finally:
        loop.remove_reader(descriptor)


def tell(cars: Sequence[Car], line: str) -> None:
    """To all cars, or to the one whose number comes first."""
    first, _, rest = line.strip().partition(" ")
    if first.isdigit() and 1 <= int(first) <= len(cars):
        cars[int(first) - 1].told = rest.strip()
    else:
        for car in cars:
            car.told = line.strip()


def print_metrics(address: str) -> None:
    """The server's own view: K/V partitions, deadlines, latency."""
    wanted = (
        "saccade_kv_",
        "saccade_vision_cache",
        "saccade_requests_",
        "saccade_end_to_end_seconds_sum",
        "saccade_end_to_end_seconds_count",
        "saccade_queue_seconds_sum",
        "saccade_queue_seconds_count",
        "saccade_frame_age",
    )
    with urllib.request.urlopen(metrics_url(address), timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    print(f"\nfrom {metrics_url(address)} (what is not 0):")
    for line in lines:
        shown = line.startswith(wanted) and "_bucket" not in line and not line.endswith(" 0")
        if shown:
            print("  " + line)


async def drive(args: argparse.Namespace, model: str, setting: Setting, view: View) -> list[Car]:
    """All cars at once, for the time asked for."""
    world = load(args.world)
    shots = [film.Film() if args.out and i == 0 else None for i in range(args.cars)]
    cars = [Car(i, world, view, shots[i]) for i in range(args.cars)]
    hand = asyncio.create_task(typed(cars, view)) if sys.stdin.isatty() or args.stdin else None
    end = time.monotonic() + args.seconds
    for car in cars:
        car.end = end
    try:
        await asyncio.gather(*(car.run(args.address, model, setting, args) for car in cars))
    finally:
        if hand is not None:
            hand.cancel()
    if shots[0] is not None:
        folder = Path(args.out)
        shots[0].write(folder / "drive.gif")
        if film.can_mp4():
            shots[0].write(folder / "drive.mp4")
    return cars


def leave(folder: Path, cars: Sequence[Car], window: dict[str, Any]) -> None:
    """The episodes, as those of ``saccade eval``, and the report."""
    with (folder / "episodes.jsonl").open("w") as file:
        for record in (r for car in cars for r in car.records):
            file.write(json.dumps(driving.as_line(record)) + "\n")
        file.write(json.dumps({"window": window}) + "\n")
    page.write(folder)


def run(args: argparse.Namespace) -> View:
    """Drives, shows and leaves what was asked for."""
    with contextlib.ExitStack() as stack:
        model, setting, job = prepare(args)
        folder = Path(args.out)
        if args.out:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("run.json", "results.json", "drive.gif", "drive.mp4"):
                (folder / name).unlink(missing_ok=True)
            runner.claim(job, folder)
        live = sys.stdout.isatty() and not args.lines
        view = View(
            args.cars,
            f"{model} at {args.address}, {setting.name}",
            sys.stdout,
            stack.enter_context(screen(sys.stdout)) if live else None,
        )
        if live:
            stack.enter_context(view.keys)
        others = (
            stack.enter_context(realtime.Load(args.address, model, args.load, Credentials()))
            if args.load
            else None
        )
        before = runner.scrape(job.metrics)
        start = time.monotonic()
        cars = asyncio.run(drive(args, model, setting, view))
        after = runner.scrape(job.metrics)
        window: dict[str, Any] = {"setting": setting.name, "seconds": time.monotonic() - start}
        window["requests"] = sum(r.calls for car in cars for r in car.records)
        if before is not None and after is not None:
            window.update(runner.measure(Window(after, before)))
    if others is not None:
        window["load"] = realtime.as_entry(others.heard)
    if args.out:
        leave(folder, cars, window)
    return view


def prepare(args: argparse.Namespace) -> tuple[str, Setting, runner.Job]:
    """What is driven and how."""
    with Client(args.address) as client:
        client.wait_ready()
        models = {m.name: m for m in client.models()}
    if args.model not in models:
        raise ValueError(f"the server has no model {args.model}, but {', '.join(models)}")
    setting = Setting(
        level=args.level,
        stress=args.stress,
        pace="real",
        replan=1,
        latency_class=args.latency_class or models[args.model].default_class,
        load=args.load,
    )
    job = runner.Job(
        address=args.address,
        model=args.model,
        world=args.world,
        settings=[setting],
        groups=(),
        seeds=range(0),
        metrics=metrics_url(args.metrics) if args.metrics else "",
    )
    return args.model, setting, job


def main() -> int:
    """Runs the loop; see the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--metrics", default="127.0.0.1:9090", help="empty: no metrics at the end")
    parser.add_argument("--model", default="highway_demo")
    parser.add_argument("--latency-class", default="", help="default: the model's")
    parser.add_argument("--seconds", type=float, default=20.0, help="of driving")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--world", default=str(WORLD), help="as of saccade eval (the demo's)")
    parser.add_argument("--cars", type=int, default=1, help="each with a client of its own")
    parser.add_argument("--level", default="base", help="of the scenes: base or hard")
    parser.add_argument("--stress", default="none", help="see README.md")
    parser.add_argument("--load", type=float, default=0.0, help="act requests a second of others")
    parser.add_argument("--out", default="", help="folder for the film, episodes and report.html")
    parser.add_argument("--lines", action="store_true", help="no live view on a terminal")
    parser.add_argument("--stdin", action="store_true", help="take instructions though no terminal")
    parser.add_argument("--strict", action="store_true", help="any miss or failed episode: exit 1")
    args = parser.parse_args()
    if args.cars < 1 or args.seconds <= 0 or args.load < 0:
        parser.error("--cars, --seconds or --load is out of range")
    try:
        view = run(args)
    except (SaccadeError, TimeoutError, OSError, ValueError) as error:
        print(f"drive: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if args.metrics:
        print_metrics(args.metrics)
    print("\n" + view.summary())
    if args.out:
        print(f"film and report: {Path(args.out) / 'report.html'}")
    asked = sum(seen.asked for seen in view.cars)
    flawless = all(seen.missed == 0 and all(seen.verdicts) for seen in view.cars)
    return 0 if asked and (flawless or not args.strict) else 1


if __name__ == "__main__":
    sys.exit(main())
