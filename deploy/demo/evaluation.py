"""Closed-loop success of the demo's policies, on a server of its own: see eval.sh.

Without --table: all groups on the given seeds, one line of JSON last. With --table: every setting of both policies on
the same hard scenes, resumable, and the table in server/kv/README.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eval_table
from eval_server import CAUSAL, DEMO, ROOT, Server, policies

from saccade import SaccadeError
from saccade.eval import Job, parse, run, summarise, with_baselines
from saccade.eval.command import seeds
from saccade.eval.summary import terminal
from saccade.eval.world import load

WORLD = DEMO / "scenes.py"
DEFAULT_SEEDS = range(5_000_000, 5_000_010)  # held out
SESSIONS = 8
"""So many cars at a time."""
MODES = ("policy", "shuffled", "blank")


def evaluate(
    address: str,
    metrics: str,
    wanted: range,
    out: Path,
    model: str = CAUSAL,
    settings: Sequence[str] = ("full",),
    level: str = "base",
    sessions: int = 8,
    processes: int = 0,
    limit_s: float = 0.0,
    margin: float = 0.01,
) -> dict[str, Any]:
    """All groups on these seeds, with each setting and its baseline; ``metrics`` is a URL."""
    chosen = with_baselines([parse(s, level) for s in settings])
    job = Job(
        address=address,
        model=model,
        world=str(WORLD),
        settings=chosen,
        groups=load(str(WORLD)).GROUPS,
        seeds=wanted,
        sessions=sessions,
        processes=processes,
        metrics=metrics,
        limit_s=limit_s,
    )
    log = run(job, out)
    log.episodes = [e for e in log.episodes if e["seed"] in wanted]
    result = summarise(log, chosen, margin)
    result["seeds"] = [wanted.start, wanted.stop]
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def line(result: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The one line of --json: the first of the settings, and all of them where there are more."""
    rows = {s["name"]: s for s in result["settings"]}
    kept = ("n", "ok", "success", "collision_free", "interval")
    more = ("latency_ms", "round_trip_ms", "model_calls_per_s", "deadlines", "action_error")

    def short(name: str) -> dict[str, Any]:
        row = rows[name]
        return {
            "setting": name,
            **{k: row[k] for k in kept},
            "groups": {g: {k: v[k] for k in kept} for g, v in row["groups"].items()},
            **{k: row.get(k) for k in (*more, "server", "baseline", "paired")},
            "cached_share": row["work"]["cached_share"],
        }

    found = {"model": result["model"], "seeds": result["seeds"], **short(names[0])}
    if len(names) > 1:
        found["settings"] = [short(name) for name in names]
    return found


def one(args: argparse.Namespace) -> int:
    """Drives --settings and prints."""
    wanted = args.seeds or DEFAULT_SEEDS
    settings = [s if args.mode == "policy" else _with_mode(s, args.mode) for s in args.settings]
    models = {args.model, *(k.model for s in settings if (k := parse(s)).model)}
    with (
        tempfile.TemporaryDirectory(prefix="saccade-eval-") as scratch,
        Server(sorted(models), args.binary, args.threads, args.dtype) as server,
    ):
        result = evaluate(
            server.address,
            server.metrics,
            wanted,
            Path(args.out or scratch),
            args.model,
            settings,
            args.level,
            args.sessions or SESSIONS,
            args.processes,
            args.limit_s,
            args.margin,
        )
    print(terminal(result), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(line(result, [parse(s, args.level).name for s in settings])))
    return 0


def _with_mode(setting: str, mode: str) -> str:
    return f"mode={mode}" if setting == "full" else f"{setting}+mode={mode}"


def table(args: argparse.Namespace) -> int:
    """Drives what is missing of all settings and writes the table; exit code 3 when time was too short."""
    wanted = args.seeds or eval_table.SEEDS
    folder = Path(args.out or ROOT / "build" / "eval-table")
    end = time.monotonic() + args.limit_s if args.limit_s else 0.0
    results = {}
    # What no clock judges first, so that the rest can have a quiet machine.
    for model, real in [(m, real) for real in (False, True) for m in policies()]:
        settings = [
            "full",
            *(s for s in eval_table.SETTINGS[model] if real or parse(s).pace == "fast"),
        ]
        left = max(1.0, end - time.monotonic()) if end else 0.0
        with Server([model, f"{model}_bf16"], args.binary, args.threads) as server:
            results[model] = evaluate(
                server.address,
                server.metrics,
                wanted,
                folder / model,
                model,
                settings,
                "hard",
                args.sessions or eval_table.SESSIONS,
                args.processes,
                left,
                args.margin,
            )
        print(f"{model}:\n{terminal(results[model])}\n", file=sys.stderr)
    eval_table.write(results, eval_table.README, args.margin)
    least = min(s["n"] for r in results.values() for s in r["settings"])
    print(json.dumps({"table": str(eval_table.README.relative_to(ROOT)), "least_episodes": least}))
    return 0 if least >= 6 * len(wanted) else 3


def main() -> int:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds, default=None, help="FIRST:END, END not among them")
    parser.add_argument("--json", action="store_true", help="one line of JSON, last on stdout")
    parser.add_argument("--table", action="store_true", help="all settings, into the README")
    parser.add_argument("--model", default=CAUSAL, help="%(default)s or highway_flow")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument(
        "--settings", type=lambda s: s.split(","), default=["full"], help="see saccade eval"
    )
    parser.add_argument("--mode", choices=MODES, default="policy", help="controls: not policy")
    parser.add_argument("--level", default="base", help="base or hard")
    parser.add_argument("--sessions", type=int, default=0, help="side by side; default: 8, or 15")
    parser.add_argument("--processes", type=int, default=0, help="worlds in; default: by cores")
    parser.add_argument("--threads", type=int, default=1, help="of the server (%(default)s)")
    parser.add_argument("--limit-s", type=float, default=0.0, help="begin nothing after that")
    parser.add_argument("--margin", type=float, default=0.01)
    parser.add_argument("--out", default="", help="folder to go on in; default: a new one")
    parser.add_argument("--binary", default="", help="saccade-server; default: the release build")
    args = parser.parse_args()
    if args.model.removesuffix("_bf16") not in policies():
        parser.error(f"--model is one of {', '.join(policies())}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends, too
    try:
        return table(args) if args.table else one(args)
    except (SaccadeError, OSError, ValueError) as error:
        print(f"eval: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
