"""What the examples share: arguments, frames, cameras by name, chunks of actions, a steady pace."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade import Actions, ModelInfo, SaccadeError
from saccade.client import DEFAULT_ADDRESS

Rgb = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.float64]


def arguments(
    about: str | None, instruction: str, steps: int, hz: float
) -> argparse.ArgumentParser:
    """The command line of an example."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="host:port (%(default)s)")
    parser.add_argument("--model", default="", help="default: the only one")
    parser.add_argument("--statistics", default="", help="statistics key; default: the only one")
    parser.add_argument("--instruction", default=instruction, help='("%(default)s")')
    parser.add_argument("--latency-class", default="", help="default: the model's")
    parser.add_argument(
        "--frames",
        type=Path,
        help="folder of .jpg or .png, or of one per camera; default: synthetic",
    )
    parser.add_argument("--steps", type=int, default=steps, help="control steps (%(default)s)")
    parser.add_argument("--hz", type=float, default=hz, help="control rate (%(default)g)")
    return parser


class Frames:
    """A robot's cameras: recorded frames over and over, or a pattern that moves."""

    def __init__(self, folder: Path | None, height: int = 240, width: int = 320) -> None:
        self._folder = folder
        self._shape = (height, width)
        self._files: dict[str, list[Path]] = {}

    def shot(self, camera: str, step: int) -> Rgb:
        """RGB, uint8 [height, width, 3], the first row is the top."""
        if self._folder is None:
            return self._pattern(camera, step)
        if camera not in self._files:
            own = self._folder / camera
            source = own if own.is_dir() else self._folder
            kinds = (".jpg", ".jpeg", ".png")
            files = sorted(p for p in source.iterdir() if p.suffix.lower() in kinds)
            if not files:
                raise SystemExit(f"no .jpg or .png in {source}")
            self._files[camera] = files
        files = self._files[camera]
        with Image.open(files[step % len(files)]) as picture:
            return np.asarray(picture.convert("RGB"))

    def _pattern(self, camera: str, step: int) -> Rgb:
        y, x = np.mgrid[: self._shape[0], : self._shape[1]]
        phase = sum(camera.encode()) % 64
        return np.stack([x + 2 * step, y + 3 * phase, x + y + step], axis=2).astype(np.uint8)


def bind(model: ModelInfo, names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The model's name of each of the robot's cameras that it knows.

    `names`: what models call them. Cameras are bound by name: neither order nor number decides.
    """
    known = [camera.name for camera in model.cameras]
    bound = {
        own: next(name for name in (own, *others) if name in known)
        for own, others in names.items()
        if any(name in known for name in (own, *others))
    }
    lacking = [c.name for c in model.cameras if c.required and c.name not in bound.values()]
    if not bound or lacking:
        raise SystemExit(
            f"{model.name} takes the cameras {', '.join(known)}; this robot has"
            f" {', '.join(names)}: add what it calls them to CAMERAS"
        )
    return bound


def check(model: ModelInfo, state_dim: int, dim: int, action_dim: int) -> None:
    """Ends where a model was trained for another robot."""
    if model.state_dim not in (0, state_dim) or dim != action_dim:
        raise SystemExit(
            f"{model.name} takes {model.state_dim} values of state and gives {dim} of action;"
            f" this robot has {state_dim} and {action_dim}"
        )


def targets(actions: Actions, relative: Sequence[bool]) -> Rows:
    """Targets in the robot's own frame, [steps, dim].

    `relative`: which values of an action are changes where the action space is relative. All steps of
    a chunk are changes against the one state that it was computed from; the answer brings it along.
    """
    if actions.space.reference == "absolute":
        return actions.values
    if actions.space.reference == "relative":
        state = np.array(actions.state[: actions.space.dim], np.float64)
        changes: Rows = actions.values + np.where(relative, state, np.zeros_like(state))
        return changes
    raise SystemExit(
        "neither the checkpoint nor the server's configuration says what the actions are relative to:"
        " set models[].action_space"
    )


class Plan:
    """The newest chunk, of which one action is due at each control step."""

    def __init__(self) -> None:
        self._chunk: tuple[int, Rows] | None = None  # replaced as a whole: any thread may

    def put(self, observed_at: int, rows: Rows) -> None:
        """A chunk whose first action belongs to the step that it was computed from."""
        self._chunk = (observed_at, rows)

    def at(self, step: int) -> Rows | None:
        """The action for a step; None: there is none left, or none yet."""
        if self._chunk is None:
            return None
        observed_at, rows = self._chunk
        at = step - observed_at
        return rows[at] if 0 <= at < len(rows) else None


class Pace:
    """Control steps at a steady rate; a late one is not made up for by haste."""

    def __init__(self, hz: float) -> None:
        self._period = 1 / hz
        self._next = time.monotonic()

    def wait(self) -> None:
        """Until the next step is due."""
        self._next = max(self._next + self._period, time.monotonic() - self._period)
        time.sleep(max(0.0, self._next - time.monotonic()))


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the process with what `main` returns, or with what it could not go on from."""
    try:
        sys.exit(main())
    except SaccadeError as error:
        sys.exit(str(error))
