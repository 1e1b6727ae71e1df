"""What a run's episodes say: per setting success, what is lost against the baseline, error, deadlines, work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from saccade.eval import stats
from saccade.eval.runner import Log
from saccade.eval.settings import Setting

COLLISION = ("collision", "off road")
"""Reasons of a verdict that are worse than not achieved."""


def summarise(log: Log, settings: Sequence[Setting], margin: float = 0.01) -> dict[str, Any]:
    """The result of a run, for JSON; see client/README.md for its fields."""
    episodes: dict[str, list[dict[str, Any]]] = {s.name: [] for s in settings}
    for episode in log.episodes:
        if episode["setting"] in episodes:
            episodes[episode["setting"]].append(episode)
    windows: dict[str, list[dict[str, Any]]] = {s.name: [] for s in settings}
    for entry in log.windows:
        windows.get(entry["window"]["setting"], []).append(entry["window"])
    rows = []
    for setting in settings:
        base = setting.baseline
        row = _setting(episodes[setting.name], windows[setting.name])
        rows.append({"name": setting.name, "knobs": dataclasses.asdict(setting), **row})
        if base != setting and base.name in episodes:
            against = paired_with(episodes[base.name], episodes[setting.name], margin)
            rows[-1]["baseline"] = base.name
            rows[-1]["paired"] = against
    everything = [w for ws in windows.values() for w in ws]
    whole = {"version": 1, **log.run, "margin": margin, "settings": rows, **_server(everything)}
    return dict(_finite(whole))


def _finite(value: Any) -> Any:
    """What is no number is null: JSON has no NaN."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def paired_with(
    base: Iterable[Mapping[str, Any]], this: Iterable[Mapping[str, Any]], margin: float
) -> dict[str, Any]:
    """On the episodes that both drove."""
    by_key = {(e["group"], e["seed"]): bool(e["ok"]) for e in base}
    pairs = [
        (by_key[key], bool(e["ok"])) for e in this if (key := (e["group"], e["seed"])) in by_key
    ]
    found = stats.paired(pairs, margin)
    return {**dataclasses.asdict(found), "verdict": found.verdict}


def _setting(
    episodes: Sequence[Mapping[str, Any]], windows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    groups = sorted({str(e["group"]) for e in episodes})
    calls = sum(e["calls"] for e in episodes)
    tokens: dict[str, list[int]] = {}
    for episode in [e for e in episodes if not e["probes"]] or episodes:
        for modality, (total, cached) in episode["tokens"].items():
            sums = tokens.setdefault(modality, [0, 0])
            sums[0] += total
            sums[1] += cached
    wrong = [v for e in episodes for v in e["errors"]]
    return {
        **_success(episodes),
        "groups": {g: _success([e for e in episodes if e["group"] == g]) for g in groups},
        "why": {
            why: sum(e["why"] == why for e in episodes)
            for why in sorted({str(e["why"]) for e in episodes if e["why"]})
        },
        "action_error": {**_quantiles(wrong), "n": len(wrong)} if wrong else None,
        "latency_ms": _quantiles([v for e in episodes for v in e["server_ms"]]),
        "round_trip_ms": _quantiles([v for e in episodes for v in e["round_trip_ms"]]),
        "deadlines": {
            "met": sum(e["met"] for e in episodes),
            "late": sum(e["late"] for e in episodes),
            "refused": sum(e["refused"] for e in episodes),
            "continued_steps": sum(e["continued"] for e in episodes),
            "degraded": sum(e["degraded"] for e in episodes),
            "met_share": sum(e["met"] for e in episodes) / calls if calls else math.nan,
        },
        "work": {
            "calls": calls,
            "calls_per_episode": calls / len(episodes) if episodes else math.nan,
            "tokens": {m: {"total": t, "cached": c} for m, (t, c) in sorted(tokens.items())},
            "cached_share": sum(c for _, c in tokens.values())
            / max(1, sum(t for t, _ in tokens.values())),
        },
        **_server(windows),
        "world": _means([e["world"] for e in episodes]),
    }


def _success(episodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    n = len(episodes)
    ok = sum(bool(e["ok"]) for e in episodes)
    clear = sum(e["why"] not in COLLISION for e in episodes)
    return {
        "n": n,
        "ok": ok,
        "success": ok / n if n else math.nan,
        "interval": stats.wilson(ok, n),
        "collision_free": clear / n if n else math.nan,
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": stats.quantile(values, q / 100) for q in (50, 95, 99)}


def _means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each number that the world records of its episodes, where it is one."""
    sums: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "seed" and math.isfinite(value):
                sums.setdefault(name, []).append(float(value))
    return {name: math.fsum(values) / len(values) for name, values in sums.items()}


def _server(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the server's metrics say of blocks of episodes, requests for the action error among them."""
    seconds = math.fsum(w["seconds"] for w in windows)
    requests = sum(w["requests"] for w in windows)
    measured = [w for w in windows if "steps" in w]
    found: dict[str, Any] = {
        "seconds": seconds,
        "model_calls_per_s": requests / seconds if seconds else math.nan,
    }
    if not measured:
        return found

    def total(name: str) -> tuple[float, float]:
        return tuple(math.fsum(w[name][i] for w in measured) for i in (0, 1))  # type: ignore[return-value]

    sequences, steps = total("sequences")
    rows, _ = total("rows")
    kinds = sorted({k for w in measured for k in w["steps"]})
    spent = {k: math.fsum(w["steps"].get(k, (0, 0))[0] for w in measured) for k in kinds}
    found["server"] = {
        "steps": steps,
        "batch_sequences": sequences / steps if steps else math.nan,
        "batch_rows": rows / steps if steps else math.nan,
        "step_seconds": spent,
        "step_ms_per_request": 1e3
        * math.fsum(spent.values())
        / max(1, sum(map(_answered, measured))),
    }
    with_cpu = [w for w in measured if "cpu_s" in w]
    cpu = math.fsum(w["cpu_s"] for w in with_cpu)
    if cpu:
        found["server"]["cpu_s"] = cpu
        found["server"]["calls_per_cpu_s"] = sum(map(_answered, with_cpu)) / cpu
    return found


def _answered(window: Mapping[str, Any]) -> int:
    """Requests of the block, and of others meanwhile."""
    others = window["load"]["answered"] if "load" in window else 0
    return int(window["requests"]) + int(others)


# --------------------------------------------------------------------------------------------- table
HEADER = (
    "setting",
    "success % [95 %]",
    "no crash %",
    "against full % [95 %]",
    "lost/won",
    "p",
    "verdict",
    "action error p50/p95/p99",
    "on time %",
    "cached %",
    "calls/drive",
    "ms/request",
)


def shown(row: Mapping[str, Any]) -> str:
    """The setting without its level, which a table says once."""
    return dataclasses.replace(Setting(**row["knobs"]), level=Setting.level).name


def cells(row: Mapping[str, Any]) -> list[str]:
    """One setting under ``HEADER``."""
    if not row["n"]:
        return [shown(row), "not driven"] + [""] * (len(HEADER) - 2)
    low, high = row["interval"]
    against = row["paired"] if row.get("paired", {}).get("n") else None
    wrong = row["action_error"]
    server = row.get("server")
    return [
        shown(row),
        f"{100 * row['success']:.1f} [{100 * low:.1f}, {100 * high:.1f}] of {row['n']}",
        f"{100 * row['collision_free']:.1f}",
        f"{100 * against['difference']:+.1f} [{100 * against['low']:+.1f}, {100 * against['high']:+.1f}]"
        if against
        else "",
        f"{against['only_base']}/{against['only_this']}" if against else "",
        f"{against['mcnemar_p']:.2g}" if against else "",
        against["verdict"] if against else "baseline",
        f"{wrong['p50']:.3f}/{wrong['p95']:.3f}/{wrong['p99']:.3f}" if wrong else "",
        f"{100 * row['deadlines']['met_share']:.1f}" if row["knobs"]["pace"] != "fast" else "",
        f"{100 * row['work']['cached_share']:.0f}",
        f"{row['work']['calls_per_episode']:.1f}",
        f"{server['step_ms_per_request']:.1f}" if server else "",
    ]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table for a README."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def terminal(result: Mapping[str, Any]) -> str:
    """The same for a terminal, and what so many pairs can show."""
    table = [list(HEADER), *(cells(row) for row in result["settings"])]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    levels = sorted({str(row["knobs"]["level"]) for row in result["settings"]})
    lines.insert(0, f"{result['model']}, scenes: {', '.join(levels)}")
    lines.append("")
    lines.extend(
        honesty(row, result["margin"])
        for row in result["settings"]
        if row.get("paired", {}).get("n")
    )
    return "\n".join(lines)


def honesty(row: Mapping[str, Any], margin: float) -> str:
    """What these pairs could have shown."""
    p = row["paired"]
    return (
        f"{shown(row)}: {p['n']} pairs, {p['only_base'] + p['only_this']} disagree; that less than"
        f" {100 * margin:g} % of success is lost: p = {p['noninferior_p']:.2g}, power"
        f" {100 * p['power']:.0f} %, 80 % from {p['pairs_needed']} pairs; a loss of"
        f" {100 * p['detectable_harm']:.1f} points would show in 80 % of such runs"
    )
