#!/usr/bin/env python3
"""Write an OpenVLA folder of unusual sizes and its golden answers, computed in plain numpy.

    python make_variant.py NAME OUT_DIR      NAME: one of VARIANTS below, `all`, or oft_randomN

The numpy model is independent of the server: it was written from the published architecture, and on
the reference's own goldens (openvla, openvla_v01) it agrees to 7e-6. `check FOLDER` repeats that
comparison for a folder that has golden.safetensors beside its checkpoint. Needs numpy, pillow < 13
and tokenizers. The tokenizer files come from the demo checkpoint (960 ids).
"""
import hashlib
import json
import math
import random
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "deploy/demo/checkpoint"
F32 = np.float32
DINO, SIGLIP = "vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"
MEANS = {DINO: (0.484375, 0.455078125, 0.40625), SIGLIP: (0.5, 0.5, 0.5)}
STDS = {DINO: (0.228515625, 0.2236328125, 0.224609375), SIGLIP: (0.5, 0.5, 0.5)}

# towers: timm id -> width, heads, depth, mlp, registers
VARIANTS = {
    # grouped queries, an odd number of heads, a head size that is not hidden / heads, centre crop
    "gqa_crop": dict(
        towers={DINO: (24, 3, 3, 50, 4), SIGLIP: (20, 2, 2, 37, 0)}, image=84, strategy="resize-crop",
        llm="llama2-7b-pure", text=dict(hidden_size=40, intermediate_size=75, num_hidden_layers=2, num_attention_heads=6,
                                        num_key_value_heads=2, head_dim=10, rope_theta=5000.0, rms_norm_eps=1e-5),
        vocab=960 + 37, pad=37, bins=128, dtype="BF16", picture=(131, 97), instruction="Turn LEFT at the Überholspur",
        dims={"arm": 5, "base": 2}),
    # one DINOv2 tower, one layer, a tied head, F32 weights, the chat prompt
    "dino_tied": dict(
        towers={DINO: (30, 5, 4, 64, 1)}, image=70, strategy="letterbox", llm="vicuna-v15-7b",
        text=dict(hidden_size=36, intermediate_size=52, num_hidden_layers=1, num_attention_heads=3,
                  tie_word_embeddings=True),
        vocab=960 + 64, pad=64, bins=256, dtype="F32", picture=(60, 150), instruction="open the Drawer",
        dims={"drawer": 3}),
    # multi-query attention, no padding in the vocabulary, SigLIP alone
    "siglip_mqa": dict(
        towers={SIGLIP: (44, 4, 5, 90, 0)}, image=56, strategy="resize-naive", llm="llama2-7b-pure",
        text=dict(hidden_size=64, intermediate_size=160, num_hidden_layers=5, num_attention_heads=8,
                  num_key_value_heads=1),
        vocab=960, pad=0, bins=200, dtype="BF16", picture=(56, 56), instruction="push the button twice",
        dims={"a": 12, "b": 1}),
    # OpenVLA-OFT: three images, a state, a regression head of three blocks, bounds of min and max, grouped queries
    "oft_three": dict(
        towers={DINO: (24, 3, 3, 50, 4), SIGLIP: (20, 2, 2, 37, 0)}, image=56, strategy="resize-naive",
        llm="llama2-7b-pure", text=dict(hidden_size=40, intermediate_size=75, num_hidden_layers=2, num_attention_heads=6,
                                        num_key_value_heads=2, head_dim=10),
        vocab=960 + 37, pad=37, bins=128, dtype="BF16", pictures=[(90, 70), (56, 56), (64, 100)],
        instruction="fold the Towel", dims={"aloha": 14}, chunk=6, state=14, head=(48, 3), bounds=("min", "max")),
    # without a head: the answer is ids; one tower, a tied head, one image, no state
    "oft_tokens": dict(
        towers={SIGLIP: (44, 4, 3, 90, 0)}, image=56, strategy="letterbox", llm="llama2-7b-pure",
        text=dict(hidden_size=36, intermediate_size=52, num_hidden_layers=1, num_attention_heads=3,
                  tie_word_embeddings=True),
        vocab=960 + 64, pad=64, bins=256, dtype="F32", pictures=[(60, 150)], instruction="open the drawer",
        dims={"bridge": 7}, chunk=5, state=0, head=None, bounds=("q01", "q99")),
}


def random_oft(name):
    """An OpenVLA-OFT that its name draws."""
    r = random.Random(name)
    towers = {}
    for tower in r.choice(([DINO, SIGLIP], [SIGLIP], [DINO])):
        heads = r.choice((2, 3, 4))
        towers[tower] = (heads * r.choice((10, 12, 16)), heads, r.choice((2, 3, 4)), r.choice((37, 50, 96)), r.choice((1, 4)) if tower == DINO else 0)
    heads, kv = r.choice(((6, 2), (4, 4), (3, 1), (8, 2)))
    head = r.choice((8, 10, 16))
    text = dict(hidden_size=heads * r.choice((7, 8, 12)), intermediate_size=r.choice((52, 75, 131)), num_hidden_layers=r.choice((1, 2, 3)),
                num_attention_heads=heads, num_key_value_heads=kv, head_dim=head, rms_norm_eps=r.choice((1e-6, 1e-5)))
    platform, action, chunk, state, images, bounds = r.choice((
        ("aloha", 14, 25, 14, 3, ("min", "max")), ("libero", 7, 8, 8, 2, ("q01", "q99")), ("bridge", 7, 5, 7, 1, ("q01", "q99"))))
    pad, image = r.choice((0, 37, 64)), r.choice((28, 42, 56))
    return dict(
        towers=towers, image=image, strategy=r.choice(("resize-naive", "resize-crop", "letterbox")),
        llm=r.choice(("llama2-7b-pure", "vicuna-v15-7b")), text=text, vocab=960 + pad, pad=pad, bins=r.choice((128, 256)),
        dtype=r.choice(("BF16", "F32")), pictures=[(r.randint(20, 150), r.randint(20, 150)) for _ in range(r.choice((images, 1, 2)))],
        instruction=r.choice(("fold the Towel", "x", "Turn LEFT at the Überholspur", "put 12 cups, then stop!")), dims={platform: action},
        chunk=r.choice((chunk, 1, 3)), state=r.choice((state, state, 0)), head=(r.choice((33, 48, 64)), r.choice((1, 2, 3))), bounds=bounds,
        platform=platform)


# ------------------------------------------------------------------------------------------ numbers
def bf16(x):
    """Rounds to the nearest bfloat16, ties to even; the values stay F32."""
    u = np.ascontiguousarray(x, F32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(F32)


def normal(seed, name, shape, std, mean=0.0):
    key = np.frombuffer(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], np.uint64)
    return (np.random.Generator(np.random.Philox(key=key)).standard_normal(shape) * std + mean).astype(F32)


def write_safetensors(path, tensors, kinds):
    header, blob = {}, b""
    for name in sorted(tensors):
        value, kind = tensors[name], kinds.get(name)
        if kind == "BF16":
            raw = (np.ascontiguousarray(value, F32).view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            kind = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8"}[str(value.dtype)]
            raw = np.ascontiguousarray(value).tobytes()
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [len(blob), len(blob) + len(raw)]}
        blob += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob)


def read_safetensors(path):
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    out = {}
    for name, entry in json.loads(raw[8:8 + n]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = raw[8 + n + begin:8 + n + end]
        if entry["dtype"] == "BF16":
            value = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(F32)
        else:
            value = np.frombuffer(data, {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "u1"}[entry["dtype"]])
        out[name] = value.reshape(entry["shape"])
    return out


# -------------------------------------------------------------------------------------------- model
erf = np.vectorize(math.erf, otypes=[F32])


class Reference:
    """The whole model on one request. With `narrow`, every operation's result is rounded to bf16."""

    def __init__(self, config, processor, weights, narrow=False):
        self.c, self.p, self.w = config, processor, weights
        self.r = bf16 if narrow else (lambda x: np.asarray(x, F32))
        t = config["text_config"]
        self.heads = t.get("num_attention_heads", 32)
        self.kv_heads = t.get("num_key_value_heads", self.heads)
        self.head_dim = t.get("head_dim", t["hidden_size"] // self.heads)
        self.layers = t["num_hidden_layers"]
        self.theta = t.get("rope_theta", 10000.0)
        self.eps = t.get("rms_norm_eps", 1e-6)
        self.stage = {}

    def lin(self, name, x):
        y = x @ self.w[name + ".weight"].T
        return self.r(y + self.w[name + ".bias"] if name + ".bias" in self.w else y)

    def layer_norm(self, name, x):
        d = x - x.mean(-1, keepdims=True)
        y = d / np.sqrt((d * d).mean(-1, keepdims=True) + F32(1e-6))
        return self.r(y * self.w[name + ".weight"] + self.w[name + ".bias"])

    def rms(self, name, x):
        y = self.r(x / np.sqrt((x * x).mean(-1, keepdims=True) + F32(self.eps)))
        return self.r(y * self.w[name + ".weight"])

    def gelu(self, x):
        return self.r(0.5 * x * (1 + erf(x / math.sqrt(2))))

    def attend(self, q, k, v, mask=None):  # (S, H, D), (T, Hkv, D)
        group = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        s = np.einsum("qhd,khd->hqk", q, k) * F32(q.shape[-1] ** -0.5)
        if mask is not None:
            s = np.where(mask[None], s, F32(-1e30))
        e = np.exp(s - s.max(-1, keepdims=True))
        return self.r(np.einsum("hqk,khd->qhd", self.r(e / e.sum(-1, keepdims=True)), v)).reshape(len(q), -1)

    def rope(self, x, pos):
        h = x.shape[-1] // 2
        a = (pos[:, None] / self.theta ** (np.arange(h) / h)).astype(F32)[:, None, :]
        c, s, x1, x2 = np.cos(a), np.sin(a), x[..., :h], x[..., h:]
        return self.r(np.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], -1))

    def tower(self, tap, prefix, x, heads):
        w = self.w
        kernel = w[prefix + "patch_embed.proj.weight"]
        size = kernel.shape[-1]
        c, height, width = x.shape
        rows = x.reshape(c, height // size, size, width // size, size).transpose(1, 3, 0, 2, 4).reshape(-1, c * size * size)
        e = self.r(rows @ kernel.reshape(len(kernel), -1).T + w[prefix + "patch_embed.proj.bias"])
        self.stage[tap + ".patch_embed"] = e
        extra = [w[prefix + t][0] for t in ("cls_token", "reg_token") if prefix + t in w]
        h = np.concatenate(extra + [self.r(e + w[prefix + "pos_embed"][0])])
        depth = 1 + max(int(n[len(prefix + "blocks."):].split(".")[0]) for n in w if n.startswith(prefix + "blocks."))
        for i in range(depth - 1):
            b = f"{prefix}blocks.{i}."
            scale = [w.get(f"{b}ls{j}.scale_factor", F32(1)) for j in (1, 2)]
            before = h
            qkv = self.lin(b + "attn.qkv", self.layer_norm(b + "norm1", h)).reshape(len(h), 3, heads, -1)
            a = self.lin(b + "attn.proj", self.attend(qkv[:, 0], qkv[:, 1], qkv[:, 2]))
            h = self.r(h + self.r(a * scale[0]))
            m = self.lin(b + "mlp.fc2", self.gelu(self.lin(b + "mlp.fc1", self.layer_norm(b + "norm2", h))))
            h = self.r(h + self.r(m * scale[1]))
            if i == 0:
                self.stage.update({tap + ".block0.in": before, tap + ".block0.attn": a, tap + ".block0.mlp": m,
                                   tap + ".block0.out": h})
        return h[sum(map(len, extra)):]

    def picture(self, image):
        size = self.p["input_sizes"][0][1]
        pil = Image.fromarray(image)
        if self.p["tvf_do_letterbox"]:
            w, h = pil.size
            side = max(w, h)
            x, y = int((side - w) / 2), int((side - h) / 2)
            padded = Image.new("RGB", (w + 2 * x, h + 2 * y), tuple(self.p["tvf_letterbox_fill"]))
            padded.paste(pil, (x, y))
            pil = padded
        if self.p["image_resize_strategy"] == "resize-naive":
            pil = pil.resize((size, size), Image.BICUBIC)
        else:
            w, h = pil.size
            wide = (int(size * w / h), size) if w >= h else (size, int(size * h / w))
            pil = pil.resize(wide, Image.BICUBIC)
            left, top = int(round((wide[0] - size) / 2)), int(round((wide[1] - size) / 2))
            pil = pil.crop((left, top, left + size, top + size))
        x = np.asarray(pil).transpose(2, 0, 1).astype(F32) / F32(255)
        return np.concatenate([(x - np.array(n["mean"], F32)[:, None, None]) / np.array(n["std"], F32)[:, None, None]
                               for n in self.p["tvf_normalize_params"]])

    def vision(self, pixels):
        """One frame's embeddings."""
        pixels = self.r(pixels)
        features, prefixes = [], ["vision_backbone.featurizer.", "vision_backbone.fused_featurizer."]
        for i, timm_id in enumerate(self.c["timm_model_ids"]):
            heads = self.c["tiny_timm_overrides"][timm_id]["num_heads"]
            tap = "dino" if "dino" in timm_id else "siglip"
            features.append(self.tower(tap, prefixes[i], pixels[3 * i:3 * i + 3], heads))
        x = np.concatenate(features, 1)
        self.stage["vision.features"] = x
        fused = len(features) == 2
        for i in (1, 2, 3)[:3 if fused else 2]:
            x = self.lin(f"projector.fc{i}", x)
            if i < (3 if fused else 2):
                x = self.gelu(x)
        return x

    def layer(self, i, h, pos, cache, mask):
        """One layer of the trunk; `cache` holds the keys and values before these rows, or None."""
        n, p = len(h), f"language_model.model.layers.{i}."
        y = self.rms(p + "input_layernorm", h)
        q = self.rope(self.lin(p + "self_attn.q_proj", y).reshape(n, self.heads, -1), pos)
        k = self.rope(self.lin(p + "self_attn.k_proj", y).reshape(n, self.kv_heads, -1), pos)
        v = self.lin(p + "self_attn.v_proj", y).reshape(n, self.kv_heads, -1)
        if cache is not None:
            k, v = np.concatenate([cache[0], k]), np.concatenate([cache[1], v])
        a = self.attend(q, k, v, mask(len(k)))
        h = self.r(h + self.lin(p + "self_attn.o_proj", a))
        y = self.rms(p + "post_attention_layernorm", h)
        g = self.lin(p + "mlp.gate_proj", y)
        g = self.r(self.r(g / (1 + np.exp(-g))) * self.lin(p + "mlp.up_proj", y))
        return self.r(h + self.lin(p + "mlp.down_proj", g)), (k, v)

    def embeddings(self):
        table = self.w["language_model.model.embed_tokens.weight"]
        tied = self.c["text_config"].get("tie_word_embeddings", False)
        return table, table if tied else self.w["language_model.lm_head.weight"]

    def run(self, image, ids, actions):
        """Greedy ids and their logits [actions, vocabulary]."""
        self.stage["pixel_values"] = self.picture(image)
        x = self.vision(self.stage["pixel_values"])
        self.stage["vision.projected"] = x
        table, head = self.embeddings()
        h = np.concatenate([table[ids[:1]], x, table[ids[1:]]])
        cache, pos0, out, logits = [None] * self.layers, 0, [], []
        for step in range(actions):
            n = len(h)
            pos = pos0 + np.arange(n)
            if step == 0:
                self.stage["lm.embeds"] = h
            for i in range(self.layers):
                h, cache[i] = self.layer(i, h, pos, cache[i], lambda keys: pos[:, None] >= np.arange(keys)[None])
                k, v = cache[i]
                if step == 0:
                    if i == 0:
                        self.stage["lm.layer0.out"] = h
                    self.stage[f"prefill.k.{i}"] = k.transpose(1, 0, 2)
                    self.stage[f"prefill.v.{i}"] = v.transpose(1, 0, 2)
            if step == 0:
                self.stage["lm.final_norm.in"] = h
            row = self.r(self.rms("language_model.model.norm", h[-1]) @ head.T)
            logits.append(row)
            out.append(int(row.argmax()))
            pos0 += n
            h = table[out[-1:]]
        return np.array(out), np.stack(logits)

    def ln(self, name, x):
        d = x - x.mean(-1, keepdims=True)
        y = d / np.sqrt((d * d).mean(-1, keepdims=True) + F32(1e-5))
        return self.r(y * self.w[name + ".weight"] + self.w[name + ".bias"])

    def run_oft(self, images, ids, state, chunk, dim):
        """The normalised chunk [chunk, dim] of OpenVLA-OFT; its ids and logits where it has no head."""
        pictures = [self.picture(image) for image in images]
        self.stage["pixel_values"] = np.concatenate(pictures)
        frames, stages = [], []
        for picture in pictures:
            frames.append(self.vision(picture))
            stages.append({k: v for k, v in self.stage.items() if k != "pixel_values"})
        self.stage.update({k: np.concatenate([s[k] for s in stages]) for k in stages[0]})
        x = np.concatenate(frames)
        self.stage["vision.projected"] = x
        table, head = self.embeddings()
        parts = [table[ids[:1]], x]
        if state is not None:
            s = self.r(np.asarray(state, F32))[None]
            s = self.lin("proprio_projector.fc2", self.gelu(self.lin("proprio_projector.fc1", s)))
            self.stage["proprio.projected"] = s[0]
            parts.append(s)
        parts += [table[ids[1:]], np.zeros((chunk * dim, table.shape[1]), F32), table[2:3]]
        h = np.concatenate(parts)
        self.stage["lm.embeds"] = h
        for i in range(self.layers):
            h, _ = self.layer(i, h, np.arange(len(h)), None, lambda keys: None)
            if i == 0:
                self.stage["lm.layer0.out"] = h
        h = self.rms("language_model.model.norm", h)
        self.stage["lm.final_norm"] = h
        h = h[len(h) - 2 - chunk * dim:len(h) - 2]
        self.stage["actions_hidden_states"] = h
        p = "action_head.model."
        if p + "fc1.weight" not in self.w:
            logits = self.r(h @ head.T)
            return None, logits.argmax(-1), logits
        y = np.maximum(self.lin(p + "fc1", self.ln(p + "layer_norm1", h.reshape(chunk, -1))), 0)
        for i in range(sum(1 for n in self.w if n.startswith(p) and n.endswith(".ffn.1.weight"))):
            b = f"{p}mlp_resnet_blocks.{i}.ffn."
            y = self.r(np.maximum(self.lin(b + "1", self.ln(b + "0", y)), 0) + y)
        return self.lin(p + "fc2", self.ln(p + "layer_norm2", y)), None, None


# ------------------------------------------------------------------------------------------ writing
def tensors_of(v, vocab):
    """Shapes of a whole checkpoint, the parts that are never used included."""
    s, t = {}, v["text"]
    width = 0
    for prefix, (dim, heads, depth, mlp, registers), dino in zip(
            ["vision_backbone.featurizer.", "vision_backbone.fused_featurizer."], v["towers"].values(),
            [name == DINO for name in v["towers"]]):
        width += dim
        if dino:
            s[prefix + "cls_token"] = (1, 1, dim)
            s[prefix + "reg_token"] = (1, registers, dim)
        s[prefix + "pos_embed"] = (1, (v["image"] // 14) ** 2, dim)
        s[prefix + "patch_embed.proj.weight"], s[prefix + "patch_embed.proj.bias"] = (dim, 3, 14, 14), (dim,)
        s[prefix + "norm.weight"] = s[prefix + "norm.bias"] = (dim,)
        for i in range(depth):
            b = f"{prefix}blocks.{i}."
            for name, n, k in (("attn.qkv", 3 * dim, dim), ("attn.proj", dim, dim), ("mlp.fc1", mlp, dim), ("mlp.fc2", dim, mlp)):
                s[b + name + ".weight"], s[b + name + ".bias"] = (n, k), (n,)
            for name in ("norm1", "norm2"):
                s[b + name + ".weight"] = s[b + name + ".bias"] = (dim,)
            if dino:
                s[b + "ls1.scale_factor"] = s[b + "ls2.scale_factor"] = (dim,)
    hidden = t["hidden_size"]
    sizes = [width, 4 * width, hidden, hidden] if len(v["towers"]) == 2 else [width, hidden, hidden]
    for i in range(1, len(sizes)):
        s[f"projector.fc{i}.weight"], s[f"projector.fc{i}.bias"] = (sizes[i], sizes[i - 1]), (sizes[i],)
    heads = t["num_attention_heads"]
    dim = t.get("head_dim", hidden // heads)
    kv, inter = t.get("num_key_value_heads", heads) * dim, t["intermediate_size"]
    p = "language_model.model."
    s[p + "embed_tokens.weight"], s[p + "norm.weight"] = (vocab, hidden), (hidden,)
    for i in range(t["num_hidden_layers"]):
        for name, n, k in (("self_attn.q_proj", heads * dim, hidden), ("self_attn.k_proj", kv, hidden),
                           ("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, heads * dim),
                           ("mlp.gate_proj", inter, hidden), ("mlp.up_proj", inter, hidden), ("mlp.down_proj", hidden, inter)):
            s[f"{p}layers.{i}.{name}.weight"] = (n, k)
        s[f"{p}layers.{i}.input_layernorm.weight"] = s[f"{p}layers.{i}.post_attention_layernorm.weight"] = (hidden,)
    if not t.get("tie_word_embeddings"):
        s["language_model.lm_head.weight"] = (vocab, hidden)
    return s


def heads_of(v, name):
    """Weights of what OpenVLA-OFT has beside the checkpoint."""
    s, hidden = {}, v["text"]["hidden_size"]

    def linear(key, n, k):
        s[key + ".weight"], s[key + ".bias"] = (n, k), (n,)

    if v["state"]:
        linear("proprio_projector.fc1", hidden, v["state"])
        linear("proprio_projector.fc2", hidden, hidden)
    if v["head"]:
        width, blocks = v["head"]
        dim = next(iter(v["dims"].values()))
        p = "action_head.model."
        s[p + "layer_norm1.weight"] = s[p + "layer_norm1.bias"] = (dim * hidden,)
        linear(p + "fc1", width, dim * hidden)
        for i in range(blocks):
            b = f"{p}mlp_resnet_blocks.{i}.ffn."
            s[b + "0.weight"] = s[b + "0.bias"] = (width,)
            linear(b + "1", width, width)
        s[p + "layer_norm2.weight"] = s[p + "layer_norm2.bias"] = (width,)
        linear(p + "fc2", dim, width)
    out = {}
    for key, shape in s.items():
        norm = "layer_norm" in key or key.endswith(("ffn.0.weight", "ffn.0.bias"))
        std, mean = 0.4 / math.sqrt(max(1, math.prod(shape[1:]))), 0.0
        if key.endswith(".bias"):
            std = 0.1
        elif norm:
            std, mean = 0.1, 1.0
        out[key] = bf16(normal(name, key, shape, std, mean))
    return out


def weights_of(v, name):
    out, tied = {}, v["text"].get("tie_word_embeddings")
    for key, shape in tensors_of(v, v["vocab"]).items():
        leaf = key.rsplit(".", 1)[-1]
        std, mean = 1 / math.sqrt(max(1, math.prod(shape[1:]))), 0.0
        if leaf == "scale_factor":
            std, mean = 0.1, 0.5
        elif leaf == "bias":
            std = 0.1
        elif "norm" in key:
            std, mean = 0.1, 1.0
        elif leaf in ("cls_token", "reg_token", "pos_embed") or "embed_tokens" in key:
            std = 0.5
        out[key] = bf16(normal(name, key, shape, std, mean))
    # Greedy decoding lands on action ids, with useful margins.
    head = out["language_model.model.embed_tokens.weight" if tied else "language_model.lm_head.weight"]
    end = v["vocab"] - v["pad"]
    if not tied:
        head[:] = bf16(head * F32(0.3))
    head[end - v["bins"]:end] = bf16(normal(name, "actions", (v["bins"], head.shape[1]), 1.2))
    return out


def test_image(height, width, seed):
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    u, w = x / (width - 1), y / (height - 1)
    image = np.stack([255 * u, 255 * w, 127.5 * (1 + np.sin(9 * u + 14 * w * w))], -1)
    image[(u - 0.4) ** 2 + (w - 0.6) ** 2 < 0.05] = (230, 40, 25)
    noise = normal(seed, "noise", (height, width, 3), 8)
    return np.clip(np.rint(image + noise), 0, 255).astype(np.uint8)


def write_checkpoint(name, out):
    v = VARIANTS[name]
    folder = out / "checkpoint"
    shutil.rmtree(out, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(TOKENIZER / file, folder)
    statistics = {}
    for key, dims in v["dims"].items():
        low = np.round(normal(name, key + "low", (dims,), 0.4, -1).astype(float), 6)
        below, above = v.get("bounds", ("q01", "q99"))
        statistics[key] = {"action": {below: low.tolist(), above: (low + 1.75).tolist(),
                                      "mask": [i % 3 != 2 for i in range(dims)]}}
        if v.get("state"):
            low = np.round(normal(name, key + "state", (v["state"],), 0.4, -1).astype(float), 6)
            statistics[key]["proprio"] = {below: low.tolist(), above: (low + 1.25).tolist(),
                                          "mask": [i % 5 != 4 for i in range(v["state"])]}
    config = dict(
        model_type="openvla", arch_specifier="no-align+gelu-mlp" if len(v["towers"]) == 1 else "no-align+fused-gelu-mlp",
        image_resize_strategy=v["strategy"], image_sizes=[v["image"]] * len(v["towers"]), llm_backbone_id=v["llm"],
        llm_max_length=2048, n_action_bins=v["bins"], pad_to_multiple_of=v["pad"], norm_stats=statistics,
        text_config=dict(model_type="llama", vocab_size=v["vocab"], **v["text"]), timm_model_ids=list(v["towers"]),
        timm_override_act_layers=[None] * len(v["towers"]), use_fused_vision_backbone=len(v["towers"]) == 2,
        tiny_timm_overrides={k: dict(embed_dim=t[0], num_heads=t[1], depth=t[2]) for k, t in v["towers"].items()})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    size = [v["image"]] * 2
    fill = [int(255 * m) for m in MEANS[next(iter(v["towers"]))]]
    processor = dict(
        image_processor_type="PrismaticImageProcessor", image_resize_strategy=v["strategy"],
        input_sizes=[[3] + size for _ in v["towers"]], interpolations=["bicubic"] * len(v["towers"]),
        means=[MEANS[k] for k in v["towers"]], stds=[STDS[k] for k in v["towers"]],
        tvf_crop_params=[dict(output_size=size) for _ in v["towers"]],
        tvf_do_letterbox=v["strategy"] == "letterbox", tvf_letterbox_fill=fill if v["strategy"] == "letterbox" else None,
        tvf_normalize_params=[dict(inplace=False, mean=MEANS[k], std=STDS[k]) for k in v["towers"]],
        tvf_resize_params=[dict(antialias=True, interpolation=3, max_size=None,
                                size=size if v["strategy"] == "resize-naive" else v["image"]) for _ in v["towers"]],
        use_fused_vision_backbone=len(v["towers"]) == 2)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))
    weights = weights_of(v, name)
    write_safetensors(folder / "model.safetensors", weights, dict.fromkeys(weights, v["dtype"]) if v["dtype"] == "BF16" else {})
    return v, folder, statistics, config, processor, weights


def write_golden(out, golden, **info):
    write_safetensors(out / "golden.safetensors", golden, {})
    info.update(note="computed by make_variant.py in numpy; random weights",
                tensors={k: [str(x.dtype), list(x.shape)] for k, x in golden.items()})
    (out / "golden.json").write_text(json.dumps(info, indent=1))
    print(f"{out}: {sum(f.stat().st_size for f in out.rglob('*') if f.is_file()) / 1e6:.2f} MB")


def prompt_ids(v, folder):
    """As the tokenizer gives them, and with the empty token that every prompt ends with."""
    from tokenizers import Tokenizer
    around = ("A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
              "and polite answers to the user's questions. USER: What action should the robot take to {}? ASSISTANT:"
              if v["llm"].startswith("vicuna") else "In: What action should the robot take to {}?\nOut:")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw = tokenizer.encode(around.format(v["instruction"].lower())).ids
    empty = tokenizer.token_to_id("\u2581")
    return raw, raw + ([] if raw[-1] == empty else [empty])


def bins_of(v, ids):
    """Indices of the bins of ids, and all centres."""
    edges = np.linspace(-1, 1, v["bins"])
    centres = (edges[:-1] + edges[1:]) / 2
    return np.clip(v["vocab"] - v["pad"] - ids - 1, 0, len(centres) - 1), centres


def write_oft_variant(name, out):
    v, folder, statistics, config, processor, weights = write_checkpoint(name, out)
    heads = heads_of(v, name)
    if heads:
        write_safetensors(folder / "heads.safetensors", heads, dict.fromkeys(heads, "BF16"))
    raw, ids = prompt_ids(v, folder)
    images = [test_image(*size, f"{name}{i}") for i, size in enumerate(v["pictures"])]
    key, dim = next(iter(v["dims"].items()))
    below, above = v["bounds"]
    golden = {f"image{i}_u8": image for i, image in enumerate(images)}
    state = None
    if v["state"]:
        s = statistics[key]["proprio"]
        low, high = np.array(s[below]), np.array(s[above])
        robot = (low + (high - low) * np.linspace(-0.1, 1.1, len(low))).astype(F32).astype(float)
        state = np.clip(np.where(s["mask"], 2 * (robot - low) / (high - low + 1e-8) - 1, robot), -1, 1)
        golden.update({"proprio_raw": robot, "proprio_normalized": state})
    runs = {}
    for narrow in (False, True):
        reference = Reference(config, processor, {**weights, **heads}, narrow)
        normalized, tokens, logits = reference.run_oft(images, ids, state, v["chunk"], dim)
        if normalized is None:
            index, centres = bins_of(v, tokens)
            normalized = centres[index].reshape(v["chunk"], dim)
        runs[narrow] = normalized, tokens
        if not narrow:
            golden.update({k: np.asarray(x, F32)[None] for k, x in reference.stage.items()})
            if tokens is not None:
                top = np.sort(logits, -1)[:, -2:]
                print("smallest margin", (top[:, 1] - top[:, 0]).min())
    if runs[False][1] is not None:
        assert (runs[False][1] == runs[True][1]).all(), "an id depends on rounding: choose another seed"
        golden["generated_ids"] = runs[False][1]
    s = statistics[key]["action"]
    low, high = np.array(s[below]), np.array(s[above])
    chunk = np.asarray(runs[False][0], float)
    golden.update({
        "input_ids_raw": np.array([raw]), "normalized_actions": runs[False][0],
        "bf16.normalized_actions": runs[True][0],
        "actions": np.where(s["mask"], 0.5 * (chunk + 1) * (high - low + 1e-8) + low, chunk)})
    write_golden(out, golden, model="openvla-oft", instruction=v["instruction"], num_images=len(images), chunk=v["chunk"],
                 platform=v.get("platform") or {"min": "aloha", "q01": "bridge"}[below])


def write_variant(name, out):
    if "chunk" in VARIANTS[name]:
        write_oft_variant(name, out)
        return
    v, folder, statistics, config, processor, weights = write_checkpoint(name, out)
    image = test_image(*v["picture"], name)
    raw, ids = prompt_ids(v, folder)
    longest = max(v["dims"].values())
    first = next(iter(v["dims"]))
    count = v["dims"][first]
    reference = Reference(config, processor, weights)
    tokens, logits = reference.run(image, ids, longest)
    narrow_tokens, narrow = Reference(config, processor, weights, narrow=True).run(image, ids, longest)
    end = v["vocab"] - v["pad"]
    centres = bins_of(v, tokens)[1]

    def bins(t):
        return bins_of(v, t)[0]

    def act(key, t):
        s = statistics[key]["action"]
        low, high, c = np.array(s["q01"]), np.array(s["q99"]), centres[bins(t[:len(s["q01"])])]
        return np.where(s["mask"], 0.5 * (c + 1) * (high - low) + low, c)

    top = np.sort(logits[:count], -1)[:, -2:]
    golden = {k: np.asarray(x, F32)[None] for k, x in reference.stage.items()}
    golden.update({
        "image_u8": image, "input_ids_raw": np.array([raw]), "input_ids": np.array([ids]),
        "lm.logits.prefill_last": logits[0], "lm.logits.action_range": logits[:count, end - v["bins"]:],
        "generated_ids": tokens[:count], "logit_margin": top[:, 1] - top[:, 0], "bin_index": bins(tokens[:count]),
        "bin_centers": centres, "normalized_actions": centres[bins(tokens[:count])],
        "bf16.logits.prefill_last": narrow[0], f"bf16.actions.{first}": act(first, narrow_tokens)})
    for key in v["dims"]:
        golden[f"actions.{key}"] = act(key, tokens)
    margin = float((top[:, 1] - top[:, 0]).min())
    distance = float(np.abs(narrow[0] - logits[0]).max())
    write_golden(out, golden, model="openvla", instruction=v["instruction"], strategy=v["strategy"],
                 generated_ids=tokens.tolist(), min_logit_margin=margin, bf16_vs_fp32_last_logits_max_abs=distance)
    print(f"  ids {tokens.tolist()}, bf16 {narrow_tokens.tolist()}, margin {margin:.3f}, bf16 distance {distance:.3f}, "
          f"action ids {end - v['bins']}..{end - 1}")


def check(folder):
    weights = {}
    for file in (folder / "checkpoint").glob("model*.safetensors"):
        weights.update({k: np.asarray(x, F32) for k, x in read_safetensors(file).items()})
    config = json.loads((folder / "checkpoint/config.json").read_text())
    processor = json.loads((folder / "checkpoint/preprocessor_config.json").read_text())
    golden = read_safetensors(folder / "golden.safetensors")
    heads = folder / "checkpoint/heads.safetensors"
    if heads.exists():
        weights.update({k: np.asarray(x, F32) for k, x in read_safetensors(heads).items()})
    if "image0_u8" in golden:
        check_oft(golden, config, processor, weights)
        return
    reference = Reference(config, processor, weights)
    ids = golden["input_ids"][0].tolist()
    tokens, logits = reference.run(golden["image_u8"], ids, len(golden["generated_ids"]))
    reference.stage["lm.logits.prefill_last"] = logits[0]
    compare(reference.stage, golden)
    print("  ids equal:", tokens.tolist() == golden["generated_ids"].tolist())


def check_oft(golden, config, processor, weights):
    images = [golden[k] for k in sorted(golden) if k.startswith("image")]
    ids = golden["input_ids_raw"][0].tolist() + [29871]
    chunk, dim = golden["normalized_actions"].shape
    for narrow in (False, True):
        reference = Reference(config, processor, weights, narrow)
        reference.stage["normalized_actions"], _, _ = reference.run_oft(
            images, ids, golden["proprio_normalized"], chunk, dim)
        print("bf16" if narrow else "f32")
        compare(reference.stage, golden)


def compare(stage, golden):
    for name, x in sorted(stage.items()):
        if name in golden:
            y = golden[name].reshape(np.shape(x))
            print(f"  {name:24s} {np.abs(x - y).max():.2e} of {np.abs(y).max():.2f}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if sys.argv[1] == "check":
        check(Path(sys.argv[2]))
    else:
        if sys.argv[1].startswith("oft_random"):
            VARIANTS[sys.argv[1]] = random_oft(sys.argv[1])
        for variant in VARIANTS if sys.argv[1] == "all" else [sys.argv[1]]:
            write_variant(variant, Path(sys.argv[2]) / variant)
