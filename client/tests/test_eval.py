"""`saccade eval` without a server: statistics against known values, settings, drives over a session that is made up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import types as python_types
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from saccade import errors, types
from saccade.eval import drive as driving
from saccade.eval import runner, stats, summary
from saccade.eval import world as worlds
from saccade.eval.settings import Setting, parse, with_baselines


# ------------------------------------------------------------------------------------- statistics
@pytest.mark.parametrize(
    ("ok", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (0, 0, 0, 1)],
)
def test_wilson(ok: int, n: int, low: float, high: float) -> None:
    assert stats.wilson(ok, n) == pytest.approx((low, high), abs=1e-4)


def test_mcnemar_is_the_exact_binomial() -> None:
    assert stats.mcnemar(0, 0) == 1
    assert stats.mcnemar(3, 3) == 1
    assert stats.mcnemar(5, 0) == pytest.approx(2 / 32)
    assert stats.mcnemar(2, 10) == pytest.approx(2 * (1 + 12 + 66) / 4096)
    assert stats.mcnemar(2, 10) == stats.mcnemar(10, 2)
    assert 0 < stats.mcnemar(900, 300) < 1e-60


def test_the_paired_interval() -> None:
    # Tango (1998): no pair disagrees; one of 44 does; and the two directions mirror each other.
    z = stats.Z_TWO_SIDED
    low, high = stats.paired_interval(0, 0, 100)
    assert (low, high) == pytest.approx((-z * z / (100 + z * z), z * z / (100 + z * z)), abs=1e-9)
    assert stats.paired_interval(1, 0, 44) == pytest.approx((-0.118, 0.0602), abs=1e-3)
    low, high = stats.paired_interval(20, 5, 400)
    assert stats.paired_interval(5, 20, 400) == pytest.approx((-high, -low))
    assert low < -15 / 400 < high < 0
    assert stats.paired_interval(0, 0, 0) == (-1, 1)
    assert stats.paired_interval(7, 0, 7)[0] == -1


def test_the_paired_interval_covers_what_is_true() -> None:
    rng = np.random.default_rng(1)
    truth = -0.03
    inside = 0
    for _ in range(400):
        base, this, _ = rng.multinomial(300, [0.05, 0.02, 0.93])
        low, high = stats.paired_interval(int(base), int(this), 300)
        inside += low <= truth <= high
    assert 0.92 <= inside / 400 <= 0.98


def test_what_pairs_prove() -> None:
    same = stats.paired([(True, True)] * 390 + [(False, False)] * 10)
    assert (same.n, same.difference, same.ratio, same.mcnemar_p) == (400, 0, 1, 1)
    assert same.margin == pytest.approx(0.00975)
    # No pair of 400 disagrees: about what the exact (1 - margin)^400 says.
    assert same.noninferior_p == pytest.approx((1 - same.margin) ** 400, abs=0.01)
    assert same.verdict == "keeps"

    worse = stats.paired([(True, True)] * 340 + [(True, False)] * 50 + [(False, True)] * 10)
    assert worse.difference == pytest.approx(-0.1)
    assert worse.verdict == "loses"
    assert worse.ratio == pytest.approx(350 / 390)

    noisy = stats.paired(
        [(True, True)] * 370 + [(True, False)] * 15 + [(False, True)] * 14 + [(False, False)]
    )
    assert noisy.verdict == "undecided, above"
    assert noisy.power < 0.3  # honest: 29 of 400 disagree, so one per cent cannot be shown
    assert noisy.pairs_needed > 3000
    assert noisy.detectable_harm == pytest.approx(2.8016 * math.sqrt(29.5 / 401 / 400), rel=1e-4)

    nothing = stats.paired([])
    assert (nothing.n, nothing.noninferior, nothing.verdict) == (0, False, "undecided, above")
    assert not stats.paired([(False, False)] * 20).noninferior


def test_power_is_how_often_it_is_shown() -> None:
    rng = np.random.default_rng(2)
    shown = 0
    for _ in range(500):
        base, this, _ = (int(v) for v in rng.multinomial(2000, [0.01, 0.01, 0.98]))
        pairs = [(True, False)] * base + [(False, True)] * this
        pairs += [(True, True)] * (2000 - base - this)
        shown += stats.paired(pairs).noninferior
    pairs = [(True, False)] * 20 + [(False, True)] * 20 + [(True, True)] * 1960
    assert shown / 500 == pytest.approx(stats.paired(pairs).power, abs=0.06)


def test_quantiles() -> None:
    assert stats.quantile([3, 1, 2], 0.5) == 2
    assert stats.quantile([0, 10], 0.95) == 9.5
    assert stats.quantile([4], 0.99) == 4
    assert math.isnan(stats.quantile([], 0.5))


# --------------------------------------------------------------------------------------- settings
def test_settings_are_what_they_are_called() -> None:
    assert parse("full") == Setting()
    assert parse("full").name == "full"
    stale = parse("stale=200+stress=noise+steps=4", level="hard")
    assert stale == Setting(level="hard", stress="noise", stale_ms=200, flow_steps=4)
    assert parse(stale.name) == stale
    assert parse("load=2.5+pace=real").name == "pace=real+load=2.5"
    assert parse("level=hard", level="base").level == "hard"


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "fast",
        "stale",
        "stale=",
        "stale=x",
        "stale=-1",
        "replan=0",
        "load=nan",
        "a=1",
        "full+x=1",
    ],
)
def test_settings_that_are_none(wrong: str) -> None:
    with pytest.raises(ValueError, match="setting"):
        parse(wrong)


def test_baselines() -> None:
    assert parse("full").baseline == parse("full")
    assert parse("stale=200+stress=noise").baseline == parse("stress=noise")
    assert parse("stress=noise").baseline == parse("full")
    assert parse("mode=blank", "hard").baseline == parse("full", "hard")
    assert parse("model=other+pace=real").baseline == parse("pace=real")
    names = [s.name for s in with_baselines([parse("stale=200+stress=noise"), parse("full")])]
    assert names == ["full", "stress=noise", "stress=noise+stale=200"]


# ----------------------------------------------------------------------------------------- drives
class Lane:
    """A world of numbers: a picture is its step, and it succeeds where every action was its own step's."""

    GROUPS = ("even", "odd")
    CAMERAS = ("top", "wide")
    made: list[LaneEpisode] = []  # noqa: RUF012

    @staticmethod
    def Episode(
        group: str, seed: int, *, level: str = "base", stress: str = "none", mode: str = "policy"
    ) -> LaneEpisode:
        episode = LaneEpisode(group, seed)
        Lane.made.append(episode)
        return episode


class LaneEpisode:
    """See Lane."""

    dt_s = 0.2
    limit_steps = 20

    def __init__(self, group: str, seed: int) -> None:
        self.group, self.seed, self.step = group, seed, 0
        self.actions: list[list[float]] = []
        self.looked: list[float] = []
        self.held_s = 0.0
        self.closed = False

    def instruction(self) -> str:
        return f"step {self.step}"

    def speed(self) -> float:
        return 10.4

    def frames(self, cameras: Sequence[str], age_s: float = 0.0) -> Mapping[str, worlds.Picture]:
        seen = self.step - age_s / self.dt_s
        self.looked.append(seen)
        return {c: np.full((2, 2, 3), int(seen + 1e-9), np.uint8) for c in cameras}

    def frame_age_s(self) -> float:
        return self.held_s

    def state(self) -> list[float]:
        return [float(self.step), 0.25]

    def drive(self, action: Sequence[float]) -> bool:
        self.actions.append(list(action))
        self.step += 1
        return self.step >= self.limit_steps

    def verdict(self) -> tuple[bool, str]:
        return self.actions == [[float(i), 0.5] for i in range(self.limit_steps)], "not achieved"

    def record(self) -> Mapping[str, float | str]:
        return {"steps": float(self.step), "seed": 1.0, "passed_s": math.nan}

    def close(self) -> None:
        self.closed = True


SPACE = types.ActionSpace(5, 2, (), "absolute", 0.2)


class Policy:
    """A client whose sessions answer with the step that they see, and the four after it."""

    def __init__(self, state_dim: int = 0, fail: Mapping[int, Exception] | None = None) -> None:
        self.model = python_types.SimpleNamespace(
            state_dim=state_dim,
            flow_steps=10 if state_dim else 0,
            cameras=(types.Camera("observation.images.top", 2, 2, True),),
        )
        self.fail = dict(fail or {})
        self.mixed_up = 0
        self.refused: list[errors.RequestFailed] = []
        self.opened: list[str] = []
        self.asked: list[dict[str, Any]] = []

    @contextlib.asynccontextmanager
    async def session(self, model: str) -> AsyncIterator[Asked]:
        self.opened.append(model)
        yield Asked(self, model)


class Asked:
    """One session of it."""

    action_space = SPACE

    def __init__(self, policy: Policy, name: str) -> None:
        self.model = policy.model
        self.message_errors = policy.refused
        self._policy, self._name = policy, name
        self._told: dict[str, Any] = {}

    def set_instruction(self, text: str) -> None:
        self._told["text"] = text

    def set_state(self, state: list[float]) -> None:
        self._told["state"] = state

    def send_frame(
        self, image: npt.NDArray[np.uint8], camera: str, capture_time_ns: int, age_s: float
    ) -> None:
        self._told.update(seen=int(image[0, 0, 0]), camera=camera, age_s=age_s, at=capture_time_ns)

    def act_async(self, **how: Any) -> asyncio.Future[types.Actions]:
        future: asyncio.Future[types.Actions] = asyncio.get_running_loop().create_future()
        self._policy.asked.append({"model": self._name, **self._told, **how})
        failure = self._policy.fail.get(self._told["seen"])
        if failure is not None:
            future.set_exception(failure)
            return future
        values = np.array([[self._told["seen"] + i, 0.5] for i in range(5)], np.float64)
        sample = types.ActionSample(values, (values / 10).astype(np.float32), np.zeros(0, np.int32))
        tokens = {"vision": types.ModalityTokens(256, 128), "text": types.ModalityTokens(20, 0)}
        timings = types.Timings(0, 0, 0, 0, 0.01, 0)
        frame = types.FrameUsed("", self._told["at"] + self._policy.mixed_up, 0.0)
        future.set_result(
            types.Actions(
                (sample,),
                SPACE,
                (frame,),
                timings,
                tokens,
                False,
                0,
                True,
                False,
                "best_effort",
                "",
            )
        )
        return future


def drive(policy: Policy, setting: str, seed: int = 7) -> driving.Record:
    Lane.made.clear()
    record = asyncio.run(
        driving.drive(policy, Lane, parse(setting), "even", seed, "base")  # type: ignore[arg-type]
    )
    assert all(e.closed for e in Lane.made)
    return record


def test_full_recompute_sees_now_and_carries_the_chunk_out() -> None:
    policy = Policy()
    record = drive(policy, "full")
    assert record.ok
    assert record.calls == 10
    assert record.errors == []
    assert policy.opened == ["base"]
    assert [a["seen"] for a in policy.asked] == list(range(0, 20, 2))
    assert policy.asked[1]["text"] == "step 2, speed 10"
    assert {a["camera"] for a in policy.asked} == {"observation.images.top"}
    assert {a["age_s"] for a in policy.asked} == {0.0}
    assert record.tokens == {"vision": [2560, 1280], "text": [200, 0]}
    assert record.server_ms == [10.0] * 10
    assert json.loads(json.dumps(driving.as_line(record)))["group"] == "even"


def test_stale_pictures_with_the_newest_of_all_else() -> None:
    policy = Policy()
    record = drive(policy, "stale=400")
    assert not record.ok
    assert policy.opened == ["base"]  # nothing that would warm the cache for it
    assert [a["text"] for a in policy.asked] == [f"step {s}, speed 10" for s in range(0, 20, 2)]
    assert [a["seen"] for a in policy.asked] == [0, *range(0, 18, 2)]
    assert [round(a["age_s"], 9) for a in policy.asked] == [0.0] + [0.4] * 9


def test_the_action_error_is_against_full_recompute_in_the_same_state() -> None:
    policy = Policy()
    record = drive(policy, "stale=400", seed=driving.PROBE_EVERY)
    assert policy.opened == ["base", "base"]
    assert (record.calls, record.probes) == (10, 10)
    assert [a["seen"] for a in policy.asked[1::2]] == list(range(0, 20, 2))
    # Its action is two steps further, but at the start: 0.2, as trained.
    assert record.errors == pytest.approx([0, 0] + [0.2] * 18, abs=1e-6)
    assert drive(Policy(), "full", seed=driving.PROBE_EVERY).probes == 0


def test_stale_pictures_between_two_steps() -> None:
    policy = Policy()
    drive(policy, "stale=300")
    assert [round(a["age_s"], 9) for a in policy.asked] == [0.0, 0.3, *[0.3] * 8]
    assert Lane.made[0].looked == pytest.approx([0, *(s - 1.5 for s in range(2, 20, 2))])


def test_a_longer_wait_between_requests() -> None:
    policy = Policy()
    record = drive(policy, "replan=5")
    assert record.ok  # this policy's chunk is right to its end
    assert record.calls == 4
    assert drive(Policy(), "replan=5", seed=8).errors == pytest.approx([0] * 20, abs=1e-6)
    too_long = drive(Policy(), "replan=6", seed=8)
    assert Lane.made[0].actions[4:7] == [[4.0, 0.5], [4.0, 0.5], [6.0, 0.5]]  # the last one goes on
    assert max(too_long.errors) == pytest.approx(0.1)


def test_a_refused_request_lets_the_last_chunk_go_on() -> None:
    late = errors.Late("no", code="DEADLINE_EXCEEDED", reason="LATE")
    record = drive(Policy(fail={4: late, 6: late}), "full")
    assert record.refused == 2
    assert Lane.made[0].actions[3:8] == [[s, 0.5] for s in (3.0, 4.0, 5.0, 6.0, 6.0)]
    assert record.continued == 2
    first = drive(Policy(fail={0: late}), "full")
    assert Lane.made[0].actions[0] == [0.0, 0.0]
    assert first.refused == 1


def test_what_is_wrong_ends_the_drive() -> None:
    wrong = errors.InvalidInput("bad", code="INVALID_ARGUMENT", reason="INVALID_INPUT")
    with pytest.raises(errors.InvalidInput):
        drive(Policy(fail={0: wrong}), "full")
    policy = Policy()
    policy.refused.append(wrong)  # a frame, say
    with pytest.raises(errors.InvalidInput):
        drive(policy, "full")
    policy = Policy()
    policy.mixed_up = 1
    with pytest.raises(errors.SaccadeError, match="other pictures"):
        drive(policy, "full")


def test_a_server_that_hangs_ends_the_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "ANSWER_TIMEOUT_S", 0.01)

    async def wait() -> None:
        never: asyncio.Future[types.Actions] = asyncio.get_running_loop().create_future()
        await driving.FastClock(0.2, 0.1).answer(never)

    with pytest.raises(errors.SaccadeError, match="no answer within"):
        asyncio.run(wait())


def test_noise_follows_from_the_episode_alone() -> None:
    policy = Policy(state_dim=1)
    drive(policy, "steps=4", seed=8)
    own, probes = policy.asked[::2], policy.asked[1::2]
    assert [a["seed"] for a in own] == [8000 + s for s in range(0, 20, 2)]
    assert [a["seed"] for a in probes] == [a["seed"] for a in own]
    assert {a["flow"].steps for a in own} == {4}
    assert {a["flow"] for a in probes} == {None}
    assert own[1]["state"] == [2.0]
    assert own[1]["text"] == "step 2"  # a model that takes a state is not told the speed


def test_another_clock_lets_answers_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        """Every answer comes a step later."""

        lead_s = 0.0

        def __init__(self, dt_s: float, budget_s: float) -> None:
            self._asked: list[object] = []

        async def tick(self, step: int) -> None:
            await asyncio.sleep(0)

        async def answer(self, asked: asyncio.Future[types.Actions]) -> types.Actions | None:
            if asked in self._asked:
                return await asked
            self._asked.append(asked)
            return None

        def notes(self) -> Mapping[str, float]:
            return {"waited": 3.0}

    monkeypatch.setitem(driving.CLOCKS, "real", Slow)
    policy = Policy()
    record = drive(policy, "pace=real")
    actions = [a[0] for a in Lane.made[0].actions]
    assert actions[:6] == [0, 1, 2, 3, 4, 5]  # the rows of the step, whenever the chunk came
    assert record.continued == 10
    assert record.world["waited"] == 3
    assert policy.opened == ["base"]  # and nothing else that would take the server's time


# -------------------------------------------------------------------------------------------- runs
def test_settings_take_turns() -> None:
    found = list(runner.blocks([parse("full"), parse("stale=200")], ["a", "b"], range(15)))
    assert [(b[0].setting.name, len(b)) for b in found] == [
        ("full", 20),
        ("stale=200", 20),
        ("full", 10),
        ("stale=200", 10),
    ]
    assert {t.seed for t in found[1]} == set(range(10))


def episode(setting: str, group: str, seed: int, ok: bool, why: str = "") -> dict[str, Any]:
    record = driving.Record(setting, group, seed, ok, why, calls=4, met=3, late=1)
    record.server_ms = record.round_trip_ms = [1.0, 2.0, 3.0, 4.0]
    record.tokens = {"vision": [100, 25]}
    record.errors = [] if setting == "full" else [0.1, 0.3]
    record.world = {"lateral_error_m": 0.5, "seed": 3.0, "passed_s": math.nan}
    return driving.as_line(record)


def made_up() -> runner.Log:
    window = {"seconds": 2.0, "requests": 40, "sequences": [30.0, 10.0], "rows": [300.0, 10.0]}
    window["steps"] = {"decode": [0.2, 6.0], "mixed": [0.2, 4.0]}
    return runner.Log(
        {"model": "base"},
        [
            *(episode("full", g, s, True) for g in ("a", "b") for s in range(10)),
            *(episode("stale=200", "a", s, s > 1, "" if s > 1 else "collision") for s in range(10)),
            episode("other", "a", 0, True),
        ],
        [
            {"window": {"setting": "full", **window, "cpu_s": 0.5}},
            {"window": {"setting": "load=5", **window, "load": {"answered": 60}}},
        ],
    )


def test_the_summary() -> None:
    result = summary.summarise(made_up(), [parse(s) for s in ("full", "stale=200", "replan=5")])
    json.dumps(result, allow_nan=False)
    full, stale, missing = result["settings"]
    assert (full["n"], full["success"], full["work"]["calls_per_episode"]) == (20, 1, 4)
    assert full["interval"] == pytest.approx(stats.wilson(20, 20))
    assert full["groups"]["b"]["n"] == 10
    assert full["latency_ms"]["p50"] == 2.5
    assert full["action_error"] is None
    assert full["deadlines"]["met_share"] == 0.75
    assert full["work"]["cached_share"] == 0.25
    assert full["world"] == {"lateral_error_m": 0.5}
    assert full["server"]["batch_sequences"] == 3
    assert full["server"]["step_ms_per_request"] == pytest.approx(10)
    assert full["server"]["calls_per_cpu_s"] == 80
    loaded = summary.summarise(made_up(), [parse("load=5")])
    assert loaded["model_calls_per_s"] == 20
    assert loaded["server"]["step_ms_per_request"] == pytest.approx(4)
    assert result["model_calls_per_s"] == 20
    assert "paired" not in full
    assert (stale["success"], stale["collision_free"]) == (0.8, 0.8)
    assert stale["why"] == {"collision": 2}
    assert stale["baseline"] == "full"
    paired = stale["paired"]
    assert (paired["n"], paired["only_base"], paired["only_this"]) == (10, 2, 0)
    assert paired["ratio"] == pytest.approx(0.8)
    assert stale["action_error"]["p50"] == pytest.approx(0.2)
    assert (missing["n"], missing["success"]) == (0, None)
    table = summary.markdown(result["settings"])
    assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "2/0" in table
    assert "not driven" in table
    assert "10 pairs, 2 disagree" in summary.terminal(result)


def test_a_run_goes_on_after_a_line_that_was_cut_short(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"model": "base"}')
    lines = [json.dumps(e) for e in made_up().episodes[:2]]
    (tmp_path / "episodes.jsonl").write_text("\n".join(lines) + '\n{"window": {"a": 1}}\n{"sett')
    log = runner.read(tmp_path)
    assert log.done == {("full", "a", 0), ("full", "a", 1)}
    assert log.windows == [{"window": {"a": 1}}]


def test_a_file_that_is_no_world(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no world"):
        worlds.load(str(tmp_path / "none.py"))
    (tmp_path / "half_a_world.py").write_text("GROUPS = ()\n")
    with pytest.raises(ValueError, match="CAMERAS"):
        worlds.load(str(tmp_path / "half_a_world.py"))


def test_a_world_is_what_it_imports_from_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "some_world.py"
    file.write_text("import beside\nimport os\n")
    before = worlds.digest(str(file))
    (tmp_path / "script.py").write_text("")
    assert worlds.digest(str(file)) == before
    (tmp_path / "beside.py").write_text("from deeper import x\n")
    second = worlds.digest(str(file))
    (tmp_path / "deeper.py").write_text("x = 1\nimport some_world\n")
    assert len({before, second, worlds.digest(str(file))}) == 3
