"""The SDK's client of the inference service's server without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from inference_service.domain.deployment import Deployment
from millrace_client import Millrace, connect
from tests.support.inference_server import Classifier, Server, attach, deployment, served


def image(first: int) -> dict[str, Any]:
    """One row for the model `m`, which begins with that number; the greatest of the rest is the last."""
    return {"image": np.array([[first, 1, 2, 3]], np.uint8)}


def with_client(scenario: Callable[[Server, Millrace], None], one: Deployment | None = None) -> None:
    """Run the scenario in a thread of its own, beside the server's loop. Each version of `one`, by default of
    `m` with one version, has a model."""

    of_m = one or deployment()

    async def main(server: Server) -> None:
        for version in of_m.versions[1:]:
            attach(server.models, of_m, Classifier(), number=version.number)
        with connect(inference=server.kit.address) as millrace:
            await asyncio.to_thread(scenario, server, millrace)

    served(main, of_m)
