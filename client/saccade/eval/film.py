"""A film of a drive: the world, and what each answer saw, patch by patch as its K/V was computed, reused or evicted.

Everything shown is what the world, the client and the server's answers say; nothing is made up in between.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from saccade import types
from saccade.eval.world import Episode, Picture

COLOURS: dict[str, tuple[int, int, int]] = {
    "computed": (70, 130, 240),
    "reused": (0, 190, 130),
    "evicted": (235, 95, 20),
}
"""By ``types.TokenRun.source``; the report's, too."""
_TINT = 0.34
_INK, _FAINT, _PAPER, _BAD = (235, 238, 242), (150, 158, 170), (22, 25, 30), (255, 120, 100)
_SIDE = 336
_GAP = 12
_LINE = 25
MOST_SHOTS = 1500


def grid(runs: Sequence[types.TokenRun]) -> npt.NDArray[np.str_] | None:
    """Sources of a frame's patches, [rows, columns]; None where they are no square or nothing is said."""
    sources = [run.source for run in runs for _ in range(run.count)]
    side = math.isqrt(len(sources))
    if not sources or side * side != len(sources):
        return None
    return np.array(sources).reshape(side, side)


def overlay(picture: Picture, sources: npt.NDArray[np.str_], side: int) -> Image.Image:
    """The picture, ``side`` pixels wide and high, with a tint on each patch.

    The picture is squared as the models of square frames are trained: those here are square already.
    """
    image = Image.fromarray(picture).resize((side, side), Image.Resampling.BILINEAR)
    patches = np.zeros((*sources.shape, 3), np.uint8)
    for source, colour in COLOURS.items():
        patches[sources == source] = colour
    tint = Image.fromarray(patches).resize((side, side), Image.Resampling.NEAREST)
    mixed = Image.blend(image, tint, _TINT)
    draw = ImageDraw.Draw(mixed)
    for i in range(1, len(sources)):
        at = round(i * side / len(sources))
        draw.line((at, 0, at, side), fill=(60, 66, 76))
        draw.line((0, at, side, at), fill=(60, 66, 76))
    return mixed


@dataclass(frozen=True)
class _Shot:
    """One step, as it is kept until the film is made."""

    title: str
    now: Picture
    of: Mapping[str, Picture]
    answer: types.Actions | None
    action: tuple[float, ...]
    speed: float
    time_s: float


class Film:
    """Watches drives (``drive.Watcher``) and writes them. Keeps little: pictures are made at the end."""

    def __init__(self, camera: str = "") -> None:
        self._camera = camera
        self._shots: list[_Shot] = []
        self._dt_s = 0.2
        self._time_s = 0.0

    def __len__(self) -> int:
        return len(self._shots)

    def step(
        self,
        episode: Episode,
        pictures: Mapping[str, Picture],
        answer: types.Actions | None,
        of: Mapping[str, Picture],
        action: npt.NDArray[np.float64],
    ) -> None:
        """One more step."""
        if len(self._shots) >= MOST_SHOTS:
            return
        self._dt_s = episode.dt_s
        now = pictures[self._camera] if self._camera else next(iter(pictures.values()))
        self._shots.append(
            _Shot(
                f"{episode.group}: {episode.instruction()}",
                now,
                dict(of) if answer is not None else {},
                answer,
                tuple(float(a) for a in action),
                episode.speed(),
                self._time_s,
            )
        )
        self._time_s += episode.dt_s

    def frames(self) -> list[Image.Image]:
        """All of it, RGB, of one size."""
        most = max((len(s.of) for s in self._shots), default=0)
        found = []
        seen: _Shot | None = None
        for shot in self._shots:
            if shot.answer is not None:
                seen = shot
            found.append(_frame(shot, seen, max(1, most)))
        return found

    def write(self, path: Path) -> None:
        """A GIF, or by its ending an MP4, which takes ffmpeg. Raises ValueError when nothing was driven."""
        frames = self.frames()
        if not frames:
            raise ValueError("a film needs a step")
        if path.suffix == ".mp4":
            _mp4(frames, path, self._dt_s)
            return
        drawn = [
            f.quantize(96, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE) for f in frames
        ]
        drawn[0].save(
            path,
            format="GIF",
            save_all=True,
            append_images=drawn[1:],
            duration=round(self._dt_s * 1e3),
            loop=0,
        )


def can_mp4() -> bool:
    """ffmpeg is there."""
    return shutil.which("ffmpeg") is not None


def _mp4(frames: Sequence[Image.Image], path: Path, dt_s: float) -> None:
    width, height = frames[0].size
    command = ["ffmpeg", "-loglevel", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width}x{height}", "-r", f"{1 / dt_s:g}", "-i", "-"]
    command += ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", str(path)]
    data = b"".join(f.tobytes() for f in frames)
    try:
        subprocess.run(command, input=data, check=True, capture_output=True)
    except FileNotFoundError:
        raise ValueError("an MP4 takes ffmpeg, which is not installed; a GIF does not") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"ffmpeg: {error.stderr.decode(errors='replace').strip()}") from None


def _font(size: int) -> Any:
    try:
        return ImageFont.load_default(size)
    except TypeError:  # before Pillow 10.1 there is one size
        return ImageFont.load_default()


def _frame(shot: _Shot, seen: _Shot | None, cameras: int) -> Image.Image:
    width = (1 + cameras) * _SIDE + (2 + cameras) * _GAP
    top = 2 * _GAP + _LINE
    image = Image.new("RGB", (width, top + _SIDE + 4 * _LINE + 2 * _GAP), _PAPER)
    draw = ImageDraw.Draw(image)
    plain, small = _font(18), _font(16)
    draw.text((_GAP, _GAP), shot.title, fill=_INK, font=plain)
    clock = f"{shot.time_s:.1f} s"
    draw.text((width - _GAP - draw.textlength(clock, font=plain), _GAP), clock, _FAINT, font=plain)
    world = Image.fromarray(shot.now).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    image.paste(world, (_GAP, top))
    below = top + _SIDE + _GAP // 2
    names = ("steer {:+.3f} rad", "accel {:+.2f} m/s2")
    driven = "   ".join(n.format(a) for n, a in zip(names, shot.action, strict=False))
    draw.text((_GAP, below), f"the world now, {shot.speed:.1f} m/s", fill=_INK, font=small)
    draw.text((_GAP, below + _LINE), driven, fill=_FAINT, font=small)
    if seen is not None and seen.answer is not None:
        for i, frame in enumerate(seen.answer.frames[:cameras]):
            x = (i + 1) * (_SIDE + _GAP) + _GAP
            _camera(image, (x, top), frame, seen.of[frame.camera])
            fresh = seen is shot
            said = f"{frame.camera}, {frame.age_s * 1e3:.0f} ms old when answered"
            draw.text((x, below), said, fill=_INK if fresh else _FAINT, font=small)
            _legend(draw, (x, below + _LINE), frame.runs, small)
        _timing(draw, (_GAP, below + 2 * _LINE), shot, seen.answer, small)
    else:
        draw.text((_SIDE + 2 * _GAP, top), "no answer yet", fill=_FAINT, font=plain)
    return image


def _camera(
    image: Image.Image, at: tuple[int, int], frame: types.FrameUsed, picture: Picture
) -> None:
    sources = grid(frame.runs)
    if sources is None:
        image.paste(Image.fromarray(picture).resize((_SIDE, _SIDE)), at)
    else:
        image.paste(overlay(picture, sources, _SIDE), at)


def _legend(
    draw: ImageDraw.ImageDraw,
    at: tuple[int, int],
    runs: Sequence[types.TokenRun],
    font: Any,
) -> None:
    x, y = at
    for source, colour in COLOURS.items():
        count = sum(run.count for run in runs if run.source == source)
        draw.rectangle((x, y + 4, x + 13, y + 17), fill=colour if count else None, outline=colour)
        text = f"{count} {source}"
        draw.text((x + 19, y), text, fill=_INK if count else _FAINT, font=font)
        x += 33 + round(draw.textlength(text, font=font))


def _timing(
    draw: ImageDraw.ImageDraw,
    at: tuple[int, int],
    shot: _Shot,
    answer: types.Actions,
    font: Any,
) -> None:
    if shot.answer is None:
        draw.text(at, "no answer in this step: the last chunk goes on", fill=_FAINT, font=font)
        return
    deadline = f"deadline {answer.deadline_s * 1e3:.0f} ms" if answer.deadline_s else "no deadline"
    verdict = "met" if answer.deadline_met else "LATE"
    text = f"answered in {answer.timings.total_s * 1e3:.1f} ms ({answer.latency_class}, {deadline}: {verdict})"
    draw.text(at, text, fill=_INK if answer.deadline_met else _BAD, font=font)
    tokens = ", ".join(f"{m} {t.cached}/{t.total}" for m, t in answer.tokens.items())
    draw.text((at[0], at[1] + _LINE), f"cached tokens: {tokens}", fill=_FAINT, font=font)
