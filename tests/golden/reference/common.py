"""What the writers of recorded answers share: numbers, pictures, statistics, files.

Nothing here depends on torch's random numbers: every tensor is drawn from a stream of its own, keyed
by the seed and its name, so that adding a layer moves no other weight.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
DATA = Path(__file__).resolve().parents[1] / "data"
PACKAGES = ("torch", "torchvision", "transformers", "tokenizers", "lerobot", "numpy")


def stream(seed: str, name: str) -> np.random.Generator:
    key = np.frombuffer(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def normal(
    seed: str, name: str, shape: Iterable[int], std: float = 1, mean: float = 0
) -> torch.Tensor:
    values = stream(seed, name).standard_normal(tuple(shape)) * std + mean
    return torch.from_numpy(values.astype(np.float32))


def be_deterministic() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)


def fill_weights(
    module: torch.nn.Module,
    seed: str,
    special: Mapping[str, tuple[float, float]],
    unit_norms: tuple[str, ...] = (),
) -> None:
    """Values as a trained model has them: no bias is zero, no norm is one, activations are O(1).

    All are exact in bfloat16, so that a file of either type is the same model. `special`: mean and
    deviation by a part of the name; `unit_norms`: parts of the names of norms that add 1 to their
    weight.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    norms = {
        id(m.weight)
        for m in module.modules()
        if "norm" in type(m).__name__.lower() and getattr(m, "weight", None) is not None
    }
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            found = [value for part, value in special.items() if part in name]
            if found:
                mean, std = found[-1]
            elif id(parameter) in norms and parameter.ndim == 1:
                mean, std = (0 if any(part in name for part in unit_norms) else 1), 0.1
            elif name.endswith("bias") or parameter.ndim <= 1:
                mean, std = 0, 0.1
            elif id(parameter) in tables:
                mean, std = 0, 0.5
            else:
                mean, std = 0, float(np.prod(parameter.shape[1:])) ** -0.5
            value = normal(seed, name, parameter.shape, std, mean)
            parameter.copy_(value.bfloat16().to(parameter.dtype))


def picture(seed: str, height: int, width: int) -> Array:
    """Slopes, waves, edges and noise: uint8 [height, width, 3]."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    u, v = x / max(1, width - 1), y / max(1, height - 1)
    image = np.stack([255 * u, 255 * v, 127.5 * (1 + np.sin(40 * u + 57 * v * v))], -1)
    image[(u - 0.35) ** 2 + (v - 0.6) ** 2 < 0.04] = (230, 40, 25)
    image[(abs(u - 0.72) < 0.12) & (abs(v - 0.3) < 0.15)] = (20, 60, 220)
    noise = stream(seed, f"noise {height} {width}").integers(-12, 13, (height, width, 3))
    return np.clip(np.rint(image + noise), 0, 255).astype(np.uint8)


def statistics(seed: str, dims: Mapping[str, int], still: int) -> dict[str, dict[str, Array]]:
    """Of each feature, what every mode of normalisation takes; `still`: this many last dimensions
    of the state never move."""
    out: dict[str, dict[str, Array]] = {}
    for name, dim in dims.items():
        random = stream(seed, "statistics " + name)
        mean, std = random.normal(size=dim) * 0.5, 0.2 + random.random(dim)
        if name == "observation.state" and still:
            std[-still:] = 0
        of = {"mean": mean, "std": std}
        for low, high, far in (("min", "max", 3.0), ("q01", "q99", 2.0), ("q10", "q90", 1.2)):
            of[low], of[high] = mean - far * std, mean + far * std
        out[name] = {key: value.astype(np.float32) for key, value in of.items()}
    return out


def state_of(seed: str, stats: Mapping[str, Array]) -> Array:
    """A state that may be outside of its statistics, but for what never moves."""
    mean, std = stats["mean"], stats["std"]
    return (mean + std * stream(seed, "state").normal(size=len(mean)) * 1.2).astype(np.float32)


class Record:
    """golden.safetensors and golden.json."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: Any) -> None:
        tensor = torch.as_tensor(value).detach().clone().contiguous()
        self.tensors[name] = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor

    def write(self, folder: Path, **info: Any) -> None:
        save_file(self.tensors, str(folder / "golden.safetensors"))
        info["tensors"] = {
            name: [str(x.dtype).removeprefix("torch."), list(x.shape)]
            for name, x in self.tensors.items()
        }
        info["versions"] = {p: importlib.metadata.version(p) for p in PACKAGES}
        info["versions"]["python"] = platform.python_version()
        text = json.dumps(info, indent=1)
        (folder / "golden.json").write_text(text)


def rewrite(file: Path, change: Any) -> None:
    """Replaces the tensors of a safetensors file by change(tensors)."""
    tensors = change(load_file(str(file)))
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(file))


def edit_json(file: Path, change: Any) -> None:
    """Lets `change` edit what is in a JSON file, in the order of the file."""
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value, indent=2))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def into_buffers(checkpoint: Path, stats: Mapping[str, Mapping[str, Array]]) -> None:
    """Turns a folder into one of lerobot before its processors: statistics among the weights."""
    modes = json.loads((checkpoint / "config.json").read_text())["normalization_mapping"]
    kinds = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "IDENTITY": ()}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for module, feature, kind in (
            ("normalize_inputs", "observation.state", "STATE"),
            ("normalize_targets", "action", "ACTION"),
            ("unnormalize_outputs", "action", "ACTION"),
        ):
            for name in kinds[modes[kind]]:
                key = f"{module}.buffer_{feature.replace('.', '_')}.{name}"
                tensors[key] = torch.from_numpy(stats[feature][name].copy())
        return tensors

    rewrite(checkpoint / "model.safetensors", change)
    for file in checkpoint.glob("policy_p*"):
        file.unlink()
