"""A client in another language asks a deployment, by what the protos say alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.integration.inference_service.client import outputs
from tests.integration.inference_service.conftest import Stack
from tests.support.node_client import proto_path

PROGRAM = Path(__file__).parent / "node" / "client.js"
IMAGES = np.random.default_rng(4).integers(0, 256, (4, 28, 28), dtype=np.uint8)


@pytest.mark.usefixtures("deployed")
def test_a_node_client_infers_and_streams(stack: Stack, node_packages: Path, tmp_path: Path) -> None:
    pixels = tmp_path / "pixels"
    pixels.write_bytes(IMAGES.tobytes())
    shape = ",".join(map(str, IMAGES.shape))
    ended = subprocess.run(
        ["node", str(PROGRAM), stack.service.address, "digits", shape, str(pixels)],
        env={**os.environ, "NODE_PATH": str(node_packages), "PROTO_PATH": proto_path(tmp_path / "protos")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    labels = outputs(stack.client.infer("digits", IMAGES))["label"].tolist()
    assert (found["id"], found["version"]) == ("whole", "1")
    assert found["raw"] == found["typed"] == labels
    assert found["streamed"] == [
        *([f"r{row}", label] for row, label in enumerate(labels)),
        "NOT_FOUND: model 'nobody' does not exist",
    ]
    assert found["answered"] >= 2
    assert found["refused"]["code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "'image'" in found["refused"]["details"]
