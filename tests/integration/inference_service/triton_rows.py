"""Sends rows as a dataset has them with the real `tritonclient`, and prints each model's logits as one JSON object.

Run as a process of its own, as `triton_session.py` is. ROWS.json has each model's inputs: of each the datatype and a
value a row, in base64 where they are BYTES.

    python triton_rows.py HOST:PORT ROWS.json
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import triton_to_np_dtype


def main(target: str, path: str) -> dict[str, Any]:
    client = triton.InferenceServerClient(target)
    asked = json.loads(Path(path).read_text())
    return {
        model: client.infer(model, [tensor(name, *given) for name, given in inputs.items()]).as_numpy("logits").tolist()
        for model, inputs in asked.items()
    }


def tensor(name: str, datatype: str, values: list[Any]) -> triton.InferInput:
    items = [base64.b64decode(value) for value in values] if datatype == "BYTES" else values
    made = triton.InferInput(name, [len(items)], datatype)
    made.set_data_from_numpy(np.array(items, triton_to_np_dtype(datatype)))
    return made


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
