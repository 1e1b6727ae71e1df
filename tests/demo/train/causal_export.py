"""Puts a trained causal policy into a folder in the published format.

    causal_export.py RUN FOLDER [--like CHECKPOINT]

The shipped folder came from OpenVLA's own save_pretrained(); everything that no training here changes (config, tokenizer,
the towers' last block, which OpenVLA stores and never computes) is taken from it, so that none of that code is needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import demo
import torch
from safetensors.torch import load_file, save_file

KEY = "highway_demo"


def export(run: Path, folder: Path, like: Path) -> None:
    """The folder, from nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(like, folder)
    weights = load_file(str(like / "model.safetensors"))
    trained = torch.load(run / "last.pt", map_location="cpu")["policy"]
    for name, value in trained.items():
        if name.startswith("scene_head"):
            continue
        if weights[name].shape != value.shape:
            raise ValueError(f"{name} is {list(value.shape)}, not {list(weights[name].shape)}")
        weights[name] = value.to(weights[name].dtype).contiguous()
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    action = json.loads((run / "stats.json").read_text())
    for file in ("config.json", "dataset_statistics.json"):
        whole = json.loads((folder / file).read_text())
        stats = whole["norm_stats"] if file == "config.json" else whole
        stats[KEY]["action"] = action
        (folder / file).write_text(json.dumps(whole, indent=2))


def main() -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--like", type=Path, default=demo.DEMO / "checkpoint")
    args = parser.parse_args()
    export(args.run, args.folder, args.like)


if __name__ == "__main__":
    main()
