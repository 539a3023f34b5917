"""The detached Ray actor in which an attempt runs: one actor an attempt, one name each, made for it or in advance."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any

import ray

from shared.jobs.attempt import AttemptContext, Entry, run_attempt
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.telemetry import configure_logging

logger = logging.getLogger(__name__)

NAMESPACE = "millrace"
# Whoever starts an actor calls it from then on. If it dies, nobody would ever call again.
CALL_TIMEOUT_S = 60.0
# An actor that asks for no CPU may be put on any node; a service's own, labelled so, comes and goes with the service.
NOT_BESIDE_A_SERVICE = {"millrace.role": "!service"}


class AttemptActor:
    """Runs one attempt on its main thread, which Ray Train needs, and ends with it."""

    def __init__(self) -> None:
        self._unclaimed = self._countdown()

    def _countdown(self) -> threading.Timer:
        timer = threading.Timer(CALL_TIMEOUT_S, os._exit, args=(1,))
        timer.daemon = True
        timer.start()
        return timer

    def prepare(self, function: str) -> None:
        """Calls `module:function` before there is an attempt to run: what it imports, the attempt finds there."""
        # Calls wait for this one's end, which may take long where processors are busy.
        self._unclaimed.cancel()
        try:
            _load(function)()
        finally:
            self._unclaimed = self._countdown()

    def hold(self) -> None:
        """Whoever started this actor lives, and may still need it."""
        self._unclaimed.cancel()
        self._unclaimed = self._countdown()

    def run(self, entry: str, settings: StoreSettings, kind: str, folder: str, attempt: int) -> None:
        self._unclaimed.cancel()
        configure_logging(f"{kind}-attempt", "INFO")

        def load_and_run(context: AttemptContext) -> dict[str, Any]:
            # Inside the attempt: an entry function that cannot be imported is a lost attempt like any other.
            function: Entry = _load(entry)
            return function(context)

        try:
            run_attempt(load_and_run, open_store(settings), kind, folder, attempt)
        except Exception:
            logger.exception("attempt %d of %s ended without saying so", attempt, folder)
        finally:
            gc.freeze()  # as in `warm_workers.load`: what it has imported need not be looked through as it ends
            # In any case: the job would wait for ever for an actor that stays.
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]


def new_actor_name(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def start_actor(name: str) -> ray.actor.ActorHandle[AttemptActor]:
    """Returns at once."""
    actor: ray.actor.ActorHandle[AttemptActor] = (
        ray.remote(AttemptActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            label_selector=NOT_BESIDE_A_SERVICE,
            max_restarts=0,
            max_task_retries=0,
        )
        .remote()  # type: ignore[assignment]
    )
    return actor


def find_actor(name: str) -> ray.actor.ActorHandle[AttemptActor] | None:
    """The live actor of that name; one that is being started counts. None for the empty name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE) if name else None
    except ValueError:
        return None


def _load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded
