"""Films of drives, and what is drawn on a terminal, without a server."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade import terminal, types
from saccade.eval import film


def runs(*of: tuple[str, int]) -> tuple[types.TokenRun, ...]:
    return tuple(types.TokenRun(source, count) for source, count in of)


def answer(of: tuple[types.TokenRun, ...], met: bool = True) -> types.Actions:
    space = types.ActionSpace(1, 2, (), "absolute", 0.2)
    return types.Actions(
        samples=(),
        space=space,
        frames=(types.FrameUsed("image", 5, 0.012, of),),
        timings=types.Timings(0, 0, 0, 0, 0.009, 0),
        tokens={"vision": types.ModalityTokens(16, 4)},
        frames_cached=False,
        deadline_s=0.1,
        deadline_met=met,
        late=not met,
        latency_class="driving",
        statistics_key="",
    )


class Episode:
    """A road that stands still."""

    group, seed, dt_s, limit_steps, step = "keep", 1, 0.2, 9, 0

    def instruction(self) -> str:
        return "keep your lane"

    def speed(self) -> float:
        return 20.0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


SOURCES = runs(("reused", 5), ("evicted", 3), ("computed", 8))


def test_runs_become_the_grid_of_the_picture() -> None:
    found = film.grid(SOURCES)
    assert found is not None
    assert found.tolist() == [
        ["reused"] * 4,
        ["reused", "evicted", "evicted", "evicted"],
        ["computed"] * 4,
        ["computed"] * 4,
    ]
    assert film.grid(runs(("computed", 12))) is None  # no square
    assert film.grid(()) is None  # a server that does not say


def test_each_patch_has_the_tint_of_its_source() -> None:
    grey = np.full((64, 64, 3), 100, np.uint8)
    sources = film.grid(SOURCES)
    assert sources is not None
    pixels = np.asarray(film.overlay(grey, sources, 128)).astype(float)
    for row in range(4):
        for column in range(4):
            middle = pixels[row * 32 + 16, column * 32 + 16]
            tint = np.array(film.COLOURS[sources[row, column]])
            wanted = 100 + film._TINT * (tint - 100)
            assert np.abs(middle - wanted).max() <= 1.5, (row, column)


def drive(shots: film.Film, steps: int) -> None:
    picture = np.full((224, 224, 3), 100, np.uint8)
    picture[100:110, 50:80] = (50, 200, 0)
    for step in range(steps):
        said = answer(SOURCES, met=step != 2) if step % 2 == 0 else None
        shots.step(
            Episode(), {"top": picture}, said, {"image": picture}, np.array([0.01 * step, 1.0])
        )


def test_a_gif_has_a_frame_for_every_step(tmp_path: Path) -> None:
    shots = film.Film()
    drive(shots, 5)
    assert len(shots) == 5
    path = tmp_path / "drive.gif"
    shots.write(path)
    with Image.open(path) as image:
        assert image.n_frames == 5  # type: ignore[attr-defined]
        assert image.info["duration"] == 200
        assert image.width > 2 * film._SIDE
        colours = {}
        for name in film.COLOURS:
            image.seek(0)
            data = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
            colours[name] = int((np.abs(data - film.COLOURS[name]).max(1) < 24).sum())
        assert all(n > 20 for n in colours.values()), colours  # the legend's squares at least


def test_a_film_needs_a_step_and_an_mp4_needs_ffmpeg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="a step"):
        film.Film().write(tmp_path / "x.gif")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not film.can_mp4()
    shots = film.Film()
    drive(shots, 1)
    with pytest.raises(ValueError, match="takes ffmpeg"):
        shots.write(tmp_path / "x.mp4")


@pytest.mark.skipif(not film.can_mp4(), reason="ffmpeg is not installed")
def test_an_mp4(tmp_path: Path) -> None:
    shots = film.Film()
    drive(shots, 3)
    shots.write(tmp_path / "x.mp4")
    assert (tmp_path / "x.mp4").read_bytes()[4:8] == b"ftyp"


# ------------------------------------------------------------------------------------------ terminal
def test_a_line_is_typed_key_by_key() -> None:
    keys = terminal.Keys()
    assert keys.take("turn leX\x7fft") == []
    assert keys.line == "turn left"
    assert keys.take("\n2 stop\r\x1b[A") == ["turn left", "2 stop"]  # an arrow steers nothing
    assert keys.take("\x15ok\n") == ["ok"]
    assert keys.line == ""


def test_a_picture_is_two_pixels_a_cell() -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:4] = (255, 0, 0)
    lines = terminal.picture(pixels, 4)
    assert len(lines) == 2
    assert lines[0].count("\u2580") == 4
    assert "38;2;255;0;0;48;2;255;0;0" in lines[0]
    assert "38;2;0;0;0;48;2;0;0;0" in lines[1]


def test_a_screen_shows_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "5")
    out = io.StringIO()
    with terminal.screen(out) as shown:
        shown.show([[(f"line {i} and more than fits", "")] for i in range(9)], False, ["road"] * 3)
    text = out.getvalue()
    assert "road" not in text  # no room for it
    assert "line 3 and more than" in text
    assert "line 4" not in text
    assert "... 5 more lines" in text
    assert text.endswith("\x1b[?25h\x1b[?1049l")
