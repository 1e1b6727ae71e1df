"""OpenVLA-OFT over the wire: two cameras and a state in, a chunk of actions out, as the reference has it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, RunningServer

from saccade import Client, Flow, RequestFailed

GOLDEN = ROOT / "tests" / "golden" / "data" / "openvla_oft"
KEY = "libero_spatial_no_noops"
INSTRUCTION = "put the black bowl on the plate"


def golden() -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of golden.safetensors."""
    raw = (GOLDEN / "golden.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    types = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "u1"}
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        values = np.frombuffer(raw[8 + size + begin : 8 + size + end], types[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return tensors


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    headless = Path(tmp_path_factory.mktemp("oft")) / "checkpoint"
    shutil.copytree(
        GOLDEN / "checkpoint",
        headless,
        ignore=shutil.ignore_patterns("*.pt", "heads.safetensors"),
    )
    running = RunningServer(
        extra=f"""  - name: oft
    path: {GOLDEN / "checkpoint"}
    default_class: best_effort
  - name: oft_tokens
    path: {headless}
    default_class: best_effort
    oft: {{cameras: [front, wrist]}}
"""
    )
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()


def test_predict_is_the_references(server: RunningServer) -> None:
    expected = golden()
    frames = {"full_image": expected["image0_u8"], "wrist_image": expected["image1_u8"]}
    with Client(server.address) as client:
        chunk = client.predict(
            frames, INSTRUCTION, model="oft", state=expected["proprio_raw"].tolist()
        )
        assert chunk.values.shape == (8, 7)
        np.testing.assert_allclose(chunk.values, expected["actions"], rtol=0, atol=5e-6)
        chunk = client.predict(
            {"front": frames["full_image"], "wrist": frames["wrist_image"]},
            INSTRUCTION,
            model="oft_tokens",
            statistics_key=KEY,
        )
        np.testing.assert_allclose(
            chunk.values, expected["actions.discrete_no_proprio"], rtol=0, atol=2e-6
        )


def test_a_head_that_draws_nothing_has_no_temperature(server: RunningServer) -> None:
    expected = golden()
    frames = {"full_image": expected["image0_u8"], "wrist_image": expected["image1_u8"]}
    with Client(server.address) as client:
        cases: dict[str, dict[str, Any]] = {
            "temperature": {"temperature": 1.0},
            "flow_steps": {"flow": Flow(steps=3)},
            "noise": {"flow": Flow(noise=[0.5])},
        }
        for field, act in cases.items():
            with pytest.raises(RequestFailed) as refused:
                client.predict(
                    frames,
                    INSTRUCTION,
                    model="oft",
                    state=expected["proprio_raw"].tolist(),
                    **act,
                )
            assert refused.value.code == "INVALID_ARGUMENT"
            assert refused.value.field == f"act.{field}"


def test_session_needs_all_of_it(server: RunningServer) -> None:
    expected = golden()
    state = expected["proprio_raw"].tolist()
    with (
        Client(server.address) as client,
        client.session(model="oft", instruction=INSTRUCTION) as session,
    ):
        session.send_frame(expected["image0_u8"], camera="full_image")
        session.set_state(state)
        with pytest.raises(RequestFailed, match="wrist_image"):
            session.act()
        session.send_frame(expected["image1_u8"], camera="wrist_image")
        first = session.act().values
        np.testing.assert_allclose(first, expected["actions"], rtol=0, atol=5e-6)
        session.set_state([*state[:7], float("nan")])
        session.set_state(state[:7])
        np.testing.assert_array_equal(session.act().values, first)
        assert [e for e in session.message_errors if "NaN" in str(e)]
        assert [e for e in session.message_errors if "7 values" in str(e)]
        session.set_state([0.0] * 8)
        assert not np.array_equal(session.act().values, first)
