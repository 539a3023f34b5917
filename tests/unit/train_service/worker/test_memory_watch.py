"""A rank whose own code fills the memory is ended by its limit, with the line of the code; files do not count."""

from __future__ import annotations

import mmap
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from shared.errors import MillraceError, ResourceExhausted
from train_service.worker.user_process import (
    MAX_OF_A_CORE,
    MIB,
    MemoryLimit,
    MemoryWatch,
    NodeMemory,
    ProcessMemory,
    line_of_frame,
)

FULL, ROOMY = NodeMemory(total=1000, used=950), NodeMemory(total=1000, used=100)


def own_memory() -> ProcessMemory:
    return ProcessMemory(os.getpid())


class Fixed(ProcessMemory):
    """Memory as a test says; of what is shared by forks `resident` counts each page several times."""

    def __init__(self, resident: int, proportional: int | None = None) -> None:
        self.resident, self.proportional = resident, resident if proportional is None else proportional
        self.polls = self.walks = 0

    def resident_bytes(self) -> int:
        self.polls += 1
        return self.resident

    def anonymous_bytes(self) -> int:
        self.walks += 1
        return self.proportional


def watch(memory: ProcessMemory, limit: MemoryLimit, code: Path, node: NodeMemory = FULL) -> MemoryWatch:
    return MemoryWatch(1, limit, lambda _: None, code, memory=memory, node=lambda: node)


def take_pages(size: int) -> mmap.mmap:
    """Map private memory and write each page. An allocator could give memory that the process already had."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(size // MIB):
        pages.write(b"x" * MIB)
    return pages


def test_allocated_memory_counts_and_files_in_the_page_cache_do_not(tmp_path: Path) -> None:
    memory = own_memory()
    before = memory.anonymous_bytes()
    taken = take_pages(64 * MIB)
    with_it = memory.anonymous_bytes()
    assert with_it - before > 60 * MIB
    path = tmp_path / "file"
    path.write_bytes(taken)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)) > 0  # each page is read
        assert memory.anonymous_bytes() - with_it < 16 * MIB
        assert abs(memory.resident_bytes() - memory.anonymous_bytes()) < 48 * MIB


def test_shared_memory_of_a_forked_child_counts_once_and_its_own_counts_too() -> None:
    taken = take_pages(64 * MIB)
    memory = own_memory()
    alone = memory.anonymous_bytes()
    ready, tell = os.pipe()
    go, wait = os.pipe()
    child = os.fork()
    if child == 0:
        own = take_pages(32 * MIB)
        os.write(tell, b"1")
        os.read(go, 1)
        os._exit(len(own) + len(taken) == 0)
    try:
        os.read(ready, 1)
        both = memory.anonymous_bytes()
        assert 24 * MIB < both - alone < 56 * MIB
    finally:
        os.write(wait, b"1")
        os.waitpid(child, 0)
        for end in (ready, tell, go, wait):
            os.close(end)


@pytest.fixture
def user_code(tmp_path: Path) -> ModuleType:
    """A module of the user's own, whose line 5 waits."""
    path = tmp_path / "code" / "loops" / "train.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        textwrap.dedent(
            """
            def work(act):

                # the line that is named
                act()
            """
        )
    )
    module = ModuleType("train")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def test_the_error_names_rank_limit_file_and_line(tmp_path: Path, user_code: ModuleType) -> None:
    limit = MemoryLimit.for_rank(2.0 * 2**30, 4, ROOMY)
    found: list[MillraceError | None] = []
    user_code.work(lambda: found.append(watch(Fixed(3 * 2**30), limit, tmp_path / "code", ROOMY).excess()))

    (error,) = found
    assert isinstance(error, ResourceExhausted)
    assert error.message.startswith(
        "rank 1 has 3 GiB of memory, at loops/train.py:5, more than the limit of 2 GiB that "
        "placement.resources_per_worker[memory] sets"
    )
    assert error.specific_reason == "WORKER_MEMORY"
    assert (error.metadata["ranks"], error.metadata["line"]) == ("1", "loops/train.py:5")


def test_without_a_request_a_rank_may_have_more_than_its_share_until_the_node_is_full(tmp_path: Path) -> None:
    limit = MemoryLimit.for_rank(0.0, 2, NodeMemory(total=1000, used=0))
    assert (limit.bytes, limit.is_request) == (450, False)
    assert watch(Fixed(800), limit, tmp_path, ROOMY).excess() is None
    error = watch(Fixed(800), limit, tmp_path, FULL).excess()
    assert error is not None
    assert "its share of a node that is 90% full" in error.message
    # A rank that has less than its share did not fill it.
    assert watch(Fixed(400), limit, tmp_path, FULL).excess() is None


def test_pages_that_forks_share_are_walked_before_they_count(tmp_path: Path) -> None:
    memory = Fixed(900, proportional=100)
    assert watch(memory, MemoryLimit(bytes=500, is_request=True), tmp_path).excess() is None
    assert memory.walks == 1
    memory.resident = 400
    assert watch(memory, MemoryLimit(bytes=500, is_request=True), tmp_path).excess() is None
    assert memory.walks == 1


def test_the_watch_reports_a_leak_once_though_it_grows(tmp_path: Path) -> None:
    reported: list[MillraceError] = []
    over = threading.Event()

    def leave(error: MillraceError) -> None:
        reported.append(error)
        over.set()

    memory = Fixed(100)
    with MemoryWatch(
        0, MemoryLimit(bytes=500, is_request=True), leave, tmp_path, memory=memory, poll_interval_s=0.01
    ) as watching:
        deadline = time.monotonic() + 60
        while memory.polls < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not reported
        memory.resident = memory.proportional = 501
        assert over.wait(60)
        watching._thread.join(60)
        assert not watching._thread.is_alive()
    assert len(reported) == 1


def test_a_watch_whose_looks_take_long_pauses_longer(tmp_path: Path) -> None:
    """A walk over the page tables of 100 GiB takes tenths of a second; it must not take a share of the training."""

    class Slow(Fixed):
        def resident_bytes(self) -> int:
            busy = time.thread_time() + 0.004
            while time.thread_time() < busy:
                pass
            return super().resident_bytes()

    memory, began = Slow(100), time.monotonic()
    with MemoryWatch(
        0, MemoryLimit(bytes=500, is_request=True), lambda _: None, tmp_path, memory=memory, poll_interval_s=0.01
    ):
        deadline = time.monotonic() + 60
        while memory.polls < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert time.monotonic() - began > 0.004 / MAX_OF_A_CORE


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "max"}, NodeMemory(total=1000 * 1024, used=300 * 1024)),
        ({}, NodeMemory(total=1000 * 1024, used=300 * 1024)),
        (
            {
                "memory.max": "512000",
                "memory.current": "400000",
                "memory.stat": "anon 1\ninactive_file 100000\nactive_file 50000\n",
            },
            NodeMemory(total=512000, used=250000),
        ),
    ],
)
def test_a_containers_limit_counts_where_it_has_one(
    tmp_path: Path, files: dict[str, str], expected: NodeMemory
) -> None:
    proc, group = tmp_path / "proc", tmp_path / "group"
    for folder in (proc, group):
        folder.mkdir()
    (proc / "meminfo").write_text("MemTotal:     1000 kB\nMemFree:  1 kB\nMemAvailable:  700 kB\nHugePages_Total: 0\n")
    for name, text in files.items():
        (group / name).write_text(text)
    assert NodeMemory.read(proc, group) == expected


def test_this_node_has_memory() -> None:
    node = NodeMemory.read()
    assert 0 < node.used < node.total


def test_a_thread_outside_of_the_programs_files_has_no_line(tmp_path: Path, user_code: ModuleType) -> None:
    assert line_of_frame(sys._getframe(), tmp_path / "code") == ""
    assert line_of_frame(None, tmp_path) == ""
    lines: list[str] = []
    act: Callable[[], None] = lambda: lines.append(line_of_frame(sys._getframe(), tmp_path / "code"))  # noqa: E731
    user_code.work(act)
    assert lines == ["loops/train.py:5"]
