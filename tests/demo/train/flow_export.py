"""Writes the trained flow policy as a lerobot folder, by lerobot's own save_pretrained, and what lerobot answers for it.

    flow_export.py RUN FOLDER [--golden OUT]

RUN: what flow_train.py wrote. Weights of the VLM and the expert are BF16, as in published checkpoints; the folder is
read back by lerobot before anything is said about it. --golden: golden.{safetensors,json} for `saccade-server verify`,
of a frame of the demo's world.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "golden/reference"))

import json

import common
import flow
import numpy as np
import smolvla
import torch
import variants
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from scenes import Episode

EXAMPLE_GROUP, EXAMPLE_SEED = "overtake", 6_000_000


def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As published: what surrounds the layers stays F32."""
    return {k: x.bfloat16() if "vlm_with_expert" in k else x for k, x in tensors.items()}


def export(run: Path, folder: Path) -> None:
    """The folder, from nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run / "vlm", folder / "vlm")
    policy = flow.new_policy(folder)
    policy.load_state_dict(torch.load(run / "last.pt", map_location="cpu")["mean"])
    stats = {
        feature: {name: np.array(x, np.float32) for name, x in values.items()}
        for feature, values in json.loads((run / "stats.json").read_text()).items()
    }
    with flow.inside(folder):
        policy.save_pretrained(".")
        for processor in make_smolvla_pre_post_processors(policy.config, stats):
            processor.save_pretrained(".")
    common.rewrite(folder / "model.safetensors", narrow)
    for file in folder.glob("*.md"):
        file.unlink()  # a model card of a hub's


def golden(folder: Path, out: Path) -> None:
    """lerobot's answer for one frame."""
    c = flow.config()
    v = variants.SmolVla(
        "demo_flow",
        cameras={camera: (flow.FRAME, flow.FRAME) for camera in flow.CAMERAS},
        state=flow.STATE,
        action=flow.ACTION,
        max_state=c.max_state_dim,
        max_action=c.max_action_dim,
        chunk=c.chunk_size,
        min_period=c.min_period,
        max_period=c.max_period,
    )
    episode = Episode(EXAMPLE_GROUP, EXAMPLE_SEED)
    for _ in range(3):
        episode.drive((0.02, 0.5))
    record = common.Record()
    request: dict[str, object] = {"task": episode.instruction()}
    for camera, image in episode.frames(flow.CAMERAS).items():
        record.add(f"image.{camera}_u8", image)
        request[smolvla.key(camera)] = torch.from_numpy(image).permute(2, 0, 1).float() / 255
    state = np.array(episode.state()[: flow.STATE], np.float32)
    record.add("state_raw", state)
    request["observation.state"] = torch.from_numpy(state)
    episode.close()
    out.mkdir(parents=True, exist_ok=True)
    smolvla.answer(v, folder.resolve(), request, record, out)


def main() -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--golden", type=Path)
    args = parser.parse_args()
    common.be_deterministic()
    export(args.run.resolve(), args.folder.resolve())
    smolvla.load(args.folder.resolve())
    size = sum(f.stat().st_size for f in args.folder.rglob("*") if f.is_file())
    print(f"{args.folder}: {size / 1e6:.2f} MB")
    if args.golden:
        golden(args.folder, args.golden)


if __name__ == "__main__":
    main()
