"""pi0, pi0.5 and pi0-FAST by lerobot: a checkpoint of a variant's sizes and what the library computes
with it. Only sizes are changed in the library, which knows no others than the published ones."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common import Array
from lerobot.policies.factory import make_pre_post_processors
from lerobot.processor import TokenizerProcessorStep
from lerobot.processor.factory import make_policy_processor_pipelines
from smolvla import features, modes, observation, run, write_frames
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from variants import Pi

TOKENIZER = common.DATA / "pi0/checkpoint/tokenizer"
VOCABULARY = 2048  # of that tokenizer
CLASSES = {
    "pi0": ("PI0Config", "PI0Policy"),
    "pi05": ("PI05Config", "PI05Policy"),
    "pi0_fast": ("PI0FastConfig", "PI0FastPolicy"),
}


def library(v: Pi) -> tuple[Any, Any, Any, Any]:
    """Modules of model and processors, classes of config and policy, with the variant's sizes."""
    package = f"lerobot.policies.{v.kind}"
    configuration = importlib.import_module(f"{package}.configuration_{v.kind}")
    model: Any = importlib.reload(importlib.import_module(f"{package}.modeling_{v.kind}"))
    processor = importlib.import_module(f"{package}.processor_{v.kind}")
    width, heads, kv, head, mlp, layers = v.text
    shared = {"depth": layers, "num_heads": heads, "num_kv_heads": kv, "head_dim": head}

    def sizes(name: str) -> Any:
        if name == "gemma_2b":
            return model.GemmaConfig(width=width, mlp_dim=mlp, **shared)
        return model.GemmaConfig(width=v.expert[0], mlp_dim=v.expert[1], **shared)

    model.get_gemma_config = sizes
    trunk = model.PaliGemmaForConditionalGenerationWithPiGemma

    def make_trunk(config: Any) -> Any:
        vision, vision_heads, vision_mlp, depth = v.vision
        config.vision_config.hidden_size = vision
        config.vision_config.num_attention_heads = vision_heads
        config.vision_config.intermediate_size = vision_mlp
        config.vision_config.num_hidden_layers = depth
        config.vision_config.image_size = v.image
        config.vision_config.patch_size = v.patch
        config.vision_config.projection_dim = config.projection_dim = width
        config.text_config.vocab_size = config._vocab_size = VOCABULARY
        config.image_token_index = config.image_token_id = VOCABULARY
        return trunk(config)

    model.PaliGemmaForConditionalGenerationWithPiGemma = make_trunk
    if hasattr(model, "PiGemmaForCausalLM"):
        expert = model.PiGemmaForCausalLM

        def make_expert(config: Any) -> Any:
            config.vocab_size = VOCABULARY
            return expert(config)

        model.PiGemmaForCausalLM = make_expert
    if v.kind == "pi0_fast":
        model.AutoProcessor = ActionTokenizer
    config, policy = CLASSES[v.kind]
    return model, processor, getattr(configuration, config), getattr(model, policy)


class ActionTokenizer:
    """In place of the processor that the library downloads: what the policy uses of it."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((Path(folder) / "processor_config.json").read_text())
        self.bpe_tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.scale, self.min_token = settings["scale"], settings["min_token"]

    @classmethod
    def from_pretrained(cls, folder: Path, **_: Any) -> ActionTokenizer:
        return cls(folder)

    def encode(self, chunk: Array) -> list[int]:
        from scipy.fft import dct

        rounded = np.around(dct(chunk, axis=0, norm="ortho") * self.scale).flatten()
        text = "".join(map(chr, np.maximum(rounded - self.min_token, 0).astype(int)))
        return list(self.bpe_tokenizer(text)["input_ids"])


def write_action_tokenizer(v: Pi, folder: Path) -> Array:
    """By the recipe of FAST, of random walks, which are returned."""
    from scipy.fft import dct
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.trainers import BpeTrainer

    vocabulary, scale = v.fast
    steps = common.stream(v.name, "actions").normal(size=(200, v.chunk, v.action)) * 0.2
    chunks = np.clip(np.cumsum(steps, axis=1), -1, 1)
    rounded = np.around(dct(chunks, axis=1, norm="ortho") * scale).astype(int).reshape(200, -1)
    low, high = int(rounded.min()) - 5, int(rounded.max()) + 5
    bpe = ByteLevelBPETokenizer()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=[chr(i) for i in range(high - low + 1)],
        max_token_length=10000,
    )
    bpe._tokenizer.train_from_iterator(
        ("".join(map(chr, x - low)) for x in rounded), trainer=trainer
    )
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
    settings = {
        "processor_class": "UniversalActionProcessor",
        "scale": scale,
        "min_token": low,
        "vocab_size": vocabulary,
        "time_horizon": v.chunk,
        "action_dim": v.action,
    }
    (folder / "processor_config.json").write_text(json.dumps(settings, indent=2))
    return chunks


def add_stop(tokenizer: dict[str, Any]) -> None:
    """Gives the tokenizer a piece "|", which ends an answer, in place of one that no text has."""
    vocabulary = tokenizer["model"]["vocab"]
    filler = next(piece for piece in vocabulary if piece.startswith("\u00b7"))
    tokenizer["model"]["vocab"] = {"|" if p == filler else p: i for p, i in vocabulary.items()}


def make_policy(v: Pi, config_class: Any, policy_class: Any) -> Any:
    inputs, outputs = features(v)
    settings = {
        "input_features": inputs,
        "output_features": outputs,
        "device": "cpu",
        "push_to_hub": False,
        "normalization_mapping": modes(v),
        "max_state_dim": v.max_state,
        "max_action_dim": v.max_action,
        "chunk_size": v.chunk,
        "n_action_steps": v.served,
        "image_resolution": (v.image, v.image),
        "empty_cameras": v.empty_cameras,
        "dtype": "float32",
        "tokenizer_max_length": v.text_tokens,
        "use_relative_actions": v.relative,
        "relative_exclude_joints": ["gripper"],
        "action_feature_names": [f"joint{i}" for i in range(v.action - 1)] + ["left_GRIPPER"],
    }
    if v.kind == "pi0_fast":
        settings.update(
            text_tokenizer_name="tokenizer",
            action_tokenizer_name="fast_tokenizer",
            fast_skip_tokens=v.skipped,
            max_action_tokens=32,
            max_decoding_steps=v.max_tokens,
            validate_action_token_prefix=False,
            use_kv_cache=True,
        )
    else:
        settings.update(
            num_inference_steps=v.steps, min_period=v.min_period, max_period=v.max_period
        )
    policy = policy_class(config_class(**settings)).eval()
    width, expert = v.text[0], v.expert[0]
    special = {
        "embed_tokens": (0.0, width**-0.5),
        "lm_head": (0.0, width**-0.5),
        "patch_embedding.weight": (0.0, 1.2 / v.patch / 3**0.5),
        "position_embedding": (0.0, 0.3),
        "dense.weight": (0.0, 0.34 * expert**-0.5),
        "dense.bias": (0.0, 0.2),
        "multi_modal_projector": (0.0, 0.83 * v.vision[0] ** -0.5),
        "action_out_proj.weight": (0.0, 0.68 * expert**-0.5),
    }
    common.fill_weights(policy, v.name, special, ("language_model", "gemma_expert"))
    trunk = policy.model.paligemma_with_expert.paligemma
    with torch.no_grad():
        if v.kind != "pi0_fast":  # published weights are tied
            trunk.lm_head.weight.copy_(trunk.model.language_model.embed_tokens.weight)
            return policy
        # Answers of FAST ids, with useful margins; maybe an end.
        head, top = trunk.lm_head.weight, VOCABULARY - 1 - v.skipped
        head[top - v.fast[0] + 1 : top + 1] *= 4
        stop = AutoTokenizer.from_pretrained("tokenizer").convert_tokens_to_ids("|")
        head[stop] = (head[stop] * (4 + 4 * v.stop)).bfloat16().float()
    return policy


def save(v: Pi, processor: Any, policy: Any, stats: Any) -> None:
    """To the working directory, as the library does, but for tokenizers, which are local."""
    policy.save_pretrained(".")

    def tokenize(tokenizer_name: str, **settings: Any) -> Any:
        return TokenizerProcessorStep(tokenizer_name="tokenizer", **settings)

    def without_training(input_steps: list[Any], output_steps: list[Any]) -> Any:
        kept = [step for step in input_steps if step is not None]
        return make_policy_processor_pipelines(input_steps=kept, output_steps=output_steps)

    processor.TokenizerProcessorStep = tokenize
    if v.kind == "pi0_fast":
        # Of training only, and downloaded code.
        processor.ActionTokenizerProcessorStep = lambda **_: None
        processor.make_policy_processor_pipelines = without_training
    make = getattr(processor, f"make_{v.kind}_pre_post_processors")
    for pipeline in make(policy.config, stats):
        pipeline.save_pretrained(".")
    if v.implicit:
        return
    _, heads, kv, _, _, _ = v.text
    decoder = {"num_heads": heads, "num_kv_heads": kv}
    dims = {"text": decoder, "expert": decoder, "vision": {"num_attention_heads": v.vision[1]}}
    Path("tiny_dims.json").write_text(json.dumps(dims, indent=1))


def relayout(v: Pi, checkpoint: Path, stats: Any) -> None:
    """The same model as other publishers lay it out."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if v.bf16_file:
            tensors = {k: x.bfloat16() if "paligemma_with" in k else x for k, x in tensors.items()}
        if v.names == "tied":
            tensors = {k: x for k, x in tensors.items() if "embed_tokens" not in k}
        if v.names == "bare":
            names = ("model.time_mlp", "action_time_mlp")
            if v.kind == "pi0":
                names = ("model.action_time_mlp", "time_mlp")
            tensors = {k.replace(*names): x for k, x in tensors.items()}
            tensors = {k.removeprefix("model."): x for k, x in tensors.items()}
        return tensors

    common.rewrite(checkpoint / "model.safetensors", change)
    if v.layout == "buffers":
        common.into_buffers(checkpoint, stats)


def load(policy_class: Any) -> tuple[Any, Any, Any]:
    """As a user does, from the working directory."""
    policy = policy_class.from_pretrained(".").float().eval()
    pre, post = make_pre_post_processors(policy.config, pretrained_path=".")
    if policy.config.use_relative_actions:
        # What reads a policy's files does not connect the two.
        relative = [s for s in pre.steps if type(s).__name__ == "RelativeActionsProcessorStep"]
        absolute = [s for s in post.steps if type(s).__name__ == "AbsoluteActionsProcessorStep"]
        absolute[0].relative_step = relative[0]
    return policy, pre, post


def write_pixels(record: common.Record, policy: Any, batch: Any) -> tuple[Any, Any]:
    images, masks = policy._preprocess_images(batch)
    layers = policy.model.paligemma_with_expert
    tower = layers.paligemma.model.vision_tower
    write_frames(record, zip(images, masks, strict=True), tower, layers, "vision.projected")
    return images, masks


def write_flow(v: Pi, policy: Any, pre: Any, post: Any, request: Any, record: common.Record) -> Any:
    noise = common.normal(v.name, "noise", (1, v.chunk, v.max_action))
    record.add("noise", noise)
    flow = policy.model
    recorder, batch, actions = run_flow(policy, pre, request, noise)
    write_pixels(record, policy, batch)
    recorder.write(record, v, v.expert[0], heads_first=True, allowed=lambda mask: mask == 0)
    record.add("actions_normalized", actions)
    record.add("actions", post(actions))
    # The precision of published checkpoints.
    flow.paligemma_with_expert.to_bfloat16_for_selected_params("bfloat16")
    _, _, narrow = run_flow(policy, pre, request, noise)
    record.add("bf16.actions", post(narrow))
    return batch


def run_flow(policy: Any, pre: Any, request: Any, noise: torch.Tensor) -> tuple[Any, Any, Any]:
    # `run` of SmolVLA, whose layers have another name.
    policy.model.vlm_with_expert = policy.model.paligemma_with_expert
    try:
        return run(policy, pre, request, noise)
    finally:
        del policy.model.vlm_with_expert


def write_tokens(
    v: Pi, policy: Any, pre: Any, post: Any, request: Any, record: common.Record, chunks: Array
) -> Any:
    batch = pre({k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in request.items()})
    images, masks = write_pixels(record, policy, batch)
    layers = policy.model.paligemma_with_expert
    forward = layers.forward
    seen: dict[str, Any] = {}

    def see_forward(*args: Any, **named: Any) -> Any:
        out = forward(*args, **named)
        if not seen:
            seen.update(
                cache=[(x.keys.clone(), x.values.clone()) for x in out[1].layers],
                embeds=named["inputs_embeds"][0].clone(),
                positions=named["position_ids"].clone(),
                mask=named["attention_mask"].clone(),
            )
        return out

    layers.forward = see_forward
    logits: list[torch.Tensor] = []
    handle = layers.paligemma.lm_head.register_forward_hook(
        lambda _m, _i, out: logits.append(out.clone())
    )
    tokens, mask = (
        batch["observation.language.tokens"],
        batch["observation.language.attention_mask"],
    )
    with torch.no_grad():
        written = policy.model.sample_actions_fast_kv_cache(
            images, masks, tokens, mask, max_decoding_steps=v.max_tokens
        )
    handle.remove()
    record.add("prefix.embs", seen["embeds"])
    record.add("prefix.position_ids", seen["positions"])
    record.add("prefix.attention_2d", seen["mask"] == 0)
    for i, (k, values) in enumerate(seen["cache"]):
        record.add(f"prefix.k.{i}", k)
        record.add(f"prefix.v.{i}", values)
    rows = torch.cat([x[0] for x in logits])
    top = rows.topk(2, -1).values
    record.add("logits", rows)
    record.add("logit_margin", top[:, 0] - top[:, 1])
    record.add("generated_ids", written)
    actions = policy.detokenize_actions(written, action_horizon=v.chunk, action_dim=v.action)
    record.add("actions_normalized", actions)
    record.add("actions", post(actions))
    fast, text = policy.action_tokenizer, policy._paligemma_tokenizer
    for j in range(2):
        fast_ids = fast.encode(chunks[j])
        sequence = text.encode("Action: ", add_special_tokens=False)
        sequence += [text.vocab_size - 1 - v.skipped - i for i in fast_ids]
        sequence += text.encode("|", add_special_tokens=False)
        decoded = policy.detokenize_actions(
            torch.tensor([sequence]), action_horizon=v.chunk, action_dim=v.action
        )
        record.add(f"fast{j}.chunk", chunks[j])
        record.add(f"fast{j}.fast_ids", np.array(fast_ids))
        record.add(f"fast{j}.sequence", np.array(sequence))
        record.add(f"fast{j}.decoded", decoded)
    return batch


def write(v: Pi, out: Path) -> None:
    checkpoint = out / "checkpoint"
    shutil.copytree(TOKENIZER, checkpoint / "tokenizer")
    if v.kind == "pi0_fast":
        common.edit_json(checkpoint / "tokenizer/tokenizer.json", add_stop)
    stats = common.statistics(v.name, {"observation.state": v.state, "action": v.action}, v.still)
    before = os.getcwd()
    os.chdir(checkpoint)
    try:
        chunks = (
            write_action_tokenizer(v, checkpoint / "fast_tokenizer")
            if v.kind == "pi0_fast"
            else None
        )
        _, processor, config_class, policy_class = library(v)
        save(v, processor, make_policy(v, config_class, policy_class), stats)
        if v.layout == "processors":
            relayout(v, checkpoint, stats)
        policy, pre, post = load(policy_class)
        if v.layout != "processors":
            relayout(v, checkpoint, stats)
    finally:
        os.chdir(before)
    record = common.Record()
    request = observation(v, v.name, stats, record)
    if chunks is None:
        batch = write_flow(v, policy, pre, post, request, record)
    else:
        batch = write_tokens(v, policy, pre, post, request, record, chunks)
    tokens, mask = (
        batch["observation.language.tokens"],
        batch["observation.language.attention_mask"],
    )
    record.add("tokens", tokens)
    record.add("tokens_mask", mask)
    record.add("state_normalized", batch["observation.state"])
    info: dict[str, Any] = {}
    if "bf16.actions" in record.tensors:
        gap = common.distance(record.tensors["bf16.actions"], record.tensors["actions"])
        info["bf16_vs_fp32_max_abs"] = gap
    else:
        info["generated"] = record.tensors["generated_ids"][0].tolist()
        info["min_logit_margin"] = float(record.tensors["logit_margin"].min())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    decoded = tokenizer.decode(tokens[0][mask[0].bool()])
    record.write(
        out, model=v.kind, variant=v.name, task=v.instruction, prompt_decoded=decoded, **info
    )
