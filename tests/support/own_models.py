"""Models of a user's own code for tests: sources, specifications that name them, and code in the tests' process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shared import code_bundle_registry
from shared.model_spec import ModelSpec
from shared.storage import ObjectStore
from tests.support.code_folders import store_bundle
from train_service.domain.spec import OWN, LossSpec, OptimizerSpec, TrainingSpec

# Rows of 6 numbers to 3 classes. Dropout draws, BatchNorm has buffers.
NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=16, classes=3, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes)
        )

    def forward(self, inputs):
        return self.body(inputs)


def build(config):
    return Net(**config)
"""


@contextmanager
def code_of_this_process() -> Iterator[None]:
    """What is loaded of bundles meanwhile is forgotten afterwards, with the modules."""
    loaded, path, modules, writes = (
        code_bundle_registry._loaded,
        list(sys.path),
        set(sys.modules),
        sys.dont_write_bytecode,
    )
    code_bundle_registry._loaded = {}
    try:
        yield
    finally:
        folders = tuple(f"{folder}/" for folder in code_bundle_registry._loaded.values())
        code_bundle_registry._loaded = loaded
        sys.path[:], sys.dont_write_bytecode = path, writes
        for name in set(sys.modules) - modules:
            if folders and str(getattr(sys.modules[name], "__file__", None)).startswith(folders):
                del sys.modules[name]


def own(
    store: ObjectStore, base: TrainingSpec, source: str = NET, entry: str = "net:build", **change: Any
) -> TrainingSpec:
    """`spec_of` a bundle that is stored, whose module `net` is `source`."""
    return spec_of(store_bundle(store, {"net.py": source}).name, base, entry, **change)


def spec_of(
    code_bundle: str, base: TrainingSpec, entry: str, *, kwargs: Any = None, num_classes: int = 0, **change: Any
) -> TrainingSpec:
    """`base` with a model of that code, as a client's that leaves open what follows from it."""
    model = ModelSpec(
        builder="", in_channels=0, num_classes=num_classes, code_bundle=code_bundle, entry=entry, kwargs=kwargs or {}
    )
    left_open = {"loss": LossSpec(name=OWN), "metrics": (), "optimizer": OptimizerSpec(name=OWN)}
    return replace(base, model=model, **{**left_open, **change})
