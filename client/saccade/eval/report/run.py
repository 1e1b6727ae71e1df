"""What the report says of the run itself: its first figures, the films of the drive, what it is made of."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from saccade.eval import runner
from saccade.eval.plots import text
from saccade.eval.report import markup

INLINE_BYTES = 12 << 20
"""A film above that is linked, not held in the page."""


def head(name: str, log: runner.Log, result: markup.Row, rows: Sequence[markup.Row]) -> str:
    """The model's name, what was driven, and the figures of the first setting in ``rows``."""
    driven = [r for r in rows if r["n"]]
    figures = []
    if driven:
        first = driven[0]
        low, high = first["interval"]
        figures.append(
            (
                markup.percent(first["success"]),
                f"of {first['n']} episodes succeeded ({first['name']}); 95 % interval"
                f" {100 * low:.1f} to {100 * high:.1f} %",
            )
        )
        figures.append(
            (markup.percent(first["collision_free"]), "without crash, never off the road")
        )
        figures.append(
            (markup.percent(first["deadlines"]["met_share"]), "of its requests answered on time")
        )
        latency = first["latency_ms"]
        figures.append(
            (markup.ms(latency["p50"]), f"median at the server; p99 {markup.ms(latency['p99'])}")
        )
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
            f"{markup.count(len(log.episodes))} episodes",
        )
        if part
    )
    return (
        f'<header><p class="kicker">Closed-loop report</p><h1>{text(name)}</h1>'
        f'<p class="sub">{text(said)}</p><div class="figures">{cards}</div></header>'
    )


def films(folder: Path) -> str:
    """Each GIF of the folder, with links to its MP4s."""
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
        for name, colour in markup.SOURCES.items()
    )
    note = (
        "Left the world, beside it what the newest answer saw; each square is a prompt token of the picture, tinted by"
        f" where the server says its K/V came from.{' ' + links if links else ''}"
    )
    inner = "".join(parts) + f'<ul class="legend">{legend}</ul>' if parts else ""
    return markup.section("The drive", inner, note, wide=True)


def made_of(log: runner.Log, result: markup.Row) -> str:
    """Server, models, world and seeds, how long it took, and the steps of the model."""
    facts: list[tuple[str, str]] = [("server", f"saccade-server {log.run.get('server', '?')}")]
    for name, model in log.run.get("models", {}).items():
        facts.append(
            (
                f"model {name}",
                f"{model.get('family', '?')}, {model.get('dtype', '?')},"
                f" {markup.count(model.get('parameters', 0))} parameters, fingerprint"
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
                f"{markup.count(server['steps'])}, {server['batch_sequences']:.2f} sequences and"
                f" {server['batch_rows']:.0f} rows each on average",
            )
        )
    slipped = sum(e["world"].get("slipped_s", 0.0) for e in log.episodes)
    if any("slipped_s" in e["world"] for e in log.episodes):
        facts.append(("clock", f"the world itself was late by {slipped:.2f} s in all"))
    inner = "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in facts)
    return markup.section("Made of", f"<dl>{inner}</dl>")
