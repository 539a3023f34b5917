"""Whether FSDP can shard a model, tried on the meta device in a process of its own.

torch shards only within a process group, of which a process has one by default: a service that answers several calls
must not have one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shared.errors import ResourceExhausted, invalid_field
from shared.model_spec import ModelSpec
from train_service.domain.spec import FSDP

if TYPE_CHECKING:
    from torch import nn

# To import torch and to call the model twice on the meta device; a machine that has much else to do is slow.
LIMIT_S = 120.0
_START = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import answer; answer()"
_REMEDY = "use DDP, or change that module"


def check_sharding(model: ModelSpec, row_shape: Sequence[int]) -> None:
    """`row_shape` is that of one row of the model's input. The model must have been built and called before.

    Raises `InvalidArgument` naming the module that cannot be sharded, and `ResourceExhausted` where the check does not
    end.
    """
    question = {"model": model.as_config(), "row_shape": list(row_shape)}
    try:
        answered = subprocess.run(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            # A group of one process talks to nobody, and shall not look for its host's address.
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
    except subprocess.TimeoutExpired:
        text = f"whether FSDP can shard the model could not be tried within {LIMIT_S:g} s; try again later, or use DDP"
        raise ResourceExhausted(text, reason="MODEL_NOT_TRIED") from None
    if answered.returncode:
        said = answered.stderr.strip().splitlines()[-1:] or [f"exit status {answered.returncode}"]
        raise invalid_field("spec.placement.parallel", FSDP, f"the model does not stand being sharded: {said[0]}")
    if problem := json.loads(answered.stdout.splitlines()[-1])["problem"]:
        raise invalid_field("spec.placement.parallel", FSDP, f"{problem}; {_REMEDY}")


def answer() -> None:
    """The child's whole work: a question on its standard input, the answer as the last line of its standard output."""
    question: dict[str, Any] = json.load(sys.stdin)
    import torch
    import torch.distributed as dist

    from shared.models import build_model

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with torch.device("meta"):
        model = build_model(ModelSpec.from_config(question["model"]), "spec.model")
    print(json.dumps({"problem": sharding_problem(model, question["row_shape"])}))


def sharding_problem(model: nn.Module, row_shape: Sequence[int]) -> str:
    """What keeps FSDP from sharding the model, which is on the meta device; empty if nothing. It is sharded then. In a
    process of its own with a process group of one."""
    from train_service.learning.sharding import ShardingError, find_units, mixed_unit, shard

    units = find_units(model, row_shape)
    if mixed := mixed_unit(model, units):
        name, kinds = mixed
        return f"{name or 'the model'} has parameters of {' and '.join(kinds)}, and those of a unit must be alike"
    try:
        shard(model, "cpu", 1, units)
    except ShardingError as error:
        return str(error)
    return ""
