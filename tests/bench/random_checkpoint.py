"""Writes a checkpoint folder of a published model's full size with random weights, for timing only.

    python tests/bench/random_checkpoint.py FAMILY OUT [--seed N]

The folder has the layout and the tensor names of the published one, so the server and the library that published it
both load it. Tokenizers, processors and the text of config.json are those of the tiny folders in tests/golden/data.
Tensors are written one by one: memory stays small however large the model is. Needs numpy.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "data"
# Values of all tensors are cut from one block. Its length is prime, so no two rows of a matrix are the same.
BLOCK = 4_194_301
WIDTHS = {"BF16": 2, "F32": 4}
SHARD_BYTES = 7_000_000_000

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: what to call it and how its values are spread."""

    name: str
    shape: Shape
    std: float
    mean: float = 0.0
    dtype: str = "BF16"

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * WIDTHS[self.dtype]


def matrix(name: str, *shape: int, dtype: str = "BF16") -> Tensor:
    """A weight that keeps the scale of what it multiplies: inputs are all dimensions but the first."""
    return Tensor(name, shape, 1 / math.sqrt(math.prod(shape[1:])), dtype=dtype)


def gain(name: str, width: int, mean: float = 1.0) -> Tensor:
    """The weight of a norm."""
    return Tensor(name, (width,), 0.1, mean)


def linear(name: str, rows: int, columns: int, dtype: str = "BF16") -> Iterator[Tensor]:
    """Weight and bias."""
    yield matrix(f"{name}.weight", rows, columns, dtype=dtype)
    yield Tensor(f"{name}.bias", (rows,), 0.02, dtype=dtype)


def layer_norm(name: str, width: int) -> Iterator[Tensor]:
    """Weight and bias."""
    yield gain(f"{name}.weight", width)
    yield Tensor(f"{name}.bias", (width,), 0.02)


@functools.lru_cache(maxsize=1)
def normals(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The block that all values are cut from, of standard deviation 1."""
    return np.random.default_rng(seed).standard_normal(BLOCK, dtype=np.float32)


@functools.lru_cache(maxsize=8)
def block(seed: int, std: float, mean: float, dtype: str) -> memoryview:
    """The block scaled, as bytes of the file; BF16 is rounded to even."""
    values = normals(seed) * np.float32(std) + np.float32(mean)
    if dtype == "F32":
        return values.astype("<f4").data.cast("B")
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2").data.cast("B")


def write_values(file: BinaryIO, tensor: Tensor, seed: int) -> None:
    """The tensor's values, from a place of the block that its name gives."""
    data = block(seed, tensor.std, tensor.mean, tensor.dtype)
    at = zlib.crc32(tensor.name.encode()) % BLOCK * WIDTHS[tensor.dtype]
    left = tensor.bytes
    while left:
        piece = data[at : at + left]
        file.write(piece)
        left -= len(piece)
        at = 0


def write_safetensors(path: Path, tensors: Sequence[Tensor], seed: int) -> None:
    """One safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            write_values(file, tensor, seed)


def write_sharded(out: Path, tensors: Sequence[Tensor], seed: int) -> None:
    """Several safetensors files and their index."""
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    where = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        write_safetensors(out / name, shard, seed)
        where.update({tensor.name: name for tensor in shard})
    index = {"metadata": {"total_size": sum(t.bytes for t in tensors)}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def copy_but_weights(family: str, out: Path) -> None:
    """The tiny folder's files that do not depend on the sizes, and those that are edited after."""

    def skipped(_folder: str, names: list[str]) -> set[str]:
        return {n for n in names if n.startswith("model") or n == "tiny_dims.json"}

    shutil.copytree(GOLDEN / family / "checkpoint", out, ignore=skipped)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites a JSON object."""
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content, indent=2))


def write_statistics(path: Path, dims: dict[str, int]) -> None:
    """Statistics of a lerobot normaliser, for each feature of `dims` values."""
    spread = {"mean": 0.0, "std": 0.5, "min": -1.5, "max": 1.5, "q01": -1.0, "q99": 1.0}
    write_safetensors(
        path,
        [
            Tensor(f"{feature}.{key}", (size,), 0.0, value, "F32")
            for feature, size in dims.items()
            for key, value in spread.items()
        ],
        seed=0,
    )


def write_lerobot_files(out: Path, side: int, state: int, action: int, **config: Any) -> None:
    """Frames of `side` pixels, sizes of state and action, and `config`, in every file that repeats them."""
    shapes = {"VISUAL": [3, side, side], "STATE": [state], "ACTION": [action]}

    def shape(features: dict[str, Any]) -> None:
        for feature in features.values():
            feature["shape"] = shapes[feature["type"]]

    def policy(content: dict[str, Any]) -> None:
        content.update(config)
        # No release of lerobot for Python 3.11 knows this key.
        content.pop("pretrained_revision", None)
        content["input_features"].pop("observation.images.empty_camera_0", None)
        content["empty_cameras"] = 0
        shape(content["input_features"])
        shape(content["output_features"])

    def processor(content: dict[str, Any]) -> None:
        for step in content["steps"]:
            features = step["config"].get("features", {})
            features.pop("observation.images.empty_camera_0", None)
            shape(features)

    edit_json(out / "config.json", policy)
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        edit_json(out / name, processor)
    for path in out.glob("policy_*.safetensors"):
        write_statistics(path, {"observation.state": state, "action": action})


def siglip(
    prefix: str, width: int, depth: int, mlp: int, patch: int, places: int
) -> Iterator[Tensor]:
    """A SigLIP tower by the names of transformers."""
    p = f"{prefix}embeddings."
    yield matrix(f"{p}patch_embedding.weight", width, 3, patch, patch)
    yield Tensor(f"{p}patch_embedding.bias", (width,), 0.02)
    yield Tensor(f"{p}position_embedding.weight", (places, width), 0.5)
    for i in range(depth):
        p = f"{prefix}encoder.layers.{i}."
        yield from layer_norm(f"{p}layer_norm1", width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{p}self_attn.{name}", width, width)
        yield from layer_norm(f"{p}layer_norm2", width)
        yield from linear(f"{p}mlp.fc1", mlp, width)
        yield from linear(f"{p}mlp.fc2", width, mlp)
    yield from layer_norm(f"{prefix}post_layernorm", width)


def decoder_layer(
    p: str, hidden: int, rows: int, kv: int, mlp: int, norm: float, kv_in: int = 0
) -> Iterator[Tensor]:
    """A layer of a Llama or Gemma decoder; `kv_in`: what K and V are made of, when that is not the hidden state."""
    yield gain(f"{p}input_layernorm.weight", hidden, norm)
    yield matrix(f"{p}self_attn.q_proj.weight", rows, hidden)
    yield matrix(f"{p}self_attn.k_proj.weight", kv, kv_in or hidden)
    yield matrix(f"{p}self_attn.v_proj.weight", kv, kv_in or hidden)
    yield matrix(f"{p}self_attn.o_proj.weight", hidden, rows)
    yield gain(f"{p}post_attention_layernorm.weight", hidden, norm)
    yield matrix(f"{p}mlp.gate_proj.weight", mlp, hidden)
    yield matrix(f"{p}mlp.up_proj.weight", mlp, hidden)
    yield matrix(f"{p}mlp.down_proj.weight", hidden, mlp)


def policy_heads(expert: int, hidden: int, action: int, state: int) -> Iterator[Tensor]:
    """What a lerobot flow policy has beside its two decoders; `hidden`: where the state goes in."""
    for name, rows, columns in (
        ("state_proj", hidden, state),
        ("action_in_proj", expert, action),
        ("action_out_proj", action, expert),
        ("action_time_mlp_in", expert, 2 * expert),
        ("action_time_mlp_out", expert, expert),
    ):
        yield from linear(f"model.{name}", rows, columns, "F32")


def smolvla_tensors() -> Iterator[Tensor]:
    """SmolVLA-450M: the first 16 layers of SmolVLM2-500M, and an expert of three quarters their width."""
    hidden, expert, kv, layers, vocab = 960, 720, 320, 16, 49280
    yield from policy_heads(expert, hidden, 32, 32)
    p = "model.vlm_with_expert.lm_expert."
    for i in range(layers):
        # Odd layers attend to the VLM's keys alone.
        kv_in = kv if i % 2 else 0
        yield from decoder_layer(f"{p}layers.{i}.", expert, hidden, kv, 2048, 1.0, kv_in)
    yield gain(f"{p}norm.weight", expert)
    p = "model.vlm_with_expert.vlm."
    yield matrix(f"{p}lm_head.weight", vocab, hidden)
    # The policy multiplies rows of images by sqrt(hidden), as it does those of text.
    name = f"{p}model.connector.modality_projection.proj.weight"
    yield Tensor(name, (hidden, 16 * 768), 1 / math.sqrt(16 * 768 * hidden))
    p = f"{p}model.text_model."
    yield matrix(f"{p}embed_tokens.weight", vocab, hidden)
    for i in range(layers):
        yield from decoder_layer(f"{p}layers.{i}.", hidden, hidden, kv, 2560, 1.0)
    yield gain(f"{p}norm.weight", hidden)
    yield from siglip("model.vlm_with_expert.vlm.model.vision_model.", 768, 12, 3072, 16, 1024)


def write_smolvla(out: Path, seed: int) -> None:
    """lerobot/smolvla_base, with the two cameras of the tiny folder."""
    copy_but_weights("smolvla", out)
    write_lerobot_files(
        out,
        *(512, 6, 6),
        chunk_size=50,
        n_action_steps=50,
        resize_imgs_with_padding=[512, 512],
        num_vlm_layers=16,
    )

    def vlm(content: dict[str, Any]) -> None:
        content["text_config"].update(
            hidden_size=960,
            intermediate_size=2560,
            num_hidden_layers=32,
            num_attention_heads=15,
            num_key_value_heads=5,
            head_dim=64,
            vocab_size=49280,
        )
        content["vision_config"].update(
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            image_size=512,
        )

    def images(content: dict[str, Any]) -> None:
        content["size"] = content["max_image_size"] = {"longest_edge": 512}

    def processor(content: dict[str, Any]) -> None:
        images(content["image_processor"])
        content["image_seq_len"] = 64

    edit_json(out / "vlm" / "config.json", vlm)
    edit_json(out / "vlm" / "preprocessor_config.json", images)
    edit_json(out / "vlm" / "processor_config.json", processor)
    write_safetensors(out / "model.safetensors", list(smolvla_tensors()), seed)


def pi0_tensors() -> Iterator[Tensor]:
    """pi0: PaliGemma 2B at 224 pixels and an expert of Gemma's shape, 300M. The table of words is tied."""
    hidden, expert, rows, kv, layers, vocab = 2048, 1024, 8 * 256, 256, 18, 257152
    yield from policy_heads(expert, expert, 32, 32)
    # Gains of Gemma's norms are what is added to 1.
    p = "model.paligemma_with_expert.gemma_expert."
    yield matrix(f"{p}lm_head.weight", vocab, expert)
    for i in range(layers):
        yield from decoder_layer(f"{p}model.layers.{i}.", expert, rows, kv, 4096, 0.0)
    yield gain(f"{p}model.norm.weight", expert, 0.0)
    p = "model.paligemma_with_expert.paligemma."
    yield matrix(f"{p}lm_head.weight", vocab, hidden)
    for i in range(layers):
        yield from decoder_layer(
            f"{p}model.language_model.layers.{i}.", hidden, rows, kv, 16384, 0.0
        )
    yield gain(f"{p}model.language_model.norm.weight", hidden, 0.0)
    yield from linear(f"{p}model.multi_modal_projector.linear", hidden, 1152)
    yield from siglip(f"{p}model.vision_tower.vision_model.", 1152, 27, 4304, 14, 256)


def write_pi0(out: Path, seed: int) -> None:
    """lerobot/pi0_base in BF16, with the three cameras it was trained with."""
    copy_but_weights("pi0", out)
    write_lerobot_files(
        out,
        *(224, 7, 6),
        chunk_size=50,
        n_action_steps=50,
        image_resolution=[224, 224],
        dtype="bfloat16",
    )
    write_safetensors(out / "model.safetensors", list(pi0_tensors()), seed)


def timm_tower(
    p: str, width: int, depth: int, mlp: int, patches: int, dino: bool
) -> Iterator[Tensor]:
    """A tower by the names of timm; DINOv2 has class, register tokens and layer scales, SigLIP an unused pool."""
    if dino:
        yield Tensor(f"{p}cls_token", (1, 1, width), 0.5)
        yield Tensor(f"{p}reg_token", (1, 4, width), 0.5)
    yield Tensor(f"{p}pos_embed", (1, patches, width), 0.5)
    yield matrix(f"{p}patch_embed.proj.weight", width, 3, 14, 14)
    yield Tensor(f"{p}patch_embed.proj.bias", (width,), 0.02)
    for i in range(depth):
        b = f"{p}blocks.{i}."
        yield from layer_norm(f"{b}norm1", width)
        yield from linear(f"{b}attn.qkv", 3 * width, width)
        yield from linear(f"{b}attn.proj", width, width)
        yield from layer_norm(f"{b}norm2", width)
        yield from linear(f"{b}mlp.fc1", mlp, width)
        yield from linear(f"{b}mlp.fc2", width, mlp)
        if dino:
            yield gain(f"{b}ls1.scale_factor", width, 0.5)
            yield gain(f"{b}ls2.scale_factor", width, 0.5)
    yield from layer_norm(f"{p}norm", width)
    if not dino:
        p = f"{p}attn_pool."
        yield Tensor(f"{p}latent", (1, 1, width), 0.5)
        yield from linear(f"{p}q", width, width)
        yield from linear(f"{p}kv", 2 * width, width)
        yield from linear(f"{p}proj", width, width)
        yield from layer_norm(f"{p}norm", width)
        yield from linear(f"{p}mlp.fc1", mlp, width)
        yield from linear(f"{p}mlp.fc2", width, mlp)


def openvla_tensors() -> Iterator[Tensor]:
    """OpenVLA-7B: DINOv2 and SigLIP at 224 pixels, a projector, Llama 2 7B."""
    hidden, mlp, layers, vocab = 4096, 11008, 32, 32064
    dino, siglip_width = 1024, 1152
    features = dino + siglip_width
    yield from timm_tower("vision_backbone.featurizer.", dino, 24, 4096, 256, True)
    yield from timm_tower("vision_backbone.fused_featurizer.", siglip_width, 27, 4304, 256, False)
    yield from linear("projector.fc1", 4 * features, features)
    yield from linear("projector.fc2", hidden, 4 * features)
    yield from linear("projector.fc3", hidden, hidden)
    p = "language_model.model."
    yield matrix(f"{p}embed_tokens.weight", vocab, hidden)
    for i in range(layers):
        yield from decoder_layer(f"{p}layers.{i}.", hidden, hidden, hidden, mlp, 1.0)
    yield gain(f"{p}norm.weight", hidden)
    yield matrix("language_model.lm_head.weight", vocab, hidden)


def write_openvla(out: Path, seed: int) -> None:
    """openvla/openvla-7b in its three files."""
    copy_but_weights("openvla", out)

    def config(content: dict[str, Any]) -> None:
        del content["tiny_timm_overrides"]
        content["torch_dtype"] = "bfloat16"
        content["text_config"].update(
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
        )

    edit_json(out / "config.json", config)
    write_sharded(out, list(openvla_tensors()), seed)


WRITERS = {"openvla": write_openvla, "pi0": write_pi0, "smolvla": write_smolvla}


def write_checkpoint(family: str, out: Path, seed: int = 0) -> None:
    """Writes the folder; it appears under its name only when it is whole."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[family](partial, seed)
    partial.rename(out)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=sorted(WRITERS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_checkpoint(args.family, args.out, args.seed)


if __name__ == "__main__":
    main()
