"""One page on a run's folder: what was driven, how well, how fast, and what the caches did. Needs nothing from elsewhere."""

from __future__ import annotations

import argparse
import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.eval import film, plots, runner, served, stats, summary
from saccade.eval.plots import text
from saccade.eval.settings import Setting, parse

INLINE_BYTES = 12 << 20
"""A film above that is linked, not held in the page."""
MOST_CURVES = plots.SERIES
_ENDINGS = {
    "met": ("on time", "--good"),
    "missed": ("answered late", "--warn"),
    "failed": ("failed or expired", "--bad"),
    "rejected": ("refused", "--faint"),
}
_SOURCES = {"computed": "--computed", "reused": "--reused", "evicted": "--evicted"}

_NBSP = "\u00a0"

Row = Mapping[str, Any]


def write(folder: Path, out: Path | None = None) -> Path:
    """``report.html`` in the folder, or ``out``. Raises OSError or ValueError where there is no run."""
    page = render(folder)
    path = out or folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def render(folder: Path) -> str:
    """The page."""
    log = runner.read(folder)
    settings = _settings(log)
    result = summary.summarise(log, settings)
    seen = {s.name: [e for e in log.episodes if e["setting"] == s.name] for s in settings}
    windows = [w["window"] for w in log.windows]
    server = served.add(w["served"] for w in windows if "served" in w)
    rows = result["settings"]
    sections = [
        _films(folder),
        _success(rows),
        _groups(rows),
        _latency(server, rows, seen, windows, log.run.get("deadlines_ms", {})),
        _deadlines(server, rows),
        _cache(server, seen),
        _made_of(log, result),
        _others(windows),
        _settings_table(rows),
        _reading(rows, result["margin"]),
    ]
    name = log.run.get("model", "")
    body = _head(name, log, result, rows) + "<main>" + "".join(filter(None, sections)) + "</main>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(name)}: closed-loop report</title><style>{_style()}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _settings(log: runner.Log) -> list[Setting]:
    """Those that were driven, baselines first, in the order they came."""
    found: list[Setting] = []
    for name in dict.fromkeys(e["setting"] for e in log.episodes):
        found.append(parse(name))
    for window in log.windows:  # driven, and nothing of it finished
        setting = parse(window["window"]["setting"])
        if setting not in found:
            found.append(setting)
    return sorted(found, key=lambda s: s.baseline != s)


# ------------------------------------------------------------------------------------------- pieces
def _section(title: str, inner: str, note: str = "", wide: bool = False) -> str:
    if not inner:
        return ""
    said = f'<p class="note">{note}</p>' if note else ""
    return f"<section{' class=wide' if wide else ''}><h2>{text(title)}</h2>{inner}{said}</section>"


def _percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}{_NBSP}%"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}{_NBSP}ms"


def _count(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f")


def _head(name: str, log: runner.Log, result: Row, rows: Sequence[Row]) -> str:
    driven = [r for r in rows if r["n"]]
    figures = []
    if driven:
        first = driven[0]
        low, high = first["interval"]
        figures.append(
            (
                _percent(first["success"]),
                f"of {first['n']} episodes succeeded ({first['name']}); 95 % interval"
                f" {100 * low:.1f} to {100 * high:.1f} %",
            )
        )
        figures.append((_percent(first["collision_free"]), "without crash, never off the road"))
        figures.append(
            (_percent(first["deadlines"]["met_share"]), "of its requests answered on time")
        )
        latency = first["latency_ms"]
        figures.append((_ms(latency["p50"]), f"median at the server; p99 {_ms(latency['p99'])}"))
    else:
        figures.append(("0", "episodes were driven to their end"))
    cards = "".join(f"<div><b>{text(b)}</b><span>{text(s)}</span></div>" for b, s in figures)
    model = log.run.get("models", {}).get(name, {})
    said = ", ".join(
        part
        for part in (
            model.get("family", ""),
            f"{model['parameters'] / 1e6:.2f} million parameters" if "parameters" in model else "",
            model.get("dtype", "").upper(),
            f"saccade-server {log.run['server']}" if "server" in log.run else "",
            f"{_count(len(log.episodes))} episodes",
        )
        if part
    )
    return (
        f'<header><p class="kicker">Closed-loop report</p><h1>{text(name)}</h1>'
        f'<p class="sub">{text(said)}</p><div class="figures">{cards}</div></header>'
    )


def _films(folder: Path) -> str:
    parts = []
    for path in sorted(folder.glob("*.gif")):
        data = path.read_bytes()
        source = (
            "data:image/gif;base64," + base64.b64encode(data).decode()
            if len(data) <= INLINE_BYTES
            else path.name
        )
        parts.append(
            f'<img class="film" src="{text(source)}" alt="The drive of {text(path.stem)}">'
        )
    links = " ".join(
        f'<a href="{text(p.name)}">{text(p.name)}</a>' for p in sorted(folder.glob("*.mp4"))
    )
    said = {
        "computed": "computed for this answer",
        "reused": "taken from the cache",
        "evicted": "computed again, since the cache had given it up",
    }
    legend = "".join(
        f'<li><i style="background:var({colour})"></i><b>{name}</b> {said[name]}</li>'
        for name, colour in _SOURCES.items()
    )
    note = (
        "Left the world, beside it what the newest answer saw; each square is a prompt token of the picture, tinted by"
        f" where the server says its K/V came from.{' ' + links if links else ''}"
    )
    inner = "".join(parts) + f'<ul class="legend">{legend}</ul>' if parts else ""
    return _section("The drive", inner, note, wide=True)


def _success(rows: Sequence[Row]) -> str:
    estimates = [
        plots.Estimate(
            r["name"],
            r["success"],
            r["interval"][0],
            r["interval"][1],
            f"{100 * r['success']:.1f} % of {r['n']}",
            "paired" not in r,
        )
        for r in rows
        if r["n"]
    ]
    return _section(
        "Success by setting",
        plots.intervals(
            estimates,
            "episodes that succeeded, with the 95 % interval (Wilson)",
            "Success by setting",
        ),
        "Bold and in the first colour: baselines. Each episode is driven on the same seeds in every setting; see the"
        " differences of pairs in the table.",
    )


def _groups(rows: Sequence[Row]) -> str:
    driven = [r for r in rows if r["n"]][:1]
    estimates = [
        plots.Estimate(
            g, v["success"], v["interval"][0], v["interval"][1], f"{v['ok']} of {v['n']}"
        )
        for r in driven
        for g, v in r["groups"].items()
    ]
    title = "Success by instruction"
    note = f"Setting: {text(driven[0]['name'])}." if driven else ""
    axis = "episodes that succeeded, with the 95 % interval"
    return _section(title, plots.intervals(estimates, axis, title), note)


def _of_buckets(name: str, one: Row, mark: float) -> plots.Curve | None:
    """A bucket's count lies at its upper bound: the curve is never better than the truth."""
    total = one["buckets"][-1][1] if one["buckets"] else 0
    if not total:
        return None
    points = [(bound * 1e3, n / total) for bound, n in one["buckets"] if bound is not None]
    first = next((i for i, (_, share) in enumerate(points) if share > 0), len(points))
    last = next((i for i, (_, share) in enumerate(points) if share >= 1), len(points) - 1)
    shown = points[max(0, first - 1) : last + 1]
    return plots.Curve(f"{name} (histogram), {_count(total)} answers", shown, mark)


def _exact(name: str, values: Iterable[float], mark: float) -> plots.Curve | None:
    ordered = sorted(values)
    if not ordered:
        return None
    step = max(1, len(ordered) // 200)
    points = [(v, (i + 1) / len(ordered)) for i, v in enumerate(ordered)][::step]
    points.append((ordered[-1], 1.0))
    return plots.Curve(f"{name}, {_count(len(ordered))} answers", points, mark)


def _latency(
    server: Row,
    rows: Sequence[Row],
    seen: Mapping[str, Sequence[Row]],
    windows: Sequence[Row],
    deadlines: Mapping[str, float],
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
    curves = [_exact(name, values, deadlines.get(name, 0.0)) for name, values in times.items()]
    known = {name for name, values in times.items() if values}
    curves += [
        _of_buckets(name, one, deadlines.get(name, 0.0))
        for name, one in server["classes"].items()
        if name not in known
    ]
    shown = [c for c in curves if c][:MOST_CURVES]
    return _section(
        "Latency by class",
        plots.cdf(shown, "arrival to answer at the server, ms (logarithmic)", "Latency by class"),
        "Share of answers within a time. Refused requests have no answer and are in the next figure.",
    )


def _deadlines(server: Row, rows: Sequence[Row]) -> str:
    bars = [
        plots.Stack(
            name,
            [one[end] for end in _ENDINGS],
            f"{_percent(one['met'] / max(1.0, sum(one[e] for e in _ENDINGS)))} of"
            f" {_count(sum(one[e] for e in _ENDINGS))}",
        )
        for name, one in server["classes"].items()
    ]
    note = "From the server's counters, everybody's requests, by latency class."
    if not bars:  # no metrics were read: what the clients saw
        bars = [
            plots.Stack(
                r["name"],
                [d["met"], d["late"], 0, d["refused"]],
                f"{_percent(d['met_share'])} of {_count(r['work']['calls'])}",
            )
            for r in rows
            if r["n"]
            for d in [r["deadlines"]]
        ]
        note = "As the drives' own clients saw it, by setting."
    late = sum(r["deadlines"]["continued_steps"] for r in rows if r["n"])
    if late:
        note += f" Steps on which no answer was there in time, so that the last chunk went on: {_count(late)}."
    return _section(
        "Deadlines",
        plots.stacks(
            bars,
            [said for said, _ in _ENDINGS.values()],
            [colour for _, colour in _ENDINGS.values()],
            "Deadlines",
        ),
        note,
    )


def _cache(server: Row, seen: Mapping[str, Sequence[Row]]) -> str:
    bars = [
        plots.Stack(
            f"{partition} tokens",
            [hit, miss],
            f"{_percent(hit / (hit + miss))} of {_count(hit + miss)}",
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
                f"{_percent(both[0] / max(1, sum(both)))} of {_count(sum(both))}",
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
            sums_of = cameras.setdefault(camera, dict.fromkeys(_SOURCES, 0.0))
            for source, count in sources.items():
                sums_of[source] = sums_of.get(source, 0.0) + count
    patches = plots.stacks(
        [
            plots.Stack(
                f"patches of camera {camera}",
                [of[s] for s in _SOURCES],
                f"{_percent(of['reused'] / max(1.0, sum(of[s] for s in _SOURCES)))} reused",
            )
            for camera, of in cameras.items()
        ],
        list(_SOURCES),
        list(_SOURCES.values()),
        "Patches by source",
    )
    evicted = sum(server["evicted"].values())
    note = "Prompt tokens whose K/V was in the cache, by modality; below by camera, as the drives' answers say."
    if server["evicted"]:
        note += f" {_count(evicted)} blocks were evicted meanwhile."
    return _section("Cache hits by modality", hits + patches, note)


def _others(windows: Sequence[Row]) -> str:
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
                name,
                _count(sum(load["asked"] for load in mine)),
                _count(sum(load["answered"] for load in mine)),
                ", ".join(f"{text(r)} {_count(c)}" for r, c in failed.items()) or "none",
                _ms(stats.quantile(values, 0.5)) if values else "-",
                _ms(stats.quantile(values, 0.99)) if values else "-",
            ]
        )
    heads = ["setting", "asked", "answered", "failed", "p50", "p99"]
    return _section("Others, who asked meanwhile", _table(heads, rows), wide=True)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows become blocks on a narrow page: each cell knows its head."""
    top = "".join(f"<th>{text(h)}</th>" for h in heads)
    lines = []
    for row in rows:
        cells = "".join(
            f'<td data-head="{text(h)}">{c}</td>' for h, c in zip(heads, row, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _settings_table(rows: Sequence[Row]) -> str:
    heads = [
        "setting",
        "success",
        "against baseline",
        "verdict",
        "action error",
        "on time",
        "p50, p99",
        "cached",
        "calls",
    ]
    lines = []
    for r in rows:
        if not r["n"]:
            continue
        low, high = r["interval"]
        p = r.get("paired")
        against = (
            f"{100 * p['difference']:+.1f} [{100 * p['low']:+.1f}, {100 * p['high']:+.1f}] points,"
            f" {p['only_base']} lost, {p['only_this']} won"
            if p and p["n"]
            else "-"
        )
        wrong = r["action_error"]
        lines.append(
            [
                f"<b>{text(r['name'])}</b>",
                f"{100 * r['success']:.1f} % [{100 * low:.1f}, {100 * high:.1f}] of {r['n']}",
                against,
                text(p["verdict"]) if p and p["n"] else "baseline",
                f"{wrong['p50']:.3f}, p99 {wrong['p99']:.3f}" if wrong else "-",
                _percent(r["deadlines"]["met_share"]),
                f"{_ms(r['latency_ms']['p50'])}, {_ms(r['latency_ms']['p99'])}",
                _percent(r["work"]["cached_share"], 0),
                _count(r["work"]["calls"]),
            ]
        )
    note = (
        "Against baseline: difference of success on the episodes both drove, with Tango's 95 % interval. Action error:"
        " median and p99 of the largest difference from full recompute in the same state, in the model's own units."
    )
    return _section("Settings", _table(heads, lines) if lines else "", note, wide=True)


def _made_of(log: runner.Log, result: Row) -> str:
    facts: list[tuple[str, str]] = [("server", f"saccade-server {log.run.get('server', '?')}")]
    for name, model in log.run.get("models", {}).items():
        facts.append(
            (
                f"model {name}",
                f"{model.get('family', '?')}, {model.get('dtype', '?')},"
                f" {_count(model.get('parameters', 0))} parameters, fingerprint"
                f" {model.get('fingerprint', '?')}",
            )
        )
    facts.append(
        ("world", f"{log.run.get('world', '?')}, digest {log.run.get('world_digest', '?')}")
    )
    seeds = sorted({e["seed"] for e in log.episodes})
    if seeds:
        facts.append(("seeds", f"{seeds[0]} to {seeds[-1]}, {len(seeds)} of them"))
    if result.get("seconds"):
        facts.append(
            (
                "driven in",
                f"{result['seconds']:.0f} s, {result['model_calls_per_s'] or 0:.1f} model calls a second",
            )
        )
    server = result.get("server")
    if isinstance(server, Mapping) and server["steps"]:  # else it is the run's version
        facts.append(
            (
                "steps of the model",
                f"{_count(server['steps'])}, {server['batch_sequences']:.2f} sequences and"
                f" {server['batch_rows']:.0f} rows each on average",
            )
        )
    slipped = sum(e["world"].get("slipped_s", 0.0) for e in log.episodes)
    if any("slipped_s" in e["world"] for e in log.episodes):
        facts.append(("clock", f"the world itself was late by {slipped:.2f} s in all"))
    inner = "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in facts)
    return _section("Made of", f"<dl>{inner}</dl>")


def _reading(rows: Sequence[Row], margin: float) -> str:
    honest = [
        f"<li>{text(summary.honesty(r, margin))}.</li>"
        for r in rows
        if r.get("paired", {}).get("n")
    ]
    inner = f"<ul>{''.join(honest)}</ul>" if honest else ""
    return _section("What so many episodes can show", inner, wide=True)


def _style() -> str:
    tints = ";".join(
        f"--{name}:rgb{colour}".replace(" ", "") for name, colour in film.COLOURS.items()
    )
    return _CSS.replace("/*tints*/", tints + ";")


_CSS = """
:root{color-scheme:light dark;/*tints*/
--ink:#1d2530;--soft:#55606f;--faint:#a3adba;--rule:#dfe4ea;--paper:#f5f6f8;--card:#fff;
--good:#178a55;--warn:#d99a06;--bad:#cf3b32;
--s0:#1f63d1;--s1:#c2570c;--s2:#178a55;--s3:#8b46c1;--s4:#b8336a;--s5:#5c6b7a}
@media(prefers-color-scheme:dark){:root{
--ink:#e8ecf1;--soft:#a9b4c1;--faint:#66717e;--rule:#2c343f;--paper:#12161b;--card:#1a2027;
--good:#3cc384;--warn:#edbb3f;--bad:#f2726a;
--s0:#6aa5ff;--s1:#ff9a52;--s2:#46c98d;--s3:#c08df0;--s4:#f27aa8;--s5:#9fb0c0}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI","Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
header,main{max-width:1180px;margin:0 auto;padding:0 20px}
header{padding-top:36px}
.kicker{margin:0;color:var(--soft);font-size:13px;letter-spacing:.08em;text-transform:uppercase}
h1{margin:2px 0 0;font-size:34px;line-height:1.15;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{margin:0 0 14px;font-size:18px;line-height:1.3;overflow-wrap:anywhere}
.sub{margin:6px 0 22px;color:var(--soft)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:1px;
background:var(--rule);border:1px solid var(--rule);border-radius:10px;overflow:hidden}
.figures div{background:var(--card);padding:16px 18px}
.figures b{display:block;font-size:28px;line-height:1.2;font-variant-numeric:tabular-nums}
.figures span{overflow-wrap:anywhere;color:var(--soft);font-size:14px;line-height:1.4;display:block;margin-top:4px}
main{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:20px;padding-top:20px;padding-bottom:48px}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:20px;min-width:0}
section.wide{grid-column:1/-1}
.note{margin:14px 0 0;color:var(--soft);font-size:14px}
.film{display:block;width:100%;max-width:720px;height:auto;margin:0 auto;border-radius:8px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:6px 22px;margin:14px 0 0;padding:0;font-size:14px;
color:var(--soft);justify-content:center}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:7px}
.legend b{color:var(--ink);font-weight:600}
svg{display:block;width:100%;height:auto;overflow:visible}
svg+svg{margin-top:18px}
svg text{font-family:inherit;font-size:12px;fill:var(--soft)}
svg .name{fill:var(--ink)}svg .strong{font-weight:700}svg .axis{fill:var(--soft)}
svg .grid{stroke:var(--rule);stroke-width:1}
svg .curve{fill:none;stroke-width:2.2;stroke-linejoin:round}
svg .mark{stroke-width:1.4;stroke-dasharray:5 4}
svg .range{stroke-width:4;stroke-linecap:round;opacity:.45}
table{width:100%;border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:8px 14px 8px 0;border-bottom:1px solid var(--rule)}
td:first-child{overflow-wrap:anywhere;min-width:9em}
th{color:var(--soft);font-weight:600;font-size:13px}
tbody tr:last-child td{border-bottom:0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 18px;margin:0;font-size:14px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
ul{margin:0;padding-left:18px;font-size:14px}ul.legend{padding:0}
a{color:var(--s0)}
@media(max-width:860px){main{grid-template-columns:minmax(0,1fr)}}
@media(max-width:700px){
header,main{padding-left:12px;padding-right:12px}section{padding:16px 14px}
h1{font-size:27px}svg text{font-size:14px}
.figures{grid-template-columns:repeat(2,minmax(0,1fr))}.figures div{padding:12px 14px}.figures b{font-size:22px}
thead{display:none}tr{display:block;padding:10px 0;border-bottom:1px solid var(--rule)}
tbody tr:last-child{border-bottom:0}
td{display:grid;grid-template-columns:118px minmax(0,1fr);gap:10px;border:0;padding:3px 0;overflow-wrap:anywhere}
td::before{content:attr(data-head);color:var(--soft)}
dl{grid-template-columns:1fr;gap:2px}dd{margin-bottom:8px}
.legend{justify-content:flex-start}}
@media print{section{break-inside:avoid}}
"""


# ------------------------------------------------------------------------------------------ command
def add_parser(commands: Any) -> None:
    """Beside the other commands."""
    command = commands.add_parser(
        "report",
        help="one page on a run of saccade eval",
        description="Writes one HTML page on a run's folder.",
    )
    command.add_argument("folder", type=Path, help="that --out of saccade eval named")
    command.add_argument("--out", type=Path, help="file; default: report.html in the folder")
    command.set_defaults(run=execute)


def execute(_client: object, args: argparse.Namespace) -> int:
    """Asks no server."""
    print(write(args.folder, args.out))
    return 0
