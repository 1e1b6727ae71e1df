"""SmolVLA by lerobot: a checkpoint of a variant's sizes and what the library computes with it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import common
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from transformers import AutoTokenizer, SmolVLMConfig
from variants import SmolVla

VLM = common.DATA / "smolvla/checkpoint/vlm"
HUB = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"


def write_vlm(v: SmolVla, folder: Path) -> None:
    """Config, tokenizer and processor of the VLM; lerobot keeps its weights itself."""
    shutil.copytree(VLM, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    width, heads, kv, head, mlp, layers = v.text
    vision, vision_heads, vision_mlp, depth = v.vision
    config = SmolVLMConfig(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=v.shuffle,
        tie_word_embeddings=False,
        vision_config={
            "hidden_size": vision,
            "intermediate_size": vision_mlp,
            "num_hidden_layers": depth,
            "num_attention_heads": vision_heads,
            "image_size": v.positions or v.image,
            "patch_size": v.patch,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": head,
            "vocab_size": (len(tokenizer) + 31) // 32 * 32,
            "rms_norm_eps": v.epsilon,
            "rope_theta": 100000.0,
            "max_position_embeddings": 8192,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "pad_token_id": tokenizer.pad_token_id,
        },
    )
    config.architectures = ["SmolVLMForConditionalGeneration"]
    config.save_pretrained(folder)


def features(v: Any) -> tuple[dict[str, PolicyFeature], dict[str, PolicyFeature]]:
    inputs = {
        key(camera): PolicyFeature(type=FeatureType.VISUAL, shape=(3, *(size or (48, 64))))
        for camera, size in v.cameras.items()
    }
    inputs["observation.state"] = PolicyFeature(type=FeatureType.STATE, shape=(v.state,))
    return inputs, {"action": PolicyFeature(type=FeatureType.ACTION, shape=(v.action,))}


def key(camera: str) -> str:
    return camera if camera.startswith("observation.") else f"observation.images.{camera}"


def modes(v: Any) -> dict[str, str]:
    return {"VISUAL": "IDENTITY", "STATE": v.state_mode, "ACTION": v.action_mode}


def observation(v: Any, seed: str, stats: Any, record: common.Record) -> dict[str, Any]:
    """The request, recorded."""
    out: dict[str, Any] = {"task": v.instruction}
    for camera, size in v.cameras.items():
        if size is None:
            continue
        image = common.picture(f"{seed} {camera}", *size)
        record.add(f"image.{camera}_u8", image)
        out[key(camera)] = torch.from_numpy(image).permute(2, 0, 1).float() / 255
    state = common.state_of(seed, stats["observation.state"])
    record.add("state_raw", state)
    out["observation.state"] = torch.from_numpy(state)
    return out


class Recorder:
    """Sees what goes through the methods of a flow model, and changes nothing."""

    def __init__(self, model: Any, layers: Any) -> None:
        self.steps: list[tuple[Any, ...]] = []
        embed_prefix, forward = model.embed_prefix, layers.forward
        denoise_step, embed_suffix = model.denoise_step, model.embed_suffix

        def see_prefix(*args: Any, **named: Any) -> Any:
            out = embed_prefix(*args, **named)
            self.prefix = [x.detach().clone() for x in out]
            return out

        def see_forward(*args: Any, **named: Any) -> Any:
            prefill = named["inputs_embeds"][1] is None
            out = forward(*args, **named)
            mask, positions = named["attention_mask"].clone(), named["position_ids"].clone()
            if prefill:
                self.mask, self.positions = mask, positions
                self.out = out[0][0].detach().clone()
                self.cache = [(x.keys.clone(), x.values.clone()) for x in out[1].layers]
            else:
                self.suffix_mask, self.suffix_positions = mask, positions
                self.suffix_out = out[0][1].detach().clone()
            return out

        def see_step(*args: Any, **named: Any) -> Any:
            v = denoise_step(*args, **named)
            x, t = named["x_t"].detach().clone(), named["timestep"].clone()
            self.steps.append(
                (x, v.detach().clone(), t, self.suffix, self.suffix_out, self.condition)
            )
            return v

        def see_suffix(*args: Any, **named: Any) -> Any:
            out = embed_suffix(*args, **named)
            self.suffix = out[0].detach().clone()
            self.condition = (
                out[3].detach().clone() if len(out) > 3 and out[3] is not None else None
            )
            return out

        model.embed_prefix, layers.forward = see_prefix, see_forward
        model.denoise_step, model.embed_suffix = see_step, see_suffix

    def write(
        self, record: common.Record, v: Any, width: int, heads_first: bool, allowed: Any
    ) -> None:
        """`allowed`: a mask of the library to one of ones."""
        record.add("prefix.embs", self.prefix[0])
        record.add("prefix.pad_masks", self.prefix[1])
        record.add("prefix.att_masks", self.prefix[2])
        record.add("prefix.attention_2d", allowed(self.mask))
        record.add("prefix.position_ids", self.positions)
        record.add("prefix.final_norm_out", self.out)
        for i, (k, values) in enumerate(self.cache):
            record.add(f"prefix.k.{i}", k if heads_first else k.transpose(1, 2))
            record.add(f"prefix.v.{i}", values if heads_first else values.transpose(1, 2))
        record.add("suffix.attention_2d", allowed(self.suffix_mask))
        record.add("suffix.position_ids", self.suffix_positions)
        for i, (x, velocity, t, suffix, out, condition) in enumerate(self.steps):
            record.add(f"step{i}.time", t)
            record.add(f"step{i}.x_t", x)
            record.add(f"step{i}.v_t", velocity)
            if i not in (0, len(self.steps) - 1):
                continue
            embedded = create_sinusoidal_pos_embedding(
                t, width, v.min_period, v.max_period, device=t.device
            )
            record.add(f"step{i}.time_emb", embedded)
            record.add(f"step{i}.suffix_embs", suffix)
            record.add(f"step{i}.suffix_out", out)
            if condition is not None:
                record.add(f"step{i}.adarms_cond", condition)


def load(checkpoint: Path) -> tuple[Any, Any, Any]:
    """As a user does."""
    before = os.getcwd()
    os.chdir(checkpoint)
    try:
        policy = SmolVLAPolicy.from_pretrained(".").float().eval()
        pre, post = make_pre_post_processors(policy.config, pretrained_path=".")
    finally:
        os.chdir(before)
    return policy, pre, post


def run(
    policy: Any, pre: Any, request: dict[str, Any], noise: torch.Tensor
) -> tuple[Any, Any, Any]:
    recorder = Recorder(policy.model, policy.model.vlm_with_expert)
    # The library changes what it is given; the state of a batch then is what the model has seen.
    batch = pre({k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in request.items()})
    with torch.no_grad():
        actions = policy.predict_action_chunk(dict(batch), noise=noise.clone())
    return recorder, batch, actions


def write_checkpoint(v: SmolVla, checkpoint: Path, stats: Any) -> None:
    write_vlm(v, checkpoint / "vlm")
    inputs, outputs = features(v)
    config = SmolVLAConfig(
        input_features=inputs,
        output_features=outputs,
        device="cpu",
        push_to_hub=False,
        normalization_mapping=modes(v),
        max_state_dim=v.max_state,
        max_action_dim=v.max_action,
        chunk_size=v.chunk,
        n_action_steps=v.served,
        num_steps=v.steps,
        resize_imgs_with_padding=(v.image, v.image),
        empty_cameras=v.empty_cameras,
        vlm_model_name="vlm",
        load_vlm_weights=False,
        num_vlm_layers=v.vlm_layers,
        self_attn_every_n_layers=v.every,
        attention_mode=v.attention_mode,
        expert_width_multiplier=v.expert,
        pad_language_to=v.padding,
        tokenizer_max_length=v.text_tokens,
        add_image_special_tokens=v.around,
        prefix_length=v.prefix_length,
        min_period=v.min_period,
        max_period=v.max_period,
        adapt_to_pi_aloha=v.aloha,
    )
    before = os.getcwd()
    os.chdir(checkpoint)
    try:
        policy = SmolVLAPolicy(config).float().eval()
        width = v.text[0]
        fan_in = v.shuffle**2 * v.vision[0]
        special = {
            "embed_tokens": (0.0, width**-0.5),
            "connector.modality_projection": (0.0, (fan_in * width) ** -0.5),
            "action_out_proj.weight": (0.0, 0.5 * (width * v.expert) ** -0.5),
        }
        common.fill_weights(policy, v.name, special)
        policy.save_pretrained(".")
        pre, post = make_smolvla_pre_post_processors(config, stats)
        pre.save_pretrained(".")
        post.save_pretrained(".")
    finally:
        os.chdir(before)


def write_frames(record: common.Record, frames: Any, tower: Any, layers: Any, joined: str) -> None:
    """Pixels of (image, mask) pairs, and of those that are there what the tower and its projection make."""
    for i, (image, mask) in enumerate(frames):
        record.add(f"pixels.{i}", image if mask else image[..., :1, :1])
        record.add(f"pixels_mask.{i}", mask)
        if not mask:
            continue
        with torch.no_grad():
            record.add(f"vision.features.{i}", tower(pixel_values=image).last_hidden_state)
            record.add(f"{joined}.{i}", layers.embed_image(image))


def relayout(v: SmolVla, checkpoint: Path, stats: Any) -> None:
    """The same model as other releases and publishers lay it out."""
    if v.bf16_file:

        def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {k: x.bfloat16() if "vlm_with_expert" in k else x for k, x in tensors.items()}

        common.rewrite(checkpoint / "model.safetensors", narrow)
    if v.layout == "buffers":
        common.into_buffers(checkpoint, stats)
    if v.vlm == "hub":
        common.edit_json(checkpoint / "config.json", lambda c: c.update(vlm_model_name=HUB))


def write(v: SmolVla, out: Path) -> None:
    checkpoint = out / "checkpoint"
    checkpoint.mkdir(parents=True)
    stats = common.statistics(v.name, {"observation.state": v.state, "action": v.action}, v.still)
    write_checkpoint(v, checkpoint, stats)
    record = common.Record()
    request = observation(v, v.name, stats, record)
    answer(v, checkpoint, request, record, out)
    relayout(v, checkpoint, stats)
    assert json.loads((checkpoint / "config.json").read_text())["type"] == "smolvla"


def answer(
    v: SmolVla, checkpoint: Path, request: dict[str, Any], record: common.Record, out: Path
) -> None:
    """Writes what the library computes for a request whose inputs are recorded already."""
    noise = common.normal(v.name, "noise", (1, v.chunk, v.max_action))
    record.add("noise", noise)
    policy, pre, post = load(checkpoint)
    recorder, batch, actions = run(policy, pre, request, noise)
    record.add("tokens", batch["observation.language.tokens"])
    record.add("tokens_mask", batch["observation.language.attention_mask"])
    record.add("state_normalized", batch["observation.state"])
    images, masks = policy.prepare_images(batch)
    vlm = policy.model.vlm_with_expert
    tower = vlm.get_vlm_model().vision_model
    write_frames(record, zip(images, masks, strict=True), tower, vlm, "vision.connector")
    width = vlm.expert_hidden_size
    recorder.write(record, v, width, heads_first=False, allowed=lambda mask: mask)
    record.add("actions_normalized", actions)
    record.add("actions", post(actions))
    # The precision of published checkpoints.
    policy, pre, post = load(checkpoint)
    policy.model.vlm_with_expert.to(torch.bfloat16)
    _, _, narrow = run(policy, pre, request, noise)
    record.add("bf16.actions", post(narrow))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "vlm")
    kept = batch["observation.language.tokens"][0][
        batch["observation.language.attention_mask"][0].bool()
    ]
    record.write(
        out,
        model="smolvla",
        variant=v.name,
        task=request["task"],
        prompt_decoded=tokenizer.decode(kept),
        bf16_vs_fp32_max_abs=common.distance(
            record.tensors["bf16.actions"], record.tensors["actions"]
        ),
        prefix_len=recorder.prefix[0].shape[1],
    )
