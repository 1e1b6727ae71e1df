"""``saccade eval``: drives what is missing of a run, then says what it shows."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from saccade.client import Client
from saccade.credentials import Credentials
from saccade.eval import runner, summary
from saccade.eval import world as worlds
from saccade.eval.report import page
from saccade.eval.settings import parse, with_baselines


def seeds(text: str) -> range:
    """``A:B``, B not among them; or how many from 6 000 000 on."""
    first, colon, end = text.rpartition(":")
    try:
        found = range(int(first), int(end)) if colon else range(6_000_000, 6_000_000 + int(end))
    except ValueError:
        raise argparse.ArgumentTypeError("FIRST:END or a number of seeds") from None
    if not found or found[0] < 0:
        raise argparse.ArgumentTypeError("no seeds")
    return found


def add_parser(commands: Any) -> None:
    """Beside the other commands."""
    command = commands.add_parser(
        "eval",
        help="closed-loop success of settings, on the same seeds",
        description="A setting is 'full' or knobs joined by '+': level, stress, mode, pace, model, stale (ms),"
        " replan (steps), steps (denoise), class, load (acts/s); e.g. stale=200+replan=1.",
    )
    command.add_argument("--address", default=argparse.SUPPRESS, help="host:port")
    command.add_argument("--model", default="", help="default: the only one")
    command.add_argument("--world", required=True, help="Python file with GROUPS and Episode")
    command.add_argument("--seeds", type=seeds, default="20", help="FIRST:END, or a number")
    command.add_argument("--groups", default="", help="comma-separated; default: the world's")
    command.add_argument("--settings", default="full", help="comma-separated (%(default)s)")
    command.add_argument("--level", default="base", help="of settings without one (%(default)s)")
    command.add_argument("--margin", type=float, default=0.01, help="of success that may be lost")
    command.add_argument("--sessions", type=int, default=8, help="side by side (%(default)s)")
    command.add_argument("--processes", type=int, default=0, help="worlds in; default: by cores")
    command.add_argument("--metrics", default="", help="URL of the server's; default: not read")
    command.add_argument("--jpeg", action="store_true", help="send JPEG instead of raw pixels")
    command.add_argument("--limit-s", type=float, default=0.0, help="begin nothing after that")
    command.add_argument(
        "--out", default="build/eval", help="folder to go on in, and for the result"
    )
    command.add_argument("--json", action="store_true", help="the result as one line of JSON")
    command.set_defaults(run=execute)


def execute(client: Client, args: argparse.Namespace) -> int:
    """Exit code: 0 with a result; 3 where the time limit left episodes out."""
    settings = with_baselines([parse(s, args.level) for s in args.settings.split(",")])
    names = [m.name for m in client.models()]
    model = args.model or (names[0] if len(names) == 1 else "")
    if not model:
        raise ValueError(f"--model is one of {', '.join(names)}")
    if args.sessions < 1 or args.processes < 0 or not 0 < args.margin < 1:
        raise ValueError("--sessions, --processes or --margin is out of range")
    known = list(worlds.load(args.world).GROUPS)
    groups = args.groups.split(",") if args.groups else known
    if unknown := sorted(set(groups) - set(known)):
        raise ValueError(f"no group {', '.join(unknown)}, but {', '.join(known)}")
    job = runner.Job(
        address=args.address,
        model=model,
        world=args.world,
        settings=settings,
        groups=groups,
        seeds=args.seeds,
        sessions=args.sessions,
        processes=args.processes,
        metrics=args.metrics,
        jpeg=args.jpeg,
        limit_s=args.limit_s,
        credentials=Credentials(args.tls_ca, args.tls_cert, args.tls_key, args.token_file),
    )
    folder = Path(args.out)
    log = runner.run(job, folder)
    log.episodes = [e for e in log.episodes if e["seed"] in args.seeds and e["group"] in groups]
    result = summary.summarise(log, settings, args.margin)
    result["seeds"] = [args.seeds.start, args.seeds.stop]
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    written = page.write(folder)
    if args.json:
        print(json.dumps(result))
    else:
        print(summary.terminal(result))
        print(f"\n{result['model_calls_per_s'] or 0:.1f} calls/s; {written}")
    if any(s["n"] < len(groups) * len(args.seeds) for s in result["settings"]):
        print("saccade: not all driven yet; the same command goes on", file=sys.stderr)
        return 3
    return 0
