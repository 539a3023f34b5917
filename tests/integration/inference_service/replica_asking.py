"""Asks every replica of an application on a real Ray what it has loaded, and prints the outcomes.

Run as a process of its own, since Ray connects once a process. Before the second question it waits for a line.

    python replica_asking.py HOST:PORT STORE_URL FOLDER SHA256
"""

from __future__ import annotations

import asyncio
import sys
import time

from ray.exceptions import RayError

from inference_service.domain.deployment import Scale
from inference_service.serve.ray_serve import ServeApplications
from inference_service.serve.replica import ReplicaSpec
from shared.errors import MillraceError, Unavailable
from shared.settings import StoreSettings

NAME = "asked"
REPLICAS = 2
TIMEOUT_S = 180.0
ANSWER = "answer:"  # Ray prints lines of its own


def main(address: str, store_url: str, folder: str, sha256: str) -> None:
    applications = ServeApplications(store_url, replica_sockets=False)
    applications.connect(address)
    store = StoreSettings(url=store_url)
    spec = ReplicaSpec(store=store, folder=folder, manifest_sha256=sha256, threads=1, max_batch_size=2)
    applications.deploy(NAME, spec, Scale(initial=REPLICAS, cpus=1))
    try:
        asyncio.run(asked(applications))
    finally:
        applications.delete(NAME)


async def asked(applications: ServeApplications) -> None:
    answer(await wait_for_outcome(applications, REPLICAS))
    await asyncio.to_thread(sys.stdin.readline)
    answer(await wait_for_outcome(applications, REPLICAS, "DataLoss"), await wait_for_outcome(applications, 1))


def answer(*outcomes: str) -> None:
    print(ANSWER, *outcomes, flush=True)


async def wait_for_outcome(applications: ServeApplications, replicas: int, wanted: str = "Loaded") -> str:
    """What the replicas say once that is what is wanted, or what they said last."""
    until = time.monotonic() + TIMEOUT_S
    while (said := await once(applications, replicas)) != wanted and time.monotonic() < until:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.1)
    return said


async def once(applications: ServeApplications, replicas: int) -> str:
    if not (await asyncio.to_thread(applications.statuses))[NAME].running:
        return "not running"
    try:
        return type((await applications.open_model(NAME, replicas))[1]).__name__
    except Unavailable:
        return "too few"
    except (MillraceError, RayError) as error:
        return type(error).__name__


if __name__ == "__main__":
    main(*sys.argv[1:])
