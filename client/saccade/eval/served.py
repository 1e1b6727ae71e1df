"""What a server's metrics say of a time: latency by class, how requests ended, what the caches had. Adds up over times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from saccade.exposition import Quantile, Window, quantile

ENDINGS = ("met", "missed", "failed", "rejected")
"""Answered on time; answered late; failed after it was admitted; refused before."""


def measure(window: Window) -> dict[str, Any]:
    """Sums, for JSON.

    ``classes``: by latency class the cumulative ``buckets`` [bound in s, count] (the last bound is null: any time) of
    arrival to answer, and how many requests ended which way. ``tokens``: by modality, found in the cache and not.
    """
    return {
        "classes": {
            name: {
                "buckets": _buckets(window, name),
                **{
                    end: window.increase(f"saccade_requests_{end}_total", **{"class": name}) or 0.0
                    for end in ENDINGS
                },
            }
            for name in window.values("saccade_requests_admitted_total", "class")
        },
        "tokens": {
            partition: [
                window.increase(f"saccade_kv_{of}_tokens_total", partition=partition) or 0.0
                for of in ("hit", "miss")
            ]
            for partition in window.values("saccade_kv_hit_tokens_total", "partition")
        },
        "evicted": {
            partition: window.increase("saccade_kv_evicted_blocks_total", partition=partition)
            or 0.0
            for partition in window.values("saccade_kv_evicted_blocks_total", "partition")
        },
    }


def _buckets(window: Window, name: str) -> list[list[float | None]]:
    metric = "saccade_end_to_end_seconds_bucket"
    found = []
    for bound in sorted(window.values(metric, "le"), key=float):
        count = window.increase(metric, **{"class": name, "le": bound}) or 0.0
        found.append([None if math.isinf(float(bound)) else float(bound), count])
    return found


def add(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Several times as one. Classes nobody asked in are left out."""
    classes: dict[str, dict[str, Any]] = {}
    tokens: dict[str, list[float]] = {}
    evicted: dict[str, float] = {}
    for part in parts:
        for name, one in part["classes"].items():
            sums = classes.setdefault(name, {"buckets": {}, **dict.fromkeys(ENDINGS, 0.0)})
            for bound, count in one["buckets"]:
                sums["buckets"][bound] = sums["buckets"].get(bound, 0.0) + count
            for end in ENDINGS:
                sums[end] += one[end]
        for partition, (hit, miss) in part["tokens"].items():
            both = tokens.setdefault(partition, [0.0, 0.0])
            both[0] += hit
            both[1] += miss
        for partition, blocks in part["evicted"].items():
            evicted[partition] = evicted.get(partition, 0.0) + blocks
    return {
        "classes": {
            name: {**sums, "buckets": [[b, c] for b, c in sums["buckets"].items()]}
            for name, sums in classes.items()
            if any(sums[end] for end in ENDINGS)
        },
        "tokens": {p: both for p, both in tokens.items() if any(both)},
        "evicted": evicted,
    }


def quantile_of(buckets: Iterable[tuple[float | None, float]], q: float) -> Quantile | None:
    """Of ``buckets`` as above; None: nothing was answered."""
    return quantile(q, [(math.inf if bound is None else bound, n) for bound, n in buckets])
