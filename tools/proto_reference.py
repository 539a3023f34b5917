"""`python tools/proto_reference.py IMAGE FOLDER`: the contracts as pages, a page for each package of protos.

IMAGE is a FileDescriptorSet with source information, as protoc writes it. FOLDER gets `index.md`, and PACKAGE.md with
the comments of the protos as its text. `make docs` and `make lint-docs` call it, so the pages are never committed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

# Numbers of fields in descriptor.proto: a place in a file is a path of such numbers and indexes.
MESSAGES, ENUMS, SERVICES, METHODS = 4, 5, 6, 2
FIELDS_OF_A_MESSAGE, MESSAGES_OF_A_MESSAGE, ENUMS_OF_A_MESSAGE, VALUES_OF_AN_ENUM = 2, 3, 4, 2
FOREIGN = ("google.",)

Comments = Mapping[tuple[int, ...], str]
Place = tuple[int, ...]


def comments_of(file: FileDescriptorProto) -> Comments:
    """What stands before or behind each place of a file."""
    return {
        tuple(one.path): "\n\n".join(text.strip() for text in (one.leading_comments, one.trailing_comments) if text)
        for one in file.source_code_info.location
    }


def as_markdown(comment: str) -> str:
    """A comment as text of a page: `<` outside of code is no HTML, and an indented line is part of its paragraph."""
    lines = [line.strip() for line in comment.splitlines()]
    parts = re.split(r"(`[^`]*`)", "\n".join(lines))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;").replace("*", r"\*") for part in parts)


def type_of(field: FieldDescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
    name = field.type_name.lstrip(".")
    if name in maps:
        key, value = maps[name].field
        return f"map<{type_of(key, {})}, {type_of(value, {})}>"
    plain = name or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {plain}"
    return f"optional {plain}" if field.proto3_optional else plain


def service_lines(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    for number, service in enumerate(file.service):
        yield f"## Service {service.name}\n"
        yield as_markdown(comments.get((SERVICES, number), "")) + "\n"
        for place, method in enumerate(service.method):
            yield f"### {method.name}\n"
            yield f"`{signature(method)}`\n"
            yield as_markdown(comments.get((SERVICES, number, METHODS, place), "")) + "\n"


def signature(method: MethodDescriptorProto) -> str:
    taken, given = (name.rpartition(".")[2] for name in (method.input_type, method.output_type))
    return (
        f"{method.name}({'stream ' if method.client_streaming else ''}{taken}) "
        f"returns ({'stream ' if method.server_streaming else ''}{given})"
    )


def message_lines(message: DescriptorProto, name: str, place: Place, comments: Comments) -> Iterator[str]:
    """Of a message and all in it. `name` is what it is called within its package."""
    yield f"### {name}\n"
    yield as_markdown(comments.get(place, "")) + "\n"
    maps = {one.name: one for one in message.nested_type if one.options.map_entry}
    by_type = {field.type_name.lstrip("."): maps.get(field.type_name.rpartition(".")[2]) for field in message.field}
    entries = {type_name: entry for type_name, entry in by_type.items() if entry is not None}
    for number, field in enumerate(message.field):
        text = as_markdown(comments.get((*place, FIELDS_OF_A_MESSAGE, number), "")).replace("\n", "\n    ")
        of = message.oneof_decl[field.oneof_index].name if is_choice(field) else ""
        choice = f", one of `{of}`" if of else ""
        yield f"- **`{field.name}`** (`{type_of(field, entries)}`{choice})" + (f": {text}" if text else "")
    yield ""
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            inner = (*place, MESSAGES_OF_A_MESSAGE, number)
            yield from message_lines(nested, f"{name}.{nested.name}", inner, comments)
    for number, enum in enumerate(message.enum_type):
        yield from enum_lines(enum, f"{name}.{enum.name}", (*place, ENUMS_OF_A_MESSAGE, number), comments)


def is_choice(field: FieldDescriptorProto) -> bool:
    return field.HasField("oneof_index") and not field.proto3_optional


def enum_lines(enum: EnumDescriptorProto, name: str, place: Place, comments: Comments) -> Iterator[str]:
    yield f"### {name}\n"
    yield as_markdown(comments.get(place, "")) + "\n"
    for number, value in enumerate(enum.value):
        text = as_markdown(comments.get((*place, VALUES_OF_AN_ENUM, number), "")).replace("\n", "\n    ")
        yield f"- **`{value.name}`**" + (f": {text}" if text else "")
    yield ""


def page_of(package: str, files: Sequence[FileDescriptorProto]) -> str:
    lines = [f"# {package}\n", f"From {', '.join(f'`protos/{file.name}`' for file in files)}.\n"]
    with_comments = [(file, comments_of(file)) for file in files]
    for file, comments in with_comments:
        lines.extend(service_lines(file, comments))
    lines.append("## Messages\n")
    for file, comments in with_comments:
        for number, message in enumerate(file.message_type):
            lines.extend(message_lines(message, message.name, (MESSAGES, number), comments))
        for number, enum in enumerate(file.enum_type):
            lines.extend(enum_lines(enum, enum.name, (ENUMS, number), comments))
    return "\n".join(lines)


def packages_of(image: FileDescriptorSet) -> dict[str, list[FileDescriptorProto]]:
    """The files of each package of ours, services first."""
    packages: dict[str, list[FileDescriptorProto]] = {}
    for file in sorted(image.file, key=lambda one: (not one.service, one.name)):
        if not file.package.startswith(FOREIGN):
            packages.setdefault(file.package, []).append(file)
    return packages


def main(image_path: str, folder: str) -> None:
    packages = packages_of(FileDescriptorSet.FromString(Path(image_path).read_bytes()))
    pages = Path(folder)
    pages.mkdir(parents=True, exist_ok=True)
    for package, files in packages.items():
        (pages / f"{package}.md").write_text(page_of(package, files))
    rows = "\n".join(
        f"| [{package}]({package}.md) | {', '.join(service.name for file in files for service in file.service)} |"
        for package, files in sorted(packages.items())
    )
    (pages / "index.md").write_text(
        "# Contracts\n\nMade from the protos and their comments. Every RPC names the statuses that it fails with.\n\n"
        f"| package | services |\n|---|---|\n{rows}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
