"""The report's sections on the server: latency, deadlines, cache hits, and others who asked meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from saccade.eval import plots, stats
from saccade.eval.plots import text
from saccade.eval.report import markup

MOST_CURVES = plots.SERIES
_ENDINGS = {
    "met": ("on time", "--good"),
    "missed": ("answered late", "--warn"),
    "failed": ("failed or expired", "--bad"),
    "rejected": ("refused", "--faint"),
}


def latency(
    server: markup.Row,
    rows: Sequence[markup.Row],
    seen: Mapping[str, Sequence[markup.Row]],
    windows: Sequence[markup.Row],
    deadlines_ms: Mapping[str, float],
) -> str:
    """Exact where each answer's time was written down: by class of the settings, and of the others."""
    times: dict[str, list[float]] = {}
    for r in rows:
        times.setdefault(r["knobs"]["latency_class"], []).extend(
            ms for e in seen[r["name"]] for ms in e["server_ms"]
        )
    for window in windows:
        for name, values in window.get("load", {}).get("server_ms", {}).items():
            times.setdefault(name, []).extend(values)
    curves = [_exact(name, values, deadlines_ms.get(name, 0.0)) for name, values in times.items()]
    known = {name for name, values in times.items() if values}
    curves += [
        _of_buckets(name, one, deadlines_ms.get(name, 0.0))
        for name, one in server["classes"].items()
        if name not in known
    ]
    shown = [c for c in curves if c][:MOST_CURVES]
    return markup.section(
        "Latency by class",
        plots.cdf(shown, "arrival to answer at the server, ms (logarithmic)", "Latency by class"),
        "Share of answers within a time. Refused requests have no answer and are in the next figure.",
    )


def _exact(name: str, values: Iterable[float], mark: float) -> plots.Curve | None:
    ordered = sorted(values)
    if not ordered:
        return None
    step = max(1, len(ordered) // 200)
    points = [(v, (i + 1) / len(ordered)) for i, v in enumerate(ordered)][::step]
    points.append((ordered[-1], 1.0))
    return plots.Curve(f"{name}, {markup.count(len(ordered))} answers", points, mark)


def _of_buckets(name: str, one: markup.Row, mark: float) -> plots.Curve | None:
    """A bucket's count lies at its upper bound: the curve is never better than the truth."""
    total = one["buckets"][-1][1] if one["buckets"] else 0
    if not total:
        return None
    points = [(bound * 1e3, n / total) for bound, n in one["buckets"] if bound is not None]
    first = next((i for i, (_, share) in enumerate(points) if share > 0), len(points))
    last = next((i for i, (_, share) in enumerate(points) if share >= 1), len(points) - 1)
    shown = points[max(0, first - 1) : last + 1]
    return plots.Curve(f"{name} (histogram), {markup.count(total)} answers", shown, mark)


def deadlines(server: markup.Row, rows: Sequence[markup.Row]) -> str:
    """How requests ended, by class as the server counted; by setting where its metrics were not read."""
    bars = [
        plots.Stack(
            name,
            [one[end] for end in _ENDINGS],
            f"{markup.percent(one['met'] / max(1.0, sum(one[e] for e in _ENDINGS)))} of"
            f" {markup.count(sum(one[e] for e in _ENDINGS))}",
        )
        for name, one in server["classes"].items()
    ]
    note = "From the server's counters, everybody's requests, by latency class."
    if not bars:  # no metrics were read: what the clients saw
        bars = [
            plots.Stack(
                r["name"],
                [d["met"], d["late"], 0, d["refused"]],
                f"{markup.percent(d['met_share'])} of {markup.count(r['work']['calls'])}",
            )
            for r in rows
            if r["n"]
            for d in [r["deadlines"]]
        ]
        note = "As the drives' own clients saw it, by setting."
    late = sum(r["deadlines"]["continued_steps"] for r in rows if r["n"])
    if late:
        note += f" Steps on which no answer was there in time, so that the last chunk went on: {markup.count(late)}."
    return markup.section(
        "Deadlines",
        plots.stacks(
            bars,
            [said for said, _ in _ENDINGS.values()],
            [colour for _, colour in _ENDINGS.values()],
            "Deadlines",
        ),
        note,
    )


def cache(server: markup.Row, seen: Mapping[str, Sequence[markup.Row]]) -> str:
    """Prompt tokens found in the cache, by modality, and patches by camera. ``seen``: episodes by setting."""
    bars = [
        plots.Stack(
            f"{partition} tokens",
            [hit, miss],
            f"{markup.percent(hit / (hit + miss))} of {markup.count(hit + miss)}",
        )
        for partition, (hit, miss) in server["tokens"].items()
    ]
    if not bars:
        sums: dict[str, list[float]] = {}
        for e in (e for episodes in seen.values() for e in episodes):
            for modality, (total, cached) in e["tokens"].items():
                both = sums.setdefault(modality, [0.0, 0.0])
                both[0] += cached
                both[1] += total - cached
        bars = [
            plots.Stack(
                f"{m} tokens",
                both,
                f"{markup.percent(both[0] / max(1, sum(both)))} of {markup.count(sum(both))}",
            )
            for m, both in sums.items()
        ]
    hits = plots.stacks(
        bars,
        ["found in the cache", "computed"],
        ["--reused", "--computed"],
        "Hit rates by modality",
    )
    cameras: dict[str, dict[str, float]] = {}
    for e in (e for episodes in seen.values() for e in episodes):
        for camera, sources in e.get("patches", {}).items():
            sums_of = cameras.setdefault(camera, dict.fromkeys(markup.SOURCES, 0.0))
            for source, count in sources.items():
                sums_of[source] = sums_of.get(source, 0.0) + count
    patches = plots.stacks(
        [
            plots.Stack(
                f"patches of camera {camera}",
                [of[s] for s in markup.SOURCES],
                f"{markup.percent(of['reused'] / max(1.0, sum(of[s] for s in markup.SOURCES)))} reused",
            )
            for camera, of in cameras.items()
        ],
        list(markup.SOURCES),
        list(markup.SOURCES.values()),
        "Patches by source",
    )
    evicted = sum(server["evicted"].values())
    note = "Prompt tokens whose K/V was in the cache, by modality; below by camera, as the drives' answers say."
    if server["evicted"]:
        note += f" {markup.count(evicted)} blocks were evicted meanwhile."
    return markup.section("Cache hits by modality", hits + patches, note)


def others(windows: Sequence[markup.Row]) -> str:
    """What became of the requests of ``load=``, by setting."""
    loads = [(w["setting"], w["load"]) for w in windows if "load" in w]
    if not loads:
        return ""
    rows = []
    for name in dict.fromkeys(n for n, _ in loads):
        mine = [load for n, load in loads if n == name]
        values = [v for load in mine for vs in load["server_ms"].values() for v in vs]
        failed: dict[str, int] = {}
        for load in mine:
            for reason, count in load["failed"].items():
                failed[reason] = failed.get(reason, 0) + count
        rows.append(
            [
                text(name),
                markup.count(sum(load["asked"] for load in mine)),
                markup.count(sum(load["answered"] for load in mine)),
                ", ".join(f"{text(r)} {markup.count(c)}" for r, c in failed.items()) or "none",
                markup.ms(stats.quantile(values, 0.5)) if values else "-",
                markup.ms(stats.quantile(values, 0.99)) if values else "-",
            ]
        )
    heads = ["setting", "asked", "answered", "failed", "p50", "p99"]
    return markup.section("Others, who asked meanwhile", markup.table(heads, rows), wide=True)
