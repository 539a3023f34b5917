"""Models whose preprocessing is real, of a table and of photos, and requests for them whose tensors fit and whose rows
may be anything."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from inference import grpc_service_pb2 as oip
from inference_service.domain.deployment import Deployment
from inference_service.domain.signature import DATATYPES, NULLS, Outputs, Rows, Signature, TensorSpec, encode_raw
from inference_service.serve.preprocessing import Preprocessing
from tests.support.checkpoint_samples import content
from tests.support.hostile_messages import NAMES, NUMBERS
from tests.support.inference_server import Server, attach, deployment
from tests.support.mutated_requests import flipped
from tests.support.versions import columns_of

COLUMNS = pa.schema(
    [
        ("mass", pa.float64()),
        ("whole", pa.float32()),
        ("count", pa.int64()),
        ("kind", pa.string()),
        ("day", pa.date32()),
        ("at", pa.timestamp("s", tz="UTC")),
        ("photo", pa.binary()),
    ]
)
STEPS: dict[str, list[dict[str, Any]]] = {
    "rows": [
        {"column": "mass", "fillNulls": {"value": {"number": 0.5}}},
        {"column": "mass", "minMaxScale": {"min": 0, "max": 2, "clip": True}},
        {"column": "whole", "cast": {"arrowType": "int32"}},
        {"column": "count", "bucketize": {"boundaries": [0, 10]}},
        {"column": "kind", "oneHotEncode": {"categories": ["train", "a", ""], "unknown": "UNKNOWN_VALUE_ERROR"}},
        *({"column": "day", "cast": {"arrowType": one}} for one in ("timestamp[ns]", "int64", "double")),
        *({"column": "at", "cast": {"arrowType": one}} for one in ("timestamp[us]", "int64")),
        {"concat": {"columns": ["mass", "whole", "count", "kind", "day", "at"], "into": "x"}},
    ],
    "photos": [
        {"column": "photo", "decodeImage": {}},
        {"column": "photo", "resize": {"height": 4, "width": 5}},
        {"column": "photo", "toFloat": {}},
    ],
}
INPUT = {"rows": "x", "photos": "photo"}
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")
MAX_ROWS = 12


class Prepared:
    """Its logits are zeros; its preprocessing is that of a replica."""

    def __init__(self, name: str) -> None:
        said = content(ingested=columns_of(COLUMNS), transforms=[{"steps": STEPS[name]}], input_column=INPUT[name])
        self._preprocessing = Preprocessing(said)
        outputs = (TensorSpec("logits", "FP32", (-1, 4)), TensorSpec("label", "INT64", (-1,)))
        self.deployment: Deployment = deployment(
            name, Signature(self._preprocessing.raw, self._preprocessing.prepared, outputs)
        )

    @property
    def raw(self) -> Sequence[TensorSpec]:
        return self._preprocessing.raw

    async def forward(self, rows: Rows) -> Outputs:
        prepared, refused, failed = self._preprocessing.prepare(rows)
        zeros = np.zeros((len(prepared), 4), np.float32)
        return Outputs([zeros, np.zeros(len(prepared), np.int64)], refused, failed=failed)


@cache
def prepared() -> dict[str, Prepared]:
    """By name."""
    return {name: Prepared(name) for name in STEPS}


def attach_prepared(server: Server) -> None:
    """Have the server answer for both."""
    for model in prepared().values():
        server.models.put(model.deployment)
        attach(server.models, model.deployment, model)


def any_rows(random_: random.Random) -> oip.ModelInferRequest:
    """For one of both: all values are good, or all but one or two, or few are. What one of them alone does shows only
    where no other is refused."""
    name = random_.choice(("rows", "rows", "photos"))
    specs, rows = prepared()[name].raw, random_.randint(1, MAX_ROWS)
    cells = [(spec.name, row) for spec in specs for row in range(rows)]
    bad = {*random_.choices(cells, k=random_.choice((0, 1, 1, 2, 2 * len(cells))))}
    request = oip.ModelInferRequest(model_name=name)
    for spec in specs:
        values = [_value(spec, random_, (spec.name, row) in bad) for row in range(rows)]
        _add(request, spec.name, spec.datatype, _values(values, spec.datatype))
        if random_.random() < 0.3:
            nulls = np.array([(spec.name, row) in bad and random_.random() < 0.5 for row in range(rows)])
            _add(request, spec.name + NULLS, "BOOL", nulls)
    return request


def _add(request: oip.ModelInferRequest, name: str, datatype: str, values: Any) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=values.shape)
    request.raw_input_contents.append(encode_raw(datatype, values))


def _values(items: Sequence[Any], datatype: str) -> Any:
    dtype = DATATYPES[datatype].dtype
    values = np.empty(len(items), dtype)
    with np.errstate(over="ignore"):  # what is too great for the type is infinite
        for row, item in enumerate(items):
            values[row] = item
    return values


def _value(spec: TensorSpec, random_: random.Random, bad: bool) -> Any:
    if spec.name == "photo":
        return _photo(random_, bad)
    if spec.datatype == "BYTES":
        return random_.choice((*(name.encode() for name in NAMES), b"\xff", b"\xed\xa0\x80")) if bad else b"train"
    if spec.datatype.startswith("FP"):
        return random_.choice(NUMBERS) if bad else float(random_.randrange(3))
    if not bad:
        return random_.randrange(20_000)
    limits = np.iinfo(np.int32 if spec.datatype == "INT32" else np.int64)
    return random_.choice((limits.min, limits.max, -1, 3_000_000, random_.randint(limits.min, limits.max)))


def _photo(random_: random.Random, bad: bool) -> bytes:
    file, size = io.BytesIO(), (random_.randint(1, 9), random_.randint(1, 9))
    image = Image.new(random_.choice(("RGB", "L", "1")), size, random_.randrange(2))
    image.save(file, random_.choice(FORMATS))
    good = file.getvalue()
    return random_.choice((flipped(good, random_), random_.randbytes(40), b"")) if bad else good
