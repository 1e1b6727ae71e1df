"""Trains the flow policy: data-parallel over single-thread processes, which beats one process of as many threads here.

    flow_train.py OUT --steps N [--decay M] [--data FOLDER ...] --validation FOLDER [--resume]

OUT gets "vlm" (config and tokenizer), "last.pt" every --save steps and "log.jsonl". The rate is flat and falls linearly
over the last M steps, so that a run can be cut short: resume it with fewer steps. Steps are counted, not seconds: it may
be stopped and continued. A step: --frames frames of each rank x --groups instructions x --draws of noise and time.
Muon for the blocks' matrices, AdamW for the rest; what is exported is a running mean of the weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flow
import numpy as np
import ranks
import torch
import torch.nn.functional as F
from phrases import GROUPS
from sentences import corpus, sentence
from tokenizers import Tokenizer
from torch import Tensor, nn

SCENE = 11
VALIDATION = 96  # frames
MEAN_DECAY = 0.995


def halve(pictures: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the policy's resizing makes of 224 x 224: the mean of 2 x 2, to a byte."""
    out = np.empty((len(pictures), flow.IMAGE, flow.IMAGE, 3), np.uint8)
    for here, picture in zip(out, pictures, strict=True):
        rows = picture.astype(np.uint16)
        rows = rows[::2] + rows[1::2]
        here[:] = (rows[:, ::2] + rows[:, 1::2] + 2) // 4
    return out


def shard(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What a shard holds, pictures halved; kept beside it, because that takes longest of all there is to load."""
    small = file.with_name(f"half_{file.stem}.npz")
    if not small.exists():
        with np.load(file) as z:
            part = {k: halve(z[k]) if k in ("top", "wide") else z[k] for k in z}
        partial = small.with_name(f"tmp_{small.name}")
        np.savez(partial, **part)
        partial.rename(small)
        return part
    with np.load(small) as z:
        return dict(z)


def statistics(folders: list[Path]) -> dict[str, dict[str, list[float]]]:
    """Mean and deviation of the state, and of the actions over all steps of a chunk."""
    columns: dict[str, list[Any]] = {"observation.state": [], "action": []}
    for folder in folders:
        for file in sorted(folder.glob("s_*.npz")):
            with np.load(file) as z:
                columns["observation.state"].append(z["state"].astype(np.float64))
                columns["action"].append(z["actions"].astype(np.float64).reshape(-1, flow.ACTION))
    out = {}
    for k, parts in columns.items():
        x = np.concatenate(parts)
        named = {"mean": x.mean(0), "std": x.std(0), "min": x.min(0), "max": x.max(0)}
        out[k] = {name: value.tolist() for name, value in named.items()}
    return out


class Data:
    """Frames of folders of collect.py, in memory; whole shards go to one rank."""

    def __init__(self, folders: list[Path], rank: int = 0, of: int = 1) -> None:
        parts: dict[str, list[Any]] = {}
        start = number = 0
        for folder in folders:
            for file in sorted(folder.glob("s_*.npz")):
                number += 1
                if number % of != rank:
                    continue
                part = shard(file)
                episode = part.pop("episode")
                n, here = len(episode), np.arange(len(episode))
                first = np.append(True, episode[1:] != episode[:-1])
                part["before"] = start + np.where(first, here, here - 1)
                for k, v in part.items():
                    parts.setdefault(k, []).append(v)
                start += n
        self.all = {k: np.concatenate(v) for k, v in parts.items()}

    def __len__(self) -> int:
        return len(self.all["state"])

    def pixels(self, i: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """[n, cameras, IMAGE, IMAGE, 3]"""
        top = self.all["top"]
        return np.stack([top[i], top[self.all["before"][i]], self.all["wide"][i]], 1)


class Batches:
    """Tensors of frames and instructions."""

    def __init__(self, data: Data, stats: Any, tokenizer: Tokenizer) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.stats = {
            k: [np.array(s[m], np.float32) for m in ("mean", "std")] for k, s in stats.items()
        }

    def normal(self, key: str, x: np.ndarray[Any, Any]) -> Tensor:
        mean, std = self.stats[key]
        return torch.from_numpy((x - mean) / (std + 1e-8))

    def make(
        self,
        frames: np.ndarray[Any, Any],
        groups: Callable[[], Any],
        rng: np.random.Generator,
    ) -> dict[str, Tensor]:
        """The batch of Fast.losses."""
        texts, actions = [], []
        for i in frames:
            for g in groups():
                texts.append(self.tokenizer.encode(sentence(GROUPS[g], rng) + "\n").ids)
                actions.append(self.data.all["actions"][i, g])
        tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        kept = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, ids in enumerate(texts):
            tokens[row, : len(ids)] = torch.tensor(ids)
            kept[row, : len(ids)] = True
        return {
            "pixels": torch.from_numpy(self.data.pixels(frames)),
            "tokens": tokens,
            "kept": kept,
            "state": self.normal("observation.state", self.data.all["state"][frames]),
            "actions": self.normal("action", np.stack(actions)),
            "scene": torch.from_numpy(self.data.all["scene"][frames]),
        }


class Scenes(nn.Module):
    """Training only: reads the scene off a picture's tokens, so that the tower learns to see early."""

    def __init__(self) -> None:
        super().__init__()
        width = (flow.IMAGE // flow.PATCH // flow.SHUFFLE) ** 2 * flow.TEXT["width"]
        self.top, self.wide = nn.Linear(width, SCENE), nn.Linear(width, SCENE)

    def forward(self, pictures: Tensor, scene: Tensor) -> Tensor:
        """Of [f, cameras * tokens, width]."""
        top, _, wide = pictures.view(len(pictures), len(flow.CAMERAS), -1).unbind(1)
        losses = [F.smooth_l1_loss(h(x), scene) for h, x in ((self.top, top), (self.wide, wide))]
        return torch.stack(losses).sum()


def optimizers(fast: flow.Fast, scenes: Scenes, rate: float) -> list[torch.optim.Optimizer]:
    """Muon and AdamW. The connector's numbers are small: lerobot multiplies what it gives by width**0.5."""
    matrices, joint, rest = [], [], list(scenes.parameters())
    for name, p in fast.policy.named_parameters():
        if "lm_head" in name:
            continue
        if "connector" in name:
            joint.append(p)
        elif p.ndim == 2 and ("layers." in name or "action_time_mlp" in name):
            matrices.append(p)
        else:
            rest.append(p)
    muon = torch.optim.Muon(
        [
            {"params": matrices, "lr": 2 * rate},
            {"params": joint, "lr": 2 * rate * flow.TEXT["width"] ** -0.5},
        ],
        weight_decay=0.01,
        momentum=0.95,
        ns_steps=4,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


@torch.no_grad()
def validate(fast: flow.Fast, batches: Batches) -> dict[str, Any]:
    """Loss, and mean errors of the first two sampled actions by group, in physical units."""
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    frames = np.linspace(0, len(batches.data) - 1, VALIDATION).astype(int)
    loss, errors = [], []
    for part in np.split(frames, VALIDATION // 12):
        batch = batches.make(part, lambda: range(6), rng)
        n = len(batch["actions"])
        noise = torch.randn(n, 1, *batch["actions"].shape[1:], generator=generator)
        time = torch.rand(n, 1, generator=generator)
        loss.append(float(fast.losses(batch, noise, time)[0].mean()))
        e = (fast.act(batch, noise[:, 0]) - batch["actions"])[:, :2].abs().mean(1)
        errors.append(e.view(-1, 6, 2).numpy())
    mean = np.concatenate(errors).mean(0, dtype=np.float64) * batches.stats["action"][1]
    return {
        "loss": round(float(np.mean(loss)), 4),
        "steer": dict(zip(GROUPS, mean[:, 0].round(4).tolist(), strict=True)),
        "accel": dict(zip(GROUPS, mean[:, 1].round(3).tolist(), strict=True)),
    }


def train(rank: int, a: argparse.Namespace) -> None:
    """One rank."""
    torch.set_float32_matmul_precision("medium")  # products of BF16, sums of F32
    torch.manual_seed(a.seed)
    policy = flow.new_policy(a.out)
    fast, scenes = flow.Fast(policy), Scenes()
    stats = json.loads((a.out / "stats.json").read_text())
    tokenizer = Tokenizer.from_file(str(a.out / "vlm/tokenizer.json"))
    batches = Batches(Data(a.data, rank, a.ranks), stats, tokenizer)
    held = Batches(Data([a.validation]), stats, tokenizer) if rank == 0 else None
    mean = copy.deepcopy(policy)
    both = optimizers(fast, scenes, a.rate)
    rates = [[g["lr"] for g in o.param_groups] for o in both]
    first = 0
    if a.resume:
        kept = torch.load(a.out / "last.pt", map_location="cpu")
        policy.load_state_dict(kept["policy"])
        mean.load_state_dict(kept["mean"])
        scenes.load_state_dict(kept["scenes"])
        for o, s in zip(both, kept["optimizers"], strict=True):
            o.load_state_dict(s)
        first = kept["step"]
    rng = np.random.default_rng([a.seed, rank, first])
    torch.manual_seed(int(rng.integers(1 << 31)))
    parameters = [p for o in both for g in o.param_groups for p in g["params"]]
    pairs = list(zip(mean.parameters(), policy.parameters(), strict=True))
    order = np.zeros(0, int)
    losses: list[list[float]] = []
    begin = time.monotonic()
    with (a.out / "log.jsonl").open("a") as log:
        for step in range(first, a.steps):
            scale = min(1.0, (step - first + 1) / 50, max(0.01, (a.steps - step) / max(1, a.decay)))
            for o, base in zip(both, rates, strict=True):
                for group, lr in zip(o.param_groups, base, strict=True):
                    group["lr"] = lr * scale
            if len(order) < a.frames:
                order = rng.permutation(len(batches.data))
            frames, order = order[: a.frames], order[a.frames :]
            batch = batches.make(
                frames, lambda: rng.choice(6, a.groups, replace=False).tolist(), rng
            )
            n = len(batch["actions"])
            noise = torch.randn(n, a.draws, *batch["actions"].shape[1:])
            times = policy.model.sample_time(n * a.draws, "cpu").view(n, a.draws)
            error, pictures = fast.losses(batch, noise, times)
            loss, seen = error.mean(), scenes(pictures, batch["scene"])
            (loss + a.scene * seen).backward()
            norm = ranks.exchange(parameters, a.ranks)
            for o in both:
                o.step()
            for p in parameters:
                p.grad = None
            with torch.no_grad():
                decay = min(MEAN_DECAY, (step - first + 1) / (step - first + 10))
                for m, p in pairs:
                    m.lerp_(p, 1 - decay)
            losses.append([loss.item(), seen.item(), norm])
            if rank or held is None:
                continue
            done = step + 1
            if done % 25 == 0:
                values = " ".join(f"{x:.4f}" for x in np.mean(losses, 0))
                print(f"step {done} {time.monotonic() - begin:.0f} s {values}", flush=True)
                losses = []
            if done % a.save == 0 or done == a.steps:
                ranks.save(
                    a.out / "last.pt",
                    policy=policy.state_dict(),
                    mean=mean.state_dict(),
                    scenes=scenes.state_dict(),
                    optimizers=[o.state_dict() for o in both],
                    step=done,
                )
                ranks.tell(log, {"step": done, **validate(flow.Fast(mean), held)})


def main() -> int:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--decay", type=int, default=1)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--scene", type=float, default=1.0, help="weight of the scenes' loss")
    parser.add_argument("--save", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    ranks.arguments(parser)
    a = parser.parse_args()
    a.out = a.out.resolve()
    if not (a.out / "vlm").exists():
        flow.write_vlm(a.out / "vlm", corpus())
    if not (a.out / "stats.json").exists():
        (a.out / "stats.json").write_text(json.dumps(statistics(a.data)))
    return ranks.launch(a, train)


if __name__ == "__main__":
    sys.exit(main())
