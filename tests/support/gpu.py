"""Tests that need a GPU. Without one they are skipped and say so; with MILLRACE_REQUIRE_GPU set they fail instead."""

from __future__ import annotations

import pytest
import torch

from tests.support.needs import demanded

VARIABLE = "MILLRACE_REQUIRE_GPU"
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() and not demanded(VARIABLE),
    reason=f"torch finds no GPU here: see docs/gpu.md (or set {VARIABLE}=1, and this fails)",
)
# For tests of what is the same on both.
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
