"""Writes the fixtures of the host-side model tests from the references: Pillow 12, `tokenizers` 0.22, zlib.

    python make_fixtures.py GOLDEN_DATA     # needs numpy pillow<13 safetensors tokenizers

GOLDEN_DATA is the reference's data folder (preproc/, tokenizers/, a folder per model). Deterministic: same inputs, same bytes.
"""
import io
import json
import random
import shutil
import struct
import sys
import unicodedata
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

HERE = Path(__file__).parent
GOLDEN = Path(sys.argv[1])


def picture(h, w, seed):
    r = np.random.default_rng(seed)
    y, x = np.mgrid[0:h, 0:w]
    img = np.stack([255 * x / max(1, w - 1), 255 * y / max(1, h - 1), 127 + 120 * np.sin(x / 3 + y / 5)], -1)
    img[(x // 3 + y // 4) % 5 == 0] = (250, 20, 30)
    return np.clip(img + r.integers(-12, 13, (h, w, 3)), 0, 255).astype(np.uint8)


# ------------------------------------------------------------------------------------------- resize
def resize():
    src = load_file(str(GOLDEN / "preproc/resize.safetensors"))
    keep = {k: v for k, v in src.items() if k.endswith(".in_u8") or ".pil_" in k}
    for k in [k for k in keep if k.startswith("224x224_to_224x224.pil")]:
        del keep[k]  # the same size is a copy of the input
    save_file(keep, str(HERE / "resize.safetensors"))

    crop = load_file(str(GOLDEN / "preproc/pad_crop.safetensors"))
    out = {k: v for k, v in crop.items() if v.dtype == np.uint8}
    # torchvision's Resize and CenterCrop on PIL images, written out.
    cases = [(37, 113), (113, 37), (100, 1), (1, 100), (61, 61), (48, 64), (75, 50), (56, 56), (57, 56), (200, 131)]
    for strategy in ("resize-naive", "resize-crop", "letterbox"):
        for h, w in cases:
            img = picture(h, w, 7)
            out[f"case.{h}x{w}.in"] = img
            p = Image.fromarray(img)
            if strategy == "letterbox":
                side = max(h, w)
                px, py = int((side - w) / 2), int((side - h) / 2)
                p = ImageOps.expand(p, (px, py, px, py), fill=(123, 116, 103))
            if strategy == "resize-naive":
                p = p.resize((56, 56), Image.BICUBIC)
            else:
                w2, h2 = p.size
                short, long = min(w2, h2), max(w2, h2)
                new_long = int(56 * long / short)
                size = (56, new_long) if w2 <= h2 else (new_long, 56)
                p = p.resize(size, Image.BICUBIC)
                top, left = round((p.size[1] - 56) / 2.0), round((p.size[0] - 56) / 2.0)
                p = p.crop((left, top, left + 56, top + 56))
            out[f"case.{h}x{w}.{strategy}"] = np.asarray(p)
    save_file(out, str(HERE / "preprocess.safetensors"))


def resize_with_pad():
    """Frames of lerobot and openpi policies: `NAME.in` to `NAME.out` [3, h, w] in [-1, 1]."""
    out = {}
    for model, cameras in (("smolvla", ("top", "wrist")), ("pi0", ("base", "wrist")), ("pi05", ("base", "wrist"))):
        golden = load_file(str(GOLDEN / model / "golden.safetensors"))
        for i, camera in enumerate(cameras):
            out[f"{model}.{camera}.in"] = golden[f"image.{camera}_u8"]
            out[f"{model}.{camera}.out"] = golden[f"pixels.{i}"][0]
    crop = load_file(str(GOLDEN / "preproc/pad_crop.safetensors"))
    for model, name in (("smolvla", "smolvla"), ("pi0", "openpi")):
        out[f"{model}.odd.in"] = crop["in_u8"]
        out[f"{model}.odd.out"] = crop[f"{name}_resize_with_pad_56x72"] * 2 - 1
    # Aspect ignored, values in [0, 1] as float16; the inputs are in resize.safetensors.
    for k, v in load_file(str(GOLDEN / "preproc/resize.safetensors")).items():
        if k.endswith("noaa"):
            out[k] = np.ascontiguousarray(v[:, ::4, ::4])
    save_file(out, str(HERE / "resize_with_pad.safetensors"))


def adapters():
    """What folders say about normalisation, without their weights, and what comes of it."""
    out = {}
    for model in ("smolvla", "pi0", "pi05", "pi0_fast"):
        folder = HERE / "adapters" / model
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = GOLDEN / model / "checkpoint"
        for file in ["config.json", *(p.name for p in checkpoint.glob("policy_*"))]:
            (folder / file).write_bytes((checkpoint / file).read_bytes())
        save_file({"none": np.zeros(1, np.float32)}, str(folder / "model.safetensors"))
        golden = load_file(str(GOLDEN / model / "golden.safetensors"))
        for name in ("state_raw", "state_normalized", "actions_normalized", "actions"):
            if name in golden:
                out[f"{model}.{name}"] = golden[name]
    (HERE / "adapters/openvla_oft").mkdir(exist_ok=True)
    statistics = "openvla_oft/checkpoint/dataset_statistics.json"
    (HERE / "adapters/openvla_oft/dataset_statistics.json").write_bytes((GOLDEN / statistics).read_bytes())
    golden = load_file(str(GOLDEN / "openvla_oft/golden.safetensors"))
    for name in ("proprio_raw", "proprio_normalized", "normalized_actions", "actions"):
        out[f"openvla_oft.{name}"] = golden[name]
    save_file(out, str(HERE / "adapters/golden.safetensors"))


def fast_tokens():
    """FAST: answers of the text model, their FAST ids and the actions they are. tokenizer.json is in tokenizers()."""
    config = "pi0_fast/checkpoint/fast_tokenizer/processor_config.json"
    (HERE / "tokenizers/fast/processor_config.json").write_bytes((GOLDEN / config).read_bytes())
    golden = load_file(str(GOLDEN / "pi0_fast/golden.safetensors"))
    keep = ("fast_ids", "sequence", "decoded", "chunk", "generated_ids", "actions_normalized")
    out = {k: v for k, v in golden.items() if k.split(".")[-1] in keep}
    save_file(out, str(HERE / "tokenizers/fast/golden.safetensors"))


# ------------------------------------------------------------------------------------------- images
def png(samples, depth, color, interlace=False, chunks=()):
    """samples [h, w, channels] of integers below 2**depth."""
    h, w, _n = samples.shape

    def pack(part):
        rows = b""
        for row in part:
            flat = row.reshape(-1)
            if depth == 16:
                data = flat.astype(">u2").tobytes()
            elif depth == 8:
                data = flat.astype(np.uint8).tobytes()
            else:
                bits = "".join(format(int(v), f"0{depth}b") for v in flat)
                bits += "0" * (-len(bits) % 8)
                data = bytes(int(bits[i:i + 8], 2) for i in range(0, len(bits), 8))
            rows += b"\0" + data
        return rows

    if interlace:
        raw = b""
        for y0, x0, dy, dx in ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)):
            part = samples[y0::dy, x0::dx]
            if part.size:
                raw += pack(part)
    else:
        raw = pack(samples)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    out = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, depth, color, 0, 0, int(interlace)))
    for kind, data in chunks:
        out += chunk(kind, data)
    return out + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def exif(orientation):
    return b"II*\0\x08\0\0\0" + struct.pack("<HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)


def images():
    t = {}

    def add(name, data, rgb=None):
        t[f"{name}.bytes"] = np.frombuffer(data, np.uint8)
        if rgb is not None:
            t[f"{name}.rgb"] = np.ascontiguousarray(rgb, np.uint8)

    def pil(data):
        return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))

    def jpeg(img, **kw):
        b = io.BytesIO()
        Image.fromarray(img).save(b, "JPEG", **kw)
        return b.getvalue()

    base = picture(16, 24, 1)
    for o in range(1, 9):
        d = jpeg(base, quality=95, exif=b"Exif\0\0" + exif(o))
        add(f"jpeg_exif{o}", d, pil(d))
        d = png(base, 8, 2, chunks=[(b"eXIf", exif(o))])
        add(f"png_exif{o}", d, pil(d))
    columns = np.zeros((64, 64, 3), np.uint8)
    columns[:, 0::2] = (255, 0, 0)
    columns[:, 1::2] = (0, 0, 255)
    for name, img, kw in (("jpeg_420_columns", columns, dict(subsampling=2)), ("jpeg_444_columns", columns, dict(subsampling=0)),
                          ("jpeg_422_columns", columns, dict(subsampling=1)), ("jpeg_420_odd", picture(47, 61, 2), dict(subsampling=2)),
                          ("jpeg_progressive", picture(47, 61, 3), dict(progressive=True)), ("jpeg_gray", picture(31, 33, 4)[..., 0], {}),
                          ("jpeg_restart", picture(47, 61, 5), dict(restart_marker_blocks=2)),
                          ("jpeg_red", np.full((16, 16, 3), (255, 0, 0), np.uint8), dict(quality=95))):
        d = jpeg(img, **{"quality": 90, **kw})
        add(name, d, pil(d))
    b = io.BytesIO()
    Image.fromarray(np.full((8, 8, 4), (10, 200, 30, 40), np.uint8), "CMYK").save(b, "JPEG")
    add("jpeg_cmyk", b.getvalue())

    r = np.random.default_rng(9)
    for il in (False, True):
        s = "_interlaced" if il else ""
        rgb = picture(13, 19, 6)
        add(f"png_rgb8{s}", png(rgb, 8, 2, il), rgb)
        rgba = np.concatenate([rgb, r.integers(0, 256, (13, 19, 1), np.uint8)], -1)
        black = (rgba[..., :3].astype(int) * rgba[..., 3:] + 127) // 255
        add(f"png_rgba8{s}", png(rgba, 8, 6, il), black)
        wide = r.integers(0, 65536, (13, 19, 3))
        wide[0, :4, 0] = (0, 65535, 128, 129)
        add(f"png_rgb16{s}", png(wide, 16, 2, il), (wide + 128) // 257)
        wide4 = np.concatenate([wide, r.integers(0, 65536, (13, 19, 1))], -1)
        add(f"png_rgba16{s}", png(wide4, 16, 6, il), ((wide * wide4[..., 3:] + 32767) // 65535 + 128) // 257)
        for depth in (1, 2, 4, 8, 16):
            g = r.integers(0, 1 << depth, (11, 17, 1))
            top = (1 << depth) - 1
            full = (g + 128) // 257 if depth == 16 else g * (255 // top)
            add(f"png_gray{depth}{s}", png(g, depth, 0, il), np.repeat(full, 3, -1))
            trns = struct.pack(">H", int(g[0, 0, 0]))
            add(f"png_gray{depth}_trns{s}", png(g, depth, 0, il, [(b"tRNS", trns)]), np.where(g == g[0, 0, 0], 0, np.repeat(full, 3, -1)))
        for depth in (1, 2, 4, 8):
            palette = r.integers(0, 256, (1 << depth, 3), np.uint8)
            index = r.integers(0, 1 << depth, (11, 17, 1))
            plte = (b"PLTE", palette.tobytes())
            add(f"png_palette{depth}{s}", png(index, depth, 3, il, [plte]), palette[index[..., 0]])
            alpha = r.integers(0, 256, 1 << depth, np.uint8)
            add(f"png_palette{depth}_trns{s}", png(index, depth, 3, il, [plte, (b"tRNS", alpha.tobytes())]),
                (palette[index[..., 0]].astype(int) * alpha[index] + 127) // 255)
        la = r.integers(0, 256, (9, 10, 2))
        add(f"png_la8{s}", png(la, 8, 4, il), np.repeat((la[..., :1] * la[..., 1:] + 127) // 255, 3, -1))
    add("png_gray16_white", png(np.full((3, 5, 1), 65535), 16, 0), np.full((3, 5, 3), 255))
    for name in ("a", "b"):  # fully transparent, different colours underneath
        hidden = np.concatenate([r.integers(0, 256, (6, 7, 3)), np.zeros((6, 7, 1), int)], -1)
        add(f"png_hidden_{name}", png(hidden, 8, 6), np.zeros((6, 7, 3)))
    add("png_red", png(np.full((16, 16, 3), (255, 0, 0)), 8, 2), np.full((16, 16, 3), (255, 0, 0)))
    # Small files that claim or expand to a lot.
    add("png_claims_60000", png(np.zeros((1, 1, 3), int), 8, 2)[:16] + struct.pack(">II", 60000, 60000) + b"\x08\x02\0\0\0\0\0\0\0")
    text = b"k\0\0" + zlib.compress(b"a" * (32 << 20), 9)
    add("png_text_bomb", png(np.full((2, 2, 3), 9), 8, 2, chunks=[(b"zTXt", text)]), np.full((2, 2, 3), 9))
    save_file(t, str(HERE / "images.safetensors"))


# --------------------------------------------------------------------------------------- tokenizers
def corpus():
    r = random.Random(11)
    words = ("pick up the red block and place it in bowl put black on plate open top drawer What action should robot "
             "take to In: Out: State: 127 0 255 USER: ASSISTANT: café naïve 你好 こんにちは Привет עברית ไทย "
             "🤖 👩‍👩‍👧 e\u0301 Å ﬁ \u1d2c\u0bb5 \U00010348 ꙮ don't WE'LL o'\u017f 'Re ٣٤٥ Ⅻ½ x² 12345 ... (ok) A\u030a\u0323 각").split()
    glue = [" ", " ", " ", "  ", "\n", "\t", "", "\u2581", "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<pad>", "<PAD>", "<mask>", "\n\n\n", "    ",
            " \n ", "\n \n", "<image>", "<|im_end|>", "<|endoftext|>", "<loc0001>", "\r\n", "\u00a0", "\u3000", "<0x0A>", "<", "\0", "\u200b"]
    lines = ["This is", " This is", "This  is ", "\n", "", " ", "a" * 300, " " * 300, "\n" * 40, "🤖" * 50, "<s><s></s>", "<s>x<s>", "x<s> y",
             "\u2581\u2581", "\ufeffbom", "\U0010ffff\ud7ff\ue000\uffff"]
    for _ in range(184):
        lines.append("".join(r.choice(words) + r.choice(glue) for _ in range(r.randrange(1, 14))))
    lines.append("".join(r.choice(words) + r.choice(glue) for _ in range(1500)))
    return lines


# Byte-level tokenizers whose only difference from smollm is how they split, by what replaces its parts.
NEWER = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def newer_split(numbers, invert=False):
    split = {"type": "Split", "pattern": {"Regex": NEWER % numbers}, "behavior": "Removed" if invert else "Isolated",
             "invert": invert}
    return {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}


VARIANTS = {
    "qwen": {"normalizer": {"type": "NFC"}, "pre_tokenizer": newer_split(r"\p{N}")},
    "llama3": {"pre_tokenizer": newer_split(r"\p{N}{1,3}", invert=True)},
    "gpt2": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    "digits": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithNext", "invert": False},
        {"type": "Digits", "individual_digits": False}, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}},
}


def client_text(definition):
    """The tokenizer to which every added token that is special or has a name is plain text."""
    for token in definition["added_tokens"]:
        token["special"] |= any(unicodedata.category(c)[0] in "LN" for c in token["content"])
    t = Tokenizer.from_str(json.dumps(definition))
    t.encode_special_tokens = True
    return t


def checkpoint_rows():
    """Texts that the reference's own policies tokenized, without padding."""
    rows = []
    for model, name in (("smolvla", "smollm"), ("pi0", "gemma"), ("pi05", "gemma"), ("pi0_fast", "gemma"), ("openvla_oft", "llama")):
        golden = json.loads((GOLDEN / model / "golden.json").read_text())
        tensors = load_file(str(GOLDEN / model / "golden.safetensors"))
        if model == "openvla_oft":
            text, ids = golden["prompt"], tensors["input_ids_raw"][0]
        else:
            text = golden["task"] + "\n" if model == "smolvla" else golden["prompt_decoded"].removeprefix("<bos>")
            ids = tensors["tokens"][0][tensors["tokens_mask"][0] == 1]
        rows.append({"model": model, "tokenizer": name, "text": text, "ids": ids.tolist()})
    return rows


def tokenizers():
    out = HERE / "tokenizers"
    definitions = {}
    for name, folder in (("llama", "tokenizers/llama"), ("llama_metaspace", "tokenizers/llama_metaspace"),
                         ("gemma", "tokenizers/gemma"), ("smollm", "tokenizers/smollm"), ("fast", "pi0_fast/checkpoint/fast_tokenizer")):
        definitions[name] = json.loads((GOLDEN / folder / "tokenizer.json").read_text())
        if name != "llama":  # lies with the golden checkpoint
            (out / name).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(GOLDEN / folder / "tokenizer.json", out / name / "tokenizer.json")
    shutil.copyfile(GOLDEN / "tokenizers/gemma/tokenizer.model", out / "gemma/tokenizer.model")
    shutil.copyfile(GOLDEN / "tokenizers/gemma/tokenizer_config.json", out / "gemma/tokenizer_config.json")
    golden = json.loads((GOLDEN / "tokenizers/golden_tokenizers.json").read_text())
    slim = {n: {"rows": [{k: r[k] for k in ("text", "ids", "decoded")} for r in golden[n]["rows"]]}
            for n in ("llama", "llama_metaspace", "gemma", "smollm")}
    slim["checkpoints"] = checkpoint_rows()
    fast = Tokenizer.from_str(json.dumps(definitions["fast"]))
    tensors = load_file(str(GOLDEN / "pi0_fast/golden.safetensors"))
    ids = [tensors[f"fast{i}.fast_ids"].tolist() for i in range(4)]
    r = random.Random(5)  # and ids that no chunk has: their bytes are no text
    ids += [[r.randrange(512) for _ in range(r.randrange(1, 40))] for _ in range(60)]
    slim["fast"] = [{"ids": i, "text": fast.decode(i)} for i in ids]
    (out / "golden_tokenizers.json").write_text(json.dumps(slim) + "\n")
    (out / "variants.json").write_text(json.dumps(VARIANTS, indent=1) + "\n")
    rows = {"texts": corpus()}
    for name, change in VARIANTS.items():
        definitions[name] = definitions["smollm"] | change
    for name, definition in definitions.items():
        if name == "fast":
            continue
        t = Tokenizer.from_str(json.dumps(definition))
        rows[name] = [t.encode(s).ids for s in rows["texts"]]
        if name in ("llama", "llama_metaspace", "gemma"):  # the others have no template
            rows[name + ".bare"] = [t.encode(s, add_special_tokens=False).ids for s in rows["texts"]]
        if name not in VARIANTS:
            rows[name + ".text"] = [client_text(definition).encode(s).ids for s in rows["texts"]]
    (out / "corpus.json").write_text(json.dumps(rows, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    resize()
    resize_with_pad()
    adapters()
    fast_tokens()
    images()
    tokenizers()
