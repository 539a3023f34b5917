"""What a rank reads of a checkpoint lies where its optimizer looks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shared.checkpoint.reading import StoredTensor
from train_service.checkpoints.tensor_files import _optimizer_plan


@pytest.mark.parametrize(
    ("kwargs", "device"),
    [({}, "cpu"), ({"fused": False}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
)
def test_the_count_of_steps_lies_where_torch_puts_it(kwargs: dict[str, Any], device: str) -> None:
    model = nn.Linear(2, 1, bias=False, device="meta")  # a device that is not host memory, as a GPU
    optimizer = torch.optim.AdamW(model.parameters(), **kwargs)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    step = StoredTensor("F32", (), ())
    saved = {"param_groups": [{**group, "params": ["weight"]}], "state": {"weight": {"step": step}}}

    plan = _optimizer_plan(model, optimizer, saved)

    assert plan.state[model.weight]["step"].device.type == device
    loaded = torch.optim.AdamW(model.parameters(), **kwargs)
    loaded.load_state_dict({"param_groups": [{**group, "params": [0]}], "state": {0: {"step": torch.tensor(1.0)}}})
    assert loaded.state[model.weight]["step"].device.type == device, "torch itself"
