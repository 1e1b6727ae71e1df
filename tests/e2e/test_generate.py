"""Text from the shipped demo checkpoint: the real binary, both clients, the command line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import ROOT, RunningServer

from saccade import Client, InvalidInput, RequestFailed, Text, TextOptions, aio

PROMPT = "In: What action should the robot take to keep your lane?\nOut:"


def frame(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (120, 160, 3), dtype=np.uint8)


def without_times(text: Text) -> tuple[object, ...]:
    return tuple(text.sequences)


def wait_idle(client: Client) -> None:
    """Until nothing holds a block of the cache."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if all(p.held == 0 for cache in client.admin.caches() for p in cache.partitions):
            assert client.admin.broken_invariant() == ""
            return
        time.sleep(0.02)
    pytest.fail("blocks are held by nobody")


def test_tokens_stream_and_make_the_text(server: RunningServer) -> None:
    options = TextOptions(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=3)
    with Client(server.address) as client, client.generate(PROMPT, frame(1), options) as stream:
        tokens = list(stream)
        text = stream.result()
    assert [t.index for t in tokens] == list(range(len(tokens)))
    sequence = text.sequences[0]
    assert tuple(t.token_id for t in tokens) == sequence.token_ids
    assert sequence.text.startswith("".join(t.text for t in tokens))
    assert sequence.finish_reason in ("stop", "length")
    assert (sequence.finish_reason == "length") == (len(tokens) == 24)
    assert text.latency_class == "planning"
    assert text.frames[0].camera == "image"
    assert text.tokens["vision"].total > 0
    assert text.deadline_met and text.deadline_s == 30.0


def test_the_same_alone_and_among_actions_and_cached(server: RunningServer) -> None:
    options = TextOptions(max_new_tokens=20, temperature=1.0, top_p=0.9, seed=7, num_sequences=2)
    beams = TextOptions(max_new_tokens=20, num_beams=3, num_sequences=2)
    with Client(server.address) as client:
        alone = without_times(client.generate(PROMPT, frame(2), options).result())
        best = without_times(client.generate(PROMPT, frame(2), beams).result())
        stop = threading.Event()

        def act() -> None:
            number = 10
            while not stop.is_set():
                number += 1
                client.predict(frame(number), "keep your lane, speed 24")

        threads = [threading.Thread(target=act) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                assert without_times(client.generate(PROMPT, frame(2), options).result()) == alone
                assert without_times(client.generate(PROMPT, frame(2), beams).result()) == best
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        wait_idle(client)


def test_a_prompt_is_shared_with_actions(server: RunningServer) -> None:
    """An action request leaves the frame's and the words' K/V to a text with the same prompt."""
    with Client(server.address) as client:
        client.predict(frame(50), "stay behind the truck")
        prompt = "In: What action should the robot take to stay behind the truck?\nOut:"
        text = client.generate(prompt, frame(50), TextOptions(max_new_tokens=4)).result()
        assert text.frames_cached
        assert text.tokens["vision"].cached == text.tokens["vision"].total
        assert text.tokens["text"].cached > 0


def test_without_a_frame_and_with_ids(server: RunningServer) -> None:
    with Client(server.address) as client:
        text = client.generate("hello", options=TextOptions(max_new_tokens=5)).result()
        assert "vision" not in text.tokens
        ids = client.generate([1, 5, 9], options=TextOptions(max_new_tokens=5)).result()
        assert ids.tokens["text"].total == 3


def test_limits_and_cancellation(server: RunningServer) -> None:
    with Client(server.address) as client:
        with pytest.raises(InvalidInput) as refused:
            client.generate(PROMPT, options=TextOptions(max_new_tokens=100_000)).result()
        assert refused.value.field == "max_new_tokens"
        with pytest.raises(InvalidInput):
            client.generate(PROMPT, options=TextOptions(num_beams=2, temperature=1.0)).result()
        for beams in (1, 4):
            options = TextOptions(max_new_tokens=300, num_beams=beams, ignore_eos=True)
            stream = client.generate(PROMPT, frame(4), options)
            if beams == 1:
                next(stream)
            stream.cancel()
            with pytest.raises(RequestFailed) as cancelled:
                stream.result()
            assert cancelled.value.code == "CANCELLED"
        wait_idle(client)


def test_asyncio(server: RunningServer) -> None:
    async def run() -> tuple[list[int], Text]:
        async with aio.Client(server.address) as client:
            stream = client.generate(PROMPT, frame(5), TextOptions(max_new_tokens=8))
            tokens = [t.token_id async for t in stream]
            return tokens, await stream.result()

    tokens, text = asyncio.run(run())
    with Client(server.address) as client:
        blocking = client.generate(PROMPT, frame(5), TextOptions(max_new_tokens=8)).result()
    assert tuple(tokens) == text.sequences[0].token_ids == blocking.sequences[0].token_ids


def test_command_line(server: RunningServer) -> None:
    def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "saccade", "--address", server.address, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT / "client")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    plain = cli("generate", "hello there", "--max-new-tokens", "6")
    assert plain.returncode == 0, plain.stderr
    assert "tokens (" in plain.stderr
    answer = cli("generate", "hello", "--beams", "3", "--sequences", "2", "--json")
    assert answer.returncode == 0, answer.stderr
    sequences = json.loads(answer.stdout)["sequences"]
    assert len(sequences) == 2
    assert sequences[0]["score"] >= sequences[1]["score"]
    assert cli("generate", "hello", "--top-p", "2").returncode == 1
