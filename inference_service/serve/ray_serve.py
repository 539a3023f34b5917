"""The use of Ray Serve: applications by name, and calls of them.

No call waits longer than a healthy Serve would take.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import shutil
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import ray
from ray import serve
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve._private.common import ReplicaState
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, LoggingConfig

from inference_service.domain.batch_policy import Load
from inference_service.domain.deployment import Autoscaling, Scale
from inference_service.domain.signature import Outputs, Rows
from inference_service.serve.autoscaling import by_rows
from inference_service.serve.replica import Loaded, ModelReplica, ReplicaSpec
from inference_service.serve.sockets import LocalReplicas, ReplicaLost, socket_folder
from shared.errors import MillraceError, Unavailable
from shared.logging_and_tracing import hidden, tracing

logger = logging.getLogger(__name__)


# --- Applications ---
# Serve's proxies are off, since requests come through our own frontend. The frontend calls the replicas through a
# `DeploymentHandle`, and those on its own machine over their sockets, unless these are switched off.


NAMESPACE = "millrace"
ANSWER_TIMEOUT_S = 10.0
CONSTRUCTOR_RETRIES = 3
RUNNING = ReplicaState.RUNNING
# More calls than several frontends send, copies for a shadow included, so that Serve itself never queues.
CALLS_PER_REPLICA = 100
# How often a replica passes its load to Serve; the frontends' reports are means already.
RECORD_EVERY_S = 2.0
# The errors of a batch whose replica was lost: it died, was killed for lack of memory, or was on a lost node; or its
# answer, which may be an object of its own, was lost.
LOST = (
    ReplicaLost,
    RayActorError,
    WorkerCrashedError,
    OutOfMemoryError,
    NodeDiedError,
    LocalRayletDiedError,
    ObjectLostError,
)


@dataclass(frozen=True)
class Application:
    """Serve's state of an application.

    `running`: all replicas of the deployment are up, or were at first. `failed`: Serve has given up; `message` has the
    reason. `replicas` are running now. `deleting`: it is being deleted, and gets no new replicas.
    """

    running: bool
    failed: bool
    message: str
    replicas: int = 0
    deleting: bool = False


class ServeApplications:
    """The applications of one Millrace.

    Their names begin with `millrace-` and a digest of the store's URL, so several Millraces and other applications can
    share a Ray cluster.

    Methods that are not coroutines block: call them in threads. Every method raises Ray's own errors when Ray does not
    answer.
    """

    def __init__(self, store_url: str, *, replica_sockets: bool) -> None:
        self._replica_sockets = replica_sockets
        self._prefix = f"millrace-{hashlib.sha256(store_url.encode()).hexdigest()[:8]}-"
        self._kept_at = f"{self._prefix}deployments"
        self._models: dict[str, ServeModel] = {}
        # Ray's session name of the joined cluster.
        self._cluster = ""

    def connect(self, address: str) -> None:
        """Join the cluster at host:port, and start Serve there if necessary."""
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        try:
            serve.start(proxy_location=ProxyLocation.Disabled)
        except ValueError:  # another process started it at the same moment, and its controller has the name
            serve.start(proxy_location=ProxyLocation.Disabled)
        # A head creates the name when it starts, so another or a restarted head has another name.
        self._cluster = ray.get_runtime_context().get_session_name()

    def nodes(self) -> dict[str, dict[str, float]]:
        """Return the total resources of each node, by its id."""
        return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]

    def statuses(self) -> dict[str, Application]:
        """Return our applications by name; names have no prefix outside of this class."""
        found = {
            name.removeprefix(self._prefix): Application(
                running=app.status is ApplicationStatus.RUNNING,
                failed=app.status is ApplicationStatus.DEPLOY_FAILED,
                message="\n".join([app.message, *(one.message for one in app.deployments.values())]),
                replicas=sum(deployment.replica_states.get(RUNNING, 0) for deployment in app.deployments.values()),
                deleting=app.status is ApplicationStatus.DELETING,
            )
            for name, app in serve.status().applications.items()
            if name.startswith(self._prefix)
        }
        for name, model in list(self._models.items()):
            if name in found:
                model.scaled(found[name].replicas)
        return found

    def deploy(self, name: str, spec: ReplicaSpec, scale: Scale) -> None:
        """Deploy an application, without waiting for its replicas."""
        deployment = serve.deployment(
            name="model",
            num_replicas=scale.initial if scale.autoscaling is None else None,
            autoscaling_config=_autoscaling(scale.autoscaling, scale.initial) if scale.autoscaling else None,
            max_ongoing_requests=CALLS_PER_REPLICA,
            ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
            max_constructor_retry_count=CONSTRUCTOR_RETRIES,
            health_check_period_s=2.0,
            # The frontend drains before it deletes.
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=5.0,
            logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        )(ModelReplica)
        sockets = socket_folder(self._cluster, self._prefix + name) if self._replica_sockets else None
        target = serve.RunTarget(target=deployment.bind(spec, sockets), name=self._prefix + name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)

    def forget(self, name: str) -> None:
        """Forget an application that another process deletes."""
        self._models.pop(name, None)

    def keep(self, data: bytes) -> None:
        """Store these bytes in Ray's head, for processes with the same store that join it.

        They replace earlier ones, and are lost with the head, as all replicas are.
        """
        _internal_kv_put(self._kept_at, data, overwrite=True, namespace=NAMESPACE)

    def kept(self) -> bytes | None:
        """Return the bytes last stored by `keep` in any process; None if there are none."""
        data: bytes | None = _internal_kv_get(self._kept_at, namespace=NAMESPACE)
        return data

    def delete(self, name: str) -> None:
        """Delete an application and wait for it; a missing one is no error."""
        self.forget(name)
        serve.delete(self._prefix + name)
        # Removes the sockets of killed replicas on this machine. On other machines they are removed when other replicas
        # start.
        shutil.rmtree(socket_folder(self._cluster, self._prefix + name), ignore_errors=True)

    async def open_model(self, name: str, replicas: int) -> tuple[ServeModel, Loaded]:
        """Return a running application's model, once `replicas` of its replicas have loaded it.

        The model belongs to this event loop. Raises the error of a replica that could not load it, and `Unavailable`
        while fewer are known.
        """
        handle: DeploymentHandle[Any] = await to_serve_thread(serve.get_app_handle, self._prefix + name)
        # By default a handle has its own thread and event loop, which opens grpc.aio channels. All such loops are woken
        # by each event of any of them, our server's included: that took a seventh of the frontend's time.
        if not handle.is_initialized:  # Serve caches initialized handles
            handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            with suppress(RayTaskError):  # unlike `broadcast`, this call waits until the handle knows a replica
                await handle.describe.remote()
        # In a thread: there each replica has its own timeout, and a hung one is an exception among the answers.
        asked = handle.broadcast("describe")
        answers = await to_serve_thread(asked.results, timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
        loaded = [answer for answer in answers if isinstance(answer, Loaded)]
        if len(loaded) < replicas:
            failures = [_cause(one) for one in answers if isinstance(one, Exception)]
            for failure in sorted(failures, key=lambda one: not isinstance(one, MillraceError)):
                raise failure
            # Serve's handles learn of a replica a little later than its status shows it.
            raise Unavailable(f"{len(loaded)} of {replicas} replicas of {name} are known", reason="MODEL_NOT_READY")
        # The application may have been deployed with another setting of replica sockets.
        folders = [one.sockets for one in loaded if one.sockets is not None and self._replica_sockets]
        local = LocalReplicas(folders[0] if folders else None, len(loaded), name)
        model = self._models[name] = ServeModel(handle, local)
        return model, loaded[0]

    async def report_load(self, name: str, frontend: str, load: Load) -> None:
        """Report this frontend's load to all replicas of a described application."""
        model = self._models.get(name)
        if model is not None:
            await model.report_load(frontend, load)


class ServeModel:
    """Runs batches on free replicas: locally over sockets, elsewhere through Serve's handle.

    A batch whose replica dies is sent once more.
    """

    def __init__(self, handle: DeploymentHandle[Any], local: LocalReplicas) -> None:
        self._handle = handle
        self._local = local

    def scaled(self, replicas: int) -> None:
        """Set the number of running replicas; safe to call from any thread."""
        self._local.replicas = replicas

    async def report_load(self, frontend: str, load: Load) -> None:
        """Report the load; raise the first error after all replicas were called."""
        calls = self._handle.broadcast("report_load", frontend, load)
        for answer in await calls.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True):
            if isinstance(answer, Exception):
                raise answer

    async def forward(self, rows: Rows) -> Outputs:
        """Run a batch; raise `Unavailable` if a second replica dies or none is healthy, and the replica's errors."""
        try:
            return await self._call(rows)
        except LOST:
            logger.warning("a replica died with a batch of %d rows; sending it once more", len(rows))
        try:
            # A connected replica on this machine is alive as far as known. Serve's handle may choose replicas that have
            # been dead for seconds before it learns of that.
            return replace(await self._call(rows, busy_too=True), sent_again=True)
        except LOST:
            raise Unavailable(
                "two replicas died while they worked on this request; try again",
                reason="REPLICA_LOST",
                retry_after_s=1.0,
            ) from None

    async def _call(self, rows: Rows, *, busy_too: bool = False) -> Outputs:
        """Send a batch to the replica on this machine that has the fewest batches, by its socket.

        Serve's router chooses if no replica here has capacity for a batch, or if other machines have replicas, too.
        `busy_too`: as in `LocalReplicas.least_loaded`.
        """
        replica = await self._local.least_loaded(busy_too=busy_too)
        with tracing().span("replica", outgoing=True, way="handle" if replica is None else "socket"):
            headers = tracing().headers()
            if headers is not None:
                rows = replace(rows, trace=headers)
            return await (self._through_handle(rows) if replica is None else replica.forward(rows))

    async def _through_handle(self, rows: Rows) -> Outputs:
        try:
            outputs: Outputs = await self._handle.forward.remote(rows)
        except RayTaskError as error:
            cause = _cause(error)
            if isinstance(cause, (MillraceError, *LOST)):
                raise cause from None
            raise hidden(error, logger, "a batch failed") from None
        except DeploymentUnavailableError:
            raise Unavailable(
                "no replica of this model is well; try again", reason="MODEL_NOT_READY", retry_after_s=1.0
            ) from None
        return outputs


def _autoscaling(autoscaling: Autoscaling, initial: int) -> AutoscalingConfig:
    with warnings.catch_warnings():
        # Ray plans to replace this setting by an environment variable of the replicas' nodes, whose default is 10 s.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=autoscaling.min_replicas,
            initial_replicas=initial,
            max_replicas=autoscaling.max_replicas,
            target_ongoing_requests=autoscaling.rows_per_replica,
            upscale_delay_s=autoscaling.up_after_s,
            downscale_delay_s=autoscaling.down_after_s,
            metrics_interval_s=RECORD_EVERY_S,
            policy=AutoscalingPolicy(policy_function=by_rows),  # type: ignore[no-untyped-call]
        )


def _cause(error: Exception) -> Exception:
    """Return our own error inside of Ray's wrapper."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, MillraceError) else error


# --- Calls of Serve ---
# Calls Ray Serve with a timeout longer than a healthy Serve takes.

# Longer than any healthy answer of Serve's controller. Deploying waits until the controller has recorded it.
SERVE_TIMEOUT_S = 30.0
# Separate threads: those of the event loop wait for the store, which may be unresponsive, and Serve would then seem
# unresponsive, too.
SERVE_THREADS = ThreadPoolExecutor(16, thread_name_prefix="serve")

T = TypeVar("T")
P = ParamSpec("P")


class ServeUnresponsive(Exception):
    """Ray Serve did not answer, or answered with an error of its own."""


async def call_serve(call: Callable[..., T], *arguments: object) -> T:
    """Make a blocking call of Serve in a thread; raise the errors of `answered`."""
    return await answered(to_serve_thread(call, *arguments))


async def to_serve_thread(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Like `asyncio.to_thread`, in a thread that only waits for Ray."""
    run = partial(contextvars.copy_context().run, call, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(SERVE_THREADS, run)


async def answered(call: Awaitable[T]) -> T:
    """Return Serve's answer.

    Raises `ServeUnresponsive` after the timeout and for Ray's errors. A `MillraceError` is raised as it is, since
    replicas raise them, too.
    """
    try:
        async with asyncio.timeout(SERVE_TIMEOUT_S):
            return await call
    except MillraceError:
        raise
    except Exception as error:
        raise ServeUnresponsive(repr(error)) from error
