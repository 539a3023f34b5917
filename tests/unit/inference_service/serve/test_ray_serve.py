"""Which way batches go to the replicas: what is asked of Ray Serve, and what is done with what a replica says."""

from __future__ import annotations

import asyncio
import copy
import pickle
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve
from ray.exceptions import (
    ActorAlreadyExistsError,
    ActorDiedError,
    ActorUnavailableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus

from inference_service.domain.deployment import Scale
from inference_service.domain.signature import Outputs, Rows, Signature, TensorSpec
from inference_service.serve.ray_serve import Application, ServeApplications, ServeModel
from inference_service.serve.replica import Loaded, ReplicaSpec
from inference_service.serve.sockets import LocalReplicas, listen
from inference_service.settings import settings_from
from shared.errors import DataLoss, FailedPrecondition, Internal, MillraceError, Unavailable
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
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Method:
    """Its calls end with these values, in turn; exceptions are raised. The last one stays."""

    def __init__(self, *values: Any) -> None:
        self._values = [*values]

    def remote(self, *_: Any) -> Answer:
        return Answer(self._values.pop(0) if len(self._values) > 1 else self._values[0])


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


def asked_folder(
    monkeypatch: pytest.MonkeyPatch, *, replica_sockets: bool = True, applications: ServeApplications | None = None
) -> Path | None:
    """The folder that replicas are told to listen in."""
    applications = applications or ServeApplications(STORE, replica_sockets=replica_sockets)
    targets: list[Any] = []
    monkeypatch.setattr(serve, "run_many", lambda given, **_: targets.extend(given))
    applications.deploy("d-v1", SPEC, Scale(initial=2, cpus=1))
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
    monkeypatch.setattr("inference_service.serve.sockets._changed_ns", lambda path: looked.append(path))

    async def called() -> Outputs:
        model, _ = await applications.open_model("d-v1", 1)
        return await model.forward(Rows("raw", {"x": np.array([1])}))

    applications = ServeApplications(STORE, replica_sockets=False)
    assert asyncio.run(called()).infer_s == 7.0
    assert looked == []
    applications = ServeApplications(STORE, replica_sockets=True)
    assert asyncio.run(called()).infer_s == 7.0
    assert looked == [folder]


async def test_an_application_without_a_replica_that_is_well_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoReplica(Handle):
        def __init__(self) -> None:
            super().__init__(None)
            del self.forward

        def __getattr__(self, name: str) -> Any:
            raise DeploymentUnavailableError(DeploymentID(name="model", app_name="d-v1"))

    monkeypatch.setattr(serve, "get_app_handle", lambda _: NoReplica())

    model, _ = await ServeApplications(STORE, replica_sockets=False).open_model("d-v1", 1)
    with pytest.raises(Unavailable, match="try again"):
        await model.forward(Rows("raw", {"x": np.array([1])}))


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
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_session_name=lambda: "session"))
    monkeypatch.setattr(serve, "start", start)
    ServeApplications(STORE, replica_sockets=False).connect("127.0.0.1:6379")
    assert started == [True]
    refusals.extend([ActorAlreadyExistsError("the name is taken")] * 2)
    with pytest.raises(ActorAlreadyExistsError):
        ServeApplications(STORE, replica_sockets=False).connect("127.0.0.1:6379")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sockets lie in a folder of the test's own, and not deep: a socket's path must be short."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def connected(monkeypatch: pytest.MonkeyPatch, session: str) -> ServeApplications:
    """To the cluster whose head named its session so."""
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_session_name=lambda: session))
    applications = ServeApplications(STORE, replica_sockets=True)
    applications.connect("127.0.0.1:6379")
    return applications


@pytest.mark.usefixtures("temporary")
def test_replicas_of_another_cluster_are_not_called_and_keep_their_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (connected(monkeypatch, name) for name in ("session_1", "session_2"))
    theirs, own = (asked_folder(monkeypatch, applications=applications) for applications in (one, other))
    assert theirs is not None
    assert own is not None
    socket_server = listen(theirs, ThreadPoolExecutor(1), lambda rows: Outputs([rows.values["x"]]))
    assert socket_server is not None

    async def found(folder: Path) -> bool:
        return await LocalReplicas(folder).least_loaded() is not None

    assert asyncio.run(found(theirs))
    assert not asyncio.run(found(own))
    monkeypatch.setattr(serve, "delete", lambda _: None)
    other.delete("d-v1")
    assert asyncio.run(found(theirs))
    one.delete("d-v1")
    assert not asyncio.run(found(theirs))
    socket_server.close(0.0)


def test_an_application_that_is_deployed_again_in_its_cluster_is_the_same_to_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applications = connected(monkeypatch, "session_1")
    first = asked_folder(monkeypatch, applications=applications)
    assert asked_folder(monkeypatch, applications=applications) == first
    assert asked_folder(monkeypatch, applications=connected(monkeypatch, "session_1")) == first  # started again


GONE = [
    ActorDiedError(),
    ActorUnavailableError("the network is gone", None),
    WorkerCrashedError(),
    OutOfMemoryError("killed by the memory monitor"),  # type: ignore[no-untyped-call]
    NodeDiedError("the node is gone"),  # type: ignore[no-untyped-call]
    LocalRayletDiedError(),
    ObjectLostError("ab", None, ""),
    OwnerDiedError("ab", None, ""),
]


def asked_through(handle: Handle) -> Outputs:
    model = ServeModel(handle, LocalReplicas(None))  # type: ignore[arg-type]
    return asyncio.run(model.forward(Rows("raw", {"x": np.array([1])})))


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
def test_a_batch_whose_replica_is_gone_is_sent_once_more(error: RayError) -> None:
    handle = Handle(None)
    handle.forward = Method(error, Outputs([np.array([2])]))
    outputs = asked_through(handle)
    assert outputs.sent_again
    assert outputs.arrays[0].tolist() == [2]
    handle.forward = Method(error)
    with pytest.raises(Unavailable, match="two replicas died"):
        asked_through(handle)


def test_a_replicas_own_error_comes_through_and_an_unexpected_one_without_its_internals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handle = Handle(None)
    for cause in (FailedPrecondition("no negative numbers"), ZeroDivisionError("secret")):
        ray_error: Any = RayTaskError  # which has no types
        reported_by_ray = ray_error("forward", "secret traceback", cause, proctitle="replica", ip="127.0.0.1")
        handle.forward = Method(reported_by_ray.as_instanceof_cause())
        with pytest.raises(MillraceError) as error:
            asked_through(handle)
        assert "secret" not in error.value.message
        assert isinstance(error.value, FailedPrecondition | Internal)
    correlation_id = error.value.metadata["correlation_id"]
    assert error.value.message == f"internal error; quote the correlation id {correlation_id}"
    assert correlation_id in caplog.text
    assert "secret traceback" in caplog.text


def test_one_replica_of_two_that_cannot_load_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_error: Any = RayTaskError  # which has no types
    reported_by_ray = ray_error(
        "describe", "traceback", DataLoss("a file is damaged"), proctitle="replica", ip="127.0.0.1"
    )
    answers = [Loaded(SIGNATURE, "", {}), reported_by_ray.as_instanceof_cause()]
    handle = Handle(None)
    monkeypatch.setattr(handle, "broadcast", lambda _: SimpleNamespace(results=lambda **_: answers))
    monkeypatch.setattr(serve, "get_app_handle", lambda _: handle)
    applications = ServeApplications(STORE, replica_sockets=False)

    with pytest.raises(DataLoss, match="a file is damaged"):
        asyncio.run(applications.open_model("d-v1", 2))
    # The one that loaded is enough where one is asked for; and of two, as many have to be known.
    assert asyncio.run(applications.open_model("d-v1", 1))[1] == answers[0]
    del answers[1]
    with pytest.raises(Unavailable, match="1 of 2 replicas of d-v1 are known"):
        asyncio.run(applications.open_model("d-v1", 2))


def test_a_folder_is_taken_from_the_replicas_that_listen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    handle = Handle(tmp_path)
    loaded = [Loaded(SIGNATURE, "", {}), Loaded(SIGNATURE, "", {}, tmp_path)]
    monkeypatch.setattr(handle, "broadcast", lambda _: SimpleNamespace(results=lambda **_: loaded))
    monkeypatch.setattr(serve, "get_app_handle", lambda _: handle)

    async def described() -> Path | None:
        model, _ = await ServeApplications(STORE, replica_sockets=True).open_model("d-v1", 2)
        return model._local._folder

    assert asyncio.run(described()) == tmp_path


def test_an_application_that_serve_deletes_is_distinguished_from_one_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applications = ServeApplications(STORE, replica_sockets=False)

    def seen(status: ApplicationStatus) -> Application:
        running = SimpleNamespace(replica_states={ReplicaState.RUNNING: 2}, message="")
        found = SimpleNamespace(status=status, message="", deployments={"model": running})
        reported = SimpleNamespace(applications={f"{applications._prefix}d-v1": found, "another": found})
        monkeypatch.setattr(serve, "status", lambda: reported)
        (one,) = applications.statuses().items()
        assert one[0] == "d-v1"
        return one[1]

    assert seen(ApplicationStatus.DELETING) == Application(False, False, "\n", replicas=2, deleting=True)
    assert seen(ApplicationStatus.DEPLOYING) == Application(False, False, "\n", replicas=2)
    assert seen(ApplicationStatus.RUNNING) == Application(True, False, "\n", replicas=2)
