#!/usr/bin/env python3
"""Write checkpoints of lerobot's policies and the answers of the library itself.

    python generate.py FAMILY OUT_DIR NAME...

FAMILY: smolvla, pi0, pi05 or pi0_fast. NAME: one of variants.py, or randomN (N: any number).
Makes OUT_DIR/FAMILY_NAME/{checkpoint/,golden.safetensors,golden.json} for
`saccade-server verify`. Needs Python 3.12 with lerobot 0.6.1, transformers 5.5.4 and torch 2.10.0,
and no network.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import common
import variants


def main(arguments: list[str]) -> None:
    if len(arguments) < 3:
        sys.exit(__doc__)
    kind, root, *names = arguments
    write = importlib.import_module("smolvla" if kind == "smolvla" else "pi").write
    common.be_deterministic()
    for name in names:
        out = Path(root).resolve() / f"{kind}_{name}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        variant = variants.find(kind, name)
        print(f"{out.name}: {variants.settings(variant)}", flush=True)
        write(variant, out)


if __name__ == "__main__":
    main(sys.argv[1:])
