"""The process that reads files ends with the process that it reads for, even in the middle of a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.process_states import stop_process, thread_states
from tests.support.waiting import wait_until

READING = """
import sys
from pathlib import Path, PurePosixPath
from data_service.imports.reader import leased_reader, open_in_child
from data_service.storage.source_files import SourceFiles
from tests.support.import_sources import source_of

folder = Path(sys.argv[1])
(rows,) = open_in_child([source_of((folder / "a.csv").as_uri(), "csv")], SourceFiles([PurePosixPath(folder)], None), {})
assert rows.rows.row_count is not None
with leased_reader() as reader:
    print(reader.pid, flush=True)
    sys.stdin.read()
"""


def test_a_reader_ends_with_its_killed_parent_while_it_is_busy(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n")
    parent = subprocess.Popen(
        [sys.executable, "-c", READING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        stop_process(pid)  # so it cannot see that its socket closes
        parent.kill()
        parent.wait()
        wait_until(lambda: thread_states(pid) <= {"Z"}, f"reader {pid} to end")
