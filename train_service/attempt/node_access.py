"""Reaching a worker's process on whatever node it runs: to read what it left there, and to end it for sure."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError

from train_service.attempt.heartbeats import RankHeartbeat

logger = logging.getLogger(__name__)

TIMEOUT_S = 20.0
NODE_ID_LABEL = "ray.io/node-id"


def end_hard(ranks: list[RankHeartbeat]) -> dict[int, str]:
    """SIGKILLs the ranks' processes, stopped ones too. Returns what each had left in its stacks file, by rank."""
    own_node = ray.get_runtime_context().get_node_id()
    found = {one.rank: _end(one.pid, one.stacks_file) for one in ranks if one.node_id == own_node}
    elsewhere = {one.rank: one for one in ranks if one.node_id != own_node}
    remote = ray.remote(num_cpus=0, max_retries=0)(_end)
    calls = {
        rank: remote.options(label_selector={NODE_ID_LABEL: one.node_id}).remote(one.pid, one.stacks_file)
        for rank, one in elsewhere.items()
    }
    for rank, call in calls.items():
        try:
            found[rank] = ray.get(call, timeout=TIMEOUT_S)
        except (RayError, GetTimeoutError) as error:
            logger.warning("rank %d on node %s cannot be reached: %s", rank, elsewhere[rank].node_id, error)
    return {rank: text for rank, text in found.items() if text}


def _end(pid: int, stacks_file: str) -> str:
    text = ""
    with suppress(OSError):
        text = Path(stacks_file).read_text(errors="replace")
        Path(stacks_file).unlink()
    with suppress(OSError):
        # A worker of Ray's, and not who has got its number since.
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
    return text
