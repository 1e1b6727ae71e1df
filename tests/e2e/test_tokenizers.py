"""Random Unicode text through our tokenizers and the reference's, where PyPI's `tokenizers` is installed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import BINARY, ROOT

tokenizers = pytest.importorskip("tokenizers", minversion="0.22")

DATA = ROOT / "tests" / "data" / "tokenizers"
TOOL = Path(BINARY).resolve().parent / "tests" / "golden" / "tokenize_lines"
# Texts per layout; more for a longer search.
TEXTS = int(os.environ.get("SACCADE_TOKENIZER_TEXTS", "400"))
SEED = int(os.environ.get("SACCADE_TOKENIZER_SEED", "1"))

VARIANTS: dict[str, dict[str, Any]] = json.loads((DATA / "variants.json").read_text())
LAYOUTS = ["llama", "llama_metaspace", "gemma", "smollm", "fast", *VARIANTS]


def definition(layout: str) -> dict[str, Any]:
    """What a tokenizer.json says; variants are smollm with other parts."""
    folder = DATA / ("smollm" if layout in VARIANTS else layout)
    if layout == "llama":
        folder = ROOT / "tests" / "golden" / "data" / "openvla" / "checkpoint"
    whole: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return whole | VARIANTS.get(layout, {})


def is_named(token: str) -> bool:
    """Whether a client's words must not become this added token."""
    return any(unicodedata.category(c)[0] in "LN" for c in token)


def of_category(*categories: str) -> list[str]:
    return [c for c in map(chr, range(0x110000)) if unicodedata.category(c).startswith(categories)]


def random_texts(added: list[str], count: int) -> list[str]:
    """Text of all kinds: what people write, what splits are about, and any code points."""
    r = random.Random(SEED)
    marks, digits = of_category("M"), of_category("N")
    spaces = [c for c in map(chr, range(0x110000)) if c.isspace() or unicodedata.category(c) == "Zs"]
    words = ["pick", "up", "the", "block", "don't", "WE'LL", "o'RE", "'S", "café", "State:", "127", "<0x0A>", "ima"]
    names = [*added, "<s>", "</s>", "<unk>", "<image>", "<|endoftext|>", "<|im_start|>", "<loc0001>"]

    def code_point() -> str:
        plane = r.choice([0, 0, 0, 1, 2, 3, 14, 15, 16])
        c = chr(plane << 16 | r.randrange(0x10000))
        return "?" if "\ud800" <= c <= "\udfff" else c

    def part_of_name() -> str:
        name = r.choice(names)
        return name[: r.randrange(len(name) + 1)]

    kinds: list[Callable[[], str]] = [
        lambda: r.choice(words),
        lambda: r.choice(words) + " ",
        lambda: r.choice(names),
        part_of_name,
        code_point,
        lambda: chr(r.randrange(0x20, 0x250)),
        lambda: r.choice("AaeEoOuy각한ㄱ\u1100\u1161\u11a8") + "".join(r.choices(marks, k=r.randrange(4))),
        lambda: "".join(r.choices(digits, k=r.randrange(1, 5))),
        lambda: "".join(r.choices("0123456789", k=r.randrange(1, 8))),
        lambda: "".join(r.choices(spaces, k=r.randrange(1, 4))),
        lambda: r.choice(" \n\r\t\u2581") * r.randrange(1, 9),
        lambda: "'" + r.choice(["s", "S", "t", "re", "VE", "m", "Ll", "d", "\u017f", "l", "r", "x"]),
        lambda: "".join(r.choices("!?.,;:'\"()[]{}<>@#|", k=r.randrange(1, 5))),
    ]
    return ["".join(r.choice(kinds)() for _ in range(r.randrange(1, 14))) for _ in range(count)]


def ours(path: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    run = subprocess.run([str(TOOL), str(path)], input=lines, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    answers = [json.loads(line) for line in run.stdout.split("\n") if line]
    assert len(answers) == len(requests)
    return answers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_text_equals_the_reference(layout: str, tmp_path: Path) -> None:
    whole = definition(layout)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(whole))
    reference = tokenizers.Tokenizer.from_file(str(path))
    added = [token["content"] for token in whole["added_tokens"]]
    texts = random_texts(added, TEXTS)

    answers = ours(path, [{"text": text} for text in texts])
    for text, answer in zip(texts, answers, strict=True):
        expected = reference.encode(text).ids
        assert answer["ids"] == expected, ascii(text)
        assert answer["text"] == reference.decode(expected, skip_special_tokens=True), ascii(text)

    # What a client says: names are words.
    for token in whole["added_tokens"]:
        token["special"] |= is_named(token["content"])
    plain = tokenizers.Tokenizer.from_str(json.dumps(whole))
    plain.encode_special_tokens = True
    named = {token["id"] for token in whole["added_tokens"] if token["special"]}
    named -= {reference.token_to_id("<unk>")}
    answers = ours(path, [{"text": text, "special": False, "template": False} for text in texts])
    for text, answer in zip(texts, answers, strict=True):
        assert answer["ids"] == plain.encode(text, add_special_tokens=False).ids, ascii(text)
        assert not named & set(answer["ids"]), ascii(text)


@pytest.mark.parametrize("layout", ["llama", "gemma"])
def test_random_text_equals_sentencepiece(layout: str, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = DATA / layout
    if layout == "llama":
        folder = ROOT / "tests" / "golden" / "data" / "openvla" / "checkpoint"
    shutil.copy(folder / "tokenizer.model", tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    # It splits user-defined names out of any text; ours keeps them text for clients.
    texts = [text for text in random_texts([], TEXTS) if "<" not in text]
    requests = [{"text": text, "special": False, "template": False} for text in texts]
    for text, answer in zip(texts, ours(tmp_path, requests), strict=True):
        assert answer["ids"] == reference.encode(text), ascii(text)
        assert answer["text"] == reference.decode(answer["ids"]), ascii(text)


@pytest.mark.parametrize("layout", ["smollm", "fast"])
def test_the_text_of_any_byte_level_ids_is_the_references(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition(layout)))
    reference = tokenizers.Tokenizer.from_file(str(path))
    r = random.Random(SEED)
    size = reference.get_vocab_size()
    ids = [[r.randrange(size) for _ in range(r.randrange(30))] for _ in range(TEXTS)]
    for some, answer in zip(ids, ours(path, [{"ids": some} for some in ids]), strict=True):
        assert answer["text"] == reference.decode(some, skip_special_tokens=True), some
