"""The library that published SmolVLA, answering the same observations as the server: see families.py, which starts it.

    PYTHON tests/bench/smolvla_peer.py CHECKPOINT OBSERVATIONS

PYTHON has lerobot 0.4.4 (requirements of families.py). OBSERVATIONS is an .npz with images [n, cameras, h, w, 3] of
uint8, states [n, dims], noise [n, steps, width] and the text. Weights of the two decoders and of the vision tower are
BF16, the heads F32, as published; one thread. For every line with the index of an observation on standard input one
JSON object is written: wall and CPU seconds of predict_action_chunk, and the normalised chunk that it gave.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy


def load(checkpoint: Path) -> tuple[Any, Any]:
    """The policy and what makes its batches."""
    os.chdir(checkpoint)  # config.json names the tokenizer's folder relative to it
    policy = SmolVLAPolicy.from_pretrained(".", strict=True).eval()
    # In F32 this release of transformers would shift every patch to the position before its own; BF16 rounds that away.
    policy.model.vlm_with_expert.to(torch.bfloat16)
    make_batch, _ = make_pre_post_processors(policy.config, pretrained_path=".")
    return policy, make_batch


def observations(path: Path, cameras: list[str], make_batch: Any) -> list[tuple[Any, Any]]:
    """Batches and noises."""
    out = []
    with np.load(path) as data:
        text = str(data["text"])
        for images, state, noise in zip(data["images"], data["states"], data["noise"], strict=True):
            batch: dict[str, Any] = {"observation.state": torch.from_numpy(state), "task": text}
            for camera, image in zip(cameras, images, strict=True):
                batch[camera] = torch.from_numpy(image).permute(2, 0, 1).float() / 255
            batch = make_batch(batch)
            rows = int(batch["observation.language.attention_mask"].sum())
            if rows != policy_rows(batch):
                raise ValueError(f"the text has {rows} tokens, so padding would be computed, too")
            out.append((batch, torch.from_numpy(noise)[None]))
    return out


def policy_rows(batch: dict[str, Any]) -> int:
    """Rows of text that the policy computes, whether they are padding or not."""
    return int(batch["observation.language.tokens"].shape[1])


def main() -> None:
    """Answers until standard input ends."""
    checkpoint, path = (Path(a).resolve() for a in sys.argv[1:3])
    # Libraries print; the answers must not mix with that.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    policy, make_batch = load(checkpoint)
    cameras = [k for k, f in policy.config.input_features.items() if f.type.name == "VISUAL"]
    known = observations(path, cameras, make_batch)
    versions = {"torch": torch.__version__}
    print(json.dumps({"ready": True, **versions}), file=answers, flush=True)
    for line in sys.stdin:
        batch, noise = known[int(line)]
        wall, cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            chunk = policy.predict_action_chunk(dict(batch), noise=noise.clone())
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        answer = {"wall_s": wall, "cpu_s": cpu, "chunk": chunk[0].float().tolist()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
