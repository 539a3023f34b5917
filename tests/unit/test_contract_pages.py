"""The pages of the contracts say what the protos and their comments say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.proto_reference import main

PROTO = """
syntax = "proto3";
package example.v1;

// Keeps books.
service Library {
  // Sends pages as they are read.
  // Fails with NOT_FOUND (`name` is <unknown>).
  rpc Read(ReadRequest) returns (stream Page);
}

message ReadRequest {
  // The book's name, of <20 letters.
  string name = 1;
  optional int32 limit = 2;
  map<string, Page> kept = 3;
  oneof how {
    // Front to back.
    bool forwards = 4;
    bool backwards = 5;
  }
}

message Page {
  enum Kind {
    // Not said.
    KIND_UNSPECIFIED = 0;
    KIND_TEXT = 1;
  }
  message Line {
    repeated string words = 1;
  }
  Kind kind = 1;
}
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the pages of `PROTO`."""
    folder = tmp_path_factory.mktemp("protos")
    (folder / "library.proto").write_text(PROTO)
    image = folder / "image.binpb"
    command = (sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", "--include_source_info")
    subprocess.run((*command, f"--descriptor_set_out={image}", "library.proto"), check=True)
    main(str(image), str(folder / "pages"))
    return folder / "pages"


def test_the_index_names_each_package_and_its_services(pages: Path) -> None:
    assert "| [example.v1](example.v1.md) | Library |" in (pages / "index.md").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "## Service Library",
        "Keeps books.",
        "`Read(ReadRequest) returns (stream Page)`",
        "Fails with NOT_FOUND (`name` is &lt;unknown>).",
        "- **`name`** (`string`): The book's name, of &lt;20 letters.",
        "- **`limit`** (`optional int32`)",
        "- **`kept`** (`map<string, example.v1.Page>`)",
        "- **`forwards`** (`bool`, one of `how`): Front to back.",
        "### Page.Line",
        "- **`words`** (`repeated string`)",
        "### Page.Kind",
        "- **`KIND_UNSPECIFIED`**: Not said.",
    ],
)
def test_a_page_has_what_the_proto_says(pages: Path, line: str) -> None:
    assert line in (pages / "example.v1.md").read_text().splitlines()


def test_a_map_is_no_message_of_its_own(pages: Path) -> None:
    assert "Entry" not in (pages / "example.v1.md").read_text()
