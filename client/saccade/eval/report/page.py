"""The page: which sections, in which order. It needs nothing from elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from saccade.eval import runner, served, summary
from saccade.eval.plots import text
from saccade.eval.report import markup, run, server, success
from saccade.eval.settings import Setting, parse


def write(folder: Path, out: Path | None = None) -> Path:
    """``report.html`` in the folder, or ``out``. Raises OSError or ValueError where there is no run."""
    page = render(folder)
    path = out or folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def render(folder: Path) -> str:
    """The page. Raises OSError or ValueError where there is no run."""
    log = runner.read(folder)
    settings = _settings(log)
    result = summary.summarise(log, settings)
    seen = {s.name: [e for e in log.episodes if e["setting"] == s.name] for s in settings}
    windows = [w["window"] for w in log.windows]
    counted = served.add(w["served"] for w in windows if "served" in w)
    rows = result["settings"]
    sections = [
        run.films(folder),
        success.by_setting(rows),
        success.by_instruction(rows),
        server.latency(counted, rows, seen, windows, log.run.get("deadlines_ms", {})),
        server.deadlines(counted, rows),
        server.cache(counted, seen),
        run.made_of(log, result),
        server.others(windows),
        success.settings_table(rows),
        success.reading(rows, result["margin"]),
    ]
    name = log.run.get("model", "")
    head = run.head(name, log, result, rows)
    body = head + "<main>" + "".join(filter(None, sections)) + "</main>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(name)}: closed-loop report</title><style>{markup.style()}</style></head>"
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
