"""tests/demo/train: what the demo's policies are trained with.

The parts that need torch and lerobot are skipped where there are none; `SACCADE_TRAIN_PYTHON` names a Python that has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import BINARY, ROOT

TRAIN = ROOT / "tests" / "demo" / "train"
PYTHON = os.environ.get("SACCADE_TRAIN_PYTHON", sys.executable)
SEED = 900_000


def has(python: str, *modules: str) -> bool:
    """Whether that Python can find them all."""
    code = (
        f"import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in {modules!r}))"
    )
    return subprocess.run([python, "-c", code], check=False).returncode == 0


needs_world = pytest.mark.skipif(not has(PYTHON, "highway_env"), reason="no highway-env")
needs_lerobot = pytest.mark.skipif(
    not has(PYTHON, "highway_env", "lerobot", "torch"), reason="no lerobot"
)


def run(*command: str | Path) -> str:
    """What it prints; fails with it."""
    one_thread = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "client")}
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | one_thread,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script(name: str, *arguments: str | Path) -> str:
    """Runs one of tests/demo/train."""
    return run(PYTHON, TRAIN / name, *arguments)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A few collected frames."""
    folder = tmp_path_factory.mktemp("frames")
    script("collect.py", folder, "100", str(SEED))
    yield folder
    shutil.rmtree(folder)


@needs_world
def test_frames_are_what_their_seed_says(frames: Path, tmp_path: Path) -> None:
    script("collect.py", tmp_path, "100", str(SEED))
    (mine,), (again,) = (sorted(f.glob("s_*.npz")) for f in (frames, tmp_path))
    assert mine.name == again.name
    run(
        PYTHON,
        "-c",
        "import sys, numpy as np\n"
        "a, b = map(np.load, sys.argv[1:])\n"
        "assert set(a) == {'top', 'wide', 'actions', 'state', 'scene', 'episode'}, set(a)\n"
        "for k in a: np.testing.assert_array_equal(a[k], b[k])\n"
        "n = len(a['episode'])\n"
        "assert n >= 100 and a['top'].shape == a['wide'].shape == (n, 224, 224, 3)\n"
        "assert a['actions'].shape == (n, 6, 8, 2) and np.isfinite(a['actions']).all()\n"
        "assert abs(a['actions'][..., 0]).max() <= 0.12 and a['top'].std() > 5\n",
        mine,
        again,
    )


@needs_world
def test_no_instruction_of_training_is_one_that_the_judge_keeps() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(TRAIN)!r})\n"
        "import sentences as s\n"
        "said = {line.strip().lower().rstrip('.') for line in s.corpus(5000)}\n"
        "assert len(said) > 500 and not said & s.KEPT and len(s.KEPT) > 60\n"
    )
    run(PYTHON, "-c", code)


@pytest.mark.skipif(not has(sys.executable, "highway_env"), reason="no highway-env")
def test_the_shipped_flow_policy_drives() -> None:
    script = ROOT / "deploy" / "demo" / "evaluation.py"
    said = run(
        sys.executable, script, "--model", "highway_flow", "--seeds", "6000000:6000002",
        "--json", "--binary", BINARY,
    )  # fmt: skip
    found = json.loads(said.splitlines()[-1])
    assert found["n"] == 12 and found["ok"] >= 11, said


@needs_lerobot
def test_the_loss_is_lerobots(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(TRAIN)!r})
from pathlib import Path
import torch, flow, sentences
folder = Path({str(tmp_path)!r})
flow.write_vlm(folder / "vlm", sentences.corpus(2000))
policy = flow.new_policy(folder).eval()
fast = flow.Fast(policy)
frames, k, n, words = 2, 3, 2, 9
torch.manual_seed(1)
pixels = torch.randint(0, 256, (frames, 3, flow.IMAGE, flow.IMAGE, 3), dtype=torch.uint8)
tokens = torch.randint(7, 400, (frames * k, words))
kept = torch.arange(words) < torch.tensor([9, 5, 9, 1, 7, 9])[:, None]
batch = dict(pixels=pixels, tokens=tokens, kept=kept, state=torch.randn(frames, flow.STATE),
             actions=torch.randn(frames * k, flow.CHUNK, flow.ACTION))
noise, time = torch.randn(frames * k, n, flow.CHUNK, flow.ACTION), torch.rand(frames * k, n)
images = [(pixels[:, c].permute(0, 3, 1, 2) / 255 * 2 - 1).repeat_interleave(k, 0) for c in range(3)]
there = [torch.ones(frames * k, dtype=torch.bool)] * 3
state = batch["state"].repeat_interleave(k, 0)
mine, _ = fast.losses(batch, noise, time)
mine.mean().backward()
gradients = {{name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}}
policy.zero_grad(set_to_none=True)
theirs = torch.stack([policy.model.forward(images, there, tokens, kept, state, batch["actions"],
                                           noise[:, i], time[:, i]) for i in range(n)], 1)
torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
theirs.mean().backward()
assert len(gradients) > 100
for name, p in policy.named_parameters():
    if p.grad is None:
        assert name not in gradients or not gradients[name].any(), name
    else:
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-3, atol=1e-6, msg=name)
with torch.no_grad():
    answer = policy.model.sample_actions(images, there, tokens, kept, state, noise=noise[:, 0])
torch.testing.assert_close(fast.act(batch, noise[:, 0]), answer, rtol=1e-5, atol=1e-5)
"""
    run(PYTHON, "-c", code)


@needs_lerobot
def test_a_flow_policy_of_a_few_steps_is_served_as_lerobot_runs_it(
    frames: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    common = ("--data", frames, "--validation", frames, "--ranks", "1", "--frames", "4")
    script("flow_train.py", out, "--steps", "3", "--save", "2", *common)
    script("flow_train.py", out, "--steps", "5", "--decay", "2", "--resume", *common)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [2, 3, 5]
    assert log[-1]["loss"] < log[0]["loss"]
    script("flow_export.py", out, tmp_path / "checkpoint", "--golden", tmp_path)
    run(
        BINARY, "verify", "--model", tmp_path / "checkpoint",
        "--golden", tmp_path / "golden.safetensors", "--threads", "1",
    )  # fmt: skip


@needs_lerobot
def test_a_causal_policy_of_a_few_steps_is_served(frames: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    script(
        "causal_train.py", out, "--steps", "2", "--frames", "2", "--ranks", "1",
        "--data", frames, "--validation", frames,
    )  # fmt: skip
    script("causal_export.py", out, tmp_path / "checkpoint")
    shown = run(BINARY, "inspect", tmp_path / "checkpoint")
    assert "openvla" in shown.lower()
