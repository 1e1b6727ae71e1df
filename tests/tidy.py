"""Runs clang-tidy on the sources of a build folder, one process per core; a file that passed is not read again until it,
a header it includes, its flags or .clang-tidy change.

    python3 tests/tidy.py BUILD-FOLDER [PATH-PREFIX ...]

Needs the folder to be built: the includes of each file are taken from ninja. Exits 1 when a file has a finding.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIDY = "clang-tidy-14"


def includes(build: Path) -> dict[str, list[str]]:
    """Object file -> every file of ours it was built from."""
    out = subprocess.run(
        ["ninja", "-C", str(build), "-t", "deps"], capture_output=True, text=True, check=True
    ).stdout
    result: dict[str, list[str]] = {}
    current: list[str] = []
    for line in out.splitlines():
        if line and not line.startswith((" ", "ninja:")):
            current = result.setdefault(line.split(":", 1)[0], [])
        elif line.strip():
            path = Path(build, line.strip()).resolve()
            if path.is_relative_to(ROOT) and path.exists():
                current.append(str(path))
    return result


def main() -> int:
    """See the module's first lines."""
    build = Path(sys.argv[1]).resolve()
    prefixes = sys.argv[2:] or ["server/", "kernels/"]
    passed = build / "tidy-passed"
    passed.mkdir(exist_ok=True)
    config = (ROOT / ".clang-tidy").read_bytes()
    deps = includes(build)

    def key(entry: dict[str, str]) -> str:
        digest = hashlib.sha256(config + entry["command"].encode())
        for path in sorted({entry["file"], *deps.get(entry["output"], [])}):
            digest.update(path.encode() + b"\0" + Path(path).read_bytes())
        return digest.hexdigest()

    jobs = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        name = os.path.relpath(entry["file"], ROOT)
        if not name.startswith(tuple(prefixes)):
            continue
        if "output" not in entry:  # CMake before 3.20 leaves it out
            entry["output"] = entry["command"].split(" -o ", 1)[1].split(" ", 1)[0]
        stamp = passed / key(entry)
        if not stamp.exists():
            jobs.append((name, stamp))

    def check(job: tuple[str, Path]) -> bool:
        name, stamp = job
        run = subprocess.run(
            [TIDY, "-p", str(build), "--quiet", name], capture_output=True, text=True, cwd=ROOT
        )
        if run.returncode == 0:
            stamp.touch()
            return True
        noise = ("warnings generated", "warning generated", "error generated", "errors generated")
        lines = (run.stdout + run.stderr).splitlines()
        print(f"{name}:\n" + "\n".join(line for line in lines if not line.endswith(noise)), flush=True)
        return False

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(check, jobs))
    print(f"clang-tidy: {len(results)} files read, {results.count(False)} with findings")
    return 1 if False in results else 0


if __name__ == "__main__":
    sys.exit(main())
