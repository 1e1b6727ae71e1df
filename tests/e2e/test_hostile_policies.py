"""Damaged policy folders, loaded into a running server, and sessions of all kinds whose model comes and goes."""

from __future__ import annotations

import random
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Golden, golden
from conftest import RunningServer

from saccade import Actions, Client, Flow, RequestFailed, SaccadeError

FAMILIES = ("smolvla", "pi0", "pi0_fast")
GOLDEN = {name: golden(name) for name in FAMILIES}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[RunningServer]:
    models = "\n".join(
        f"  - {{name: {name}, path: {GOLDEN[name].checkpoint}, default_class: best_effort, kv: {{memory_mb: 8}}}}"
        for name in FAMILIES
    )
    running = RunningServer(
        models=models,
        extra=f'admin: {{models_root: "{root}"}}\nmemory: {{budget_mb: 1024}}\n',
        limits="{acts_per_s: 10000, messages_per_s: 10000}",
    )
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()


def ask(client: Client, case: Golden, model: str = "", **act: object) -> Actions:
    return client.predict(
        case.frames,
        case.task,
        model=model or case.name,
        state=case.state,
        **act,  # type: ignore[arg-type]
    )


def check_witness(client: Client) -> None:
    """The others answer as the reference, and everything is in order."""
    case = GOLDEN["pi0"]
    answer = ask(client, case, flow=Flow(noise=case.tensors["noise"]))
    np.testing.assert_allclose(answer.values, case.tensors["actions"][0], rtol=0, atol=2e-6)
    assert client.status().ready
    assert client.admin.broken_invariant() == ""


def open_gauges(server: RunningServer) -> list[str]:
    """Lines of the metrics of streams and sessions that are not 0."""
    text = urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5).read().decode()
    return [
        line
        for line in text.splitlines()
        if line.startswith(("saccade_streams", "saccade_sessions"))
        and float(line.rsplit(" ", 1)[1]) != 0
    ]


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: tuple[Callable[[Path], None], ...] = (Path.unlink, half, short, folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_damaged_folder_is_refused_or_answers_as_before(
    server: RunningServer, root: Path, name: str
) -> None:
    case = GOLDEN[name]
    noise = case.tensors.get("noise")
    files = [
        path.relative_to(case.checkpoint)
        for path in sorted(case.checkpoint.rglob("*"))
        if path.is_file()
    ]
    refused: set[str] = set()
    with Client(server.address, timeout_s=30) as client:
        before = client.admin.memory().kinds
        for file in files:
            for damage in DAMAGES:
                shutil.rmtree(root / "damaged", ignore_errors=True)
                shutil.copytree(case.checkpoint, root / "damaged")
                damage(root / "damaged" / file)
                try:
                    client.admin.load("damaged", "damaged", like=name)
                except RequestFailed as error:
                    assert error.code in ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED")
                    refused.add(str(file))
                    continue
                if noise is not None and file.name != "tiny_dims.json":  # sizes of the test's own
                    answer = ask(client, case, "damaged", flow=Flow(noise=noise))
                    np.testing.assert_allclose(
                        answer.values, case.tensors["actions"][0], rtol=0, atol=2e-6
                    )
                client.admin.unload("damaged", grace_s=0)
        after = client.admin.memory().kinds
        for kind in ("weights", "kv_cache", "embeddings", "scratch", "staging"):
            assert after[kind] == before[kind], kind
        check_witness(client)
    for file in files:
        if file.suffix == ".safetensors" or file.name in (
            "config.json",
            "policy_preprocessor.json",
        ):
            assert str(file) in refused, file


def test_sessions_of_a_model_that_comes_and_goes_leave_the_others_alone(
    server: RunningServer, root: Path
) -> None:
    """Refreshes, pushes, cancels and endless flows of one model, while it is unloaded and reloaded."""
    source = GOLDEN["smolvla"]
    shutil.copytree(source.checkpoint, root / "guest")
    stop = threading.Event()
    outcomes: dict[str, int] = {}

    def misbehave(seed: int) -> None:
        choose = random.Random(seed)
        while not stop.is_set():
            try:
                with (
                    Client(server.address, timeout_s=30) as own,
                    own.session(
                        model="guest",
                        instruction=source.task,
                        reconnect=None,
                        refresh_class=choose.choice(("", "best_effort", "planning")),
                    ) as session,
                ):
                    session.set_state(source.state)
                    for _ in range(choose.randrange(1, 15)):
                        what = choose.randrange(6)
                        if what == 0:
                            session.push(
                                50, lambda _: None, flow=Flow(steps=choose.choice((1, 400)))
                            )
                        elif what == 1:
                            session.act(flow=Flow(steps=choose.choice((1, 30))), timeout_s=5)
                        elif what == 2:
                            session.set_state([choose.choice((0.1, float("nan"), 1e38))] * 7)
                        elif what == 3:
                            session.act_async(flow=Flow(steps=1000)).cancel()
                        else:
                            for camera, pixels in source.frames.items():
                                session.send_frame(np.roll(pixels, choose.randrange(9), 0), camera)
                outcome = "ended"
            except SaccadeError as error:
                outcome = type(error).__name__
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

    with Client(server.address, timeout_s=60) as client:
        case = GOLDEN["pi0"]
        questions = [(seed, steps) for seed in range(3) for steps in (1, 6)]
        alone = [ask(client, case, seed=s, flow=Flow(steps=n)).values for s, n in questions]
        before = client.admin.memory().kinds
        threads = [threading.Thread(target=misbehave, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(6):
                client.admin.load("guest", "guest", like="smolvla")
                for (seed, steps), expected in zip(questions, alone, strict=True):
                    answer = ask(client, case, seed=seed, flow=Flow(steps=steps))
                    np.testing.assert_array_equal(answer.values, expected)
                if turn % 2 == 0:
                    client.admin.reload("guest", grace_s=0.1)
                client.admin.unload("guest", grace_s=0)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        assert sum(outcomes.values()) > 6, outcomes
        for _ in range(100):
            if not open_gauges(server):
                break
            time.sleep(0.05)
        assert open_gauges(server) == []
        after = client.admin.memory().kinds
        for kind in (
            "weights",
            "kv_cache",
            "embeddings",
            "scratch",
            "staging",
            "sessions",
            "messages",
        ):
            assert after[kind] == before[kind], kind
        check_witness(client)
