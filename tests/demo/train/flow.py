"""The flow policy: lerobot's SmolVLA, small, and its loss computed faster on the same parameters.

`Fast` shares what lerobot's forward() computes again: a picture's features between the instructions of a frame, and a
prefix between several draws of noise and time. test_flow_train.py holds it to lerobot's numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from collect import CHUNK
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import SmolVLMConfig

CAMERAS = ("top", "before", "wide")
FRAME = 224  # as rendered
IMAGE = 112  # as seen
PATCH, SHUFFLE = 14, 2
VISION = {"width": 96, "heads": 3, "mlp": 384, "layers": 4}
TEXT = {"width": 128, "heads": 4, "kv": 2, "head": 32, "mlp": 352, "layers": 4}
EXPERT = 0.75  # of the text's width
STATE = 2  # speed, heading
ACTION = 2
VOCABULARY = 640
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<global-img>",
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
)


# ------------------------------------------------------------------------------------------------------- the folder
def write_tokenizer(folder: Path, lines: list[str]) -> None:
    """Byte-level BPE as SmolVLM's, of the words of the instructions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "clean_up_tokenization_spaces": False,
        "end_of_utterance_token": "<end_of_utterance>",
        "eos_token": "<end_of_utterance>",
        "extra_special_tokens": {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "image_token": "<image>",
        "model_max_length": 8192,
        "pad_token": "<|im_end|>",
        "processor_class": "SmolVLMProcessor",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def write_vlm(folder: Path, lines: list[str]) -> None:
    """Config, tokenizer and processor of the VLM; lerobot keeps its weights itself."""
    write_tokenizer(folder, lines)
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    config = SmolVLMConfig(
        image_token_id=vocabulary["<image>"],
        pad_token_id=vocabulary["<|im_end|>"],
        scale_factor=SHUFFLE,
        tie_word_embeddings=False,
        vision_config={
            "hidden_size": VISION["width"],
            "intermediate_size": VISION["mlp"],
            "num_hidden_layers": VISION["layers"],
            "num_attention_heads": VISION["heads"],
            "image_size": IMAGE,
            "patch_size": PATCH,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": TEXT["width"],
            "intermediate_size": TEXT["mlp"],
            "num_hidden_layers": TEXT["layers"],
            "num_attention_heads": TEXT["heads"],
            "num_key_value_heads": TEXT["kv"],
            "head_dim": TEXT["head"],
            "vocab_size": VOCABULARY,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "max_position_embeddings": 8192,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "pad_token_id": vocabulary["<|im_end|>"],
        },
    )
    config.architectures = ["SmolVLMForConditionalGeneration"]
    config.save_pretrained(folder)
    picture = {
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_image_size": {"longest_edge": IMAGE},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": IMAGE},
    }
    named = {"image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(picture | named, indent=2))
    processor = {
        "image_seq_len": (IMAGE // PATCH // SHUFFLE) ** 2,
        "processor_class": "SmolVLMProcessor",
    }
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2))


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """The working directory, for paths in a config that are relative to it."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def config() -> SmolVLAConfig:
    """lerobot's settings; the VLM is in the folder's "vlm"."""
    inputs = {
        f"observation.images.{camera}": PolicyFeature(
            type=FeatureType.VISUAL, shape=(3, FRAME, FRAME)
        )
        for camera in CAMERAS
    }
    inputs["observation.state"] = PolicyFeature(type=FeatureType.STATE, shape=(STATE,))
    return SmolVLAConfig(
        input_features=inputs,
        output_features={"action": PolicyFeature(type=FeatureType.ACTION, shape=(ACTION,))},
        device="cpu",
        push_to_hub=False,
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        max_state_dim=STATE,
        max_action_dim=ACTION,
        num_steps=10,
        resize_imgs_with_padding=(IMAGE, IMAGE),
        vlm_model_name="vlm",
        load_vlm_weights=False,
        num_vlm_layers=TEXT["layers"],
        expert_width_multiplier=EXPERT,
        freeze_vision_encoder=False,
        train_expert_only=False,
        tokenizer_max_length=64,
        pad_language_to="longest",
    )


def new_policy(folder: Path) -> SmolVLAPolicy:
    """Untrained; `folder` has a "vlm"."""
    with inside(folder):
        policy = SmolVLAPolicy(config()).float()
    generator = torch.Generator().manual_seed(0)
    width, fan_in = TEXT["width"], SHUFFLE**2 * VISION["width"]
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if p.ndim < 2:
                continue
            deviation = p.flatten(1).shape[1] ** -0.5
            if "embed_tokens" in name:
                deviation = width**-0.5  # lerobot multiplies by width**0.5
            elif "connector" in name:
                deviation = (fan_in * width) ** -0.5
            elif "position_embedding" in name:
                deviation = 0.3
            elif name.endswith(
                ("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight")
            ):
                deviation *= 0.4
            p.copy_(torch.randn(p.shape, generator=generator) * deviation)
        for name, p in policy.named_parameters():
            if name.endswith("bias"):
                p.zero_()
    return policy


# --------------------------------------------------------------------------------------------------------- the loss
def rope_table(positions: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """lerobot's, of base 10000 whatever the config says. [..., head / 2] each."""
    scale = 10000.0 ** (torch.arange(head // 2, dtype=torch.float32) * 2 / head)
    angle = positions[..., None].float() / scale
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """x: [b, heads, n, head]; table: [b, n, head / 2]."""
    cos, sin = (t[:, None] for t in table)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def heads(x: Tensor, head: int) -> Tensor:
    """[b, n, heads * head] to [b, heads, n, head]."""
    return x.view(*x.shape[:2], -1, head).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """[b, n, heads * head]. Written out: torch's fused attention is slower where products are BF16."""
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e30)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Fast(nn.Module):
    """lerobot's loss of F frames x K instructions x N draws of noise and time."""

    def __init__(self, policy: SmolVLAPolicy) -> None:
        super().__init__()
        self.policy = policy
        flow = policy.model
        joint = flow.vlm_with_expert
        self.flow = flow
        self.vision = joint.vlm.model.vision_model
        self.connector = joint.vlm.model.connector
        self.text = joint.vlm.model.text_model
        self.expert = joint.lm_expert
        self.every = joint.self_attn_every_n_layers

    def pictures(self, pixels: Tensor) -> Tensor:
        """[n, IMAGE, IMAGE, 3] bytes to [n, tokens, text width], as the prefix has them."""
        n, side = len(pixels), IMAGE // PATCH
        x = pixels.view(n, side, PATCH, side, PATCH, 3).permute(0, 1, 3, 5, 2, 4)
        x = x.reshape(n, side * side, -1).float() * (2 / 255) - 1
        embed = self.vision.embeddings
        x = F.linear(x, embed.patch_embedding.weight.flatten(1), embed.patch_embedding.bias)
        x = x + embed.position_embedding.weight
        head = VISION["width"] // VISION["heads"]
        for layer in self.vision.encoder.layers:
            h = layer.layer_norm1(x)
            a = layer.self_attn
            x = x + a.out_proj(attend(*(heads(p(h), head) for p in (a.q_proj, a.k_proj, a.v_proj))))
            h = layer.layer_norm2(x)
            x = x + layer.mlp.fc2(F.gelu(layer.mlp.fc1(h), approximate="tanh"))
        return self.connector(self.vision.post_layernorm(x)) * TEXT["width"] ** 0.5

    def prefix(
        self, pictures: Tensor, tokens: Tensor, kept: Tensor, state: Tensor
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Every layer's keys [b, kv, n, head] after RoPE and values; and which positions hold something [b, n]."""
        b = len(tokens)
        words = self.text.embed_tokens(tokens) * TEXT["width"] ** 0.5
        x = torch.cat([pictures, words, self.flow.state_proj(state)[:, None]], 1)
        there = torch.cat([kept.new_ones(b, pictures.shape[1]), kept, kept.new_ones(b, 1)], 1)
        table = rope_table(there.cumsum(1) - 1, TEXT["head"])
        mask = there[:, None, :].repeat(1, x.shape[1], 1)
        mask[:, :-1, -1] = False  # nobody but itself and the actions sees the state
        out = []
        for i, layer in enumerate(self.text.layers):
            a, h = layer.self_attn, layer.input_layernorm(x)
            k, v = rotate(heads(a.k_proj(h), TEXT["head"]), table), heads(a.v_proj(h), TEXT["head"])
            out.append((k, v))
            if i + 1 == len(self.text.layers):
                break
            q = rotate(heads(a.q_proj(h), TEXT["head"]), table)
            x = x + a.o_proj(attend(q, k, v, mask[:, None]))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return out, there

    def observe(
        self, batch: dict[str, Tensor]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
        """The tokens of the pictures [f, cameras * tokens, width]; and as ``prefix``, a frame's for each instruction."""
        pixels = batch["pixels"]
        pictures = self.pictures(pixels.flatten(0, 1)).view(len(pixels), -1, TEXT["width"])
        k = len(batch["tokens"]) // len(pixels)
        prefix, there = self.prefix(
            pictures.repeat_interleave(k, 0),
            batch["tokens"],
            batch["kept"],
            batch["state"].repeat_interleave(k, 0),
        )
        return pictures, prefix, there

    def velocity(
        self, prefix: list[tuple[Tensor, Tensor]], there: Tensor, x: Tensor, time: Tensor
    ) -> Tensor:
        """x: [b, n draws, chunk, action]; time: [b, n]. The draws do not see each other."""
        b, n, chunk, _ = x.shape
        head, width = TEXT["head"], self.flow.vlm_with_expert.expert_hidden_size
        c = self.flow.config
        h = self.flow.action_in_proj(x)
        t = create_sinusoidal_pos_embedding(
            time.flatten(), width, c.min_period, c.max_period, device=time.device
        )
        t = t.view(b, n, 1, width).expand(-1, -1, chunk, -1)
        h = self.flow.action_time_mlp_in(torch.cat([h, t.to(h.dtype)], -1))
        h = self.flow.action_time_mlp_out(F.silu(h)).flatten(1, 2)
        steps = torch.arange(chunk).repeat(n)
        draw = torch.arange(n).repeat_interleave(chunk)
        own = (draw[:, None] == draw[None, :]) & (steps[:, None] >= steps[None, :])
        to_prefix = there[:, None, None, :].expand(-1, 1, n * chunk, -1)
        to_all = torch.cat([to_prefix, own.expand(b, 1, -1, -1)], -1)
        late = rope_table(there.sum(1, keepdim=True) + steps, head)
        early = rope_table(steps.expand(b, -1), head)
        for i, layer in enumerate(self.expert.layers):
            a, y = layer.self_attn, layer.input_layernorm(h)
            q = heads(a.q_proj(y), head)
            k, v = prefix[i]
            if i % self.every == 0:
                k = torch.cat([k, rotate(heads(a.k_proj(y), head), late).to(k.dtype)], 2)
                v = torch.cat([v, heads(a.v_proj(y), head).to(v.dtype)], 2)
                o = attend(rotate(q, late), k, v, to_all)
            else:
                k = heads(a.k_proj(k.transpose(1, 2).flatten(2)), head)
                v = heads(a.v_proj(v.transpose(1, 2).flatten(2)), head)
                o = attend(rotate(q, early), k, v, to_prefix)
            h = h + a.o_proj(o)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        out = self.flow.action_out_proj(self.expert.norm(h).float())
        return out.view(b, n, chunk, -1)

    def losses(
        self, batch: dict[str, Tensor], noise: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Squared errors [f * k, n, chunk, action], and the tokens of the pictures [f, cameras * tokens, width].

        pixels [f, cameras, IMAGE, IMAGE, 3]; tokens, kept [f * k, words]; state [f, s] and actions [f * k, chunk, a]
        normalised; noise [f * k, n, chunk, a]; time [f * k, n].
        """
        pictures, prefix, there = self.observe(batch)
        actions, t = batch["actions"][:, None], time[..., None, None]
        v = self.velocity(prefix, there, t * noise + (1 - t) * actions, time)
        return (noise - actions - v).square(), pictures

    @torch.no_grad()
    def act(self, batch: dict[str, Tensor], noise: Tensor, steps: int = 10) -> Tensor:
        """Normalised actions [f * k, chunk, a] from noise of that shape."""
        _, prefix, there = self.observe(batch)
        x = noise[:, None]
        for step in range(steps):
            time = torch.full((len(x), 1), 1.0 - step / steps)
            x = x - self.velocity(prefix, there, x, time) / steps
        return x[:, 0]
