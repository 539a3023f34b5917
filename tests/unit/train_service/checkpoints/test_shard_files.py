"""A rank whose disk is full names what it needs, and keeps no file open."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import ResourceExhausted
from train_service.checkpoints.tensor_files import spool_shards

WEIGHTS = {"weight": torch.zeros(1000)}
STATE = {"optimizer": {"momentum": torch.ones(1000)}}


@pytest.mark.parametrize("full_from", [1, 2])
def test_a_full_disk_is_named_and_no_file_stays_open(full_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the weights, or at the optimizer's state."""
    opened: list[Any] = []
    on_disk = tempfile.TemporaryFile

    def open_file(**kwargs: Any) -> Any:
        is_full = len(opened) + 1 >= full_from
        file: Any = Path("/dev/full").open("r+b", buffering=0) if is_full else on_disk(**kwargs)  # noqa: SIM115
        opened.append(file)
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", open_file)

    with pytest.raises(ResourceExhausted, match=r"rank 0 needs 4,\d{3} bytes in .* set TMPDIR") as raised:
        spool_shards(WEIGHTS, STATE, 0, 1)

    assert raised.value.specific_reason == "SCRATCH_FULL"
    assert tempfile.gettempdir() in raised.value.message
    assert len(opened) == full_from
    assert all(file.closed for file in opened)
