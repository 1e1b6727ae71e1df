"""The Prometheus text format, as much of it as ``saccade top`` needs: samples, rates, quantiles."""

from __future__ import annotations

import math
import re
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_BYTES = 8 << 20
MAX_SAMPLES = 100_000
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,\s*|(?=\}))')
_ESCAPE = re.compile(r"\\(.)")

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """Every sample of one answer."""

    at: float
    """Monotonic seconds when it was asked for."""
    samples: dict[str, dict[Labels, float]]
    """By name and labels."""


@dataclass(frozen=True)
class Quantile:
    """Of a histogram; interpolated within its bucket."""

    s: float
    over: bool = False
    """It lies beyond the last bound, which ``s`` then is."""


def parse(text: str, at: float = 0.0) -> Scrape:
    """Raises ValueError, with the line, on anything that is not this format, or too much of it."""
    samples: dict[str, dict[Labels, float]] = {}
    count = 0
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        count += 1
        if count > MAX_SAMPLES:
            raise ValueError(f"more than {MAX_SAMPLES} samples")
        try:
            name, labels, value = _sample(line)
        except ValueError:
            raise ValueError(f"line {number} is no sample: {line[:80]!r}") from None
        samples.setdefault(name, {})[labels] = value
    return Scrape(at, samples)


def _sample(line: str) -> tuple[str, Labels, float]:
    matched = _NAME.match(line)
    if matched is None:
        raise ValueError
    at = matched.end()
    labels: list[tuple[str, str]] = []
    if line[at : at + 1] == "{":
        at += 1
        while line[at : at + 1] != "}":
            label = _LABEL.match(line, at)
            if label is None:
                raise ValueError
            value = _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], label[2])
            labels.append((label[1], value))
            at = label.end()
        at += 1
    rest = line[at:].split()
    if not 1 <= len(rest) <= 2:  # a time stamp may follow
        raise ValueError
    return matched[0], frozenset(labels), float(rest[0])


def fetch(url: str, timeout_s: float) -> Scrape:
    """Asks once. Raises OSError when there is no answer, ValueError when it is another thing."""
    at = time.monotonic()
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        data = answer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    return parse(data.decode("utf-8", "replace"), at)


class Window:
    """What happened between two scrapes. A counter that went down began again: its server did."""

    def __init__(self, now: Scrape, before: Scrape | None) -> None:
        self._now = now
        self._before = before
        self.seconds = now.at - before.at if before is not None else 0.0

    def values(self, name: str, label: str) -> list[str]:
        """What a label takes, in order."""
        found = {v for labels in self._now.samples.get(name, {}) for k, v in labels if k == label}
        return sorted(found)

    def gauge(self, name: str, **labels: str) -> float | None:
        """Sum of the samples that have these labels; None: there is none."""
        return self._sum(name, labels, lambda _, value: value)

    def total(self, name: str, **labels: str) -> float | None:
        """The same of a counter, since its server started."""
        return self.gauge(name, **labels)

    def increase(self, name: str, **labels: str) -> float | None:
        """Of a counter over the window; None: no such counter, or there is no window."""
        if self.seconds <= 0:
            return None
        return self._sum(name, labels, lambda key, value: self._grown(name, key, value))

    def rate(self, name: str, **labels: str) -> float | None:
        """``increase`` per second."""
        grown = self.increase(name, **labels)
        return None if grown is None else grown / self.seconds

    def mean(self, name: str, **labels: str) -> float | None:
        """Of a histogram's observations in the window; None: there were none."""
        count = self.increase(name + "_count", **labels)
        total = self.increase(name + "_sum", **labels)
        return total / count if count and total is not None else None

    def quantile(self, q: float, name: str, **labels: str) -> Quantile | None:
        """Of a histogram's observations in the window; None: there were none."""
        if self.seconds <= 0:
            return None
        buckets: dict[float, float] = {}
        wanted = set(labels.items())
        for key, value in self._now.samples.get(name + "_bucket", {}).items():
            bound = dict(key).get("le")
            if bound is not None and wanted <= key:
                le = float(bound)
                grown = self._grown(name + "_bucket", key, value)
                buckets[le] = buckets.get(le, 0.0) + grown
        return quantile(q, buckets.items())

    def _grown(self, name: str, key: Labels, value: float) -> float:
        before = self._before.samples.get(name, {}).get(key, 0.0) if self._before else 0.0
        return value - before if value >= before else value

    def _sum(
        self, name: str, labels: dict[str, str], of: Callable[[Labels, float], float]
    ) -> float | None:
        wanted = set(labels.items())
        found = [of(k, v) for k, v in self._now.samples.get(name, {}).items() if wanted <= k]
        found = [value for value in found if math.isfinite(value)]
        return sum(found) if found else None


def quantile(q: float, buckets: Iterable[tuple[float, float]]) -> Quantile | None:
    """Of cumulative (upper bound, count) pairs, the last of them at infinity."""
    ordered = sorted(buckets)
    if len(ordered) < 2 or not math.isinf(ordered[-1][0]) or not 0 < ordered[-1][1] < math.inf:
        return None
    rank = q * ordered[-1][1]
    low = below = 0.0
    for bound, count in ordered:
        if count >= rank and count > below:
            if math.isinf(bound):
                break
            return Quantile(low + (bound - low) * (rank - below) / (count - below))
        if not math.isinf(bound):
            low = bound
            below = max(below, count)
    return Quantile(low, over=True)
