"""All uses of Ray Data's private parts by a program's shards, in one place.

What a new release of Ray may break, and how it would be noticed: `DataIterator._iter_batches`, which every public way
to iterate calls, gets other arguments (a shard's first batch raises `TypeError`), or `prepare_trainer` of Hugging Face
asks for another type than `_IterableFromIterator` (`tests/unit/train_service/program/test_shards.py`).
"""

from __future__ import annotations

from typing import Any

from ray.data._internal.block_batching.interfaces import FinalizedData
from ray.data.block import _apply_batch_format
from ray.data.iterator import _IterableFromIterator

IterableFromIterator = _IterableFromIterator


def default_format(batch_format: str | None) -> str | None:
    """`numpy` for `default`; raises `ValueError` for a format that Ray does not know."""
    found: str | None = _apply_batch_format(batch_format)
    return found


def unwrap_finalized(batch: Any) -> Any:
    """The batch that a finalizing function of Ray's gives, whose transfer to the device has ended."""
    if not isinstance(batch, FinalizedData):
        return batch
    if batch.on_consume is not None:
        batch.on_consume()
    return batch.data
