"""Workers that wait with their imports made: a task of their environment gets one of them, and no other process."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from shared.jobs.warm_workers import WarmWorkers
from tests.support.ray_head import RayHead
from tests.support.waiting import wait_until

# Little, and nothing that Ray imports by itself.
MODULE = "wave"
TIMEOUT_S = 240.0
JOIN = "import ray; ray.init(address={address!r}, log_to_driver=False); "
START = "from shared.jobs.warm_workers import WarmWorkers; WarmWorkers(({module!r},)).start({counts!r})"
RUN = """
import gc, json, os, sys
def look(): return os.getpid(), {module!r} in sys.modules, gc.get_freeze_count() > 0
print(json.dumps(ray.get(ray.remote(look).options(runtime_env={runtime_env!r}).remote())))
"""


def test_a_task_gets_the_process_that_waited_for_it(ray: RayHead) -> None:
    (node_id,) = ray.node_ids().values()
    _driver(ray, START, counts={node_id: 1})
    wait_until(lambda: len(_waiting(ray)) == 1, "a process to wait", TIMEOUT_S)
    (waiting,) = _waiting(ray)

    pid, imported, frozen = json.loads(
        _driver(ray, RUN, runtime_env=WarmWorkers((MODULE,)).runtime_env).splitlines()[-1]
    )

    assert (pid, imported) == (waiting, True)
    assert frozen  # so that it ends at once


def _driver(ray: RayHead, program: str, **names: object) -> str:
    """What it prints; a process of its own, since Ray connects once a process."""
    code = JOIN.format(address=ray.address) + program.format(module=MODULE, **names)
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=TIMEOUT_S
    ).stdout


def _waiting(ray: RayHead) -> set[int]:
    found = set()
    for pid in ray.processes("ray::IDLE"):
        with suppress(OSError):
            if f"MILLRACE_WARM_MODULES={MODULE}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
    return found
