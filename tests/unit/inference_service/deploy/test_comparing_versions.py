"""A rollout that compares what both versions answer to held rows, before any traffic moves."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from inference_service.deploy.deployments import DeploymentManager, Deployments
from inference_service.deploy.rollout_driver import RolloutManager
from inference_service.domain.deployment import Deployment
from inference_service.domain.rollout import (
    Compared,
    Comparison,
    RolloutState,
)
from inference_service.domain.signature import Outputs, Rows
from shared.storage import ObjectStore
from tests.support.versions import commit_version, striped_digits
from tests.unit.inference_service.driven import Driven, driving
from tests.unit.inference_service.wishes import DATASET, DIGITS, creation, load, request, weights


class Stripes:
    """Tells the stripes of `striped_digits`; `wrong` rows of each batch it tells wrongly, and those of the labels that
    it `refuses` it does not tell."""

    def __init__(self, wrong: int = 0, refuses: Collection[int] = ()) -> None:
        self._wrong = wrong
        self._refuses = refuses

    async def forward(self, rows: Rows) -> Outputs:
        images = rows.values["image"].astype(np.float32)
        columns = images.mean(axis=1)  # (B, 28)
        logits = np.stack([columns[:, 2 * label + 4 : 2 * label + 6].mean(axis=1) for label in range(10)], axis=1)
        refused = {place: "is null" for place, label in enumerate(logits.argmax(axis=1)) if label in self._refuses}
        logits[: self._wrong] = np.roll(logits[: self._wrong], 1, axis=1)
        return Outputs([logits, logits.argmax(axis=1)], refused)


def is_comparing(driven: Driven) -> bool:
    return driven.state is RolloutState.COMPARING


def comparing(
    store: ObjectStore,
    manager: DeploymentManager,
    rollouts: RolloutManager,
    comparison: Comparison,
    models: tuple[Stripes, Stripes] | None = None,
    max_queued_rows: int = 100,
) -> Deployment:
    """The deployment after version 2 was compared, which the second of `models` answers for."""
    old, new = models or (Stripes(), Stripes())
    deployments = Deployments(store)
    spec = replace(creation().spec, max_batch_size=8, max_queued_rows=max_queued_rows)
    load(deployments, manager.create(creation(spec=spec)), DIGITS)
    assert load(deployments, rollouts.begin(request(comparison=comparison)), DIGITS).versions[1].weight == 0
    seen: list[Deployment] = []

    async def scenario(driven: Driven) -> None:
        driven.answer("1", old, max_queued_rows)
        await driven.poll()
        await asyncio.sleep(0.1)
        assert is_comparing(driven)  # version 2 has no replicas yet
        driven.answer("2", new, max_queued_rows)
        while is_comparing(driven):
            await driven.poll()
            await asyncio.sleep(0.01)
        seen.append(driven.now)

    driving(Driven(store), scenario)
    return seen[0]


def test_a_version_that_answers_the_holdout_rows_alike_gets_traffic(
    store: ObjectStore, manager: DeploymentManager, rollouts: RolloutManager
) -> None:
    commit_version(store, DATASET, {"train": striped_digits(50), "test": striped_digits(20, seed=1)})
    wanted = Comparison(dataset_version=DATASET, split="test", min_agreement=1.0, max_difference=0.0)
    after = comparing(store, manager, rollouts, wanted)
    assert after.rollout is not None
    assert (after.rollout.state, weights(after)) == (RolloutState.SHIFTING, {"1": 90, "2": 10})
    assert after.rollout.compared == Compared(rows=20, agreement=1.0, difference=0.0)
    assert Deployment.from_record(after.as_record()) == after


def test_a_version_that_answers_them_otherwise_is_rolled_back_before_any_traffic_moves(
    store: ObjectStore, manager: DeploymentManager, rollouts: RolloutManager
) -> None:
    commit_version(store, DATASET, {"test": striped_digits(16)})
    wanted = Comparison(dataset_version=DATASET, split="test", min_agreement=0.9, max_rows=16)
    after = comparing(store, manager, rollouts, wanted, (Stripes(), Stripes(wrong=2)))
    assert after.rollout is not None
    assert (after.rollout.state, weights(after)) == (RolloutState.ROLLED_BACK, {"1": 100, "2": 0})
    assert after.rollout.compared is not None
    assert after.rollout.compared.agreement == 0.75
    assert after.rollout.error is not None
    assert "75.00% of 16 held rows" in after.rollout.error["message"]


@pytest.mark.parametrize(
    ("version", "split", "kind"), [("datasets/x/versions/v1", "test", "NotFound"), (DATASET, "no", "InvalidArgument")]
)
def test_a_rollout_with_an_unusable_comparison_split_is_rolled_back_with_the_error(
    store: ObjectStore, manager: DeploymentManager, rollouts: RolloutManager, version: str, split: str, kind: str
) -> None:
    commit_version(store, DATASET, {"test": striped_digits(4)})
    wanted = Comparison(dataset_version=version, split=split, min_agreement=0.9)
    after = comparing(store, manager, rollouts, wanted)
    assert after.rollout is not None
    assert after.rollout.error is not None
    assert (after.rollout.state, after.rollout.error["kind"]) == (RolloutState.ROLLED_BACK, kind)


def test_a_queue_smaller_than_a_batch_is_compared_in_smaller_batches(
    store: ObjectStore, manager: DeploymentManager, rollouts: RolloutManager
) -> None:
    commit_version(store, DATASET, {"test": striped_digits(20)})
    wanted = Comparison(dataset_version=DATASET, split="test", min_agreement=1.0)
    after = comparing(store, manager, rollouts, wanted, max_queued_rows=3)
    assert after.rollout is not None
    assert after.rollout.compared == Compared(rows=20, agreement=1.0, difference=0.0)


def test_rows_that_both_versions_refuse_are_left_out_and_one_that_one_refuses_is_a_disagreement(
    store: ObjectStore, manager: DeploymentManager, rollouts: RolloutManager
) -> None:
    rows = striped_digits(40)
    labels = list(rows[1])
    threes, fours = labels.count(3), labels.count(4)
    assert threes
    assert fours
    commit_version(store, DATASET, {"test": rows})
    wanted = Comparison(dataset_version=DATASET, split="test", min_agreement=0.5)
    models = Stripes(refuses=[3]), Stripes(refuses=[3, 4])
    after = comparing(store, manager, rollouts, wanted, models)
    assert after.rollout is not None
    compared = 40 - threes
    assert after.rollout.compared == Compared(
        rows=compared,
        agreement=(compared - fours) / compared,
        difference=math.inf,
        refused=threes,
        refused_by_one=fours,
    )
    assert after.rollout.state is RolloutState.SHIFTING
    assert Deployment.from_record(json.loads(json.dumps(after.as_record()))) == after


def test_holdout_rows_that_both_versions_refuse_every_one_compare_nothing(
    store: ObjectStore, manager: DeploymentManager, rollouts: RolloutManager
) -> None:
    commit_version(store, DATASET, {"test": striped_digits(9)})
    wanted = Comparison(dataset_version=DATASET, split="test", min_agreement=0.5)
    models = Stripes(refuses=range(10)), Stripes(refuses=range(10))
    after = comparing(store, manager, rollouts, wanted, models)
    assert after.rollout is not None
    assert after.rollout.state is RolloutState.ROLLED_BACK
    assert after.rollout.error is not None
    assert after.rollout.error["reason"] == "NOTHING_TO_COMPARE"
    assert "refuse all 9 rows" in after.rollout.error["message"]
    assert "is null" in after.rollout.error["message"]


async def test_a_comparison_for_which_requests_leave_no_time_is_given_up_with_a_remedy_of_its_own(
    store: ObjectStore, manager: DeploymentManager, rollouts: RolloutManager
) -> None:
    commit_version(store, DATASET, {"test": striped_digits(4)})
    deployments = Deployments(store)
    load(deployments, manager.create(creation()), DIGITS)
    wanted = Comparison(dataset_version=DATASET, split="test", min_agreement=0.9)
    load(deployments, rollouts.begin(request(comparison=wanted)), DIGITS)

    driven = Driven(store)
    driven.settings = replace(driven.settings, rollout_load_timeout_s=0.0)
    driven.restart()
    await driven.poll()
    assert driven.now.rollout is not None
    assert driven.now.rollout.error is not None
    assert driven.now.rollout.error["reason"] == "ROLLOUT_NOT_COMPARED"
    assert "compare fewer rows" in driven.now.rollout.error["message"]
