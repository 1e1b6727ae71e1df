"""The causal policy: OpenVLA (fused DINOv2-reg4 and SigLIP towers, a projector, Llama), small, under the published names.

Only what inference uses is built; the towers' last block, their final norm and SigLIP's pooling are in the folder and
stay as they are (causal_export.py). A packed forward() trains several instructions per picture: they share the causal
prefix [BOS | 256 patches] exactly as so many sequences of their own would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOWER, TOWER_HEADS, BLOCKS = 48, 3, 2
SIGLIP_MLP = 179
WIDTH, LAYERS, HEADS, MLP = 128, 4, 4, 352
ROWS, IDS = (
    1024,
    960,
)  # of the vocabulary with and without padding; the last 256 ids are action bins
PATCH, SIDE = 14, 16
PATCHES = SIDE * SIDE
STEPS, ACTION = 5, 2  # of an answer
TOKENS = STEPS * ACTION
SCENE, SCENE_LAYER = 11, 2
MEANS = ((0.484375, 0.455078125, 0.40625), (0.5, 0.5, 0.5))
DEVIATIONS = ((0.228515625, 0.2236328125, 0.224609375), (0.5, 0.5, 0.5))
EDGES = np.linspace(-1, 1, 256)
CENTRES = (EDGES[:-1] + EDGES[1:]) / 2

Array = np.ndarray[Any, Any]


def to_ids(values: Array) -> Array:
    """Action tokens of values in -1..1."""
    return IDS - np.digitize(np.clip(values, -1, 1), EDGES)


def to_values(ids: Array) -> Array:
    """The centres of the bins."""
    return CENTRES[np.clip(IDS - ids - 1, 0, 254)]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, TOWER_HEADS, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Block(nn.Module):
    def __init__(self, inner: int, scaled: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(TOWER, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = Attention(TOWER), Mlp(TOWER, inner)
        self.ls1, self.ls2 = (Scale(TOWER) if scaled else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, TOWER, PATCH, PATCH)

    def forward(self, patches: Tensor) -> Tensor:
        """[n, patches, 3 * PATCH * PATCH]: the same numbers as the convolution's."""
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Tower(nn.Module):
    def __init__(self, dino: bool) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.pos_embed = nn.Parameter(torch.randn(1, PATCHES, TOWER) * 0.3)
        self.dino = dino
        if dino:
            self.cls_token = nn.Parameter(torch.randn(1, 1, TOWER) * 0.3)
            self.reg_token = nn.Parameter(torch.randn(1, 4, TOWER) * 0.3)
        inner = 4 * TOWER if dino else SIGLIP_MLP
        self.blocks = nn.ModuleList(Block(inner, dino) for _ in range(BLOCKS))

    def forward(self, patches: Tensor, kept: Tensor) -> Tensor:
        x = self.patch_embed(patches) + self.pos_embed[:, kept]
        if self.dino:
            extra = [t.expand(len(x), -1, -1) for t in (self.cls_token, self.reg_token)]
            x = torch.cat([*extra, x], 1)
        for block in self.blocks:
            x = block(x)
        return x[:, 5:] if self.dino else x


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.featurizer, self.fused_featurizer = Tower(True), Tower(False)

    def forward(self, pictures: Tensor, kept: Tensor) -> Tensor:
        """pictures: [n, 224, 224, 3] bytes."""
        x = pictures.view(-1, SIDE, PATCH, SIDE, PATCH, 3).permute(0, 1, 3, 5, 2, 4)
        x = x.reshape(-1, PATCHES, 3 * PATCH * PATCH)[:, kept].float() / 255
        out = []
        towers = (self.featurizer, self.fused_featurizer)
        for tower, mean, deviation in zip(towers, MEANS, DEVIATIONS, strict=True):
            m, d = (torch.tensor(v).repeat_interleave(PATCH * PATCH) for v in (mean, deviation))
            out.append(tower((x - m) / d, kept))
        return torch.cat(out, 2)


class Projector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(2 * TOWER, 8 * TOWER), nn.Linear(8 * TOWER, WIDTH)
        self.fc3 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, MLP, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(MLP, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(), GatedMlp()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2)
        )


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Llama()
        self.lm_head = nn.Linear(WIDTH, ROWS, bias=False)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """x: [b, heads, n, head]; positions: [n]."""
    half = x.shape[-1] // 2
    angle = positions[:, None].float() * 10000.0 ** (-torch.arange(half).float() / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def heads(x: Tensor) -> Tensor:
    """[b, n, WIDTH] to [b, HEADS, n, head]."""
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2).float()


class Policy(nn.Module):
    """Everything; `scene_head` is training's own."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_backbone, self.projector = Vision(), Projector()
        self.language_model = Language()
        self.scene_head = nn.Linear(WIDTH, SCENE)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Draws the weights from torch's generator."""
        small = ("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.fc2.weight")
        for name, p in self.named_parameters():
            if p.ndim >= 2 and "pos_embed" not in name and "_token" not in name:
                nn.init.normal_(p, std=p[0].numel() ** -0.5)
            if name.endswith(small):
                p.mul_(0.3)
            if name.endswith("bias"):
                p.zero_()
        rows, head = (
            self.language_model.model.embed_tokens.weight,
            self.language_model.lm_head.weight,
        )
        rows.normal_(std=0.5)
        head.normal_(std=0.02)
        # Neighbouring bins begin as neighbours.
        at = torch.linspace(-1, 1, 256).flip(0)[:, None]
        frequency = torch.cat([torch.rand(WIDTH // 2) * 3, torch.rand(WIDTH // 2) * 20])
        wave = torch.cos(at * frequency + torch.rand(WIDTH) * 6.28)
        rows[IDS - 256 : IDS] = 0.7 * wave
        head[IDS - 256 : IDS] = 0.02 * wave

    def forward(
        self, pictures: Tensor, texts: Tensor, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of the texts [b, k, n, WIDTH], and what the last patch tells of the scene [b, SCENE].

        texts: [b, k, n] ids after BOS and the patches. kept: the patches to compute, at their own places: rows that
        never show the road may be left out while training; None: all.
        """
        b, k, n = texts.shape
        kept = torch.arange(PATCHES) if kept is None else kept
        trunk = self.language_model.model
        patches = self.projector(self.vision_backbone(pictures, kept))
        bos = trunk.embed_tokens.weight[1].to(patches.dtype).expand(b, 1, -1)
        x = torch.cat([bos, patches, trunk.embed_tokens(texts.flatten(1)).to(patches.dtype)], 1)
        shared = 1 + len(kept)
        places = torch.cat(
            [torch.zeros(1, dtype=torch.long), kept + 1, (PATCHES + 1 + torch.arange(n)).repeat(k)]
        )
        text = torch.arange(k).repeat_interleave(n)
        own = (text[:, None] == text[None]) & (places[shared:, None] >= places[None, shared:])
        mask = torch.cat([torch.ones(k * n, shared, dtype=torch.bool), own], 1)
        scene = torch.zeros(0)
        for i, layer in enumerate(trunk.layers):
            a, h = layer.self_attn, layer.input_layernorm(x)
            keys, values = rope(heads(a.k_proj(h)), places), heads(a.v_proj(h))
            if i + 1 == LAYERS:  # nobody uses what the prefix becomes here
                x = x[:, shared:]
                q = rope(heads(a.q_proj(h[:, shared:])), places[shared:])
                out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            else:
                q = rope(heads(a.q_proj(h)), places)
                first = F.scaled_dot_product_attention(
                    q[:, :, :shared], keys[:, :, :shared], values[:, :, :shared], is_causal=True
                )
                rest = F.scaled_dot_product_attention(
                    q[:, :, shared:], keys, values, attn_mask=mask
                )
                out = torch.cat([first, rest], 2)
            x = x + a.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if i + 1 == SCENE_LAYER:
                scene = self.scene_head(x[:, shared - 1].float())
        return trunk.norm(x).view(b, k, n, -1), scene

    @torch.no_grad()
    def act(self, pictures: Tensor, texts: list[list[int]]) -> Array:
        """Greedy action ids [b, TOKENS]. texts: ids after BOS, with the empty token at the end. Recomputes everything
        for every token: for checks, not for driving."""
        out = []
        for picture, text in zip(pictures, texts, strict=True):
            ids = list(text)
            for _ in range(TOKENS):
                hidden, _ = self(picture[None], torch.tensor(ids)[None, None])
                ids.append(int(self.language_model.lm_head(hidden[0, 0, -1]).argmax()))
            out.append(ids[-TOKENS:])
        return np.array(out)
