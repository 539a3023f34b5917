"""Idle processes with their imports done, which wait for the workers of an attempt.

Most of a short attempt, and of a restart, is the start of Python processes: three to twelve processor seconds each. Ray
can start processes in advance, by a call of its nodes that has no public name. Their own runtime environment defines
their first function and the tasks that may use them. If a release of Ray has other names for this, there are no such
workers: that costs time, but fails no job.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import ray

from shared import settings

logger = logging.getLogger(__name__)

REPORT_TIMEOUT_S = 5.0
_MODULES = "MILLRACE_WARM_MODULES"
# Modules that Ray imports in each process before it unpacks the first argument there: most of a second.
_OF_FIRST_ARGUMENT = ("ray._common.pydantic_compat", "starlette.datastructures")


def load() -> None:
    """Import the modules. Ray calls this in each process of a `WarmWorkers.runtime_env` as it starts."""
    for module in os.environ[_MODULES].split(","):
        importlib.import_module(module)
    for module in _OF_FIRST_ARGUMENT:
        with suppress(ImportError):  # another Ray may want others
            importlib.import_module(module)
    # Python would collect all of it once more as the process ends, which takes 0.4 s of a processor.
    gc.freeze()


@dataclass(frozen=True)
class WarmWorkers:
    """Workers that have imported `modules`, which must be installed on Ray's nodes.

    Unused workers wait for `kept_for_s`; a node with free CPUs keeps them longer.
    """

    modules: tuple[str, ...]
    kept_for_s: int = 3600

    @property
    def runtime_env(self) -> dict[str, Any]:
        """The environment of tasks and actors that use such a worker, or a new one with the same imports."""
        hook = f"{__name__}.{load.__name__}"
        try:
            from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
        except ImportError as error:
            logger.warning(
                "this Ray starts its processes in another way, so none waits with its imports made: %s", error
            )
            return {}
        return {"env_vars": {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: hook, _MODULES: ",".join(self.modules)}}

    def start(self, counts: Mapping[str, int]) -> None:
        """Start that many workers on each node, by node id, and return at once. A failure only costs time later."""
        if not self.runtime_env:
            return
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        for node_id, count in counts.items():
            if node_id in nodes:
                self._start_on(nodes[node_id], count)

    def _start_on(self, node: Mapping[str, Any], count: int) -> None:
        try:
            from ray._private.grpc_utils import init_grpc_channel
            from ray._private.utils import get_runtime_env_info, parse_runtime_env_for_task_or_actor
            from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
            from ray.core.generated.common_pb2 import Language  # type: ignore[attr-defined]
        except ImportError as error:
            logger.warning("this Ray starts no processes ahead, so none waits for the next attempt: %s", error)
            return
        request = node_manager_pb2.PrestartWorkersRequest(  # type: ignore[attr-defined]
            language=Language.Value("PYTHON"),
            runtime_env_info=get_runtime_env_info(parse_runtime_env_for_task_or_actor(self.runtime_env)),
            keep_alive_duration_secs=self.kept_for_s,
            num_workers=count,
        )
        with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
            stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                stub.PrestartWorkers(request, timeout=REPORT_TIMEOUT_S)
            except grpc.RpcError as error:
                logger.warning("no processes of node %s wait for the next attempt: %s", node["NodeID"], error)
                return
        logger.info("%d processes of node %s wait for the next attempt", count, node["NodeID"])


def wanted() -> bool:
    """Return whether this node's settings enable such workers. An invalid setting disables them."""
    try:
        return settings.warm_workers(os.environ)
    except settings.SettingsError as error:
        logger.warning("%s; no processes wait for the next attempt", error)
        return False
