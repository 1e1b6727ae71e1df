"""Trains the causal policy by behaviour cloning.

    causal_train.py OUT --steps N [--decay M] --data FOLDER ... --validation FOLDER

OUT gets "stats.json" (q01, q99, ...), "last.pt" every --save steps and "log.jsonl". The tokenizer is that of --folder.
The rate is flat, then falls linearly over the last M steps. A step: --frames frames of each rank x --groups
instructions with a random phrase; soft targets over neighbouring bins, teacher forcing with jitter, and a regression
of the scene from the last patch. Until --whole of the steps are done, most steps compute only the rows of patches that
can show the road.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import causal
import demo
import numpy as np
import ranks
import torch
import torch.nn.functional as F
from phrases import GROUPS, PHRASES
from tokenizers import Tokenizer
from torch import Tensor

ROAD = torch.arange(4 * causal.SIDE, 12 * causal.SIDE)  # patches that can show the road
WEIGHTS = torch.tensor([3.0, 3, 2, 2, 1, 1, 1, 1, 1, 1])  # of the tokens of an answer
VALIDATION = 120  # frames


class Data:
    """Frames of folders of collect.py, in memory; whole shards go to one rank."""

    def __init__(self, folders: list[Path], rank: int = 0, of: int = 1) -> None:
        files = [file for folder in folders for file in sorted(folder.glob("s_*.npz"))]
        parts: list[dict[str, Any]] = []
        for file in files[rank::of]:
            with np.load(file) as z:
                parts.append({k: z[k] for k in ("top", "actions", "state", "scene")})
        self.all = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
        self.all["actions"] = self.all["actions"][:, :, : causal.STEPS]

    def __len__(self) -> int:
        return len(self.all["state"])


def statistics(folders: list[Path]) -> dict[str, list[Any]]:
    """As OpenVLA's: quantiles of each of an answer's numbers; symmetric for steer, so that 0 is a bin's centre."""
    parts = []
    for file in sorted(f for folder in folders for f in folder.glob("s_*.npz")):
        with np.load(file) as z:
            parts.append(z["actions"][:, :, : causal.STEPS].reshape(-1, causal.ACTION))
    a = np.concatenate(parts)
    steer = float(np.quantile(np.abs(a[:, 0]), 0.99))
    low, high = (float(x) for x in np.quantile(a[:, 1], [0.01, 0.99]))
    out: dict[str, list[Any]] = {
        name: f(a, 0).tolist() * causal.STEPS
        for name, f in (("mean", np.mean), ("std", np.std), ("min", np.min), ("max", np.max))
    }
    out["q01"], out["q99"] = [-steer, low] * causal.STEPS, [steer, high] * causal.STEPS
    out["mask"] = [True] * causal.TOKENS
    return out


class Batches:
    """Tensors of frames and instructions."""

    def __init__(self, data: Data, stats: dict[str, list[Any]], folder: Path) -> None:
        self.data = data
        self.low, self.high = np.array(stats["q01"]), np.array(stats["q99"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.empty = self.tokenizer.token_to_id("\u2581")

    def text(self, phrase: str, speed: float) -> list[int]:
        """After BOS."""
        prompt = f"In: What action should the robot take to {phrase}, speed {round(speed)}?\nOut:"
        return [*self.tokenizer.encode(prompt).ids[1:], self.empty]

    def make(
        self, frames: causal.Array, count: int, rng: np.random.Generator, jitter: float
    ) -> dict[str, Tensor]:
        """pictures [b, ...], texts [b, k, n], targets [b, k, TOKENS], first [b, k] (of an answer), scene [b, ...]."""
        rows, targets, first = [], [], []
        for i in frames:
            chosen = range(6) if count == 6 else rng.choice(6, count, replace=False)
            for g in chosen:
                phrase = PHRASES[GROUPS[g]][rng.integers(6)]
                ids = self.text(phrase, float(self.data.all["state"][i, 0]))
                flat = self.data.all["actions"][i, g].reshape(-1)
                answer = causal.to_ids(2 * (flat - self.low) / (self.high - self.low) - 1)
                noise = np.rint(rng.normal(size=causal.TOKENS - 1) * jitter).astype(int)
                said = np.clip(answer[:-1] + noise, causal.IDS - 255, causal.IDS - 1)
                first.append(len(ids) - 1)
                rows.append([*ids, *said.tolist()])
                targets.append(answer)
        texts = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for row, r in enumerate(rows):
            texts[row, : len(r)] = torch.tensor(r)
        b = len(frames)
        return {
            "pictures": torch.from_numpy(self.data.all["top"][frames]),
            "texts": texts.view(b, count, -1),
            "targets": torch.from_numpy(np.stack(targets)).view(b, count, -1),
            "first": torch.tensor(first).view(b, count),
            "scene": torch.from_numpy(self.data.all["scene"][frames]),
        }


def soft(deviation: float) -> Tensor:
    """[bin, bin]: what is to be said where a bin is right."""
    at = torch.arange(256.0)
    table = torch.exp(-((at[None] - at[:, None]) ** 2) / (2 * deviation**2))
    table[:, 255] = 0  # the last two bins decode to the same centre
    return table / table.sum(1, keepdim=True)


def losses(
    policy: causal.Policy, batch: dict[str, Tensor], table: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy, the scenes' loss, and the most probable ids."""
    hidden, scene = policy(batch["pictures"], batch["texts"], kept)
    at = batch["first"][..., None] + torch.arange(causal.TOKENS)
    hidden = hidden.gather(2, at[..., None].expand(-1, -1, -1, causal.WIDTH))
    scores = policy.language_model.lm_head(hidden).float()
    bins = (causal.IDS - 1 - batch["targets"]).clamp(0, 254)
    said = scores.log_softmax(-1)[..., causal.IDS - 256 : causal.IDS].flip(-1)
    entropy = -(table[bins] * said).sum(-1)
    loss = (entropy * WEIGHTS).mean() / WEIGHTS.mean()
    return loss, F.smooth_l1_loss(scene, batch["scene"]), scores.argmax(-1)


@torch.no_grad()
def validate(policy: causal.Policy, batches: Batches, table: Tensor) -> dict[str, Any]:
    """Mean errors of the first action by group, in physical units."""
    rng = np.random.default_rng(0)
    frames = np.linspace(0, len(batches.data) - 1, VALIDATION).astype(int)
    loss, errors = [], []
    for part in np.split(frames, VALIDATION // 12):
        batch = batches.make(part, 6, rng, 0.0)
        one, _, ids = losses(policy, batch, table, None)
        loss.append(float(one))
        said, right = (causal.to_values(x.numpy()) for x in (ids, batch["targets"]))
        errors.append(np.abs(said - right)[..., :2] * (batches.high - batches.low)[:2] / 2)
    mean = np.concatenate(errors).mean(0, dtype=np.float64)
    return {
        "loss": round(float(np.mean(loss)), 4),
        "steer": dict(zip(GROUPS, mean[:, 0].round(4).tolist(), strict=True)),
        "accel": dict(zip(GROUPS, mean[:, 1].round(3).tolist(), strict=True)),
    }


def optimizers(policy: causal.Policy, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices and the projector's, AdamW for the rest."""
    inner = ("blocks", "layers", "projector")
    named = list(policy.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and any(part in n for part in inner)]
    ids = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in ids]
    muon = torch.optim.Muon(
        matrices,
        lr=2.5 * rate,
        weight_decay=0.01,
        momentum=0.95,
        ns_steps=4,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def train(rank: int, a: argparse.Namespace) -> None:
    """One rank."""
    torch.manual_seed(a.seed)
    policy = causal.Policy()
    stats = json.loads((a.out / "stats.json").read_text())
    batches = Batches(Data(a.data, rank, a.ranks), stats, a.folder)
    held = Batches(Data([a.validation]), stats, a.folder) if rank == 0 else None
    both = optimizers(policy, a.rate)
    rates = [[g["lr"] for g in o.param_groups] for o in both]
    parameters = [p for o in both for g in o.param_groups for p in g["params"]]
    rng, common = np.random.default_rng([a.seed, rank]), np.random.default_rng(a.seed)
    order = np.zeros(0, int)
    seen: list[list[float]] = []
    with (a.out / "log.jsonl").open("a") as log:
        for step in range(a.steps):
            scale = min(1.0, (step + 1) / 40, max(0.02, (a.steps - step) / max(1, a.decay)))
            for o, base in zip(both, rates, strict=True):
                for group, lr in zip(o.param_groups, base, strict=True):
                    group["lr"] = lr * scale
            if len(order) < a.frames:
                order = rng.permutation(len(batches.data))
            frames, order = order[: a.frames], order[a.frames :]
            done = step / a.steps
            table = soft(a.soft + (a.soft_end - a.soft) * done)
            whole = common.random() < 0.15 or done >= a.whole
            batch = batches.make(frames, a.groups, rng, 2.0)
            with torch.autocast("cpu", torch.bfloat16):
                loss, scene, _ = losses(policy, batch, table, None if whole else ROAD)
            (loss + 2 * scene).backward()
            norm = ranks.exchange(parameters, a.ranks)
            for o in both:
                o.step()
            for p in parameters:
                p.grad = None
            seen.append([loss.item(), scene.item(), norm])
            if held is None:
                continue
            if (step + 1) % 25 == 0:
                values = " ".join(f"{x:.4f}" for x in np.mean(seen, 0))
                print(f"step {step + 1} {values}", flush=True)
                seen = []
            if (step + 1) % a.save == 0 or step + 1 == a.steps:
                ranks.save(a.out / "last.pt", policy=policy.state_dict(), step=step + 1)
                ranks.tell(log, {"step": step + 1, **validate(policy, held, soft(2.0))})


def main() -> int:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--decay", type=int, default=1)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument(
        "--folder", type=Path, default=demo.DEMO / "checkpoint", help="its tokenizer"
    )
    parser.add_argument("--frames", type=int, default=6)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--soft", type=float, default=2.0, help="width of the targets, bins")
    parser.add_argument("--soft-end", type=float, default=1.0)
    parser.add_argument("--whole", type=float, default=0.6)
    parser.add_argument("--save", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    ranks.arguments(parser)
    a = parser.parse_args()
    a.out = a.out.resolve()
    a.out.mkdir(parents=True, exist_ok=True)
    if not (a.out / "stats.json").exists():
        (a.out / "stats.json").write_text(json.dumps(statistics(a.data)))
    return ranks.launch(a, train)


if __name__ == "__main__":
    sys.exit(main())
