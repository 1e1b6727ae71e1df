"""Policies of published sizes with random weights on one core: every stage, and SmolVLA beside the library it comes from.

Bars (--check), SmolVLA in BF16 with two cameras, 48 tokens of text and 10 denoise steps: the peer takes >= 1.4 times
the CPU time of the server, the server <= 1.35 times what this core needs at least for the arithmetic and for reading
the weights, and both give the same actions. The peer is lerobot on torch; it and the server answer in turns. The
server is asked over gRPC, so decoding frames and the network count against it. A core with tiles is judged twice: as it
is, beside the peer, and without its tiles, where the least time is that of vdpbf16ps, the instruction of the bar
(tests/bench/trunk judges there, too). Where F32 products are faster than that instruction the server uses them, and the
time is printed beside their peak as well; so is the time with tiles. A family there is no room for is left out. Exit code 77: the bars cannot be judged, because the peer cannot be installed or there is no room. Last line: one
JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client"))

from random_checkpoint import write_checkpoint  # noqa: E402

from saccade import Client, Flow  # noqa: E402

SKIPPED = 77
PEER = ROOT / "build" / "bench-env"
REQUIREMENTS = ROOT / "tests" / "bench" / "peer-requirements.txt"
RATIO_BAR = 1.4
BOUND_BAR = 1.35
# Root mean square of the difference by that of the actions. Rounding in BF16 makes 0.004; patches one position off 0.09.
SAME_BAR = 0.02
GIB = 1 << 30
# What has to be free: on disk, the folder; in memory, weights, K/V of eight sequences, work space.
DISK = {"smolvla": 1 * GIB, "pi0": 7 * GIB, "openvla": 15 * GIB}
MEMORY = {"smolvla": 3 * GIB, "pi0": 8 * GIB, "openvla": 17 * GIB}
PEER_DISK = 10 * GIB

PHRASE = "pick up the red block and place it in the bowl"
TEXT = " and ".join([PHRASE] * 4)  # and a line end: 48 tokens
TEXT_TOKENS = 48


class Skip(Exception):
    """Why this machine cannot run the bench."""


@dataclass(frozen=True)
class Stage:
    """Work of one stage: what it must at least do once, and how often an answer has it."""

    name: str
    flop: float
    weights: float
    times: int = 1

    def bound_ms(self, machine: Machine, gflops: float) -> float:
        """The least time of one: arithmetic at `gflops`, or weights (BF16) at the bandwidth."""
        bytes_read = 2 * self.weights
        return 1e3 * max(self.flop / gflops / 1e9, bytes_read / machine.gbps(bytes_read) / 1e9)


@dataclass(frozen=True)
class Machine:
    """What one core can do at most at a level of instructions."""

    isa: str  # the server's
    peer_isa: str
    dot_gflops: float | None  # of vdpbf16ps, where the core has it and nothing above it is used
    bf16_gflops: float  # of the fastest way to multiply BF16
    read: list[tuple[float, float]]  # bytes that are read again and again, GB/s

    def gbps(self, size: float) -> float:
        """Bandwidth of reading so much; smaller amounts stay nearer to the core."""
        return next((gbps for most, gbps in self.read if size <= most), self.read[-1][1])


def vit(depth: int, width: int, mlp: int, tokens: int, pixels: int) -> tuple[float, float]:
    """FLOP and weights of a vision tower; `pixels` are the values of one patch."""
    weights = depth * (4 * width * width + 2 * width * mlp) + pixels * width
    return 2 * weights * tokens + depth * 4 * width * tokens * tokens, weights


def decoder(
    depth: int, hidden: int, rows: int, kv: float, mlp: int, tokens: int, before: int, causal: bool
) -> tuple[float, float]:
    """FLOP and weights of a decoder over `tokens` behind `before` others."""
    weights = depth * (2 * hidden * rows + 2 * hidden * kv + 3 * hidden * mlp)
    seen = tokens * (tokens / (2 if causal else 1) + before)
    return 2 * weights * tokens + depth * 4 * rows * seen, weights


def stages_of(family: str, prompt: int) -> list[Stage]:
    """The stages of an answer, named as `saccade-server bench` does; `prompt`: rows of the prefix."""
    if family == "smolvla":
        flop, weights = vit(12, 768, 3072, 1024, 768)
        join = 16 * 768 * 960  # 64 tokens of 16 patches each
        # Every other layer of the expert has K and V of its own; the others derive theirs from the prefix, once.
        expert = decoder(16, 720, 960, 320 / 2, 2048, 50, prompt, False)
        return [
            Stage("encode", flop + 2 * join * 64, weights + join, 2),
            Stage("prefill", *decoder(16, 960, 960, 320, 2560, prompt, 0, False)),
            Stage("denoise", *expert, 10),
        ]
    if family == "pi0":
        flop, weights = vit(27, 1152, 4304, 256, 588)
        return [
            Stage("encode", flop + 2 * 256 * 1152 * 2048, weights + 1152 * 2048, 3),
            Stage("prefill", *decoder(18, 2048, 2048, 256, 16384, prompt, 0, False)),
            Stage("denoise", *decoder(18, 1024, 2048, 256, 4096, 51, prompt, False), 10),
        ]
    # The last block of either tower is not used.
    towers = [vit(26, 1152, 4304, 256, 588), vit(23, 1024, 4096, 261, 588)]
    projector = 2176 * 8704 + 8704 * 4096 + 4096 * 4096
    head = 32064 * 4096
    prefill = decoder(32, 4096, 4096, 4096, 11008, prompt, 0, True)
    decode = decoder(32, 4096, 4096, 4096, 11008, 1, prompt, True)
    return [
        Stage(
            "encode",
            sum(t[0] for t in towers) + 2 * 256 * projector,
            sum(t[1] for t in towers) + projector,
        ),
        Stage("prefill", prefill[0] + 2 * head, prefill[1] + head),
        Stage("decode", decode[0] + 2 * head, decode[1] + head, 6),
    ]


def bound_ms(family: str, prompt: int, machine: Machine, gflops: float) -> float:
    """The least time of an answer."""
    return sum(s.times * s.bound_ms(machine, gflops) for s in stages_of(family, prompt))


# --- this machine ---


def last_core() -> int:
    """The core that everything measured runs on."""
    return max(os.sched_getaffinity(0))


def pinned(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Starts a process that stays on one core."""
    core = last_core()
    return subprocess.Popen(["taskset", "--cpu-list", str(core), *command], text=True, **options)


def measure_machine(binary: Path, isa: str) -> list[Machine]:
    """Runs the machine bench on the core: what is judged there, at `isa` or as the server chooses."""
    process = pinned([str(binary)], stdout=subprocess.PIPE)
    out, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{binary} failed")
    found = json.loads(out.splitlines()[-1])
    peaks = found["peaks"]
    read = [(row["mib"] * 2.0**20, row["gbps"]) for row in found["read"]]

    def machine(server: str, peer: str) -> Machine:
        vector = server in ("avx512", "avx512_bf16") and peer == "avx512_bf16"
        dot = peaks[peer]["bf16_gflops"] if vector else None
        return Machine(server, peer, dot, max(peaks[server].values()), read)

    if isa != "auto":
        return [machine(isa, isa)]
    levels = [machine(found["auto"], found["best"])]
    if found["best"] == "amx_bf16":
        fastest = max(("avx512", "avx512_bf16"), key=lambda level: peaks[level]["bf16_gflops"])
        levels.append(machine(fastest, "avx512_bf16"))
    return levels


def available_memory() -> int:
    """Bytes that processes may still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def need(what: str, wanted: int, have: int) -> None:
    """Skips where there is too little."""
    if have < wanted:
        raise Skip(f"{what} needs {wanted / GIB:.0f} GiB, {have / GIB:.1f} GiB are free")


def ensure_checkpoint(family: str, folder: Path) -> Path:
    """The folder, written where it is missing."""
    path = folder / family
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        need(f"the checkpoint of {family} on disk", DISK[family], shutil.disk_usage(folder).free)
        print(f"writing {path}", file=sys.stderr)
        write_checkpoint(family, path)
    return path


# --- stages ---


def bench_stages(binary: Path, path: Path, isa: str, repetitions: int) -> dict[str, Any]:
    """`saccade-server bench` on one thread: its answer and the most memory it had."""
    command = [str(binary), "bench", "--model", str(path), "--dtype", "bf16", "--threads", "1"]
    command += ["--isa", isa, "--repetitions", str(repetitions)]
    with pinned(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}")
    result: dict[str, Any] = json.loads(out)
    result["max_rss_mib"] = usage.ru_maxrss / 1024
    return result


def print_stages(family: str, found: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """The table of one family; what goes into the JSON line."""
    prompt = found["prompt_tokens"]
    known = {stage.name: stage for stage in stages_of(family, prompt)}
    print(
        f"\n{family}: {found['backend']}, {machine.bf16_gflops:.0f} GFLOP/s at most, "
        f"{found['frames']} cameras, {prompt} rows of prefix, "
        f"{found['max_rss_mib']:.0f} MiB resident at most, mapped files included"
    )
    print(
        f"{'stage':<12}{'times':>6}{'min ms':>10}{'median ms':>11}{'GFLOP/s':>9}{'GB/s':>7}"
        f"{'bound ms':>10}{'x bound':>9}"
    )
    out: dict[str, Any] = {"max_rss_mib": round(found["max_rss_mib"]), "prompt_tokens": prompt}
    for step in found["steps"]:
        name = step["stage"]
        several = name in ("denoise", "decode") and step["sequences"] > 1
        label = f"{name} x{step['sequences']}" if several else name
        line = f"{label:<12}{'':>6}{step['min_ms']:>10.1f}{step['median_ms']:>11.1f}"
        out[label] = {k: round(step[k], 2) for k in ("min_ms", "median_ms")}
        bound = None
        if name in known and not several:
            stage = known[name]
            bound = stage.bound_ms(machine, machine.bf16_gflops)
            gflops = stage.flop / step["min_ms"] / 1e6
            gbps = 2 * stage.weights / step["min_ms"] / 1e6
            line = f"{label:<12}{stage.times:>6}{step['min_ms']:>10.1f}{step['median_ms']:>11.1f}"
            line += f"{gflops:>9.0f}{gbps:>7.1f}"
        elif name == "answer":
            bound = bound_ms(family, prompt, machine, machine.bf16_gflops)
            line += " " * 16
        if bound is not None:
            line += f"{bound:>10.1f}{step['min_ms'] / bound:>9.2f}"
            out[label]["bound_ms"] = round(bound, 2)
        print(line)
    return out


# --- SmolVLA beside its peer ---


@dataclass(frozen=True)
class Sample:
    """One answer: its cost and its normalised actions."""

    wall_s: float
    cpu_s: float
    chunk: np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Observations:
    """What both are asked; no frame comes twice, so nothing is found in a cache."""

    images: np.ndarray[Any, np.dtype[np.uint8]]
    states: np.ndarray[Any, np.dtype[np.float32]]
    noise: np.ndarray[Any, np.dtype[np.float32]]

    @staticmethod
    def make(count: int, seed: int) -> Observations:
        """Random ones."""
        random = np.random.default_rng(seed)
        return Observations(
            random.integers(0, 256, (count, 2, 512, 512, 3), dtype=np.uint8),
            random.standard_normal((count, 6), dtype=np.float32),
            random.standard_normal((count, 50, 32), dtype=np.float32),
        )

    def save(self, path: Path) -> None:
        """For the peer."""
        np.savez(path, images=self.images, states=self.states, noise=self.noise, text=TEXT)


class Peer:
    """lerobot in a process of its own."""

    def __init__(self, python: Path, checkpoint: Path, observations: Path, isa: str) -> None:
        levels = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512_bf16": "AVX512_CORE_BF16"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if isa in levels:
            environment["ONEDNN_MAX_CPU_ISA"] = levels[isa]
        script = ROOT / "tests" / "bench" / "smolvla_peer.py"
        self._process = pinned(
            [str(python), str(script), str(checkpoint), str(observations)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.ready = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, index: int) -> Sample:
        """Its answer to one observation."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{index}\n")
        self._process.stdin.flush()
        answer = self._read()
        chunk = np.asarray(answer["chunk"], np.float32)
        return Sample(answer["wall_s"], answer["cpu_s"], chunk)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()


class Server:
    """saccade-server with the policy, on one thread of one core."""

    def __init__(
        self, binary: Path, checkpoint: Path, observations: Observations, isa: str
    ) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        self._config = tempfile.NamedTemporaryFile("w", suffix=".yaml")  # noqa: SIM115
        self._config.write(
            f'server: {{listen: "{address}", metrics_listen: "", decode_threads: 1, log: {{level: warn}}}}\n'
            f"backends: [{{name: cpu, kind: cpu, threads: 1, isa: {isa}}}]\n"
            f"models: [{{name: policy, path: {checkpoint}, dtype: bf16, default_class: best_effort}}]\n"
        )
        self._config.flush()
        self._process = pinned([str(binary), "serve", "--config", self._config.name])
        self._observations = observations
        self._client = Client(address)
        try:
            self._client.wait_ready(120)
        except BaseException:
            self._process.kill()
            raise

    def _cpu_s(self) -> float:
        """CPU time of all its threads, which live as long as it does."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks.iterdir()) / 1e9

    def ask(self, index: int) -> Sample:
        """Its answer to one observation."""
        o = self._observations
        frames = dict(zip(("top", "wrist"), o.images[index], strict=True))
        cpu, wall = self._cpu_s(), time.perf_counter()
        answer = self._client.predict(
            frames, TEXT, state=o.states[index].tolist(), flow=Flow(noise=o.noise[index])
        )
        wall, cpu = time.perf_counter() - wall, self._cpu_s() - cpu
        rows = {k: v.total for k, v in answer.tokens.items()}
        if rows.get("text") != TEXT_TOKENS:
            raise RuntimeError(f"expected {TEXT_TOKENS} tokens of text: {rows}")
        if any(v.cached for v in answer.tokens.values()):
            raise RuntimeError("an answer that was partly known costs less than the peer's")
        return Sample(wall, cpu, answer.samples[0].normalized)

    def close(self) -> None:
        """Drains and ends it."""
        self._client.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        self._config.close()


def has_peer(python: Path) -> bool:
    """Whether this Python has what the requirements say."""
    pins = [x for x in REQUIREMENTS.read_text().split("\n") if x and not x.startswith("#")]
    code = (
        "import sys; from importlib.metadata import version; "
        "sys.exit(any(version(p.split('==')[0]) != p.split('==')[1] for p in sys.argv[1:]))"
    )
    with contextlib.suppress(OSError):
        return subprocess.run([python, "-c", code, *pins], capture_output=True).returncode == 0
    return False


def ensure_peer(python: Path | None) -> Path:
    """A Python with lerobot; installs one where none is given and none is there."""
    if python is not None:
        if not has_peer(python):
            raise Skip(f"{python} lacks what {REQUIREMENTS.name} says")
        return python
    python = PEER / "bin" / "python"
    if has_peer(python):
        return python
    if sys.version_info[:2] != (3, 11):
        raise Skip(f"lerobot 0.4.4 is for Python 3.11, this is {sys.version.split()[0]}")
    need("the peer's environment on disk", PEER_DISK, shutil.disk_usage(ROOT).free)
    print(f"installing the peer into {PEER}", file=sys.stderr)
    make = [str(ROOT / "deploy" / "venv.sh"), str(PEER), "-r", str(REQUIREMENTS)]
    if subprocess.run(make, cwd=ROOT).returncode != 0:
        raise Skip("the peer could not be installed")
    return python


def in_turns(server: Server, peer: Peer, runs: int) -> Iterator[tuple[Sample, Sample]]:
    """Answers of both to the same observations; the first is not counted."""
    for index in range(runs + 1):
        pair = server.ask(index), peer.ask(index)
        if index > 0:
            yield pair


def compare_smolvla(
    binary: Path, python: Path, checkpoint: Path, machine: Machine, runs: int
) -> tuple[dict[str, Any], bool]:
    """Server and peer in turns; the JSON and whether the bars hold."""
    observations = Observations.make(runs + 1, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "observations.npz"
        observations.save(path)
        with (
            contextlib.closing(Server(binary, checkpoint, observations, machine.isa)) as server,
            contextlib.closing(Peer(python, checkpoint, path, machine.peer_isa)) as peer,
        ):
            pairs = list(in_turns(server, peer, runs))
            ready = peer.ready
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    prompt = 2 * 64 + TEXT_TOKENS + 1
    least = bound_ms("smolvla", prompt, machine, machine.bf16_gflops)
    out: dict[str, Any] = {"runs": runs, "isa": machine.isa, "peer_isa": machine.peer_isa}
    out |= {"peer_torch": ready["torch"], "bound_ms": round(least, 1)}
    print(
        f"\nsmolvla, whole answers, {runs} each in turns: 2 cameras, {TEXT_TOKENS} tokens, 10 steps; "
        f"{machine.isa} against {machine.peer_isa}"
    )
    print(f"{'':<26}{'CPU min ms':>12}{'CPU median':>12}{'wall min':>10}{'wall median':>13}")
    for name, samples in (("saccade, over gRPC", ours), (f"lerobot, {ready['torch']}", theirs)):
        row = []
        for clock in ("cpu_s", "wall_s"):
            ms = [1e3 * getattr(s, clock) for s in samples]
            row += [min(ms), statistics.median(ms)]
        print(f"{name:<26}{row[0]:>12.0f}{row[1]:>12.0f}{row[2]:>10.0f}{row[3]:>13.0f}")
        keys = ("cpu_min_ms", "cpu_median_ms", "wall_min_ms", "wall_median_ms")
        out["saccade" if samples is ours else "peer"] = {
            k: round(v, 1) for k, v in zip(keys, row, strict=True)
        }
    ratio = out["peer"]["cpu_min_ms"] / out["saccade"]["cpu_min_ms"]
    differences = [
        float(np.sqrt(np.mean((a.chunk - b.chunk) ** 2) / np.mean(b.chunk**2))) for a, b in pairs
    ]
    worst = max(differences)
    rows = [
        ("peer / saccade", f"{ratio:.2f}", f">= {RATIO_BAR}", ratio >= RATIO_BAR),
        ("actions differ by", f"{worst:.4f}", f"<= {SAME_BAR}", worst <= SAME_BAR),
    ]
    out |= {"ratio": round(ratio, 3), "difference": worst}
    for name, gflops in (("bound", machine.bf16_gflops), ("bound_vdpbf16ps", machine.dot_gflops)):
        if gflops is None:
            continue
        bound = bound_ms("smolvla", prompt, machine, gflops)
        over = out["saccade"]["cpu_min_ms"] / bound
        out[f"over_{name}"] = round(over, 3)
        judged = name == "bound_vdpbf16ps"
        rows.append(
            (
                f"saccade / {bound:.0f} ms at {gflops:.0f} GFLOP/s",
                f"{over:.2f}",
                f"<= {BOUND_BAR}" if judged else "",
                over <= BOUND_BAR or not judged,
            )
        )
    print(f"\n{'what':<40}{'measured':<12}{'bar':<10}")
    for what, measured, bar, good in rows:
        print(f"{what:<40}{measured:<12}{bar:<10}{'ok' if good and bar else 'MISS' if bar else ''}")
    return out, all(row[3] for row in rows)


def main() -> int:
    """The command line; 0 only when every bar holds (with --check)."""
    build = ROOT / "build"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--family", action="append", choices=list(DISK), help="default: all")
    parser.add_argument("--isa", default="auto", help="instruction set, of the peer, too")
    parser.add_argument("--repetitions", type=int, default=3, help="of each stage")
    parser.add_argument("--runs", type=int, default=5, help="answers of server and peer each")
    parser.add_argument("--folder", type=Path, default=build / "bench", help="of checkpoints")
    parser.add_argument("--binary", type=Path, default=build / "release" / "saccade-server")
    parser.add_argument("--peer-python", type=Path, help="one that has peer-requirements.txt")
    args = parser.parse_args()
    families = args.family or list(DISK)
    if args.check and "smolvla" not in families:
        parser.error("--check judges smolvla alone: name it, too")
    levels = measure_machine(build / "release" / "tests" / "bench" / "machine_bench", args.isa)
    reads = ", ".join(f"{gbps:.1f} GB/s of {size / 2**20:.0f} MiB" for size, gbps in levels[0].read)
    print(f"one core reads {reads}")
    result: dict[str, Any] = {"bench": "families", "isa": levels[0].isa}
    result["bf16_gflops"] = round(levels[0].bf16_gflops, 1)
    passed: bool | None = None
    for family in families:
        try:
            path = ensure_checkpoint(family, args.folder.resolve())
            need(f"{family} in memory", MEMORY[family], available_memory())
            for machine in levels if family == "smolvla" else levels[:1]:
                found = bench_stages(args.binary, path, machine.isa, args.repetitions)
                stages = print_stages(family, found, machine)
                if family == "smolvla":
                    python = ensure_peer(args.peer_python)
                    stages["served"], held = compare_smolvla(
                        args.binary, python, path, machine, args.runs
                    )
                    passed = held and passed is not False
                key = family if machine is levels[0] else f"{family}_without_tiles"
                result[key] = stages
        except Skip as why:
            print(f"{family}: skipped: {why}", flush=True)
            result.setdefault(family, {})["skipped"] = str(why)
    result["pass"] = passed
    print(json.dumps(result))
    if passed is None and any("skipped" in result[family] for family in families):
        return SKIPPED
    return 1 if args.check and passed is False else 0


if __name__ == "__main__":
    sys.exit(main())
