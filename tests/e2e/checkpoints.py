"""Golden checkpoints and answers, and copies of them for robots of other conventions."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from conftest import ROOT

DATA = ROOT / "tests" / "golden" / "data"
Array = npt.NDArray[Any]
_DTYPES = {"F32": np.float32, "F64": np.float64, "U8": np.uint8, "I64": np.int64}


def read_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of a small file."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    header.pop("__metadata__", None)
    out: dict[str, Array] = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        out[name] = np.frombuffer(blob[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return out


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """F32 tensors."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@dataclass(frozen=True)
class Golden:
    """One family's recorded question and answer."""

    name: str
    task: str
    frames: dict[str, npt.NDArray[np.uint8]]
    """By the model's camera; the third camera of the pi family was missing."""
    tensors: dict[str, Array]

    @property
    def checkpoint(self) -> Path:
        """The folder."""
        return DATA / self.name / "checkpoint"

    @property
    def state(self) -> list[float]:
        """In the robot's units."""
        return [float(x) for x in self.tensors["state_raw"]]


def golden(name: str) -> Golden:
    """`smolvla`, `pi0`, `pi05` or `pi0_fast`."""
    tensors = read_safetensors(DATA / name / "golden.safetensors")
    first = "top" if name == "smolvla" else "base"
    cameras = ("top", "wrist") if name == "smolvla" else ("base_0_rgb", "left_wrist_0_rgb")
    frames = (tensors[f"image.{first}_u8"], tensors["image.wrist_u8"])
    task = json.loads((DATA / name / "golden.json").read_text())["task"]
    return Golden(name, task, dict(zip(cameras, frames, strict=True)), tensors)


def rewrite(path: Path, document: Any) -> None:
    """In place of a link, not of the file that it leads to."""
    path.unlink()
    path.write_text(json.dumps(document))


def openvla_for(key: str, out: Path) -> Path:
    """A copy of OpenVLA's golden checkpoint with one set of statistics, in `out`."""
    folder = out / "checkpoint"
    shutil.copytree(DATA / "openvla" / "checkpoint", folder, copy_function=os.link)
    for name in ("config.json", "dataset_statistics.json"):
        document = json.loads((folder / name).read_text())
        sets = document.get("norm_stats", document)
        for other in [other for other in sets if other != key]:
            del sets[other]
        rewrite(folder / name, document)
    return folder


def robot_statistics(state_dim: int, action_dim: int) -> dict[str, npt.NDArray[np.float32]]:
    """What `for_robot` writes, by the names of lerobot's files."""
    rng = np.random.default_rng(11)
    statistics: dict[str, npt.NDArray[np.float32]] = {}
    for feature, dim in (("observation.state", state_dim), ("action", action_dim)):
        low = rng.uniform(-1.5, -0.5, dim).astype(np.float32)
        width = rng.uniform(1, 2, dim).astype(np.float32)
        for statistic, share in (
            ("min", 0.0),
            ("q01", 0.01),
            ("mean", 0.5),
            ("q99", 0.99),
            ("max", 1.0),
        ):
            statistics[f"{feature}.{statistic}"] = low + np.float32(share) * width
        statistics[f"{feature}.std"] = width / 4
    return statistics


def for_robot(
    source: str,
    out: Path,
    cameras: Mapping[str, str],
    state_dim: int,
    action_dim: int,
    relative_names: Sequence[str] = (),
) -> Path:
    """A copy of a golden checkpoint for another robot, in `out`: the weights are the same.

    State and actions are padded to 32 in the weights, so only settings and statistics change.
    `cameras`: new names by old ones. With `relative_names` (one per action) the actions are relative
    to the state, but for those that are named a gripper.
    """
    folder = out / "checkpoint"
    shutil.copytree(DATA / source / "checkpoint", folder, copy_function=os.link)

    def renamed(features: Mapping[str, Any]) -> dict[str, Any]:
        shapes = {"STATE": [state_dim], "ACTION": [action_dim]}
        result = {}
        for key, feature in features.items():
            camera = key.removeprefix("observation.images.")
            new = f"observation.images.{cameras[camera]}" if camera in cameras else key
            result[new] = {**feature, "shape": shapes.get(feature["type"], feature["shape"])}
        return result

    config = json.loads((folder / "config.json").read_text())
    for features in ("input_features", "output_features"):
        config[features] = renamed(config[features])
    rewrite(folder / "config.json", config)
    statistics = robot_statistics(state_dim, action_dim)
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        processor = json.loads((folder / name).read_text())
        for step in processor["steps"]:
            if "features" in step["config"]:
                step["config"]["features"] = renamed(step["config"]["features"])
                (folder / step["state_file"]).unlink()
                write_safetensors(folder / step["state_file"], statistics)
            if relative_names and step["registry_name"] == "relative_actions_processor":
                step["config"].update(enabled=True, action_names=list(relative_names))
            if relative_names and step["registry_name"] == "absolute_actions_processor":
                step["config"]["enabled"] = True
        rewrite(folder / name, processor)
    return folder
