"""The Ray Serve replica: one model in one process, on a thread of its own.

Its process has a higher CPU priority than Ray gives its workers (`raise_priority`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ray import serve
from ray.serve.exceptions import RayServeException

from inference_service.domain.batch_policy import Load
from inference_service.domain.signature import Outputs, Rows, Signature
from inference_service.serve.autoscaling import REFUSED, ROWS
from inference_service.serve.sockets import ReplicaSocketServer, listen
from shared.checkpoint import CheckpointContent, load_checkpoint
from shared.checkpoint.format import PROGRAM_CHECKPOINT, load_program_checkpoint, node_copy
from shared.code_bundle_registry import load_code
from shared.errors import FailedPrecondition, Internal, MillraceError, Unavailable
from shared.logging_and_tracing import configure_logging, configure_tracing, current_frames, tracing
from shared.settings import OwnCode, StoreSettings, allowed_functions
from shared.storage import open_store

if TYPE_CHECKING:
    from inference_service.serve.served_model import ServedModel, ServedPredictor


# --- Replica ---

logger = logging.getLogger(__name__)


T = TypeVar("T")

STORE_OUTAGE_TIMEOUT_S = 120.0
STORE_RETRY_S = 2.0
# Time to shut down when Serve stops a replica. Serve kills the process after 5 s.
SHUTDOWN_TIMEOUT_S = 4.0
EXPORT_TIMEOUT_S = 0.5
# A batch that makes no progress for HANGS_AFTER_S counts as hung. The limit is longer if the time limits of the model's
# custom functions, plus TIMES_THE_LARGEST times the longest warm-up batch and at least BESIDES_CUSTOM_S, are longer.
HANGS_AFTER_S = 90.0
BESIDES_CUSTOM_S = 30.0
TIMES_THE_LARGEST = 10


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """The arguments of a replica.

    They are complete: when Serve restarts a replica, it needs no other process.
    """

    store: StoreSettings
    folder: str
    manifest_sha256: str
    threads: int
    max_batch_size: int
    # The service's OpenTelemetry variables; those of the replica's own node take precedence. A class default, so that
    # specifications that Serve keeps from earlier releases have it, too.
    tracing: Mapping[str, str] | None = field(default=None, repr=False)
    # Whether rows with a NaN or an infinity that no step fills are computed. A class default, as for `tracing`.
    allow_non_finite: bool = False
    # Whether a model built by a user's own code may be loaded here. A class default, as for `tracing`.
    own_code: bool = False
    # Only for a program's checkpoint: see `Spec.predictor`. A class default, as for `tracing`.
    predictor: str = ""


@dataclass(frozen=True)
class Loaded:
    """A replica's description of the checkpoint that it serves.

    `batch_s` maps rows → seconds. `sockets` is the folder in which the replicas of this machine listen for its
    frontends; None if this replica does not listen.
    """

    signature: Signature
    dataset_version: str
    batch_s: dict[int, float]
    sockets: Path | None = None


class ModelReplica:
    """Serves one checkpoint.

    If the checkpoint can never be served, the constructor does not raise, since Serve would only retry: `describe` and
    `forward` raise the error instead. If the store does not answer, it raises, and Serve retries.
    """

    def __init__(self, spec: ReplicaSpec, sockets: Path | None = None, *_of_earlier_releases: object) -> None:
        self._socket_server: ReplicaSocketServer | None = None
        # One thread: torch computes one batch while the event loop unpacks the next. torch's own thread count is set
        # inside this thread, since OpenMP keeps it per calling thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._model: ServedModel | ServedPredictor | None = None
        self._loaded: Loaded | None = None
        self._failure: MillraceError | None = None
        self._loads = LoadAggregator()
        self._watch = HangWatch()
        _log()
        # Before the model's thread starts, because the thread inherits the priority.
        raise_priority()
        _trace(spec.tracing or {})
        try:
            self._model, self._loaded = self._thread.submit(_load, spec).result()
        except Unavailable:
            raise
        except MillraceError as error:
            self._failure = error
        if self._loaded is not None and sockets is not None:
            self._socket_server = listen(sockets, self._thread, self._compute)
            self._loaded = replace(self._loaded, sockets=sockets if self._socket_server is not None else None)

    def __del__(self) -> None:
        """Close the socket server when Serve stops the replica.

        Serve does not know about requests that arrive over the socket.
        """
        if self._socket_server is not None:
            self._socket_server.close(SHUTDOWN_TIMEOUT_S)
        tracing().close(EXPORT_TIMEOUT_S)

    async def describe(self) -> Loaded:
        """Raise `DataLoss` or `FailedPrecondition` when the checkpoint cannot be served."""
        if self._loaded is None:
            raise self._why()
        return self._loaded

    async def check_health(self) -> None:
        """Ray Serve calls this every 2 s, and replaces a replica after it raises three times in a row.

        The thread of a hung model cannot be interrupted: only a main thread could be.
        """
        lasts_s = self._watch.lasts_s()
        if lasts_s > self._hangs_after_s():
            logger.error("the model has been at one batch for %.0f s, here:\n%s", lasts_s, self._watch.stack())
            raise RuntimeError(f"the model has been at one batch for {lasts_s:.0f} s")

    def _hangs_after_s(self) -> float:
        if self._model is None or self._loaded is None:
            return HANGS_AFTER_S
        largest_s = max(self._loaded.batch_s.values(), default=0.0)
        rest_s = max(BESIDES_CUSTOM_S, TIMES_THE_LARGEST * largest_s)
        return max(HANGS_AFTER_S, self._model.custom_s + rest_s)

    async def report_load(self, frontend: str, load: Load) -> None:
        """Record the load of one frontend for all replicas of this version together."""
        self._loads.add(frontend, load)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for Ray Serve's autoscaler."""
        return self._loads.in_all()

    async def forward(self, rows: Rows) -> Outputs:
        """Return the model's outputs for one batch, in the order of the signature."""
        if self._model is None:
            raise self._why()
        loop = asyncio.get_running_loop()
        # A batch that is cancelled while it waits for the thread is never run.
        return await loop.run_in_executor(self._thread, self._compute, rows)

    def _compute(self, rows: Rows) -> Outputs:
        assert self._model is not None
        with self._watch.working(), tracing().received("model", rows.trace, rows=len(rows)):
            began_ns = time.time_ns()
            outputs = self._model.forward(rows, self._watch.note_progress)
            tracing().parts(began_ns, preprocess=outputs.input_s, infer=outputs.infer_s)
        return outputs

    def _why(self) -> MillraceError:
        return self._failure or Internal("the model is not loaded")


def _log() -> None:
    """Configure logging as the services do, with the application's name on each line.

    Does nothing outside of Ray Serve, where the process belongs to another program.
    """
    try:
        application = serve.get_replica_context().app_name
    except RayServeException:
        return
    configure_logging("inference-replica", "INFO", application=application)


def _trace(variables: Mapping[str, str]) -> None:
    """Export spans as the service does.

    The environment of this node takes precedence. A failure is logged, and the replica serves without spans.
    """
    if not variables:
        return
    os.environ.update({**variables, **os.environ})
    try:
        configure_tracing("inference", os.environ)
    except Exception as error:  # its node may have another release's packages
        logger.warning("this replica exports no spans: %r", error)


def _load(spec: ReplicaSpec) -> tuple[Any, Loaded]:
    # Before the import of torch, which takes seconds, so that a missing checkpoint is reported at once.
    try:
        checkpoint = _retry_on_outage(
            lambda: load_checkpoint(open_store(spec.store), spec.folder, spec.manifest_sha256)
        )
    except FailedPrecondition as error:
        if error.specific_reason != PROGRAM_CHECKPOINT:
            raise
        return _load_predictor(spec)
    content = checkpoint.content
    if content.model.is_own:
        _load_own_code(spec, content)
    import torch

    from inference_service.serve.served_model import ServedModel, assigned_device

    torch.set_num_threads(spec.threads)
    # The functions are allowed by this node's environment, because its operator decides which code runs here.
    model = _retry_on_outage(
        lambda: ServedModel(
            checkpoint, allowed_functions(os.environ), assigned_device(), allow_non_finite=spec.allow_non_finite
        )
    )
    batch_s = model.warm_up(spec.max_batch_size)
    return model, Loaded(model.signature, content.dataset_version, batch_s)


def _load_predictor(spec: ReplicaSpec) -> tuple[Any, Loaded]:
    from inference_service.serve.served_model import ServedPredictor

    own_code, store = OwnCode(is_trusted=spec.own_code), open_store(spec.store)
    content = _retry_on_outage(lambda: load_program_checkpoint(store, spec.folder, spec.manifest_sha256))
    own_code.require_own_code(f"{content.training_job} is served by code of {content.code_bundle}: ")
    _retry_on_outage(lambda: load_code(store, content.code_bundle))
    files = _retry_on_outage(lambda: node_copy(store, spec.folder, spec.manifest_sha256))
    import torch

    torch.set_num_threads(spec.threads)
    predictor = ServedPredictor(content, spec.predictor, files)
    batch_s = predictor.warm_up(spec.max_batch_size)
    return predictor, Loaded(predictor.signature, content.dataset_version, batch_s)


def _load_own_code(spec: ReplicaSpec, content: CheckpointContent) -> None:
    """Load a user's own code, in the replica only.

    A replica is a process of Ray, not of the service.
    """
    OwnCode(is_trusted=spec.own_code).require_own_code(
        f"the model of {content.training_job} is made by code of {content.model.code_bundle}: "
    )
    _retry_on_outage(lambda: load_code(open_store(spec.store), content.model.code_bundle))


def _retry_on_outage(read: Callable[[], T]) -> T:
    """Retry while the store does not answer.

    Serve itself would retry a replica only a few times, and then never again.
    """
    give_up_at = time.monotonic() + STORE_OUTAGE_TIMEOUT_S
    while True:
        try:
            return read()
        except Unavailable as error:
            if time.monotonic() > give_up_at:
                raise
            logger.warning("%s", error.message)
            time.sleep(STORE_RETRY_S)


# --- Hang watch ---
# Watches whether a replica's model thread makes progress. A hung thread cannot be interrupted, but the replica can be
# replaced.


class HangWatch:
    """Measures how long the present piece of work has taken.

    Written by the one model thread, read by any other.
    """

    def __init__(self) -> None:
        # When the present piece of work began; None while idle.
        self._since_s: float | None = None
        self._thread: int | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        self._thread = threading.get_ident()
        self.note_progress()
        try:
            yield
        finally:
            self._since_s = None

    def note_progress(self) -> None:
        """Mark the start of the next piece of work."""
        self._since_s = time.monotonic()

    def lasts_s(self) -> float:
        """Return the seconds since the present piece of work began; 0 while idle."""
        since_s = self._since_s
        return time.monotonic() - since_s if since_s is not None else 0.0

    def stack(self) -> str:
        """Return the thread's present stack, formatted as in a traceback."""
        frame = current_frames().get(self._thread or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


# --- Loads of frontends ---
# The load that each frontend has reported to a replica, for Ray Serve's controller.

# A frontend that has not reported for LOAD_TTL_S has stopped, or no longer serves this model.
LOAD_TTL_S = 15.0


class LoadAggregator:
    """Sums the loads of the frontends.

    `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[str, tuple[Load, float]] = {}  # by frontend

    def add(self, frontend: str, load: Load) -> None:
        self._loads = {**self._present(), frontend: (load, self._clock())}

    def in_all(self) -> dict[str, float]:
        """Return the sum over all frontends; empty before the first report."""
        if not self._loads:
            return {}
        present = [load for load, _ in self._present().values()]
        return {ROWS: sum(load.rows for load in present), REFUSED: float(sum(load.refused for load in present))}

    def _present(self) -> dict[str, tuple[Load, float]]:
        since_s = self._clock() - LOAD_TTL_S
        return {frontend: (load, at_s) for frontend, (load, at_s) in self._loads.items() if at_s >= since_s}


# --- CPU priority ---

# Ray starts its workers with niceness 15, so that its own processes have priority. A frontend has 0.
NICENESS = -10


def raise_priority() -> None:
    """Give all threads of this process, and those they start, priority over the frontend.

    A replica computes admitted requests, while a frontend may still refuse what it reads. At equal priority, a frontend
    that is flooded with calls doubles or triples the time of each batch: admitted requests become late, and batches
    become small. Logs a warning if the operating system forbids it.
    """
    try:
        for thread in Path("/proc/self/task").iterdir():
            if os.getpriority(os.PRIO_PROCESS, int(thread.name)) > NICENESS:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), NICENESS)
    except ProcessLookupError:  # a thread that ended meanwhile
        raise_priority()
    except PermissionError:
        logger.warning(
            "this replica keeps a niceness of %d, and gets little CPU beside a busy frontend: give Ray's workers "
            "CAP_SYS_NICE, or start Ray with RAY_worker_niceness=0 and the inference service with a niceness of 10",
            os.getpriority(os.PRIO_PROCESS, 0),
        )
