"""Marks what the versions that are served come from as used, so that nobody deletes it meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from inference_service.deployments.registry import Deployments
from inference_service.domain.applications import application_name
from inference_service.domain.deployment import LIVE, Deployment
from shared.errors import STORE_OUTAGES

logger = logging.getLogger(__name__)


class Marking:
    """Remembers what this process has marked: the store is asked once for each version."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments
        # The applications whose checkpoints, and whose dataset versions, are marked.
        self._kept: set[str] = set()
        self._marked: set[str] = set()

    async def mark(self, deployments: Iterable[Deployment]) -> None:
        """Raises what the store raises where it does not answer or is full."""
        there = [
            (application_name(deployment, version), deployment, version)
            for deployment in deployments
            if deployment.state in LIVE
            for version in deployment.versions
            if version.retired_at is None
        ]
        for name, deployment, version in there:
            try:
                if name not in self._kept:
                    await asyncio.to_thread(self._deployments.keep_checkpoints, deployment, [version])
                    self._kept.add(name)
                if version.signature is not None and name not in self._marked:
                    await asyncio.to_thread(self._deployments.mark_datasets, deployment, [version])
                    self._marked.add(name)
            except STORE_OUTAGES:
                raise
            except Exception as error:  # a log of its job that cannot be read must not hold up the others
                logger.warning("%s: what it uses is not marked: %r; trying again", deployment.name, error)
        names = {name for name, *_ in there}
        self._kept &= names
        self._marked &= names
