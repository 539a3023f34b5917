"""What a user's module can do to the service that looks at it: end its own check, and get a clear error for that.

Each hostile module runs in a child process as it would in the service, under limits that make it cheap.
"""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shared.code_bundle_registry import CodeBundles
from shared.code_environment import CodeEnvironments
from shared.errors import DataLoss, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from shared.storage import ObjectStore
from tests.support.code_folders import LOOP, store_bundle
from tests.support.needs import Missing
from tests.support.waiting import wait_until
from train_service.jobs import own_code
from train_service.jobs.own_code import EntryCheck, Limits

SLEEPERS = """
import os, time
for _ in range(40):
    if os.fork() == 0:
        {first}
        time.sleep(600)
time.sleep(600)
"""
HOARDERS = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        break
kept = b"x" * (60 << 20)
time.sleep(600)
"""


@pytest.fixture(params=[True, False], ids=["namespaces", "none"])
def namespaces(request: pytest.FixtureRequest) -> bool:
    """With those that the kernel grants, and without, as in a container that forbids them."""
    return bool(request.param)


@pytest.fixture
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this test alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def check(store: ObjectStore, files: dict[str, str] | str, entry: str = "train:loop", **limits: Any) -> None:
    namespaces = limits.pop("namespaces", True)
    bundle = store_bundle(store, {"train.py": files} if isinstance(files, str) else files)
    EntryCheck(store, Limits(**{"idle_s": 500.0, "wall_s": 500.0, **limits}), namespaces=namespaces).check(
        bundle, entry
    )


def refusal(store: ObjectStore, files: dict[str, str] | str, entry: str = "train:loop", **limits: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check(store, files, entry, **limits)
    assert [field for field, _ in caught.value.fields] == ["spec.program.entry"]
    return caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        LOOP,
        "def loop():\n    pass\n",
        "def loop(config=None, *, verbose=False):\n    pass\n",
        "from functools import partial\ndef inner(a, config): pass\nloop = partial(inner, 1)\n",
        "class Loop:\n    def __call__(self, config): pass\nloop = Loop()\n",
    ],
)
def test_a_function_of_one_argument_or_none_is_taken(store: ObjectStore, source: str, namespaces: bool) -> None:
    check(store, source, namespaces=namespaces)


def test_a_module_of_a_package_may_import_its_neighbours(store: ObjectStore) -> None:
    files = {"pkg/__init__.py": "", "pkg/loops.py": "from pkg import parts\nimport top\n" + LOOP, "pkg/parts.py": ""}
    check(store, {**files, "top.py": ""}, "pkg.loops:loop")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("\nimport no_such_module\n" + LOOP, "train.py:2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = (\n" + LOOP, "train.py:1: SyntaxError: "),
        ("def f():\n    1 / 0\nf()\n", "train.py:2: ZeroDivisionError: division by zero"),
        ("import json\njson.loads('{')\n", "train.py:2: JSONDecodeError: "),
        ("import sys\nsys.exit(0)\n", "train.py:2: SystemExit: 0"),
        ("def lop(config): pass\n", "train.py has no function 'loop'; it has lop"),
        ("loop = 3\n", "'loop' of train.py is of type int"),
        ("\ndef loop(a, b): pass\n", "train.py:2: loop(a, b) must take one argument"),
        ("def loop(*, config): pass\n", "train.py:1: loop(*, config) must take one argument"),
        ("async def loop(config): pass\n", "train.py:1: 'loop' is a coroutine or a generator"),
        ("def loop(config):\n    yield\n", "train.py:1: 'loop' is a coroutine or a generator"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n", "train.py:3: E: its text cannot"),
        ("raise ValueError('x' * 10**6)\n", "train.py:1: ValueError: xxx"),
    ],
)
def test_an_error_names_the_file_and_the_line(store: ObjectStore, source: str, text: str) -> None:
    message = refusal(store, source)
    assert text in message
    assert len(message) < 2_000


def test_a_script_is_compiled_and_not_run(store: ObjectStore) -> None:
    check(store, {"jobs/cells.py": "raise SystemExit('it ran')\n"}, "jobs/cells.py")


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"cells.py": "x = 1\ny = (\n"}, "cells.py:2: SyntaxError: "),
        ({"cells.py": "x = 1\n!pip install torch\n"}, "cells.py:2: SyntaxError: "),
        ({"other.py": ""}, "the bundle has no file 'cells.py'; it has other.py"),
    ],
)
def test_a_script_that_python_cannot_compile_is_refused_by_its_line(
    store: ObjectStore, files: dict[str, str], text: str
) -> None:
    assert text in refusal(store, files, "cells.py")


def test_modules_of_the_bundle_shadow_neither_ours_nor_pythons(store: ObjectStore) -> None:
    broken = "raise SystemExit('shadowed')\n"
    files = {"shared/__init__.py": broken, "shared/errors.py": broken, "types.py": broken, "torch.py": broken}
    check(store, {**files, "train.py": "import types, shared.errors\nshared.errors.shown\ntypes.FunctionType\n" + LOOP})


def test_an_entry_in_a_module_that_is_never_imported_is_refused(store: ObjectStore) -> None:
    assert "'types' is Python's or an installed package's" in refusal(store, {"types.py": LOOP}, "types:loop")


@pytest.mark.parametrize("first", ["pass", "os.setsid()"])
def test_a_module_that_starts_many_processes_is_ended_with_all_of_them(
    store: ObjectStore, namespaces: bool, first: str, own_temporary: Path
) -> None:
    message = refusal(store, SLEEPERS.format(first=first), namespaces=namespaces)
    assert "starts more than 16 processes" in message
    wait_until(lambda: not processes_in(own_temporary), "their end")


def test_a_process_that_a_module_leaves_behind_is_ended(
    store: ObjectStore, namespaces: bool, own_temporary: Path
) -> None:
    source = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n    os._exit(0)\n"
    check(store, source + LOOP, namespaces=namespaces)
    wait_until(lambda: not processes_in(own_temporary), "its end")


def test_a_module_that_takes_memory_is_reported_where(store: ObjectStore, namespaces: bool) -> None:
    source = "kept = []\nfor _ in range(500):\n    kept.append(bytearray(1 << 20))\n"
    message = refusal(store, source, namespaces=namespaces, memory_bytes=200 << 20)
    assert "train.py:3: MemoryError" in message or "200 MiB of memory" in message


def test_memory_counts_over_all_processes(store: ObjectStore, namespaces: bool) -> None:
    message = refusal(store, HOARDERS, namespaces=namespaces, memory_bytes=150 << 20)
    assert "more than 150 MiB of memory" in message


def test_an_endless_loop_is_ended_by_its_cpu_time(store: ObjectStore, namespaces: bool) -> None:
    message = refusal(store, "while True: pass\n", namespaces=namespaces, cpu_s=0.5)
    assert "more than 0.5 s of CPU time" in message


def test_a_module_that_waits_for_ever_is_ended(store: ObjectStore, namespaces: bool) -> None:
    message = refusal(store, "import time\ntime.sleep(10**6)\n", namespaces=namespaces, idle_s=0.3)
    assert "its module waits for more than 0.3 s when it is imported, without computing" in message


@pytest.mark.parametrize(
    "source",
    ["import time\nwhile True: time.sleep(0.02)\n", "import threading\nthreading.Event().wait()\n"],
    ids=["naps", "a lock"],
)
def test_a_module_that_waits_with_short_breaks_or_for_a_lock_is_ended(store: ObjectStore, source: str) -> None:
    assert "waits for more than 0.3 s" in refusal(store, source, idle_s=0.3)


def test_a_module_that_computes_is_not_taken_for_one_that_waits(store: ObjectStore) -> None:
    source = "import time\nwhile time.process_time() < 2.5: pass\n"
    check(store, source + LOOP, idle_s=2.0, cpu_s=60.0)


def test_a_check_that_does_not_end_on_a_busy_machine_does_not_blame_the_caller(
    store: ObjectStore, namespaces: bool
) -> None:
    with pytest.raises(Unavailable, match=r"did not end within 0.5 s, because this machine is busy") as caught:
        check(store, "while True: pass\n", namespaces=namespaces, wall_s=0.5, cpu_s=500.0)
    assert caught.value.specific_reason == "CHECK_NOT_FINISHED"
    assert caught.value.retry_after_s


def test_a_module_cannot_claim_that_the_machine_is_busy(store: ObjectStore) -> None:
    source = (
        "import json, os\n"
        "for number in range(3, 100):\n"
        "    try: os.write(number, json.dumps({'problem': 'none', 'busy': True}).encode())\n"
        "    except OSError: pass\n"
        "os._exit(0)\n"
    )
    assert "none" in refusal(store, source)


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("import os\nos._exit(0)\n", "with exit status 0"),
        ("import os\nos._exit(7)\n", "with exit status 7"),
        ("import os\nos.closerange(0, 1000)\n", "with exit status 0"),
    ],
)
def test_a_module_that_ends_its_process_is_no_success(
    store: ObjectStore, namespaces: bool, source: str, how: str
) -> None:
    assert f"ended the process that imported it, {how}" in refusal(store, source + LOOP, namespaces=namespaces)


def test_a_gigabyte_of_prints_goes_nowhere(store: ObjectStore, namespaces: bool) -> None:
    check(store, "text = 'x' * 10**6\nfor _ in range(1000): print(text)\n" + LOOP, namespaces=namespaces)


def test_a_module_reads_nothing_from_the_services_input(store: ObjectStore, namespaces: bool) -> None:
    check(store, "import sys\nassert sys.stdin.read() == ''\n" + LOOP, namespaces=namespaces)


def test_no_credential_token_or_proxy_is_in_the_modules_environment(
    store: ObjectStore, namespaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MILLRACE_S3_SECRET_KEY", "MILLRACE_TOKEN_FILE", "AWS_SECRET_ACCESS_KEY", "http_proxy", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "a-secret-of-the-service")
    source = "import os\nassert 'a-secret-of-the-service' not in os.environ.values()\n"
    check(store, source + LOOP, namespaces=namespaces)


def test_a_module_writes_into_its_own_folder_and_no_large_file(store: ObjectStore, namespaces: bool) -> None:
    assert "File too large" in refusal(store, "open('x', 'wb').write(bytes(20 << 20))\n", namespaces=namespaces)
    source = "import os, tempfile\nassert os.getcwd() == os.environ['HOME'] == tempfile.gettempdir()\nopen('x', 'w')\n"
    check(store, source + LOOP, namespaces=namespaces)


def test_many_open_files_are_refused_in_the_module(store: ObjectStore) -> None:
    assert "train.py:1: OSError" in refusal(store, "kept = [open('/dev/null') for _ in range(300)]\n", open_files=100)


def test_nothing_of_a_check_is_left_on_the_disk(store: ObjectStore, own_temporary: Path) -> None:
    source = "import os\nos.mkdir('a')\nopen('a/b', 'w')\nos.chmod('a', 0)\n"
    check(store, source + LOOP)
    refusal(store, "while True: pass\n", cpu_s=0.3)
    assert list(own_temporary.iterdir()) == []


def test_the_network_is_out_of_reach_in_namespaces(store: ObjectStore) -> None:
    if not grants_namespaces(store):
        text = (
            "the kernel or the container grants no namespaces, so the child has the host's network: run as root, or "
            "with user.max_user_namespaces above 0 and without a seccomp profile that forbids unshare"
        )
        Missing(text, "MILLRACE_REQUIRE_NAMESPACES").end_test()
    source = (
        "import os, socket\n"
        "assert socket.socket().connect_ex(('127.0.0.1', 1)) == 101\n"  # ENETUNREACH: not even loopback
        "assert os.getppid() == 1\n"
        "assert all(int(one) < 10 for one in os.listdir('/proc') if one.isdigit())\n"
    )
    check(store, source + LOOP)


def test_a_good_entry_is_looked_at_once(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = store_bundle(store, {"train.py": LOOP})
    entries = EntryCheck(store, Limits(idle_s=500.0, wall_s=500.0))
    entries.check(bundle, "train:loop")
    monkeypatch.setattr(own_code, "CHILD", Path("/no/such/file"))
    entries.check(bundle, "train:loop")
    with pytest.raises(InvalidArgument):
        entries.check(bundle, "train:other")


def test_a_bundle_that_is_gone_or_damaged_is_reported(store: ObjectStore) -> None:
    bundle = store_bundle(store, {"train.py": LOOP})
    store.put(f"{bundle.name}/bundle.tar", b"damaged")
    with pytest.raises(DataLoss, match="push the bundle again"):
        EntryCheck(store).check(bundle, "train:loop")
    CodeBundles(store).delete(bundle.name)
    with pytest.raises(NotFound):
        EntryCheck(store).check(bundle, "train:loop")


def grants_namespaces(store: ObjectStore) -> bool:
    try:
        check(store, "import os\nassert os.getppid() == 1\n" + LOOP)
    except InvalidArgument:
        return False
    return True


def processes_in(folder: Path) -> list[str]:
    """The pids of living processes whose working directory is below `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                where = str((entry / "cwd").readlink())
            except OSError:  # it has ended, and is a zombie at most
                continue
            if where.startswith(str(folder)):
                found.append(entry.name)
    return found


def test_a_slow_build_of_an_environment_holds_up_no_other_program(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, building, uv = tmp_path / "held", tmp_path / "building", tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\ntouch {building}\nwhile [ -e {held} ]; do sleep 0.05; done\n")
    uv.chmod(0o755)
    environments = CodeEnvironments(uv=str(uv), folder=tmp_path / "environments")
    entries = EntryCheck(store, Limits(idle_s=500.0, wall_s=500.0), environments=environments)
    entries._children = threading.BoundedSemaphore(1)

    def check_program(name: str = "") -> None:
        lock = {"requirements.lock": f"{name}==1 --hash=sha256:{'a' * 64}\n"} if name else {}
        entries.check(store_bundle(store, {"train.py": f"# {time.time_ns()}\n{LOOP}", **lock}), "train:loop")

    check_program("pack-that-is-ready")
    building.unlink()
    held.touch()
    with ThreadPoolExecutor(1) as pool:
        try:
            slow = pool.submit(check_program, "pack-that-is-slow")
            until = time.monotonic() + 300
            while not building.exists():
                assert not slow.done()
                assert time.monotonic() < until
                time.sleep(0.02)
            monkeypatch.setattr(own_code, "CHECK_WAIT_S", 0.1)
            check_program()
            check_program("pack-that-is-ready")
            with pytest.raises(ResourceExhausted, match="another environment is being built; try again later"):
                check_program("pack-that-waits")
        finally:
            held.unlink()
        slow.result(timeout=600)
