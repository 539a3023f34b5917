"""A roll-out that compares what both versions answer to held rows, before any traffic moves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from inference_service.domain.deployment import Deployment
from inference_service.domain.roll_out import (
    Compared,
    Comparison,
    RollOutState,
)
from inference_service.domain.rows import Outputs, Rows
from inference_service.manager import DeploymentManager
from inference_service.registry import Deployments
from inference_service.roll_out_manager import RollOutManager
from shared.storage import ObjectStore
from tests.support.versions import commit_version, striped_digits
from tests.unit.inference_service.driven import Driven, driving
from tests.unit.inference_service.wishes import DATASET, DIGITS, creation, load, weights, wish


class Stripes:
    """Tells the stripes of `striped_digits`; `wrong` rows of each batch it tells wrongly."""

    def __init__(self, wrong: int = 0) -> None:
        self._wrong = wrong

    async def forward(self, rows: Rows) -> Outputs:
        images = rows.values["image"].astype(np.float32)
        columns = images.mean(axis=1)  # (B, 28)
        logits = np.stack([columns[:, 2 * label + 4 : 2 * label + 6].mean(axis=1) for label in range(10)], axis=1)
        logits[: self._wrong] = np.roll(logits[: self._wrong], 1, axis=1)
        return Outputs([logits, logits.argmax(axis=1)])


def is_comparing(driven: Driven) -> bool:
    return driven.state is RollOutState.COMPARING


def comparing(
    store: ObjectStore,
    manager: DeploymentManager,
    roll_outs: RollOutManager,
    comparison: Comparison,
    wrong: int = 0,
) -> Deployment:
    """The deployment after version 2 was compared; `wrong` rows of a batch of 8 it tells otherwise."""
    deployments = Deployments(store)
    load(deployments, manager.create(creation()), DIGITS)
    assert load(deployments, roll_outs.begin(wish(comparison=comparison)), DIGITS).versions[1].weight == 0
    seen: list[Deployment] = []

    async def scenario(driven: Driven) -> None:
        driven.answer("1", Stripes())
        await driven.look()
        await asyncio.sleep(0.1)
        assert is_comparing(driven)  # version 2 has no replicas yet
        driven.answer("2", Stripes(wrong))
        while is_comparing(driven):
            await driven.look()
            await asyncio.sleep(0.01)
        seen.append(driven.now)

    driving(Driven(store), scenario)
    return seen[0]


def test_a_version_that_answers_the_held_rows_alike_gets_traffic(
    store: ObjectStore, manager: DeploymentManager, roll_outs: RollOutManager
) -> None:
    commit_version(store, DATASET, {"train": striped_digits(50), "test": striped_digits(20, seed=1)})
    wanted = Comparison(dataset_version=DATASET, split="test", min_agreement=1.0, max_difference=0.0)
    after = comparing(store, manager, roll_outs, wanted)
    assert after.roll_out is not None
    assert (after.roll_out.state, weights(after)) == (RollOutState.SHIFTING, {"1": 90, "2": 10})
    assert after.roll_out.compared == Compared(rows=20, agreement=1.0, difference=0.0)
    assert Deployment.from_record(after.as_record()) == after


def test_a_version_that_answers_them_otherwise_is_rolled_back_before_any_traffic_moves(
    store: ObjectStore, manager: DeploymentManager, roll_outs: RollOutManager
) -> None:
    commit_version(store, DATASET, {"test": striped_digits(16)})
    wanted = Comparison(dataset_version=DATASET, split="test", min_agreement=0.9, max_rows=16)
    after = comparing(store, manager, roll_outs, wanted, wrong=2)
    assert after.roll_out is not None
    assert (after.roll_out.state, weights(after)) == (RollOutState.ROLLED_BACK, {"1": 100, "2": 0})
    assert after.roll_out.compared is not None
    assert after.roll_out.compared.agreement == 0.75
    assert after.roll_out.error is not None
    assert "75.00% of 16 held rows" in after.roll_out.error["message"]


@pytest.mark.parametrize(
    ("version", "split", "kind"), [("datasets/x/versions/v1", "test", "NotFound"), (DATASET, "no", "InvalidArgument")]
)
def test_what_cannot_be_compared_is_rolled_back_with_the_reason(
    store: ObjectStore, manager: DeploymentManager, roll_outs: RollOutManager, version: str, split: str, kind: str
) -> None:
    commit_version(store, DATASET, {"test": striped_digits(4)})
    wanted = Comparison(dataset_version=version, split=split, min_agreement=0.9)
    after = comparing(store, manager, roll_outs, wanted)
    assert after.roll_out is not None
    assert after.roll_out.error is not None
    assert (after.roll_out.state, after.roll_out.error["kind"]) == (RollOutState.ROLLED_BACK, kind)
