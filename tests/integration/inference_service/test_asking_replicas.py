"""Serve calls an application RUNNING although one of its replicas could not load: each is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from shared.checkpoint.format import WEIGHTS
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.integration.inference_service.checkpoints import write
from tests.integration.inference_service.replica_asking import ANSWER
from tests.support.ray_head import RayHead
from tests.support.waiting import wait_until

PROGRAM = Path(__file__).with_name("replica_asking.py")


def answer(lines: Iterable[str]) -> list[str]:
    return next(line.split()[1:] for line in lines if line.startswith(ANSWER))


# Three replicas are started. In `make test`: tests/unit/inference_service/serve/test_ray_serve.py asks each one.
@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_replica_of_two_that_cannot_load_is_known(inference_ray: RayHead, tmp_path: Path) -> None:
    settings = StoreSettings(url=tmp_path.as_uri())
    store = open_store(settings)
    entry = write(store).entry
    before = set(inference_ray.processes("ray::ServeReplica"))
    command = [sys.executable, str(PROGRAM), inference_ray.address, settings.url, entry.folder, entry.manifest_sha256]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdin is not None
        assert asking.stdout is not None
        assert answer(asking.stdout) == ["Loaded"]
        own = set(inference_ray.processes("ray::ServeReplica")) - before
        assert len(own) == 2
        key = f"{entry.folder}/{WEIGHTS}"
        store.put(key, store.get(key)[:-1] + b"?")
        lost = own.pop()
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: lost not in inference_ray.processes("ray::ServeReplica"), "the replica is dead")
        asking.stdin.write("ask again\n")
        asking.stdin.flush()
        # Serve has started another, which says that it is well.
        assert answer(asking.stdout) == ["DataLoss", "Loaded"]
    assert asking.returncode == 0
