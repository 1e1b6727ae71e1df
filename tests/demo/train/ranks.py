"""Data-parallel training over single-thread processes, which beat one process of as many threads on few cores."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor


def arguments(parser: argparse.ArgumentParser) -> None:
    """What launch() wants."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", type=Path, help=argparse.SUPPRESS)


def launch(a: argparse.Namespace, train: Callable[[int, argparse.Namespace], None]) -> int:
    """Runs train(rank, a) in every rank; the exit code."""
    if a.ranks == 1 or a.rank is not None:
        rank = a.rank or 0
        torch.set_num_threads(1)
        if a.ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{a.meet}",
                rank=rank,
                world_size=a.ranks,
                timeout=timedelta(days=1),  # it may be stopped and continued
            )
        train(rank, a)
        if a.ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
        return 0
    # Under the script's own name, so that whoever stops and continues the training finds them all.
    command = [sys.executable, *sys.argv, "--meet", str(a.out / f"meet_{os.getpid()}"), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(a.ranks)]
    return max(abs(rank.wait()) for rank in ranks)


def exchange(parameters: list[Tensor], ranks: int, limit: float = 1.0) -> float:
    """Mean of the ranks' gradients, cut to a norm of `limit`; returns the norm before."""
    flat = torch.cat(
        [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters]
    )
    if ranks > 1:
        dist.all_reduce(flat)
        flat /= ranks
    norm = float(flat.norm())
    flat *= min(1.0, limit / (norm + 1e-6))
    for p, g in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = g.view_as(p)
    return norm


def save(file: Path, **what: Any) -> None:
    """All or nothing."""
    torch.save(what, file.with_suffix(".tmp"))
    os.replace(file.with_suffix(".tmp"), file)


def tell(log: TextIO, what: dict[str, Any]) -> None:
    """A line of JSON, printed and logged."""
    line = json.dumps(what)
    print(line, flush=True)
    log.write(line + "\n")
    log.flush()
