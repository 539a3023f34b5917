"""What the old and the new version of a roll-out answer to the same held rows, before any traffic moves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from inference_service.batching.models import Models
from inference_service.domain.batching import pieces
from inference_service.domain.comparing import Difference
from inference_service.domain.deployment import Deployment, ModelVersion
from inference_service.domain.roll_out import Compared, Comparison
from inference_service.domain.rows import Rows
from inference_service.domain.signature import Signature
from inference_service.domain.tensors import Array
from inference_service.reconciling.held_rows import held_rows
from shared.errors import FailedPrecondition, InvalidArgument
from shared.storage import ObjectStore


async def compared(
    store: ObjectStore,
    models: Models,
    deployment: Deployment,
    versions: tuple[ModelVersion, ModelVersion],
    wanted: Comparison,
) -> Compared:
    """How the old and the new one of `versions` differ on the held rows that are `wanted`.

    Raises as `held_rows` and `Models.try_out`, and `FailedPrecondition` where both refuse every row.
    """
    signature = versions[0].signature
    assert signature is not None
    rows = await asyncio.to_thread(held_rows, store, wanted.dataset_version, wanted.split, wanted.max_rows, signature)
    comparing = _Comparing(models, deployment, versions, signature)
    for start, stop in pieces(len(rows), min(deployment.spec.max_batch_size, deployment.spec.max_queued_rows)):
        await comparing.add(rows.slice(start, stop))
    found = comparing.difference.told()
    if not found.rows:
        raise FailedPrecondition(
            f"both versions of {deployment.name} refuse all {found.refused} rows of split {wanted.split!r} of "
            f"{wanted.dataset_version}, one with: {comparing.refusal}",
            reason="NOTHING_TO_COMPARE",
            metadata={"resource": wanted.dataset_version},
        )
    return found


class _Comparing:
    """`refusal` is what was wrong with the last row that a version refused."""

    def __init__(
        self,
        models: Models,
        deployment: Deployment,
        versions: tuple[ModelVersion, ModelVersion],
        signature: Signature,
    ) -> None:
        self._models = models
        self._deployment = deployment
        self._versions = versions
        self._outputs = signature.outputs
        self.difference = Difference()
        self.refusal = ""

    async def add(self, rows: Rows) -> None:
        """As many as a queue and a batch have room for. Of those with a row that is refused each half is tried: a row
        is answered alike in any company."""
        old, new = [await self._answered(version, rows) for version in self._versions]
        if old is not None and new is not None:
            self.difference.add(self._outputs, old, new)
        elif len(rows) == 1:
            self.difference.add_refused(self._outputs, by_both=old is None and new is None)
        else:
            middle = len(rows) // 2
            await self.add(rows.slice(0, middle))
            await self.add(rows.slice(middle, len(rows)))

    async def _answered(self, version: ModelVersion, rows: Rows) -> Sequence[Array] | None:
        """None where it refuses one of them."""
        try:
            return await self._models.try_out(self._deployment, version, rows)
        except InvalidArgument as error:
            self.refusal = error.message
            return None
