"""Processes that wait for the workers of an attempt to come, with everything imported that these will want.

Of a restart most is the start of Python processes: twelve seconds of a processor each. Ray can start some for later, by
a call of its nodes that it has no public name for. An environment of their own says what they do first and who takes
them.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray._private.utils import get_runtime_env_info, parse_runtime_env_for_task_or_actor
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
from ray.core.generated.common_pb2 import Language  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

# What a worker imports before its first step; torch._dynamo with the first optimizer, whether it compiles or not.
MODULES = ("train_service.loop", "torchvision", "torch._dynamo")
# Of a worker of any attempt but the first, and of what waits to become one.
RUNTIME_ENV = {"env_vars": {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: f"{__name__}.load"}}
# How long those wait whom nobody takes; where a node has free CPUs Ray keeps them beyond it.
KEPT_FOR_S = 3600
TOLD_WITHIN_S = 5.0


def load() -> None:
    """Called by Ray in each process of `RUNTIME_ENV` as it starts."""
    for module in MODULES:
        importlib.import_module(module)


def start_warm_workers(counts: Mapping[str, int]) -> None:
    """Starts so many on each node, by node id, and returns at once. What cannot be started only costs time later."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    for node_id, count in counts.items():
        if node_id in nodes:
            _start_on(nodes[node_id], count)


def _start_on(node: Mapping[str, Any], count: int) -> None:
    request = node_manager_pb2.PrestartWorkersRequest(  # type: ignore[attr-defined]
        language=Language.Value("PYTHON"),
        runtime_env_info=get_runtime_env_info(parse_runtime_env_for_task_or_actor(RUNTIME_ENV)),
        keep_alive_duration_secs=KEPT_FOR_S,
        num_workers=count,
    )
    with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)  # type: ignore[no-untyped-call]
        stub.PrestartWorkers(request, timeout=TOLD_WITHIN_S)
    logger.info("%d processes of node %s wait for the next attempt", count, node["NodeID"])
