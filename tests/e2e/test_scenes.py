"""The demo's episodes: what pairs, what a stress may change, what counts as achieved, what training never saw."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "deploy" / "demo"))
import phrases

needs_highway = pytest.mark.skipif(
    not importlib.util.find_spec("highway_env"), reason="highway-env is missing"
)
SEED = 6_000_000
Driver = Callable[[Any, int], tuple[float, float]]


def words(phrase: str) -> str:
    return " " + " ".join(phrase.lower().replace(",", " ").split()) + " "


def test_unseen_wordings_are_not_of_training() -> None:
    trained = [words(p) for group in phrases.PHRASES.values() for p in group]
    said: list[str] = []
    for table in (phrases.UNSEEN, phrases.CHATTY):
        assert list(table) == phrases.GROUPS
        for group in table.values():
            assert len(group) == 6
            said += group
    assert len(set(said)) == len(said)
    for phrase in said:
        assert not [t for t in trained if t in words(phrase)], phrase


def episode(group: str, seed: int, **more: str) -> Any:
    import scenes

    return scenes.Episode(group, seed, **more)


def wobble(_: Any, step: int) -> tuple[float, float]:
    """A driver that looks at nothing."""
    return 0.02 * np.sin(step), 0.5 * np.cos(0.7 * step)


def expert_of(group: str) -> Driver:
    import expert

    return lambda e, _: expert.decide(expert.scene_of(e.env), group)


def traffic(e: Any) -> list[tuple[float, ...]]:
    return [
        (float(c.position[0]), float(c.position[1]), float(c.heading), float(c.speed))
        for c in e.env.road.vehicles
    ]


def run(e: Any, driver: Driver, steps: int = 1000) -> list[list[tuple[float, ...]]]:
    """Where everybody was at every step."""
    seen = [traffic(e)]
    for step in range(min(steps, e.limit_steps)):
        over = e.drive(driver(e, step))
        seen.append(traffic(e))
        if over:
            break
    return seen


@needs_highway
@pytest.mark.parametrize("level", ["base", "hard"])
@pytest.mark.parametrize("group", ["right", "overtake"])
def test_settings_meet_the_same_traffic(level: str, group: str) -> None:
    import scenes

    plain = run(episode(group, SEED, level=level), wobble, 12)
    assert len(plain) > 5
    settings = [{"stress": s} for s in scenes.STRESSES] + [{"mode": m} for m in scenes.MODES]
    for setting in settings:
        e = episode(group, SEED, level=level, **setting)

        def looking(e: Any, step: int) -> tuple[float, float]:
            if step % 3 == 0:
                e.frames(scenes.CAMERAS)
                e.instruction()
            return wobble(e, step)

        assert run(e, looking, 12) == plain, setting
    assert traffic(episode(group, SEED + 1, level=level)) != plain[0]


@needs_highway
def test_other_actions_make_another_drive() -> None:
    a = run(episode("keep", SEED, level="hard"), wobble, 10)
    b = run(episode("keep", SEED, level="hard"), lambda *_: (0.0, -3.0), 10)
    assert a[0] == b[0]
    assert a[-1] != b[-1]


@needs_highway
def test_a_stress_changes_what_it_says_and_nothing_else() -> None:
    import scenes

    pictures = {"exposure", "noise", "shake", "jump", "distractor", "drop", "repeat", "late"}
    texts = {"switch", "remark"}
    assert pictures | texts | {"none"} == set(scenes.STRESSES)
    plain = episode("left", SEED + 3, level="hard")
    others = {s: episode("left", SEED + 3, level="hard", stress=s) for s in scenes.STRESSES}
    differ: dict[str, set[str]] = {s: set() for s in scenes.STRESSES}
    tops: list[Any] = []
    for step in range(20):
        tops.append(plain.frames(("top",))["top"])
        for stress, e in others.items():
            top = e.frames(("top",))["top"]
            again = e.frames(("wide", "top"))["top"]
            assert np.array_equal(top, again), (stress, step)
            if not np.array_equal(top, tops[-1]):
                differ[stress].add("top")
            if stress in ("drop", "repeat", "late"):
                shown = step - round(e.frame_age_s() / e.dt_s)
                assert np.array_equal(top, tops[shown]), (stress, step)
            else:
                assert e.frame_age_s() == 0
            if e.instruction() != plain.instruction():
                differ[stress].add("text")
            assert e.speed() == plain.speed()
            assert e.state() == plain.state()
            e.drive(wobble(e, step))
        plain.drive(wobble(plain, step))
    for stress, what in differ.items():
        assert what == ({"top"} if stress in pictures else {"text"} if stress in texts else set()), (
            stress
        )


@needs_highway
def test_lost_late_and_repeated_pictures_are_bounded() -> None:
    from stress import Stress

    for seed in range(30):
        for kind, most in (("drop", 12), ("repeat", 1), ("late", 3)):
            trouble = Stress(kind, seed)
            ages = [step - trouble.shown_step(step) for step in range(60)]
            assert all(0 <= age <= min(step, most) for step, age in enumerate(ages)), (kind, ages)
            assert ages == [step - Stress(kind, seed).shown_step(step) for step in range(60)]
    held = [step - Stress("drop", 3).shown_step(step) for step in range(60)]
    assert all(b in (0, a + 1) for a, b in itertools.pairwise(held)), held


@needs_highway
def test_a_switched_instruction_is_judged_by_the_last() -> None:
    e = episode("left", SEED + 3, stress="switch")
    plain = episode("left", SEED + 3)
    first = e.instruction()
    assert e.told != "left"
    assert first in phrases.PHRASES[e.told]
    switched = 0
    while True:
        told = e.told
        over = e.drive(expert_of(told)(e, 0))
        if told != "left" and e.told == "left":
            switched = e.step
            assert e.instruction() == plain.instruction()
        if over:
            break
    assert switched > 0
    assert e.step == e.limit_steps == plain.limit_steps + switched + 15
    assert e.verdict() == (True, "")


@needs_highway
def test_verdicts_of_scripted_drives() -> None:
    for level in ("base", "hard"):
        for group in phrases.GROUPS:
            e = episode(group, SEED + 2, level=level)
            run(e, expert_of(group))
            assert e.verdict() == (True, ""), (level, group)
            record = e.record()
            assert record["ok"] == 1 and record["why"] == "" and record["seed"] == SEED + 2
            assert ("seconds_to_pass" in record) == (group == "overtake")
    e = episode("left", SEED + 2)
    run(e, expert_of("keep"))
    assert e.verdict() == (False, "not achieved")
    e = episode("keep", SEED + 2)
    run(e, lambda *_: (0.12, 0.0))
    assert e.verdict() == (False, "off road")
    assert e.step < e.limit_steps
    with pytest.raises(ValueError, match="over"):
        e.drive((0.0, 0.0))
    e = episode("follow", SEED + 2)
    run(e, lambda e, _: (expert_of("keep")(e, 0)[0], 3.0))
    assert e.verdict() == (False, "collision")


@needs_highway
def test_an_exit_is_missed_in_another_lane() -> None:
    seeds = range(SEED, SEED + 40)
    exits = [e for s in seeds if (e := episode("right", s, level="hard")).kind == "exit"]
    assert len(exits) > 5
    stayed = exits[0]
    run(stayed, expert_of("keep"))
    assert stayed.verdict()[1] in ("missed the exit", "not achieved")
    whys = set()
    for e in exits[1:6]:
        run(e, lambda e, _: (expert_of("keep")(e, 0)[0], 2.0))
        whys.add(e.verdict()[1])
    assert "missed the exit" in whys


@needs_highway
def test_a_ramp_car_changes_lanes_and_leaves_room() -> None:
    import hard

    merged = 0
    for seed in range(SEED, SEED + 25):
        e = episode("keep", seed, level="hard")
        if e.kind != "merge":
            continue
        cars = [c for c in e.env.road.vehicles if isinstance(c, hard.CutIn)]
        run(e, expert_of("keep"))
        merged += sum(abs(c.position[1] - c.goal * 4.0) < 0.5 for c in cars)
        assert e.verdict()[1] != "collision", seed
    assert merged > 1


@needs_highway
def test_cameras_see_the_same_world() -> None:
    e = episode("overtake", SEED + 5, level="hard")
    seen = []
    for step in range(8):
        frames = e.frames(("top", "wide", "before"))
        assert all(f.shape == (224, 224, 3) and f.dtype == np.uint8 for f in frames.values())
        seen.append(frames["top"])
        assert np.array_equal(frames["before"], seen[max(0, step - 2)])
        assert np.array_equal(e.frames(("top",), age_s=e.dt_s)["top"], seen[max(0, step - 1)])
        e.drive(wobble(e, step))
    assert not np.array_equal(seen[0], seen[1])
    assert np.mean(np.any(seen[0] != seen[1], axis=2)[:60]) > 0.5  # the ground moves, too
    blank = episode("overtake", SEED + 5, mode="blank").frames(("top", "before"))
    assert all(np.all(f == 100) for f in blank.values())
    with pytest.raises(ValueError, match="camera"):
        e.frames(("rear",))
    with pytest.raises(ValueError, match="none of"):
        episode("overtake", SEED, level="medium")


@needs_highway
def test_shuffled_is_told_another_group() -> None:
    for group in phrases.GROUPS:
        for seed in range(SEED, SEED + 5):
            e = episode(group, seed, mode="shuffled")
            told = e.instruction()
            assert told not in phrases.PHRASES[group]
            assert any(told in other for other in phrases.PHRASES.values())
            assert e.record()["phrase"] == told


@needs_highway
def test_pictures_and_steps_are_the_simulators_own() -> None:
    """The fast painter and road against highway-env's viewer and road."""
    import world
    from highway_env.envs.common.graphics import EnvViewer
    from highway_env.road.road import Road, RoadNetwork

    for seed, group in enumerate(phrases.GROUPS):
        fast, slow = world.make_env(group, SEED + seed), world.make_env(group, SEED + seed)
        slow.road.__class__ = Road
        slow.road.network.__class__ = RoadNetwork
        viewer = EnvViewer(slow)
        for step in range(15):
            viewer.display()
            assert np.array_equal(fast.frame(), viewer.get_image()), (group, step)
            action = wobble(None, step)
            fast.drive(2 * action[0], action[1])
            slow.step(_normalised(2 * action[0], action[1]))
            for a, b in zip(fast.road.vehicles, slow.road.vehicles, strict=True):
                assert np.array_equal(a.position, b.position), (group, step)
                assert (a.heading, a.speed) == (b.heading, b.speed)


def _normalised(steer: float, accel: float) -> Any:
    import world

    span = world.ACC_HI - world.ACC_LO
    return np.array([2 * (accel - world.ACC_LO) / span - 1, steer / world.STEER_MAX], np.float32)
