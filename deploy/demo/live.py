"""What a drive shows while it drives: lines, or on a terminal a view that is drawn anew, with a line to type."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO

import numpy as np
import numpy.typing as npt

from saccade import Actions
from saccade.eval.drive import Record
from saccade.eval.world import Episode, Picture
from saccade.terminal import Cell, Keys, Screen, number, picture, plain, table

REDRAW_S = 0.1
PICTURE_COLUMNS = 64
KEPT = 400  # newest latencies that the view's quantiles are of


@dataclass
class Seen:
    """A car, as it was last seen."""

    told: str = ""
    by_hand: bool = False
    speed: float = 0.0
    action: tuple[float, ...] = ()
    answer: Actions | None = None
    """Of this step; None: the last chunk goes on."""
    picture: Picture | None = None
    step: int = 0
    limit: int = 0
    asked: int = 0
    missed: int = 0
    verdicts: list[bool] = field(default_factory=list)
    last: str = ""
    """How its last episode ended."""


class View:
    """All cars. ``screen`` None: lines go to ``out``."""

    def __init__(self, cars: int, title: str, out: TextIO, screen: Screen | None) -> None:
        self.cars = [Seen() for _ in range(cars)]
        self.keys = Keys()
        self.latencies_ms: collections.deque[float] = collections.deque(maxlen=KEPT)
        self._title = title
        self._out = out
        self._screen = screen
        self._colour = "NO_COLOR" not in os.environ
        self._start = time.monotonic()
        self._shown = 0.0

    def step(
        self,
        car: int,
        episode: Episode,
        pictures: Mapping[str, Picture],
        answer: Actions | None,
        action: npt.NDArray[np.float64],
    ) -> None:
        """One more step of a car."""
        seen = self.cars[car]
        seen.told = episode.instruction()
        seen.speed = episode.speed()
        seen.action = tuple(float(a) for a in action)
        seen.answer = answer
        seen.picture = next(iter(pictures.values()))
        seen.step, seen.limit = episode.step, episode.limit_steps
        if answer is not None:
            seen.asked += 1
            seen.missed += not answer.deadline_met
            self.latencies_ms.append(answer.timings.total_s * 1e3)
        if self._screen is None:
            print(self._line(car, seen), file=self._out, flush=True)
        else:
            self.draw()

    def end(self, car: int, record: Record, judged: bool) -> None:
        """An episode is over; not judged where it was cut short or told otherwise by hand."""
        seen = self.cars[car]
        seen.missed += record.refused
        if judged:
            seen.verdicts.append(record.ok)
        said = ("achieved" if record.ok else record.why) if judged else "not judged"
        seen.last = f"{record.group} {said}"
        if self._screen is None:
            print(f"    car {car + 1}, episode '{seen.told}': {said}", file=self._out, flush=True)

    def summary(self) -> str:
        """One paragraph for a person."""
        asked = sum(s.asked for s in self.cars)
        if not asked:
            return "no action was answered"
        p50, p99 = np.percentile(self.latencies_ms, [50, 99])
        verdicts = [v for s in self.cars for v in s.verdicts]
        return (
            f"{asked} actions, the newest {len(self.latencies_ms)} of them within p50 {p50:.1f} ms, p99 {p99:.1f} ms;"
            f" deadlines missed: {sum(s.missed for s in self.cars)};"
            f" episodes succeeded: {sum(verdicts)} of {len(verdicts)}"
        )

    def draw(self, now: bool = False) -> None:
        """The whole view, a few times a second."""
        if self._screen is None or (not now and time.monotonic() - self._shown < REDRAW_S):
            return
        self._shown = time.monotonic()
        first = self.cars[0].picture
        # The road is the middle of the picture.
        road = picture(first[64:160], PICTURE_COLUMNS) if first is not None and self._colour else []
        self._screen.show(self._lines(), self._colour, road)

    def _line(self, car: int, seen: Seen) -> str:
        head = f"[{time.monotonic() - self._start:6.2f} s] car {car + 1} {plain(seen.told):<28.60} {seen.speed:5.1f} m/s"
        steer, accel = seen.action[:2]
        text = f"{head} | steer {steer:+.4f} rad accel {accel:+.2f} m/s2 | "
        answer = seen.answer
        if answer is None:
            return text + "no answer in time, the last chunk goes on"
        cached = sum(m.cached for m in answer.tokens.values())
        total = sum(m.total for m in answer.tokens.values())
        return (
            f"{text}latency {answer.timings.total_s * 1e3:5.1f} ms, deadline {answer.deadline_s * 1e3:.0f} ms"
            f" {'met ' if answer.deadline_met else 'LATE'} | frame {answer.frames[0].age_s * 1e3:4.1f} ms old"
            f" | cached {cached}/{total}"
        )

    def _lines(self) -> list[list[Cell]]:
        met = sum(s.asked - s.missed for s in self.cars)
        asked = sum(s.asked for s in self.cars)
        head: list[Cell] = [("saccade drive", "title"), (f"  {plain(self._title)}", "")]
        head.append((f"  {time.monotonic() - self._start:.0f} s", "dim"))
        lines = [head]
        if self.latencies_ms:
            p50, p99 = np.percentile(self.latencies_ms, [50, 99])
            share = 100 * met / max(1, asked)
            lines.append(
                [
                    (f"{asked} answers, p50 {p50:.1f} ms, p99 {p99:.1f} ms, on time ", ""),
                    (f"{share:.1f} %", "good" if share >= 99.9 else "warn"),
                ]
            )
        lines += table(
            "cars",
            [
                "",
                "told",
                "step",
                "m/s",
                "steer rad",
                "accel m/s2",
                "ms",
                "new/reused/evicted",
                "ok",
                "last",
            ],
            [self._row(i, s) for i, s in enumerate(self.cars)],
            "none yet",
        )
        lines.append([])
        lines.append(
            [
                ("instruction> ", "title"),
                (self.keys.line, ""),
                ("_", "dim"),
                (
                    "   Enter: to all cars; '2 TEXT': to car 2; empty: the world's own; Ctrl-C ends",
                    "dim",
                ),
            ]
        )
        return lines

    def _row(self, car: int, seen: Seen) -> list[Cell]:
        steer, accel = (*seen.action[:2], None, None)[:2]
        answer = seen.answer
        late = answer is not None and not answer.deadline_met
        runs = [r for f in answer.frames for r in f.runs] if answer is not None else []
        by = {
            s: sum(r.count for r in runs if r.source == s)
            for s in ("computed", "reused", "evicted")
        }
        return [
            (f"car {car + 1}", ""),
            (plain(seen.told)[:40], "warn" if seen.by_hand else ""),
            (f"{seen.step}/{seen.limit}", ""),
            number(seen.speed),
            number(steer, 3),
            number(accel, 2),
            (f"{answer.timings.total_s * 1e3:.1f}", "bad" if late else "")
            if answer
            else ("-", "dim"),
            ("/".join(str(n) for n in by.values()), "") if runs else ("-", "dim"),
            (f"{sum(seen.verdicts)}/{len(seen.verdicts)}", ""),
            (plain(seen.last)[:24], "dim"),
        ]
