"""What may differ between checkpoints of a family, and between requests to them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any

INSTRUCTIONS = (
    "pick up the red block and put it in the bowl",
    "",
    " ",
    "x",
    "  two  spaces, Pick_up the_ BLOCK!  ",
    "a line\nand another one\n",
    "\tcaf\u00e9 \u4f60\u597d \U0001f916 e\u0301 na\u00efve \u2581 \u200b",
    "12 345 6.78 -9, then (stop)",
    "ends with a newline\n",
    "windows\r\nline",
)
LONG = "put the small wooden bowl on top of the black plate, then open the left drawer, " * 6
# Texts of added tokens of the families' tokenizers.
SPECIAL = "look at <image> <loc0001> <eos></s> <end_of_utterance><|im_end|> and <bos> stop"


@dataclass
class Variant:
    """Common to all families. Cameras: name, and the size of its frame; None: it is missing."""

    name: str
    instruction: str = INSTRUCTIONS[0]
    cameras: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    image: int = 56
    patch: int = 14
    empty_cameras: int = 0
    state: int = 7
    action: int = 6
    max_state: int = 32
    max_action: int = 32
    still: int = 0  # dimensions of the state that never move
    state_mode: str = "MEAN_STD"
    action_mode: str = "MEAN_STD"
    chunk: int = 10
    served: int = 10  # n_action_steps
    steps: int = 10
    text_tokens: int = 48
    vision: tuple[int, int, int, int] = (48, 3, 96, 3)  # width, heads, mlp, layers
    # width, heads, kv heads, head size, mlp, layers
    text: tuple[int, int, int, int, int, int] = (96, 6, 2, 16, 256, 6)
    min_period: float = 4e-3
    max_period: float = 4.0
    layout: str = "processors"  # "buffers": statistics among the weights
    bf16_file: bool = False


@dataclass
class SmolVla(Variant):
    vlm_layers: int = 4  # num_vlm_layers; 0: all
    every: int = 2  # self_attn_every_n_layers
    attention_mode: str = "cross_attn"
    expert: float = 0.75  # of the VLM's width
    shuffle: int = 4
    epsilon: float = 1e-5
    padding: str = "max_length"  # pad_language_to
    around: bool = False  # add_image_special_tokens
    prefix_length: int = -1
    vlm: str = "vlm"  # "hub": a hub id is named, the files are in "vlm"
    aloha: bool = False  # adapt_to_pi_aloha
    positions: int = 0  # side of the VLM's own frames, pixels; 0: `image`


@dataclass
class Pi(Variant):
    kind: str = "pi0"
    expert: tuple[int, int] = (32, 64)  # width, mlp
    relative: bool = False
    implicit: bool = False  # heads as published, no file says so
    names: str = "model"  # "bare": without the outermost prefix; "tied": no embed_tokens
    max_tokens: int = 24  # of pi0-FAST: max_decoding_steps
    fast: tuple[int, float] = (512, 10)  # vocabulary and scale of the action tokenizer
    skipped: int = 8  # fast_skip_tokens
    stop: float = 0  # how much larger the row of "|" in the head is


def _frame(r: random.Random, target: int) -> tuple[int, int]:
    return r.choice(
        (
            (target, target),
            (r.randint(target // 3, target - 1), r.randint(target // 3, target - 1)),
            (r.randint(target + 1, 3 * target), r.randint(target // 2, 2 * target)),
            (r.randint(target // 2, 2 * target), r.randint(target + 1, 3 * target)),
            (target, r.randint(target // 2, 2 * target)),
            (2 * target, 2 * target),
        )
    )


def _common(r: random.Random, name: str, patches: int, patch: int) -> dict[str, Any]:
    image = patches * patch
    cameras: dict[str, tuple[int, int] | None] = {}
    for camera in r.sample(
        ("top", "wrist", "observation.image", "camera1", "z_left"), r.randint(1, 3)
    ):
        cameras[camera] = _frame(r, image)
    if len(cameras) > 1 and r.random() < 0.4:
        cameras[r.choice(list(cameras))] = None
    state, action = r.choice((1, 2, 7, 8, 14, 32)), r.choice((1, 6, 7, 14, 32))
    chunk = r.choice((1, 2, 5, 10, 17, 33))
    heads, head = r.choice((2, 3, 4)), r.choice((12, 14, 16, 18))
    return {
        "name": name,
        "instruction": r.choice(INSTRUCTIONS),
        "cameras": cameras,
        "image": image,
        "patch": patch,
        "empty_cameras": r.choice((0, 0, 1, 2)),
        "state": state,
        "action": action,
        "max_state": max(state, r.choice((14, 20, 32, 40))),
        "max_action": max(action, r.choice((9, 14, 32, 37))),
        "still": r.choice((0, 0, 1)) if state > 1 else 0,
        "state_mode": r.choice(
            ("MEAN_STD", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY")
        ),
        "action_mode": r.choice(
            ("MEAN_STD", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY")
        ),
        "chunk": chunk,
        "served": r.choice((chunk, chunk, r.randint(1, chunk))),
        "steps": r.choice((1, 2, 4, 10, 13)),
        "text_tokens": r.choice((40, 48, 61)),
        "vision": (heads * head, heads, r.choice((31, 50, 96, 131)), r.choice((1, 2, 3))),
        "min_period": r.choice((4e-3, 4e-3, 1e-2)),
        "max_period": r.choice((4.0, 4.0, 2.5)),
        "bf16_file": r.random() < 0.3,
    }


def random_smolvla(seed: int) -> SmolVla:
    r = random.Random(f"smolvla {seed}")
    shuffle = r.choice((1, 2, 3, 4))
    common = _common(r, f"random{seed}", shuffle * r.choice((1, 2, 3)), r.choice((8, 14, 16)))
    heads, kv = r.choice(((2, 1), (3, 1), (4, 2), (6, 2), (6, 3), (2, 2), (3, 3), (9, 3)))
    head, layers = r.choice((6, 8, 10, 16, 18)), r.choice((2, 3, 4, 6))
    # Widths are multiples of the heads; the expert's is even.
    width = heads * r.randint(40 // heads + 1, 120 // heads)
    expert = 2 * heads * r.randint(12 // heads + 1, max(12 // heads + 1, width // 2 // heads))
    mode = "self_attn" if r.random() < 0.15 else "cross_attn"
    out = SmolVla(
        **common,
        text=(width, heads, kv, head, r.choice((50, 90, 131, 256)), layers),
        vlm_layers=r.choice((0, layers, max(1, layers - 1), max(1, layers - 2))),
        every=r.choice((2, 2, 1, 3, 4)),
        attention_mode=mode,
        expert=(expert + 0.25) / width,
        shuffle=shuffle,
        epsilon=r.choice((1e-5, 1e-6)),
        padding=r.choice(("max_length", "longest")),
        around=r.random() < 0.3,
        prefix_length=r.choice((-1, -1, 0, 10, 120, 500)),
        vlm=r.choice(("vlm", "hub")),
    )
    if {out.state_mode, out.action_mode} <= {
        "MEAN_STD",
        "MIN_MAX",
        "IDENTITY",
    } and r.random() < 0.5:
        out.layout = "buffers"
    return out


def random_pi(kind: str, seed: int) -> Pi:
    r = random.Random(f"{kind} {seed}")
    common = _common(r, f"random{seed}", r.choice((1, 2, 3, 4)), r.choice((8, 14, 16)))
    common["text_tokens"] = r.choice((150, 200))
    common["bf16_file"] = r.random() < 0.3
    implicit = r.random() < 0.25
    heads, kv = (8, 1) if implicit else r.choice(((8, 1), (3, 1), (4, 2), (6, 3), (2, 2)))
    if implicit:
        common["vision"] = (16 * r.choice((2, 3)), 16, *common["vision"][2:])
    if kind == "pi05":
        common["state_mode"] = r.choice(("QUANTILES", "QUANTILES", common["state_mode"]))
        common["action_mode"] = r.choice(("QUANTILES", "QUANTILES", common["action_mode"]))
    if kind != "pi0":
        common["max_state"] = 32
    return Pi(
        **common,
        kind=kind,
        text=(
            r.choice((36, 44, 64, 70)),
            heads,
            kv,
            r.choice((6, 8, 10, 16)),
            r.choice((50, 90, 128)),
            r.choice((1, 2, 3)),
        ),
        expert=(r.choice((26, 32, 44, 48)), r.choice((33, 44, 64))),
        implicit=implicit,
        relative=kind != "pi0_fast" and common["state"] >= common["action"] and r.random() < 0.4,
        names=r.choice(("model", "model", "bare", "tied" if kind != "pi0_fast" else "model")),
        max_tokens=r.choice((6, 24, 40)),
        fast=(r.choice((300, 512)), r.choice((10, 7.5))),
        skipped=r.choice((0, 8, 20)),
        stop=r.choice((0, 0, 0.6)),
    )


def find(kind: str, name: str) -> Variant:
    if name.startswith("random"):
        seed = int(name.removeprefix("random"))
        return random_smolvla(seed) if kind == "smolvla" else random_pi(kind, seed)
    known = {v.name: v for v in NAMED[kind]}
    if name not in known:
        raise SystemExit(f"{kind} has no variant {name}; there are: {', '.join(known)}, randomN")
    return known[name]


def settings(variant: Variant) -> dict[str, Any]:
    return {f.name: getattr(variant, f.name) for f in fields(variant)}


NAMED: dict[str, list[Variant]] = {}


_SMALL: dict[str, Any] = {
    "cameras": {"top": (41, 67), "wrist": (80, 33)},
    "image": 48,
    "patch": 8,
    "vision": (36, 3, 50, 2),
    "text": (60, 6, 3, 10, 90, 4),
    "shuffle": 3,
    "expert": 0.6,
    "chunk": 5,
    "served": 5,
    "steps": 4,
}
_RANGES: dict[str, Any] = {"state_mode": "QUANTILES", "action_mode": "MIN_MAX"}
NAMED["smolvla"] = [
    # Much at once. The first is in ../data/variants.
    SmolVla(
        "mixed",
        instruction=f"{LONG} {SPECIAL}",
        cameras={"top": (41, 67), "left": None, "observation.image": (80, 33)},
        image=32,
        patch=8,
        positions=64,
        vision=(30, 3, 50, 2),
        text=(90, 6, 3, 10, 90, 4),
        vlm_layers=3,
        every=3,
        expert=0.4,
        shuffle=2,
        empty_cameras=2,
        around=True,
        padding="longest",
        prefix_length=200,
        state=16,
        action=15,
        aloha=True,
        max_state=17,
        max_action=16,
        chunk=5,
        served=4,
        steps=3,
        max_period=2.5,
        bf16_file=True,
        vlm="hub",
        **_RANGES,
    ),
    SmolVla("long", instruction=LONG, **_SMALL),
    SmolVla("longest_long", instruction=LONG, padding="longest", around=True, **_SMALL),
    SmolVla("special", instruction=SPECIAL, **_SMALL),
    SmolVla("half", positions=96, **_SMALL),
    SmolVla("twothirds", positions=72, around=True, prefix_length=200, **_SMALL),
    SmolVla("larger", positions=24, **_SMALL),
    SmolVla("aloha", aloha=True, state=14, action=14, **_SMALL),
    SmolVla("aloha_range", aloha=True, state=16, action=15, **_RANGES, **_SMALL),
    SmolVla("degenerate", still=7, state_mode="MIN_MAX", **_SMALL),
    SmolVla(
        "three", **_SMALL | {"cameras": {"a": (48, 48), "b": None, "c": (7, 200)}}, empty_cameras=3
    ),
]

_PI: dict[str, Any] = {
    "cameras": {"base_0_rgb": (41, 67), "left_wrist_0_rgb": None, "right_wrist_0_rgb": (80, 33)},
    "image": 32,
    "patch": 8,
    "vision": (30, 3, 50, 2),
    "text": (44, 6, 3, 10, 70, 2),
    "expert": (26, 44),
    "chunk": 5,
    "served": 4,
    "steps": 3,
    "text_tokens": 200,
}
_SPACES = "\u00a0\x1d Task_\n\u3000 caf\u00e9 a\u2003b \u2003\x1f\n"
NAMED["pi0"] = [
    Pi(
        "mixed",
        instruction=SPECIAL,
        state=9,
        still=1,
        state_mode="MIN_MAX",
        empty_cameras=1,
        max_state=11,
        max_action=8,
        layout="buffers",
        names="bare",
        bf16_file=True,
        **_PI,
    )
]
NAMED["pi05"] = [
    Pi(
        "mixed",
        kind="pi05",
        instruction=_SPACES,
        state=8,
        action_mode="QUANTILES",
        state_mode="QUANTILE10",
        relative=True,
        implicit=True,
        names="tied",
        bf16_file=True,
        **_PI | {"text": (44, 8, 1, 6, 70, 2), "vision": (32, 16, 50, 2)},
    )
]
NAMED["pi0_fast"] = [
    Pi(
        "mixed",
        kind="pi0_fast",
        instruction=LONG,
        state=14,
        **_RANGES,
        fast=(300, 7.5),
        skipped=0,
        stop=0.5,
        bf16_file=True,
        **_PI | {"text_tokens": 100},
    )
]
for _kind, _named in NAMED.items():
    if _kind == "smolvla":
        continue
    _named += [
        Pi("long", kind=_kind, instruction=LONG * 3, **_PI | {"text_tokens": 90}),
        Pi("special", kind=_kind, instruction=SPECIAL, **_PI),
        Pi("spaces", kind=_kind, instruction=_SPACES, **_PI),
        Pi("degenerate", kind=_kind, still=7, state_mode="MIN_MAX", **_PI),
        Pi("extremes", kind=_kind, state=32, action=32, state_mode="QUANTILE10", **_PI),
    ]
