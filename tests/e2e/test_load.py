"""Clients that send more than there is time for, beside one that does not."""

from __future__ import annotations

import io
import subprocess
import threading

import numpy as np
import pytest
from conftest import BINARY, RunningServer
from PIL import Image
from test_server import jpeg, metric, recorded

from saccade import Client


def large_png(shade: int) -> bytes:
    """16 megapixels in a few kilobytes: decoding takes a hundred times what a camera frame takes."""
    out = io.BytesIO()
    Image.fromarray(np.full((4000, 4000), shade, np.uint8)).save(out, "PNG")
    return out.getvalue()


def test_large_frames_hold_up_nobody_else(server: RunningServer) -> None:
    """Three clients stream 16-megapixel frames as fast as the server reads them."""
    frames, _, instructions = recorded()
    stop = threading.Event()

    def flood(shade: int) -> None:
        png = large_png(shade)
        with Client(server.address) as client, client.session(instruction=instructions[0]) as session:
            while not stop.is_set():
                session.send_frame(png)
                session.act(timeout_s=30)

    floods = [threading.Thread(target=flood, args=(shade,)) for shade in (10, 20, 30)]
    for thread in floods:
        thread.start()
    try:
        with Client(server.address) as client, client.session(instruction=instructions[0]) as session:
            before = metric(server, "saccade_frames_received_total")
            calm = 30
            for i in range(calm):
                session.send_frame(jpeg(frames[i]))
                chunk = session.act(timeout_s=30)
                assert chunk.values.size
            large = metric(server, "saccade_frames_received_total") - before - calm
            probe = subprocess.run(
                [BINARY, "health", "--address", server.address], timeout=10, check=False
            )
            assert probe.returncode == 0
    finally:
        stop.set()
        for thread in floods:
            thread.join()
    # First come, first served would decode three large frames before each of the calm client's.
    assert large < calm


def test_the_newest_frame_wins_before_it_is_decoded(server: RunningServer) -> None:
    """Of many large frames sent at once only the last is needed."""
    _, _, instructions = recorded()
    with Client(server.address) as client, client.session(instruction=instructions[0]) as session:
        before = metric(server, "saccade_frames_superseded_total")
        for i in range(12):
            session.send_frame(large_png(i), capture_time_ns=i + 1)
        chunk = session.act(timeout_s=30)
        assert [frame.capture_time_ns for frame in chunk.frames] == [12]
        assert metric(server, "saccade_frames_superseded_total") - before == pytest.approx(11)
