"""The command line: predict, generate, stream, models, status, top, admin, eval, report."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from saccade import Client, errors, top, types
from saccade.client import DEFAULT_ADDRESS
from saccade.credentials import Credentials
from saccade.eval import command
from saccade.eval.report import page

_IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png"}


def format_actions(actions: types.Actions) -> str:
    """The first sample, one line per step."""
    names = [d.name for d in actions.space.dimensions] or [
        f"a{i}" for i in range(actions.space.dim)
    ]
    units = [d.unit for d in actions.space.dimensions] or [""] * actions.space.dim
    lines = []
    for step, row in enumerate(actions.values):
        cells = [f"{n} {v:+.4f} {u}".strip() for n, v, u in zip(names, row, units, strict=False)]
        lines.append(f"  step {step}: " + "   ".join(cells))
    return "\n".join(lines)


def format_summary(actions: types.Actions) -> str:
    """Latency, deadline and frame of an answer in one line."""
    t = actions.timings
    deadline = f"{actions.deadline_s * 1e3:.0f} ms" if actions.deadline_s else "none"
    verdict = "late" if actions.late else "met"
    cached = sum(m.cached for m in actions.tokens.values())
    total = sum(m.total for m in actions.tokens.values())
    return (
        f"latency {actions.round_trip_s * 1e3:.1f} ms (server {t.total_s * 1e3:.1f}: queue"
        f" {t.queue_s * 1e3:.1f}, encode {t.encode_s * 1e3:.1f}, prefill {t.prefill_s * 1e3:.1f},"
        f" act {t.act_s * 1e3:.1f})  deadline {deadline} {verdict}  cached {cached}/{total} tokens"
    )


def _as_json(actions: types.Actions) -> str:
    return json.dumps(
        {
            "values": [s.values.tolist() for s in actions.samples],
            "normalized": [s.normalized.tolist() for s in actions.samples],
            "token_ids": [s.token_ids.tolist() for s in actions.samples],
            "latency_ms": actions.round_trip_s * 1e3,
            "server_ms": actions.timings.total_s * 1e3,
            "deadline_ms": actions.deadline_s * 1e3,
            "deadline_met": actions.deadline_met,
            "late": actions.late,
            "frames": [
                {"camera": f.camera, "capture_time_ns": f.capture_time_ns, "age_ms": f.age_s * 1e3}
                for f in actions.frames
            ],
        }
    )


def _predict(client: Client, args: argparse.Namespace) -> int:
    actions = client.predict(
        _images(args.image),
        args.instruction,
        model=args.model,
        statistics_key=args.statistics,
        state=args.state,
        latency_class=args.latency_class,
        deadline_s=args.deadline_ms * 1e-3,
        samples=args.samples,
        seed=args.seed,
        temperature=args.temperature,
        flow=types.Flow(args.flow_steps) if args.flow_steps else None,
    )
    print(
        _as_json(actions) if args.json else format_actions(actions) + "\n" + format_summary(actions)
    )
    return 0


def _numbers(text: str) -> list[float]:
    return [float(value) for value in text.split(",")]


def _images(specs: list[str]) -> dict[str, str]:
    frames: dict[str, str] = {}
    for spec in specs:
        camera, separator, path = spec.rpartition("=")
        frames[camera if separator else ""] = path
    return frames


def _generate(client: Client, args: argparse.Namespace) -> int:
    options = types.TextOptions(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        num_sequences=args.sequences,
        num_beams=args.beams,
        length_penalty=args.length_penalty,
    )
    live = not args.json and args.sequences == 1 and args.beams <= 1
    with client.generate(
        args.prompt,
        _images(args.image),
        options,
        model=args.model,
        latency_class=args.latency_class,
        deadline_s=args.deadline_ms * 1e-3,
    ) as stream:
        for token in stream:
            if live:
                print(token.text, end="", flush=True)
        text = stream.result()
    if args.json:
        print(
            json.dumps(
                {
                    "sequences": [asdict(s) for s in text.sequences],
                    "server_ms": text.timings.total_s * 1e3,
                    "deadline_met": text.deadline_met,
                    "cached_tokens": sum(m.cached for m in text.tokens.values()),
                }
            )
        )
        return 0
    if live:
        print()
    else:
        for sequence in text.sequences:
            score = f"{sequence.score:.4f} " if args.beams > 1 else ""
            print(f"{score}{sequence.text}")
    first = text.sequences[0]
    print(
        f"{len(first.token_ids)} tokens ({first.finish_reason}) in"
        f" {text.timings.total_s * 1e3:.1f} ms, {text.timings.act_s * 1e3:.1f} of them after the"
        " first",
        file=sys.stderr,
    )
    return 0


def _stream(client: Client, args: argparse.Namespace) -> int:
    paths = sorted(p for p in Path(args.frames).iterdir() if p.suffix.lower() in _IMAGE_SUFFIXES)
    if not paths:
        print(f"saccade: no .jpg or .png in {args.frames}", file=sys.stderr)
        return 2
    answered = failed = 0
    told: errors.RequestFailed | None = None  # the newest refusal of a message that was printed
    with client.session(
        model=args.model,
        instruction=args.instruction,
        statistics_key=args.statistics,
        latency_class=args.latency_class,
    ) as session:
        if args.state is not None:
            session.set_state(args.state)
        start = time.monotonic()
        for number in range(len(paths) * args.loops):
            delay = start + number / args.hz - time.monotonic()
            if delay > 0:
                time.sleep(delay)
            path = paths[number % len(paths)]
            session.send_frame(path, camera=args.camera)
            try:
                actions = session.act(deadline_s=args.deadline_ms * 1e-3)
            except errors.RequestFailed as error:
                failed += 1
                print(f"{path.name}: {error}")
                for refused in session.message_errors[-1:]:
                    if refused is not told:
                        print(f"{path.name}: a message was refused: {refused}")
                    told = refused
                continue
            answered += 1
            if args.json:
                print(_as_json(actions), flush=True)
            else:
                frame = actions.frames[0]
                print(f"{path.name}: {format_summary(actions)}  frame {frame.capture_time_ns} ns")
                print(format_actions(actions), flush=True)
    if not args.json:
        print(f"{answered} answered, {failed} failed")
    return 0 if failed == 0 else 1


def _models(client: Client, args: argparse.Namespace) -> int:
    for model in client.models():
        cameras = ", ".join(
            f"{c.name} {c.width}x{c.height}{'' if c.required else ' (may be missing)'}"
            for c in model.cameras
        )
        print(
            f"{model.name}: {model.family}, {model.parameters / 1e6:.2f} M parameters,"
            f" {model.compute_type}"
        )
        print(f"  cameras: {cameras}; state values: {model.state_dim}")
        print(f"  class: {model.default_class}; K/V {model.kv_bytes_per_token} bytes a token")
        if model.flow_steps:
            print(
                f"  denoises in {model.flow_steps} steps; noise of {model.flow_width} values an action"
            )
        for key, space in model.statistics.items():
            dims = ", ".join(f"{d.name} [{d.unit}]" for d in space.dimensions) or "unnamed"
            print(
                f"  statistics {key}: {space.steps} x {space.dim} actions, {dims},"
                f" {space.reference}"
            )
    return 0


def _status(client: Client, args: argparse.Namespace) -> int:
    status = client.status()
    state = "draining" if status.draining else "ready" if status.ready else "not ready"
    print(f"{client.address}: saccade {status.version}, {state}, up {status.uptime_s:.0f} s")
    print(f"  sessions: {status.sessions}; models: {', '.join(status.models)}")
    for c in status.classes:
        deadline = f"{c.deadline_s * 1e3:g} ms" if c.deadline_s else "no deadline"
        late = "runs late" if c.runs_late else "refuses late work"
        if c.degrades:
            late = "cuts denoise steps of late work, or refuses it"
        print(f"  class {c.name}: {deadline}, tier {c.tier}, {late}")
    return 0 if status.ready else 1


def _top(client: Client, args: argparse.Namespace) -> int:
    return top.run(client, args.metrics, args.interval, args.once, args.json, sys.stdout)


def _admin(client: Client, args: argparse.Namespace) -> int:
    admin = client.admin
    if args.what == "recent":
        for r in admin.recent(args.count):
            deadline = f"{r.deadline_s * 1e3:g}" if r.deadline_s else "-"
            print(
                f"{r.arrival_s:10.3f} s  session {r.session_id}  {r.latency_class}: {r.outcome},"
                f" {r.total_s * 1e3:.1f} of {deadline} ms (queue {r.queue_s * 1e3:.1f}, encode"
                f" {r.encode_s * 1e3:.1f}, prefill {r.prefill_s * 1e3:.1f}, act"
                f" {r.act_s * 1e3:.1f}), {r.cached_tokens} of {r.prompt_tokens} tokens cached"
            )
    elif args.what == "trace":
        Path(args.file).write_bytes(admin.trace())
        print(f"{args.file}: open it in chrome://tracing or ui.perfetto.dev")
    elif args.what == "cache":
        for cache in admin.caches():
            print(
                f"{cache.model} on worker {cache.worker}: {cache.free_blocks} of"
                f" {cache.total_blocks} blocks free, embeddings of {cache.embeddings_held}"
                f" frames held, {cache.embeddings_idle} idle"
            )
            for p in cache.partitions:
                print(
                    f"  {p.modality}: {p.held} held, {p.idle} idle, floor {p.floor}, cap {p.cap};"
                    f" {p.hit_tokens} tokens hit, {p.miss_tokens} missed"
                )
        if args.check:
            broken = admin.broken_invariant()
            print(f"invariants: {broken or 'all hold'}")
            return 1 if broken else 0
    elif args.what in ("load", "reload"):
        model = (
            admin.load(args.name, args.folder, args.like)
            if args.what == "load"
            else admin.reload(args.name, args.folder, args.grace)
        )
        print(f"{model.name}: {args.what}ed, {model.parameters} parameters")
    elif args.what == "unload":
        admin.unload(args.name, args.grace)
        print(f"{args.name}: unloaded")
    elif args.what == "limits":
        return _limits(client, args.changes)
    elif args.what == "memory":
        memory = admin.memory()
        for kind, held in memory.kinds.items():
            print(f"{kind:10} {held / 2**20:10.1f} MiB")
        print(f"{'together':10} {memory.held / 2**20:10.1f} of {memory.limit / 2**20:.1f} MiB")
    else:
        admin.drain()
        print("draining")
    return 0


def _limits(client: Client, changes: list[str]) -> int:
    values: dict[str, float] = {}
    max_queued: dict[str, int] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        try:
            if not equals:
                raise ValueError
            if name.startswith("max_queued."):
                max_queued[name.removeprefix("max_queued.")] = int(value)
            else:
                values[name] = float(value)
        except ValueError:
            print(f"not NAME=NUMBER: {change}", file=sys.stderr)
            return 2
    try:
        limits = client.admin.set_limits(max_queued, **values) if changes else client.admin.limits()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for name, limit in limits.values.items():
        print(f"{name}={limit:.12g}")
    for klass, most in limits.max_queued.items():
        print(f"max_queued.{klass}={most}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="saccade", description=__doc__)
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="host:port (%(default)s)")
    parser.add_argument("--tls-ca", default="", help="PEM of what signed the server's certificate")
    parser.add_argument("--tls-cert", default="", help="PEM certificate of this client")
    parser.add_argument("--tls-key", default="", help="its PEM private key")
    parser.add_argument("--token-file", default="", help="file with the bearer token")
    commands = parser.add_subparsers(dest="command", required=True)

    request = argparse.ArgumentParser(add_help=False)
    request.add_argument("--instruction", required=True)
    request.add_argument("--model", default="", help="default: the only one")
    request.add_argument("--statistics", default="", help="statistics key; default: the only one")
    request.add_argument("--latency-class", default="", help="default: the model's")
    request.add_argument("--deadline-ms", type=float, default=0.0, help="default: the class's")
    request.add_argument(
        "--state", type=_numbers, help="the robot's, e.g. --state=0.1,-2; default: none"
    )
    request.add_argument("--json", action="store_true", help="one JSON line per answer")

    predict = commands.add_parser("predict", parents=[request], help="one image, one answer")
    predict.add_argument(
        "--image", required=True, action="append", help="file, or camera=file; repeat per camera"
    )
    predict.add_argument("--samples", type=int, default=1)
    predict.add_argument("--seed", type=int, default=0)
    predict.add_argument("--temperature", type=float, default=0.0)
    predict.add_argument("--flow-steps", type=int, default=0, help="default: the model's")
    predict.set_defaults(run=_predict)

    generate = commands.add_parser("generate", help="text for a prompt")
    generate.add_argument("prompt", help="used as it is")
    generate.add_argument(
        "--image", default=[], action="append", help="file, or camera=file; repeat per camera"
    )
    generate.add_argument("--model", default="", help="default: the only one")
    generate.add_argument("--latency-class", default="", help="default: the one for text")
    generate.add_argument(
        "--deadline-ms", type=float, default=30_000.0, help="0: the class's (%(default)g)"
    )
    generate.add_argument("--max-new-tokens", type=int, default=0, help="default: the server's")
    generate.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    generate.add_argument("--top-p", type=float, default=0.0, help="default: all tokens")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--sequences", type=int, default=1, help="samples, or best of the beams")
    generate.add_argument("--beams", type=int, default=1, help="above 1: beam search")
    generate.add_argument("--length-penalty", type=float, default=1.0)
    generate.add_argument("--json", action="store_true", help="one JSON line")
    generate.set_defaults(run=_generate)

    stream = commands.add_parser("stream", parents=[request], help="a folder of frames")
    stream.add_argument("--frames", required=True, help="folder of .jpg or .png, sent by name")
    stream.add_argument("--camera", default="", help="whose they are; default: the only one")
    stream.add_argument("--hz", type=float, default=10.0)
    stream.add_argument("--loops", type=int, default=1, help="times through the folder")
    stream.set_defaults(run=_stream)

    commands.add_parser("models", help="what the server has loaded").set_defaults(run=_models)
    commands.add_parser("status", help="the server as a whole").set_defaults(run=_status)

    admin = commands.add_parser("admin", help="for whoever runs the server")
    whats = admin.add_subparsers(dest="what", required=True)
    recent = whats.add_parser("recent", help="the last requests")
    recent.add_argument("-n", dest="count", type=int, default=20, help="how many (%(default)s)")
    trace = whats.add_parser("trace", help="the last steps and requests, for Perfetto")
    trace.add_argument("file")
    cache = whats.add_parser("cache", help="what the caches hold")
    cache.add_argument("--check", action="store_true", help="and whether their invariants hold")
    load = whats.add_parser("load", help="load a model beside the others")
    load.add_argument("name")
    load.add_argument("--folder", default="", help="below the server's admin.models_root")
    load.add_argument("--like", default="", help="the model whose settings a new name takes")
    unload = whats.add_parser("unload", help="take a model out and free its memory")
    unload.add_argument("name")
    reload = whats.add_parser("reload", help="load a model anew, then drain the old one")
    reload.add_argument("name")
    reload.add_argument("--folder", default="", help="of the checkpoint that takes its place")
    for parser_with_grace in (unload, reload):
        parser_with_grace.add_argument(
            "--grace", type=float, default=None, help="seconds; default: the server's drain_s"
        )
    limits = whats.add_parser("limits", help="show or change limits while the server runs")
    limits.add_argument(
        "changes", nargs="*", metavar="NAME=NUMBER", help="e.g. acts_per_s=50 max_queued.control=8"
    )
    whats.add_parser("memory", help="the memory budget and what holds it")
    whats.add_parser("drain", help="end the server as SIGTERM does")
    admin.set_defaults(run=_admin)

    live = commands.add_parser("top", help="what the server does, live")
    live.add_argument("--metrics", default=top.DEFAULT_METRICS, help="URL (%(default)s)")
    live.add_argument("--interval", type=float, default=1.0, help="seconds (%(default)s)")
    live.add_argument("--once", action="store_true", help="one frame, over one interval")
    live.add_argument("--json", action="store_true", help="one JSON line per frame")
    live.set_defaults(run=_top)

    command.add_parser(commands)
    page.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 0 good, 1 the request failed, 2 wrong usage."""
    args = _parser().parse_args(argv)
    for name in ("hz", "interval"):
        if not 0 < getattr(args, name, 1.0) < 1e6:
            print(f"saccade: --{name} must be positive", file=sys.stderr)
            return 2
    try:
        credentials = Credentials(args.tls_ca, args.tls_cert, args.tls_key, args.token_file)
        with Client(args.address, credentials=credentials) as client:
            return int(args.run(client, args))
    except errors.SaccadeError as error:
        print(f"saccade: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"saccade: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
