"""Training: the order of rows, coverage, checkpoints; and deployments. Simulated: the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.scale.measuring import Costs
from benchmarks.scale.simulated_store import SimulatedStore
from inference_service.deploy.deployments import Deployments
from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from tests.support.inference_server import deployment
from train_service.domain.coverage_counts import count_given, count_rows
from train_service.domain.order import Ints, blocks_of, default_lanes, epoch_order, rank_positions

RANKS = 1000
ROWS_A_GROUP = 4096
GLOBAL_BATCH = 64_000
JOB = "trainingJobs/j"


def order(costs: Costs, scale: int) -> None:
    """Order an epoch of a million rows at 1x on 1,000 ranks.

    Nothing is simulated.
    """
    rows = 1_000_000 * scale
    lanes = default_lanes(RANKS)
    groups = [ROWS_A_GROUP] * (rows // ROWS_A_GROUP) + [rows % ROWS_A_GROUP]
    with costs.measured("begin_epoch", units=len(groups)):
        of_epoch = epoch_order(blocks_of(groups, lanes), lanes, 7, 0)
    with costs.measured("rows_of_a_step_of_a_rank"):
        mine = rank_positions(0, GLOBAL_BATCH, lanes, 3, RANKS)
        assert len(of_epoch.rows(mine)) == GLOBAL_BATCH // RANKS
    # A program's rank takes every 1,000th position within its window.
    positions = np.arange(3, min(rows, lanes * of_epoch.window_rows), RANKS, dtype=np.int64)
    with costs.measured("rows_of_a_window_of_a_rank", units=len(positions)):
        of_epoch.rows(positions)


def coverage(costs: Costs, scale: int) -> None:
    """Count the coverage of a million rows at 1x that were all consumed.

    Simulated: parts of the record are generated on request, in an order that is shuffled within 2^20 rows.
    """
    rows, part_rows = 1_000_000 * scale, 1 << 20
    shuffled = np.random.default_rng(0).permutation(part_rows)

    def parts() -> Iterator[Ints]:
        for first in range(0, rows, part_rows):
            part = first + shuffled
            yield part[part < rows]

    with costs.measured("coverage", units=rows):
        assert count_rows(parts(), 0, rows).seen_once == rows
    lanes = 24
    groups = [ROWS_A_GROUP] * (rows // ROWS_A_GROUP) + [rows % ROWS_A_GROUP]
    of_epoch = epoch_order(blocks_of(groups, lanes), lanes, 7, 0)
    spans = [[0, rank, rows, RANKS] for rank in range(RANKS)]
    with costs.measured("coverage_of_a_program", units=rows):
        assert count_given(spans, of_epoch, 0).seen_once == rows


def checkpoints(costs: Costs, scale: int) -> None:
    """Commit to a registry of ten checkpoints at 1x.

    Simulated: no checkpoint has files.
    """
    store, entries = SimulatedStore(), 10 * scale
    registry = CheckpointRegistry(store, JOB)
    registry.fence(1)
    with costs.measured("registry_commit", store, units=entries):
        for step in range(1, entries + 1):
            registry.commit(checkpoint_entry(step))
    for name, ask in (
        ("registry_newest", lambda view: view.newest()),
        ("registry_best", lambda view: view.best()),
        ("registry_page", lambda view: view.page("", 100)),
    ):
        with costs.measured(name, store):
            assert CheckpointRegistry(store, JOB).poll(ask)
    with costs.measured("registry_entries", store, units=entries):
        assert len(CheckpointRegistry(store, JOB).entries()) == entries


def checkpoint_entry(step: int, job: str = JOB) -> CheckpointEntry:
    name = f"{job}/checkpoints/step-{step:08d}"
    return CheckpointEntry(
        name=name,
        folder=f"{job}/checkpoints/data/step-{step:08d}-a00001-01234567",
        manifest_sha256="f" * 64,
        step=step,
        epoch=step // 100,
        attempt=1,
        size_bytes=1_000_000,
        create_time=1.7e9 + step,
        metrics={"validation_accuracy": 1 - 1 / step, "validation_loss": 1 / step},
    )


def deployments(costs: Costs, scale: int) -> None:
    """List a page, and read what the reconciler polls, of ten deleted deployments at 1x and 100 existing ones at
    every size.

    Simulated: all are copies of two.
    """
    store = SimulatedStore()
    kept = Deployments(store)
    kept.create(deployment("there"))
    kept.create(deployment("gone"))
    kept.request("deployments/gone", lambda one: one and replace(one, state=one.state.GONE))
    for number in range(100):
        store.copy_folder("deployments/there", f"deployments/there{number:04d}")
        store.put_zeros(f"live/deployment/there{number:04d}.u.json", 0)
    for number in range(10 * scale):
        store.copy_folder("deployments/gone", f"deployments/gone{number:06d}")
    store.folders("deployments")
    kept.all()  # the first after an update reads all that ever were
    restarted = Deployments(store)
    with costs.measured("deployment_first_look", store, units=101):
        assert len(restarted.all()[0]) == 101
    while not restarted.has_read_all:
        restarted.all()
    with costs.measured("deployment_look", store):
        assert len(restarted.all()[0]) == 101
    with costs.measured("deployment_page", store):
        assert len(restarted.page(100, "")[0]) == 100
