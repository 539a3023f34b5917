"""Our messages are Triton's on the wire, as its own client has them."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

from inference import grpc_service_pb2, model_config_pb2

# In a process of its own: the messages' names clash with ours.
DUMP = """
import base64, json
from tritonclient.grpc import model_config_pb2, service_pb2
print(json.dumps([base64.b64encode(one.DESCRIPTOR.serialized_pb).decode() for one in (service_pb2, model_config_pb2)]))
"""
NOT_SERVED = ("SharedMemory", "TraceSetting", "LogSettings")

Shape = tuple[int, int, int, str, str]


@pytest.fixture(scope="module")
def triton() -> tuple[FileDescriptorProto, FileDescriptorProto]:
    done = subprocess.run([sys.executable, "-c", DUMP], capture_output=True, text=True, timeout=240, check=True)
    service, config = (FileDescriptorProto.FromString(base64.b64decode(one)) for one in json.loads(done.stdout))
    return service, config


def ours(module: object) -> FileDescriptorProto:
    return FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)  # type: ignore[attr-defined]


def messages(file: FileDescriptorProto) -> dict[str, DescriptorProto]:
    """Also the nested ones, by their full names."""

    def below(prefix: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
        yield f"{prefix}.{message.name}", message
        for nested in message.nested_type:
            yield from below(f"{prefix}.{message.name}", nested)

    return dict(pair for message in file.message_type for pair in below(file.package, message))


def enums(file: FileDescriptorProto) -> dict[str, EnumDescriptorProto]:
    nested = {f"{name}.{one.name}": one for name, message in messages(file).items() for one in message.enum_type}
    return {**nested, **{f"{file.package}.{one.name}": one for one in file.enum_type}}


def fields(message: DescriptorProto) -> dict[str, Shape]:
    """By name: number, type, label, the type's name and the oneof."""

    def oneof(field: FieldDescriptorProto) -> str:
        return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""

    return {one.name: (one.number, one.type, one.label, one.type_name, oneof(one)) for one in message.field}


def methods(service: ServiceDescriptorProto) -> dict[str, tuple[str, str, bool, bool]]:
    return {
        one.name: (one.input_type, one.output_type, one.client_streaming, one.server_streaming)
        for one in service.method
        if not one.name.startswith((*NOT_SERVED, "System", "Cuda"))
    }


def test_every_message_has_the_fields_that_triton_has(
    triton: tuple[FileDescriptorProto, FileDescriptorProto],
) -> None:
    theirs, mine = messages(triton[0]), messages(ours(grpc_service_pb2))
    left_out = theirs.keys() - mine.keys()
    assert mine.keys() <= theirs.keys()
    assert all(any(word in name for word in NOT_SERVED) for name in left_out), left_out
    for name, message in mine.items():
        assert fields(message) == fields(theirs[name]), name


def test_the_service_has_the_methods_that_triton_has(
    triton: tuple[FileDescriptorProto, FileDescriptorProto],
) -> None:
    (theirs,), (mine,) = triton[0].service, ours(grpc_service_pb2).service
    assert (ours(grpc_service_pb2).package, mine.name) == (triton[0].package, theirs.name)
    assert methods(mine) == methods(theirs)


def test_the_supported_configuration_is_as_triton_has_it(
    triton: tuple[FileDescriptorProto, FileDescriptorProto],
) -> None:
    theirs, mine = messages(triton[1]), messages(ours(model_config_pb2))
    for name, message in mine.items():
        assert fields(message).items() <= fields(theirs[name]).items(), name
    for name, enum in enums(ours(model_config_pb2)).items():
        values = {(value.name, value.number) for value in enums(triton[1])[name].value}
        assert {(value.name, value.number) for value in enum.value} == values, name
