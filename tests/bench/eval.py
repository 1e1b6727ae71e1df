"""Closed-loop evaluation through gRPC: model calls a second for each core of the server, 8 sessions side by side.

Bars (--check): >= 60 model calls/s per server core on the causal policy; more than one sequence a step (batching), by
the server's own metrics; every call answered. The worlds run beside it on the other cores. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy" / "demo"))
sys.path.insert(0, str(ROOT / "client"))

from eval_server import CAUSAL, Server  # noqa: E402
from evaluation import evaluate  # noqa: E402

LEAST_CALLS_PER_S = 60.0
LEAST_SEQUENCES = 1.5
SEED = 6_000_000


def main() -> int:
    """Runs it; exit code 0 only when every bar holds (with --check)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--binary", default=str(ROOT / "build" / "release" / "saccade-server"))
    parser.add_argument("--seeds", type=int, default=20, help="per group; six groups")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--processes", type=int, default=0, help="worlds in; default: by cores")
    parser.add_argument("--threads", type=int, default=1, help="of the server: its cores")
    parser.add_argument("--level", default="base")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Server([CAUSAL], args.binary, args.threads) as server,
    ):
        result = evaluate(
            server.address,
            server.metrics,
            range(SEED, SEED + args.seeds),
            Path(folder),
            level=args.level,
            sessions=args.sessions,
            processes=args.processes,
        )
        code = server.stop()
    row = result["settings"][0]
    calls = row["model_calls_per_s"] / args.threads
    batch = row["server"]["batch_sequences"]
    answered = row["deadlines"]["met"] / row["work"]["calls"]
    rows = [
        (
            "calls/s per server core",
            f"{calls:.1f}",
            f">= {LEAST_CALLS_PER_S:g}",
            calls >= LEAST_CALLS_PER_S,
        ),
        ("sequences a step", f"{batch:.2f}", f">= {LEAST_SEQUENCES:g}", batch >= LEAST_SEQUENCES),
        ("calls answered", f"{100 * answered:.2f} %", "all", answered == 1),
        ("clean stop", f"exit {code}", "exit 0", code == 0),
    ]
    print(f"\n{'what':<26}{'measured':<14}{'bar':<10}")
    for what, measured, bar, good in rows:
        print(f"{what:<26}{measured:<14}{bar:<10}{'ok' if good else 'MISS'}")
    passed = all(row[3] for row in rows)
    print(
        json.dumps(
            {
                "bench": "eval",
                "calls_per_s_per_core": calls,
                "calls_per_server_cpu_s": row["server"].get("calls_per_cpu_s"),
                "batch_sequences": batch,
                "batch_rows": row["server"]["batch_rows"],
                "server_threads": args.threads,
                "sessions": args.sessions,
                "episodes": row["n"],
                "success": row["success"],
                "latency_ms": row["latency_ms"],
                "pass": passed,
            }
        )
    )
    return 0 if passed or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
