"""A world as the evaluation needs it: a Python file with GROUPS and Episode."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]


class Episode(Protocol):
    """One drive. Everything in it follows from its arguments and the actions."""

    group: str
    seed: int
    dt_s: float
    limit_steps: int
    step: int

    def instruction(self) -> str:
        """What the driver is told now, without the speed."""

    def speed(self) -> float:
        """m/s."""

    def frames(self, cameras: Sequence[str], age_s: float = 0.0) -> Mapping[str, Picture]:
        """RGB pictures by camera as they were that long ago, between two steps as well."""

    def frame_age_s(self) -> float:
        """How old the newest picture is: not 0 where something goes wrong with it."""

    def state(self) -> list[float]:
        """For a model that takes one: as many of its first values as it takes."""

    def drive(self, action: Sequence[float]) -> bool:
        """Carries out one action for ``dt_s``; True when the episode is over."""

    def verdict(self) -> tuple[bool, str]:
        """Success, and why not."""

    def record(self) -> Mapping[str, float | str]:
        """What else is known of it."""

    def close(self) -> None:
        """Frees it."""


class MakeEpisode(Protocol):
    """What makes one."""

    def __call__(
        self, group: str, seed: int, *, level: str, stress: str, mode: str
    ) -> Episode: ...  # pragma: no cover


class World(Protocol):
    """The file as a module."""

    GROUPS: Sequence[str]
    CAMERAS: Sequence[str]
    Episode: MakeEpisode


def load(path: str) -> World:
    """Imports the file, with its folder on the path for what is beside it."""
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"no world in {path}")
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    for name in ("GROUPS", "CAMERAS", "Episode"):
        if not hasattr(module, name):
            raise ValueError(f"{path} has no {name}")
    return cast(World, module)


def digest(path: str) -> str:
    """Of the file and what it imports from its folder: another one may be another world."""
    files: dict[str, bytes] = {}
    waiting = [Path(path).resolve()]
    while waiting:
        file = waiting.pop()
        if file.name in files or not file.is_file():
            continue
        files[file.name] = file.read_bytes()
        for node in ast.walk(ast.parse(files[file.name])):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            waiting += [file.parent / f"{name.partition('.')[0]}.py" for name in names]
    hashed = hashlib.sha256()
    for name, content in sorted(files.items()):
        hashed.update(name.encode() + b"\0" + content + b"\0")
    return hashed.hexdigest()[:16]
