"""Requests that were good, and have some things wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

from inference import grpc_service_pb2 as oip
from inference_service.domain.signature import DATATYPES
from tests.support.hostile_messages import hostile

DIMENSIONS = (-1, 0, 1, 2, 3, 2**31, 2**63 - 1)


def mutated(
    made: oip.ModelInferRequest, names: Sequence[str], outputs: Sequence[str], random_: random.Random
) -> oip.ModelInferRequest:
    """Change the request, whose tensors are raw, and return it; `names` and `outputs` are what tensors may be called
    afterwards."""
    for _ in range(random_.choice((1, 1, 2, 3))):
        if not made.inputs:
            break
        index = random_.randrange(len(made.inputs))
        tensor = made.inputs[index]
        raw = made.raw_input_contents
        match random_.randrange(8):
            case 0:
                tensor.shape[:] = [random_.choice(DIMENSIONS) for _ in range(random_.randrange(5))]
            case 1:
                tensor.datatype = random_.choice((*DATATYPES, "", "FP8", "bool"))
            case 2 if index < len(raw):
                raw[index] = random_.randbytes(random_.choice((0, 1, 4, 8, len(raw[index]), 1000)))
            case 3:
                tensor.name = random_.choice(names)
            case 4 if index < len(raw):
                del made.inputs[index], raw[index]
            case 5:
                hostile(tensor.contents, random_)
            case 6:
                hostile(made.parameters[random_.choice(("priority", "timeout", "mine"))], random_)
            case _:
                output = made.outputs.add(name=random_.choice(outputs))
                hostile(output.parameters["classification"], random_)
    return made


def flipped(message: bytes, random_: random.Random) -> bytes:
    """The message with some bytes replaced, and now and then cut."""
    data = bytearray(message)
    for _ in range(random_.choice((1, 2, 8))):
        data[random_.randrange(len(data))] = random_.randrange(256)
    return bytes(data[: random_.randrange(len(data))]) if random_.random() < 0.2 else bytes(data)
