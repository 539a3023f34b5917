"""Which way batches go to the replicas: what is asked of Ray Serve, and what is done with what a replica says."""

from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from inference_service.domain.rows import Outputs, Rows
from inference_service.domain.scaling import Scale
from inference_service.domain.signature import Signature, TensorSpec
from inference_service.ray_serve import ServeApplications
from inference_service.replica import Loaded, ReplicaSpec
from inference_service.settings import settings_from
from shared.errors import Unavailable
from shared.settings import SettingsError, StoreSettings

ENVIRON = {"MILLRACE_STORE": "file:///store", "RAY_ADDRESS": "127.0.0.1:6379"}
STORE = "file:///store"
SIGNATURE = Signature((TensorSpec("x", "INT64", (-1,)),), TensorSpec("x", "FP32", (-1,)), ())
SPEC = ReplicaSpec(
    store=StoreSettings(url=STORE), folder="runs/r", manifest_sha256="0" * 64, threads=1, max_batch_size=8
)


class Answer:
    """What a call of a Serve handle gives."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def results(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0
        assert return_exceptions
        return [self._value]

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self._value


class Method:
    def __init__(self, value: Any) -> None:
        self._value = value

    def remote(self, *_: Any) -> Answer:
        return Answer(self._value)


class Handle:
    """A Serve handle of a replica that listens in `sockets`; its answers are told from a socket's by their times."""

    is_initialized = False

    def __init__(self, sockets: Path | None) -> None:
        self.describe = Method(Loaded(SIGNATURE, "versions/1", {}, sockets))
        self.forward = Method(Outputs([np.array([1])], {}, 7.0, 7.0))

    def _init(self, *, _run_router_in_separate_loop: bool) -> None:
        assert not _run_router_in_separate_loop
        self.is_initialized = True

    def broadcast(self, method: str) -> Answer:
        assert self.is_initialized
        answer: Answer = getattr(self, method).remote()
        return answer


def asked_folder(monkeypatch: pytest.MonkeyPatch, *, replica_sockets: bool) -> Path | None:
    """The folder that replicas are told to listen in."""
    targets: list[Any] = []
    monkeypatch.setattr(serve, "run_many", lambda given, **_: targets.extend(given))
    ServeApplications(STORE, replica_sockets=replica_sockets).deploy("d-v1", SPEC, Scale(initial=2, cpus=1))
    (target,) = targets
    spec, folder = target.target._bound_deployment.init_args
    assert (spec, target.target._bound_deployment.num_replicas) == (SPEC, 2)
    assert folder is None or isinstance(folder, Path)
    return folder


def test_replicas_open_no_socket_where_they_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_folder(monkeypatch, replica_sockets=False) is None
    assert asked_folder(monkeypatch, replica_sockets=True) is not None


def test_where_they_are_off_a_replica_that_listens_is_called_through_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(serve, "get_app_handle", lambda _: Handle(folder))
    looked: list[Path] = []
    monkeypatch.setattr("inference_service.local_replicas._changed_ns", lambda path: looked.append(path))

    async def called() -> Outputs:
        model, _ = await applications.describe("d-v1", 1)
        return await model.forward(Rows("raw", {"x": np.array([1])}))

    applications = ServeApplications(STORE, replica_sockets=False)
    assert asyncio.run(called()).infer_s == 7.0
    assert looked == []
    applications = ServeApplications(STORE, replica_sockets=True)
    assert asyncio.run(called()).infer_s == 7.0
    assert looked == [folder]


def test_an_application_without_a_replica_that_is_well_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoReplica(Handle):
        def __init__(self) -> None:
            super().__init__(None)
            del self.forward

        def __getattr__(self, name: str) -> Any:
            raise DeploymentUnavailableError(DeploymentID(name="model", app_name="d-v1"))

    monkeypatch.setattr(serve, "get_app_handle", lambda _: NoReplica())

    async def called() -> None:
        model, _ = await ServeApplications(STORE, replica_sockets=False).describe("d-v1", 1)
        with pytest.raises(Unavailable, match="try again"):
            await model.forward(Rows("raw", {"x": np.array([1])}))

    asyncio.run(called())


@pytest.mark.parametrize(("text", "expected"), [(None, True), ("", True), ("0", False), ("1", True)])
def test_sockets_are_a_setting(text: str | None, expected: bool) -> None:
    environ = ENVIRON if text is None else {**ENVIRON, "MILLRACE_REPLICA_SOCKETS": text}
    assert settings_from(environ).replica_sockets is expected


def test_another_value_is_refused() -> None:
    with pytest.raises(SettingsError, match="MILLRACE_REPLICA_SOCKETS: 'yes': use 0 or 1"):
        settings_from({**ENVIRON, "MILLRACE_REPLICA_SOCKETS": "yes"})


def test_a_specification_that_serve_keeps_of_an_earlier_release_exports_no_spans() -> None:
    kept = copy.copy(SPEC)
    kept.__dict__.pop("tracing")

    assert pickle.loads(pickle.dumps(kept)).tracing is None


def test_of_several_that_start_serve_at_once_the_losers_join_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [ActorAlreadyExistsError("the name is taken")]
    started = []

    def start(**_: Any) -> None:
        if refusals:
            raise refusals.pop()
        started.append(True)

    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(serve, "start", start)
    ServeApplications(STORE, replica_sockets=False).connect("127.0.0.1:6379")
    assert started == [True]
    refusals.extend([ActorAlreadyExistsError("the name is taken")] * 2)
    with pytest.raises(ActorAlreadyExistsError):
        ServeApplications(STORE, replica_sockets=False).connect("127.0.0.1:6379")
