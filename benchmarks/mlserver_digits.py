"""The benchmark's model as a custom runtime of MLServer, run in MLServer's own environment without this repository.

It is optimised: inputs and outputs are numpy's raw bytes, and the model has its own thread, so that the server
continues to read while a batch is computed.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torchvision
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from safetensors.torch import load_file

MEAN, STD = 0.1307, 0.3081


class Digits(MLModel):  # type: ignore[misc] # MLServer is not in the environment that is type-checked
    async def load(self) -> bool:
        self._thread = ThreadPoolExecutor(1)
        loop = asyncio.get_running_loop()
        self._module = await loop.run_in_executor(self._thread, _load)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = NumpyCodec.decode_input(payload.inputs[0])
        loop = asyncio.get_running_loop()
        logits = await loop.run_in_executor(self._thread, self._forward, given)
        output = NumpyCodec.encode_output(name="logits", payload=logits)
        return InferenceResponse(model_name=self.name, outputs=[output])

    def _forward(self, given: Any) -> Any:
        with torch.inference_mode():
            inputs = ((torch.from_numpy(given.copy()).float() / 255 - MEAN) / STD).unsqueeze(1)
            return self._module(inputs).numpy()


def _load() -> torch.nn.Module:
    torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
    module: torch.nn.Module = torchvision.models.resnet18(weights=None, num_classes=10)
    module.conv1 = torch.nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    module.load_state_dict(load_file(os.environ["BENCH_WEIGHTS"]))
    module.eval()
    return module
