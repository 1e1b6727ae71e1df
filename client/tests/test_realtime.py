"""The wall clock of `saccade eval`, without a server."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import numpy as np
import pytest

from saccade import types
from saccade.eval import realtime, served
from saccade.eval.realtime import RealClock, budget_s
from saccade.exposition import Window, parse

DT_S = 0.06
ANSWER = cast(types.Actions, object())


def run_steps(delays_s: list[float], work_s: float = 0.0) -> tuple[list[bool], RealClock, float]:
    """One request a step, answered after so long; whether it was there in its own step."""

    async def loop() -> tuple[list[bool], RealClock, float]:
        clock = RealClock(DT_S, DT_S / 2)
        there = []
        start = time.monotonic()
        for step, delay_s in enumerate(delays_s):
            await clock.tick(step)
            asked: asyncio.Future[types.Actions] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(delay_s, asked.set_result, ANSWER)
            there.append(await clock.answer(asked) is not None)
            time.sleep(work_s)
        return there, clock, time.monotonic() - start

    return asyncio.run(loop())


def test_an_answer_counts_until_its_step_begins() -> None:
    there, clock, seconds = run_steps([0.0, 10.0, 0.0, 10.0])
    assert there == [True, False, True, False]
    # The last step begins three steps after the first, which begins its budget after the request.
    assert seconds >= 3.5 * DT_S - 0.001
    assert clock.lead_s == DT_S / 2


def test_a_world_that_is_too_slow_is_noted_and_blamed_on_nobody() -> None:
    _, clock, _ = run_steps([0.0] * 4, work_s=2 * DT_S)
    assert clock.notes()["slipped_s"] >= 3 * DT_S


def test_a_failed_request_is_raised_in_its_step() -> None:
    async def loop() -> None:
        clock = RealClock(DT_S, DT_S)
        await clock.tick(0)
        asked: asyncio.Future[types.Actions] = asyncio.get_running_loop().create_future()
        asked.set_exception(ValueError("refused"))
        with pytest.raises(ValueError, match="refused"):
            await clock.answer(asked)

    asyncio.run(loop())


@pytest.mark.parametrize(
    ("stale_ms", "seconds"), [(0, 0.1), (100, 0.1), (150, 0.15), (200, 0.1), (350, 0.15)]
)
def test_the_budget_is_as_long_as_the_pictures_are_old(stale_ms: int, seconds: float) -> None:
    assert budget_s(stale_ms, 0.2) == pytest.approx(seconds)


def test_others_ask_with_pictures_of_their_own() -> None:
    rng = np.random.default_rng(0)
    a, b = realtime.noise(rng, 20, 12), realtime.noise(rng, 20, 12)
    assert a.shape == (12, 20, 3)
    assert (a != b).any()


def test_what_the_metrics_say_adds_up() -> None:
    def text(n: int) -> str:
        return f"""
saccade_requests_admitted_total{{class="driving"}} {10 * n}
saccade_requests_admitted_total{{class="idle"}} 0
saccade_requests_met_total{{class="driving"}} {8 * n}
saccade_requests_missed_total{{class="driving"}} {2 * n}
saccade_end_to_end_seconds_bucket{{class="driving",le="0.01"}} {5 * n}
saccade_end_to_end_seconds_bucket{{class="driving",le="0.1"}} {8 * n}
saccade_end_to_end_seconds_bucket{{class="driving",le="+Inf"}} {10 * n}
saccade_kv_hit_tokens_total{{partition="vision"}} {30 * n}
saccade_kv_miss_tokens_total{{partition="vision"}} {70 * n}
saccade_kv_evicted_blocks_total{{partition="vision",reason="flush"}} {n}
"""

    part = served.measure(Window(parse(text(3), 2.0), parse(text(1), 1.0)))
    assert part["classes"]["driving"]["buckets"] == [[0.01, 10], [0.1, 16], [None, 20]]
    both = served.add([part, part])
    assert list(both["classes"]) == ["driving"]  # nobody asked in the other
    assert both["classes"]["driving"]["met"] == 32
    assert both["classes"]["driving"]["buckets"][-1] == [None, 40]
    assert both["tokens"] == {"vision": [120, 280]}
    assert both["evicted"] == {"vision": 4}
    assert served.add([]) == {"classes": {}, "tokens": {}, "evicted": {}}
