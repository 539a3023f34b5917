"""The detached Ray actor in which an attempt runs: one actor an attempt, one name each."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from typing import Any

import ray

from shared.jobs.attempt import AttemptContext, Entry, run_attempt
from shared.jobs.record import JobRecord
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.telemetry import configure_logging

logger = logging.getLogger(__name__)

NAMESPACE = "millrace"
# The reconciler starts an actor and then calls it. If it dies in between, nobody would ever call.
CALL_WITHIN_S = 60.0
# An actor that asks for no CPU may be put on any node; a service's own, labelled so, comes and goes with the service.
NOT_BESIDE_A_SERVICE = {"millrace.role": "!service"}


class AttemptActor:
    """Runs one attempt on its main thread, which Ray Train needs, and ends with it."""

    def __init__(self) -> None:
        self._unclaimed = threading.Timer(CALL_WITHIN_S, os._exit, args=(1,))
        self._unclaimed.daemon = True
        self._unclaimed.start()

    def run(self, entry: str, settings: StoreSettings, kind: str, folder: str, attempt: int) -> None:
        self._unclaimed.cancel()
        configure_logging(f"{kind}-attempt", "INFO")

        def load_and_run(context: AttemptContext) -> dict[str, Any]:
            # Inside the attempt: an entry function that cannot be imported is a lost attempt like any other.
            return _load(entry)(context)

        try:
            run_attempt(load_and_run, open_store(settings), kind, folder, attempt)
        except Exception:
            logger.exception("attempt %d of %s ended without saying so", attempt, folder)
        finally:
            # In any case: the job would wait for ever for an actor that stays.
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]


def actor_name(kind: str, job: JobRecord) -> str:
    return f"{kind}-{job.uid}-a{job.attempt}"


def start_attempt(entry: str, settings: StoreSettings, kind: str, folder: str, job: JobRecord) -> None:
    """Starts the actor of the job's present attempt and returns at once."""
    actor = (
        ray.remote(AttemptActor)
        .options(
            name=actor_name(kind, job),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            label_selector=NOT_BESIDE_A_SERVICE,
            max_restarts=0,
            max_task_retries=0,
        )
        .remote()
    )
    actor.run.remote(  # type: ignore[attr-defined]
        entry, settings, kind, folder, job.attempt
    )


def find_actor(name: str) -> ray.actor.ActorHandle[AttemptActor] | None:
    """The live actor of that name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _load(entry: str) -> Entry:
    module, _, function = entry.partition(":")
    loaded: Entry = getattr(importlib.import_module(module), function)
    return loaded
