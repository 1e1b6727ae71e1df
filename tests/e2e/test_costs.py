"""Learned step times survive a restart; a file that is none costs a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import RunningServer
from test_server import jpeg, recorded

from saccade import Client, RequestFailed


def run(costs: Path, requests: int) -> str:
    """Serves some requests and stops; the log."""
    server = RunningServer(extra=f"scheduler: {{cost_file: {costs}}}")
    try:
        server.wait_ready()
        frames, _, instructions = recorded()
        with Client(server.address) as client:
            for i in range(requests):
                client.predict(jpeg(frames[i]), instructions[i])
            # Far less than a step takes: refused at once, because the step times are known.
            if requests == 0:
                with pytest.raises(RequestFailed) as late:
                    client.predict(
                        frames[0], instructions[0], latency_class="control", deadline_s=1e-4
                    )
                assert late.value.reason in ("LATE", "EXPIRED")
        assert server.terminate() == 0
        return server.log()
    finally:
        server.close()


def test_step_times_survive_a_restart(tmp_path: Path) -> None:
    """Written at the end, read at the start; never half a file."""
    costs = tmp_path / "costs"
    assert "step times" not in run(costs, 3)
    first = costs.read_text()
    assert first.startswith("saccade-costs 1 ")
    assert "step times of earlier runs read" in run(costs, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["costs"]
    # One entry each time: the same model on the same device has the same key.
    assert len(first.splitlines()) == len(costs.read_text().splitlines()) == 2
    assert first.splitlines()[1].split()[0] == costs.read_text().splitlines()[1].split()[0]


def test_a_damaged_file_is_not_used_and_replaced(tmp_path: Path) -> None:
    """The server starts as if there were none."""
    costs = tmp_path / "costs"
    costs.write_text("saccade-costs 1 " + 32 * "0" + "\n")
    log = run(costs, 1)
    assert "step times of earlier runs are not used" in log
    assert str(costs) in log
    assert len(costs.read_text().splitlines()) == 2


def test_a_place_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    """And nothing else."""
    log = run(tmp_path / "none" / "costs", 1)
    assert "step times are not kept" in log
