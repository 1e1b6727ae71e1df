"""The Admin service of the real binary, through the client and its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import RunningServer
from test_server import cli, jpeg, recorded

from saccade import Client, RequestFailed


def admin_cli(server: RunningServer, *arguments: str) -> str:
    run = cli(server, "admin", *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_recent_requests_trace_and_caches(server: RunningServer, tmp_path: Path) -> None:
    frames, _, instructions = recorded()
    with (
        Client(server.address) as client,
        client.session(instruction=instructions[0]) as session,
    ):
        session.send_frame(jpeg(frames[0]))
        session.act()
        session.act()
        with pytest.raises(RequestFailed):
            session.act(latency_class="control", deadline_s=1e-6)
        admin = client.admin
        first, second, refused = admin.recent(3)
        assert (first.outcome, second.outcome) == ("ok", "ok")
        assert refused.outcome in ("late", "expired")
        assert refused.latency_class == "control" and refused.deadline_s == pytest.approx(1e-6)
        assert first.session_id == second.session_id == refused.session_id != 0
        assert second.cached_tokens > first.cached_tokens
        assert first.total_s >= first.queue_s + first.act_s > 0
        assert len(admin.recent()) >= 3
        (cache,) = admin.caches()
        used = sum(p.held + p.idle for p in cache.partitions)
        assert cache.free_blocks + used == cache.total_blocks
        assert [p.modality for p in cache.partitions] == [
            "vision",
            "text",
            "state",
            "action",
        ]
        assert admin.broken_invariant() == ""
    assert admin_cli(server, "recent", "-n", "3").count("\n") == 3
    assert "invariants: all hold" in admin_cli(server, "cache", "--check")
    admin_cli(server, "trace", str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "workers",
        "sessions",
    }
    assert any(e["name"].startswith("control ") for e in events)


def test_drain_ends_the_server_with_exit_code_0() -> None:
    running = RunningServer()
    try:
        running.wait_ready()
        assert admin_cli(running, "drain") == "draining\n"
        assert running.process.wait(20) == 0
        assert "draining" in running.log()
    finally:
        running.close()
