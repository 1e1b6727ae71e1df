"""Closed-loop success of the demo's policies, on a server of its own: see eval.sh.

Without --table: all groups on the given seeds, one line of JSON last. With --table: every setting of both policies on
the same hard scenes, resumable, and the table in server/kv/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade import Client, SaccadeError
from saccade.eval import Job, parse, run, summarise, with_baselines
from saccade.eval.command import seeds
from saccade.eval.summary import honesty, markdown, shown, terminal
from saccade.eval.world import load

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo"
WORLD = DEMO / "scenes.py"
README = ROOT / "server" / "kv" / "README.md"
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"
CAUSAL, FLOW = "highway_demo", "highway_flow"
DEFAULT_SEEDS = range(5_000_000, 5_000_010)  # held out
TABLE_SEEDS = range(
    9_000_000, 9_000_067
)  # never used in training or tuning; 402 episodes over six groups
MODES = ("policy", "shuffled", "blank")

SERVING = [*(f"stale={ms}" for ms in (100, 200, 300, 500)), *(f"replan={n}" for n in (3, 5))]
LOADS = ["pace=real+class=driving", *(f"pace=real+class=driving+load={n}" for n in (50, 200))]
SETTINGS = {
    CAUSAL: [f"model={CAUSAL}_bf16", *SERVING, *LOADS],
    FLOW: [
        f"model={FLOW}_bf16",
        *SERVING,
        *(f"steps={n}" for n in (5, 3, 2, 1)),
        *LOADS,
        "pace=real+least=2+class=driving_degrades+load=200",
    ],
}
"""What ``--table`` drives beside full recompute: what makes a policy cheaper, and what others ask meanwhile."""
SESSIONS, TABLE_SESSIONS = 8, 12
"""So many cars at a time: in real time, 30 requests a second."""


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def policies() -> dict[str, Path]:
    """The checkpoints that are there, by the name they are served under."""
    folders = {CAUSAL: DEMO / "checkpoint", FLOW: DEMO / "flow"}
    return {name: path for name, path in folders.items() if (path / "config.json").exists()}


class Server:
    """A saccade-server on loopback with the demo's policies, each in F32 and BF16; `with` ends it."""

    def __init__(
        self,
        models: Sequence[str] = (CAUSAL,),
        binary: str = "",
        threads: int = 0,
        dtype: str = "f32",
    ) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.metrics = f"http://127.0.0.1:{free_port()}/metrics"
        self._folder = tempfile.TemporaryDirectory(prefix="saccade-eval-")
        config = Path(self._folder.name) / "server.yaml"
        config.write_text(self._config(models, threads, dtype))
        binary = (
            binary
            or os.environ.get("SACCADE_SERVER")
            or str(ROOT / "build" / "release" / "saccade-server")
        )
        self._process = subprocess.Popen(
            [binary, "serve", "--config", str(config)], stdout=sys.stderr
        )
        try:
            self._wait_ready(60.0)
        except BaseException:
            self.kill()
            raise

    def _wait_ready(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        with Client(self.address) as client:
            while True:
                if self._process.poll() is not None:
                    raise OSError(f"saccade-server ended with {self._process.returncode}")
                try:
                    return client.wait_ready(1.0)
                except TimeoutError:
                    if time.monotonic() > end:
                        raise

    def _config(self, models: Sequence[str], threads: int, dtype: str) -> str:
        entries = []
        for model in models:
            base = model.removesuffix("_bf16")
            entry = {
                "name": model,
                "path": str(policies()[base]),
                "dtype": "bf16" if model != base else dtype,
                "default_class": "driving",
                "kv": {"memory_mb": 64},
                "action_space": {
                    "steps": 5,
                    "dt_s": 0.2,
                    "dims": [{"name": "steer", "unit": "rad"}, {"name": "accel", "unit": "m/s^2"}],
                },
            }
            if base == FLOW:
                del entry["action_space"]  # its own folder says it
            entries.append(entry)
        # JSON is YAML. The classes are those of config/server.yaml, and one that degrades.
        return json.dumps(
            {
                "server": {
                    "listen": self.address,
                    "metrics_listen": self.metrics.split("/")[2],
                    "log": {"level": "warn"},
                },
                "backends": [{"name": "cpu", "kind": "cpu", "threads": threads}],
                "classes": [
                    _latency_class("control", 20, 0),
                    _latency_class("driving", 100, 0),
                    {**_latency_class("driving_degrades", 100, 0), "on_late": "degrade"},
                    _latency_class("perception", 50, 1),
                    _latency_class("planning", 100, 1),
                    {**_latency_class("best_effort", 0, 2), "on_late": "run_late"},
                ],
                "models": entries,
            },
            indent=1,
        )

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(30)
        finally:
            self.kill()

    def kill(self) -> None:
        """For sure."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.stop()
        self.kill()


def _latency_class(name: str, deadline_ms: int, tier: int) -> dict[str, Any]:
    return {
        "name": name,
        "deadline_ms": deadline_ms,
        "tier": tier,
        "on_late": "reject",
        "max_queued": 256,
    }


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


# --------------------------------------------------------------------------------------------- table
def table(args: argparse.Namespace) -> int:
    """Drives what is missing of all settings and writes the table; exit code 3 when time was too short."""
    wanted = args.seeds or TABLE_SEEDS
    folder = Path(args.out or ROOT / "build" / "eval-table")
    end = time.monotonic() + args.limit_s if args.limit_s else 0.0
    results = {}
    # What no clock judges first, so that the rest can have a quiet machine.
    for model, real in [(m, real) for real in (False, True) for m in policies()]:
        settings = ["full", *(s for s in SETTINGS[model] if real or parse(s).pace == "fast")]
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
                args.sessions or TABLE_SESSIONS,
                args.processes,
                left,
                args.margin,
            )
        print(f"{model}:\n{terminal(results[model])}\n", file=sys.stderr)
    write_table(results, README, args.margin)
    least = min(s["n"] for r in results.values() for s in r["settings"])
    print(json.dumps({"table": str(README.relative_to(ROOT)), "least_episodes": least}))
    return 0 if least >= 6 * len(wanted) else 3


def _is_a_choice(row: dict[str, Any]) -> bool:
    """A setting that a server could run with: no control, no stress, no load of others."""
    knobs = row["knobs"]
    return knobs["mode"] == "policy" and knobs["stress"] == "none" and not knobs["load"]


def write_table(results: dict[str, dict[str, Any]], readme: Path, margin: float) -> None:
    """Between its markers; at the end of a README without them."""
    parts = []
    for model, result in results.items():
        driven = [r for r in result["settings"] if r["n"]]
        judged = [r for r in driven if "paired" in r and _is_a_choice(r)]
        off = [shown(r) for r in judged if r["paired"]["ratio"] < 1 - margin]
        least_sure = max(judged, key=lambda r: r["paired"]["detectable_harm"], default=None)
        parts.append(
            f"### {model}\n\n{markdown(driven)}\n\n"
            f"Below {100 * (1 - margin):g} % of full recompute's success, so off by default:"
            f" {', '.join(f'`{name}`' for name in off) or 'none'}."
            + (f" Least sure: {honesty(least_sure, margin)}." if least_sure else "")
        )
    text = readme.read_text()
    if BEGIN not in text:
        text = text.rstrip("\n") + f"\n\n## What each setting costs in success\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    seeds_of = next(iter(results.values()))["seeds"]
    head = (
        f"Made by `deploy/demo/eval.sh --table`: hard scenes, seeds {seeds_of[0]} to {seeds_of[1] - 1}, six groups,"
        " the same for each setting. `pace=real`: against the wall clock, twelve"
        " cars at a time, where the table was made."
    )
    readme.write_text(f"{before}{BEGIN}\n{head}\n\n" + "\n\n".join(parts) + f"\n{END}{after}")


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
    parser.add_argument("--sessions", type=int, default=0, help="side by side; default: 8, or 12")
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
