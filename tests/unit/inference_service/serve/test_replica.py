"""A replica's word on its own health, over a model that does what tests say; real ones are in the integration tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import logging
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace

import numpy as np
import pytest

from inference_service.domain.signature import Outputs, Rows, Signature, TensorSpec
from inference_service.serve import replica
from inference_service.serve.replica import HangWatch, Loaded, ModelReplica, ReplicaSpec
from inference_service.serve.sockets import LocalReplicas, ReplicaLost
from shared.logging_and_tracing import JsonFormatter
from shared.settings import StoreSettings

SIGNATURE = Signature((TensorSpec("x", "INT64", (-1,)),), TensorSpec("x", "FP32", (-1,)), ())
SPEC = ReplicaSpec(
    store=StoreSettings(url="file:///store"), folder="runs/r", manifest_sha256="0" * 64, threads=1, max_batch_size=8
)
ROWS = Rows("raw", {"x": np.array([1])})


class Model:
    """It works while `may_work` is set; its custom functions may take `custom_s`."""

    def __init__(self, custom_s: float = 0.0) -> None:
        self.custom_s = custom_s
        self.may_work = threading.Event()
        self.at_work = threading.Event()

    def forward(self, rows: Rows, _note_progress: Callable[[], None]) -> Outputs:
        self.at_work.set()
        assert self.may_work.wait(240)
        return Outputs([rows.values["x"]])


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as root:  # a socket's path must be short
        yield Path(root) / "sockets"


def serving(
    monkeypatch: pytest.MonkeyPatch, model: Model, *, largest_s: float = 0.0, sockets: Path | None = None
) -> ModelReplica:
    monkeypatch.setattr(replica, "_load", lambda _: (model, Loaded(SIGNATURE, "", {8: largest_s})))
    return ModelReplica(SPEC, sockets)


def while_it_works(one: ModelReplica, model: Model, poll: Callable[[], Awaitable[None]]) -> None:
    """Run `poll` while the model is at a batch, and let it end then."""

    async def scenario() -> None:
        await one.check_health()
        task = asyncio.create_task(one.forward(ROWS))
        assert await asyncio.to_thread(model.at_work.wait, 240)
        try:
            await poll()
        finally:
            model.may_work.set()
        await task
        await one.check_health()

    asyncio.run(asyncio.wait_for(scenario(), 480))


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a batch that nothing was promised to hangs as soon as it has begun."""
    monkeypatch.setattr(replica, "HANGS_AFTER_S", 0.0)
    monkeypatch.setattr(replica, "BESIDES_CUSTOM_S", 0.0)


def test_a_replica_whose_model_hangs_is_not_well_and_one_that_is_idle_or_at_work_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    one = serving(monkeypatch, model)

    async def poll() -> None:
        await one.check_health()
        with monkeypatch.context() as later:
            at_once(later)
            with pytest.raises(RuntimeError, match="has been at one batch for"):
                await one.check_health()

    while_it_works(one, model, poll)
    assert "assert self.may_work.wait(240)" in caplog.text  # so an operator sees which function it was


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """A test may have it write JSON lines; afterwards it does not."""
    root, level = logging.getLogger(), logging.getLogger().level
    yield root
    root.handlers[:] = [one for one in root.handlers if not isinstance(one.formatter, JsonFormatter)]
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
def test_a_replica_that_serve_keeps_logs_as_the_services_do_and_says_which_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = SimpleNamespace(app_name="millrace-0-uid-m-v1")
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    model = Model()
    one = serving(monkeypatch, model)

    async def poll() -> None:
        with monkeypatch.context() as later:
            at_once(later)
            with pytest.raises(RuntimeError):
                await one.check_health()

    while_it_works(one, model, poll)
    (line,) = (json.loads(line) for line in capsys.readouterr().err.splitlines() if "at one batch" in line)
    assert (line["service"], line["application"], line["level"]) == ("inference-replica", context.app_name, "ERROR")


def test_elsewhere_a_replica_leaves_the_logs_of_its_process_alone(
    monkeypatch: pytest.MonkeyPatch, root_logger: logging.Logger
) -> None:
    before = list(root_logger.handlers)
    serving(monkeypatch, Model())
    assert root_logger.handlers == before


def test_a_model_has_the_time_that_its_custom_functions_were_promised_and_its_largest_batch_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once(monkeypatch)
    for model, largest_s in ((Model(custom_s=60.0), 0.0), (Model(), 6.0)):
        one = serving(monkeypatch, model, largest_s=largest_s)
        while_it_works(one, model, one.check_health)


def test_each_step_of_progress_has_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(replica, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    watch = HangWatch()
    assert watch.lasts_s() == 0.0
    with watch.working():
        now_s[0] += 50.0
        assert watch.lasts_s() == 50.0
        watch.note_progress()
        assert watch.lasts_s() == 0.0
        now_s[0] += 10.0
        assert watch.lasts_s() == 10.0
    assert watch.lasts_s() == 0.0


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_python_lists_its_threads(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[bool] = []

    def frames() -> dict[int, FrameType]:
        collected.append(gc.isenabled())
        frame = inspect.currentframe()
        assert frame is not None
        return {threading.get_ident(): frame}

    watch = HangWatch()
    monkeypatch.setattr(sys, "_current_frames", frames)
    if not collects:
        gc.disable()
    try:
        with watch.working():
            assert "in test_no_garbage_is_collected" in watch.stack()
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert collected == [False]


async def test_a_replica_that_hangs_can_be_stopped_and_what_it_had_is_known_to_be_lost(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(replica, "SHUTDOWN_TIMEOUT_S", 0.2)
    model = Model()
    one = serving(monkeypatch, model, sockets=folder)

    try:
        async with asyncio.timeout(480):
            assert (await one.describe()).sockets == folder
            local = await LocalReplicas(folder).least_loaded()
            assert local is not None
            task = asyncio.create_task(local.forward(ROWS))
            assert await asyncio.to_thread(model.at_work.wait, 240)
            await asyncio.to_thread(one.__del__)  # as Serve does
            with pytest.raises(ReplicaLost):
                await task
    finally:
        model.may_work.set()


def test_a_replica_that_cannot_listen_names_no_sockets(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.parent.chmod(0o755)
    one = serving(monkeypatch, Model(), sockets=folder)
    assert asyncio.run(one.describe()).sockets is None
