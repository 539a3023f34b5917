"""The loop in one process without Ray: the weights of one worker, and a hang that the process itself notices."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from shared.jobs import AttemptContext, Jobs
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.versions import commit_version, striped_digits
from tests.unit.train_service.conftest import VERSION
from tests.unit.train_service.in_ranks import forked_process, in_ranks
from tests.unit.train_service.worker.test_loop import ALONE, SPEC, config_of, entries, events, new_job, saved
from train_service.attempt.outcomes import HUNG
from train_service.domain import watchdog
from train_service.domain.watchdog import Phase
from train_service.learning.ranks import Ranks
from train_service.records.event_log import TRAIN_KIND, EventKind
from train_service.records.logs import STACKS_CHUNK, rank_folder
from train_service.worker.heartbeat import HeartbeatSender, HeartbeatServer
from train_service.worker.loop import Run, train_loop

JOB = "trainingJobs/a"


def stand_still(url: str, job: str) -> None:
    """An attempt in local mode whose training stands still, watched by itself."""
    from train_service.attempt.trainer import Supervision  # imports Ray, which ranks do not need

    watchdog.MIN_SECONDS = 2.0
    Supervision._check_drains = lambda *_: None  # type: ignore[method-assign]  # there is no Ray to ask

    def train_loop() -> None:
        time.sleep(600)

    store = open_store(StoreSettings(url=url))
    jobs = Jobs(store, TRAIN_KIND)
    context = AttemptContext(store, jobs, job, jobs.get(job, job))
    with (
        HeartbeatServer("127.0.0.1") as heartbeats,
        Supervision(context, replace(SPEC, num_workers=0), heartbeats),
        HeartbeatSender(0, heartbeats.address) as heartbeat,
    ):
        heartbeat.at(5, Phase.TRAINING)
        train_loop()


def one_worker(ranks: Ranks, settings: StoreSettings) -> None:
    Run(config_of(open_store(settings), JOB), ranks).run()


def test_local_mode_ends_with_bit_for_bit_the_weights_of_one_worker(
    store: ObjectStore, file_store: StoreSettings, tmp_path: Path
) -> None:
    commit_version(store, VERSION, {"train": striped_digits(100), "validation": striped_digits(20, 1)})
    new_job(store, JOB)
    in_ranks(1, one_worker, tmp_path, file_store)
    new_job(store, "trainingJobs/local")
    train_loop(config_of(store, "trainingJobs/local", spec=replace(SPEC, num_workers=0)), ALONE)

    worker, local = entries(store, JOB), entries(store, "trainingJobs/local")
    assert sorted(local) == sorted(worker)
    for step, entry in worker.items():
        assert saved(store, local[step]) == saved(store, entry), step
    torch.set_num_threads(1)


def test_a_hang_in_local_mode_is_reported_with_the_stacks_and_ends_the_process(
    store: ObjectStore, file_store: StoreSettings
) -> None:
    new_job(store, JOB)
    hung = forked_process(stand_still, file_store.url, JOB)
    hung.join()

    assert hung.exitcode == 1
    assert b"in train_loop" in store.get(f"{rank_folder(JOB, 1, 0)}/{STACKS_CHUNK}")
    (ended,) = events(store, JOB, EventKind.ATTEMPT_ENDED)
    assert (ended.payload["cause"], ended.payload["ranks"]) == (HUNG, [0])
    # What lost the attempt is for the reconciler to count.
    assert Jobs(store, TRAIN_KIND).get(JOB, JOB).failures == 0
