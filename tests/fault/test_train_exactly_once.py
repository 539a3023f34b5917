"""A run whose workers are killed reads every row once an epoch, and ends with the weights of one left alone.

The proof rests on ids in the pixels, which a training step of an installed package writes down.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.settings import StoreSettings
from tests.support.faults import Faults
from tests.support.numbered_rows import BATCH, ROWS, numbered_digits
from tests.support.versions import commit_version
from tests.support.witnessed import WitnessedStack, killed_beside_undisturbed, witnessed_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]

SEED = 11
MEGABYTE = 1_000_000
UNEVEN, UNEVEN_ROWS = "datasets/numbered/versions/uneven", 613


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WitnessedStack]:
    folder: Path = tmp_path_factory.mktemp("exactly-once")
    with witnessed_stack(StoreSettings(url=(folder / "store").as_uri()), folder) as started:
        yield started


@pytest.mark.parametrize(("workers", "kills", "epochs"), [(2, 10, 12), (3, 3, 5)])
def test_kills_lose_and_repeat_no_row_and_change_no_bit(
    place: WitnessedStack, faults: Faults, workers: int, kills: int, epochs: int
) -> None:
    proof = killed_beside_undisturbed(place, workers=workers, kills=kills, epochs=epochs, seed=SEED)
    faults.add("SIGKILL worker", f"training on {workers} workers", "file", len(proof.strikes))
    proof.publish(f"exactly-once-{workers}-workers", seed=SEED)

    assert (proof.disturbed.missing_rows, proof.disturbed.repeated_rows) == (0, 0)
    assert (proof.undisturbed.missing_rows, proof.undisturbed.repeated_rows) == (0, 0)
    assert proof.disturbed.reported == proof.undisturbed.reported == (ROWS * epochs, 0, 0)
    assert (proof.disturbed.attempts, proof.undisturbed.attempts) == (kills + 1, 1)
    assert proof.undisturbed.recomputed_steps == 0
    assert proof.disturbed.weights_bytes > MEGABYTE
    assert proof.disturbed.weights_sha256 == proof.undisturbed.weights_sha256


def test_kills_lose_and_repeat_no_row_where_neither_steps_nor_ranks_share_rows_evenly(
    place: WitnessedStack, faults: Faults
) -> None:
    workers, kills, epochs = 3, 2, 3
    assert UNEVEN_ROWS % BATCH
    commit_version(place.stack.store, UNEVEN, {"train": numbered_digits(UNEVEN_ROWS)})
    proof = killed_beside_undisturbed(
        place,
        workers=workers,
        kills=kills,
        epochs=epochs,
        seed=SEED,
        changes={"dataset_version": UNEVEN},
        row_count=UNEVEN_ROWS,
    )
    faults.add("SIGKILL worker", f"training on {workers} workers, uneven steps", "file", len(proof.strikes))
    proof.publish("exactly-once-uneven", seed=SEED)

    for account in (proof.disturbed, proof.undisturbed):
        assert (account.missing_rows, account.repeated_rows) == (0, 0)
        assert account.reported == (UNEVEN_ROWS * epochs, 0, 0)
    assert (proof.disturbed.attempts, proof.undisturbed.attempts) == (kills + 1, 1)
    assert proof.undisturbed.recomputed_steps == 0
    assert proof.disturbed.weights_sha256 == proof.undisturbed.weights_sha256
