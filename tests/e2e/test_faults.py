"""The machine around the server fails: a full disk, a clock that jumps, a checkpoint that is damaged."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import BINARY, ROOT, RunningServer, free_port
from test_server import jpeg, recorded

from saccade import Client

CHECKPOINT = ROOT / "deploy" / "demo" / "checkpoint"


def answers(server: RunningServer, n: int = 3) -> list[list[int]]:
    """Tokens of the first recorded frames."""
    frames, _, instructions = recorded()
    with Client(server.address) as client:
        return [
            client.predict(jpeg(frames[i]), instructions[i]).samples[0].token_ids.tolist()
            for i in range(n)
        ]


def test_a_full_disk_for_the_log_is_no_reason_to_stop(server: RunningServer) -> None:
    """Standard output and error are /dev/full."""
    full = RunningServer(wrapper=("sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh"))
    try:
        full.wait_ready()
        assert answers(full) == answers(server)
        assert full.terminate() == 0
    finally:
        full.close()


def test_a_jump_of_the_wall_clock_changes_nothing(server: RunningServer, tmp_path: Path) -> None:
    """Days ahead and back: deadlines, ages and idle times are of the monotonic clock."""
    shim = tmp_path / "clock_jump.so"
    source = Path(__file__).with_name("clock_jump.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl"], check=True
    )
    offset = tmp_path / "offset"
    offset.write_text("0")
    jumping = RunningServer(
        wrapper=("env", f"LD_PRELOAD={shim}", f"CLOCK_OFFSET_FILE={offset}"),
        default_class="driving",
        extra="""
classes:
  - {name: driving, deadline_ms: 20000}
  - {name: best_effort, tier: 2, on_late: run_late}
""",
    )
    try:
        jumping.wait_ready()
        frames, _, instructions = recorded()
        with (
            Client(jumping.address) as client,
            client.session(instruction=instructions[0]) as session,
        ):
            session.send_frame(jpeg(frames[0]), capture_time_ns=1)
            expected = session.act(timeout_s=30)
            for seconds in (86400, -86400, 0):
                offset.write_text(str(seconds))
                got = session.act(timeout_s=30)
                assert np.array_equal(got.values, expected.values)
                assert not got.late
        assert "1970" not in jumping.log()
        assert answers(jumping) == answers(server)
        assert jumping.terminate() == 0
    finally:
        jumping.close()


def split(folder: Path) -> tuple[Path, Path]:
    """Makes two shards and their index of the single weight file."""
    whole = folder / "model.safetensors"
    data = whole.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    names = sorted(header)
    index = {}
    shards = (folder / "model-1.safetensors", folder / "model-2.safetensors")
    for shard, part in zip(
        shards, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True
    ):
        new, body = {}, b""
        for name in part:
            begin, end = header[name]["data_offsets"]
            new[name] = {**header[name], "data_offsets": [len(body), len(body) + end - begin]}
            body += data[8 + size + begin : 8 + size + end]
            index[name] = shard.name
        text = json.dumps(new).encode()
        text += b" " * (-len(text) % 8)
        shard.write_bytes(struct.pack("<Q", len(text)) + text + body)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole.unlink()
    return shards


def edit_header(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Rewrites a weight file's header; the data stays."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def cut_shard(folder: Path) -> str:
    shard = split(folder)[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    return shard.name


def missing_shard(folder: Path) -> str:
    shard = split(folder)[1]
    shard.unlink()
    return shard.name


def absent_tensor(folder: Path) -> str:
    split(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["no.such.tensor"] = "model-1.safetensors"
    path.write_text(json.dumps(index))
    return "no.such.tensor"


def escaping_path(folder: Path) -> str:
    split(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../../etc/passwd"
    path.write_text(json.dumps(index))
    return "../../etc/passwd"


def wrong_dtype(folder: Path) -> str:
    name = "language_model.model.norm.weight"

    def change(header: dict[str, dict[str, object]]) -> None:
        width = {"F32": "I32", "BF16": "I16", "F16": "I16"}[str(header[name]["dtype"])]
        header[name]["dtype"] = width

    edit_header(folder / "model.safetensors", change)
    return name


def huge_header(folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + path.read_bytes()[8:])
    return "model.safetensors"


def lost_statistics(folder: Path) -> str:
    for name in ("config.json", "dataset_statistics.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace('"q99"', '"q98"'))
    return "q99"


@pytest.mark.parametrize(
    "damage",
    [
        cut_shard,
        missing_shard,
        absent_tensor,
        escaping_path,
        wrong_dtype,
        huge_header,
        lost_statistics,
    ],
)
def test_a_damaged_checkpoint_is_named_and_ends_the_start(
    damage: Callable[[Path], str], tmp_path: Path
) -> None:
    """With exit code 1, and soon."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    named = damage(folder)
    config = tmp_path / "server.yaml"
    config.write_text(
        f'server: {{listen: "127.0.0.1:{free_port()}", metrics_listen: ""}}\n'
        f"models: [{{name: bad, path: {folder}}}]\n"
    )
    ended = subprocess.run(
        [BINARY, "serve", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "model bad" in ended.stderr and named in ended.stderr, ended.stderr


def test_shards_that_are_whole_serve(server: RunningServer, tmp_path: Path) -> None:
    """What the damage above is done to answers as the single file does."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    split(folder)
    sharded = RunningServer(path=str(folder))
    try:
        sharded.wait_ready()
        assert answers(sharded) == answers(server)
    finally:
        sharded.close()
