"""Environments of bundles: what uv must install, and what a build, a use and an end leave on a node."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared import code_environment
from shared.code_bundle_registry import find_entry, load_code
from shared.code_environment import (
    CodeEnvironments,
    add_packages,
    code_environments,
    digest_of_environment,
    packages_of_platform,
    to_install,
    use_environment,
)
from shared.errors import FailedPrecondition, InvalidArgument
from shared.settings import SettingsError
from shared.storage import ObjectStore
from tests.support.code_folders import store_bundle, write_files
from tests.support.own_models import code_of_this_process
from tests.support.wheels import OFFLINE, write_wheel

INSTALLED = {"torch": "2.15.0", "ray": "2.60.0", "einops": "0.7", "python": "3.11.9"}
HASHED = "--hash=sha256:" + "a" * 64


def plan(*requirements: str) -> tuple[list[str], list[tuple[str, str]]]:
    return to_install(requirements, INSTALLED.get, lambda: frozenset(("torch", "ray")))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {**OFFLINE, "UV_FIND_LINKS": str(tmp_path / "wheels")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "wheels"


@pytest.fixture
def environments(tmp_path: Path) -> CodeEnvironments:
    return code_environments(
        {"MILLRACE_CODE_ENVIRONMENTS": "uv", "MILLRACE_CODE_ENVIRONMENTS_FOLDER": str(tmp_path / "environments")}
    )


@pytest.fixture
def built(wheels: Path, environments: CodeEnvironments) -> Iterator[tuple[str, Path]]:
    """A line of a lock, and the folder of its packages, in use."""
    line = write_wheel(wheels, "tiny_pack", "1.5", {"tiny_pack/__init__.py": "ANSWER = 42\n"})
    with environments.opened([line]) as packages:
        assert packages is not None
        yield line, packages


def test_only_what_the_image_does_not_meet_is_installed() -> None:
    lines, problems = plan("torch==2.15.0 --hash=sha256:ab", f"einops==0.8 {HASHED}", "ray>=2", f"new==1 {HASHED}")
    assert lines == [f"einops==0.8 {HASHED}", f"new==1 {HASHED}"]
    assert problems == []


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        (f"torch==2.1 {HASHED}", "torch 2.15.0 is installed; Millrace itself runs with it"),
        (f"ray==2.9 {HASHED}", "ray 2.60.0 is installed; Millrace itself runs with it"),
        ("python>=3.12", "python 3.11.9 is installed; Millrace itself runs with it"),
        (f"new>=1 {HASHED}", "new is not installed; name one version, new==…"),
        (f"new==1.* {HASHED}", "new is not installed; name one version, new==…"),
        ("new==1", "new is not installed; name its hashes"),
        (f"new==1 {HASHED} --hash=md5:ab", "new is not installed; name its hashes"),
        ("new @ https://example.org/new.whl", "it names an address"),
        (f"new==1 --index-url=https://example.org {HASHED}", "it is no requirement"),
    ],
)
def test_a_requirement_that_neither_the_image_nor_uv_provides_is_refused(requirement: str, problem: str) -> None:
    lines, problems = plan(requirement)
    assert lines == []
    ((text, said),) = problems
    assert said.startswith(problem)
    assert requirement.startswith(text)


def test_a_wheels_own_requirement_is_met_by_the_lock_beside_it() -> None:
    lines, problems = plan(f"new==1.2 {HASHED}", "new>=1")
    assert (lines, problems) == ([f"new==1.2 {HASHED}"], [])
    _, ((text, said),) = plan(f"new==1.2 {HASHED}", "new>=2")
    assert (text, said.partition(";")[0]) == ("new>=2", "new is not installed")


def test_packages_that_millrace_needs_come_from_the_image() -> None:
    assert {"millrace", "ray", "torch", "numpy", "pyarrow", "grpcio", "pandas"} <= packages_of_platform()
    assert not {"transformers", "lightning", "pytest"} & packages_of_platform()


def test_unmet_requirements_name_field_value_and_remedy(environments: CodeEnvironments) -> None:
    with pytest.raises(
        InvalidArgument, match=r"spec\.x: 'torch==0\.1': torch .* is installed; .* use an image"
    ) as caught:
        environments.check([f"torch==0.1 {HASHED}"], "spec.x")
    assert [field for field, _ in caught.value.fields] == ["spec.x"]


def test_packages_come_before_the_images_and_after_pythons_own(built: tuple[str, Path]) -> None:
    _, packages = built
    path = list(sys.path)
    add_packages(packages, path)
    add_packages(packages, path)
    place = path.index(str(packages))
    assert path[:place] + path[place + 1 :] == sys.path
    assert path[place + 1].endswith("site-packages")
    code = f"import sys; sys.path[:] = {path!r}; import tiny_pack, packaging; print(tiny_pack.ANSWER)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout
    assert said == "42\n"


def test_an_environment_is_built_once_and_shared(
    built: tuple[str, Path], environments: CodeEnvironments, tmp_path: Path
) -> None:
    line, packages = built
    missing = replace(environments, uv=str(tmp_path / "no-such-program"))
    with missing.opened([line, "torch"]) as again:
        assert again == packages
    with missing.opened(["torch"]) as none:
        assert none is None


def test_processes_that_need_it_at_once_build_it_once(
    wheels: Path, environments: CodeEnvironments, tmp_path: Path
) -> None:
    line = write_wheel(wheels, "tiny_pack", "1.5", {"tiny_pack.py": ""})
    counted, count = tmp_path / "uv", tmp_path / "count"
    counted.write_text(f'#!/bin/sh\necho built >> {count}\nexec {environments.uv} "$@"\n')
    counted.chmod(0o755)
    barrier = threading.Barrier(4)

    def use() -> Path | None:
        barrier.wait()
        with replace(environments, uv=str(counted)).opened([line]) as packages:
            return packages

    with ThreadPoolExecutor(4) as pool:
        folders = {call.result() for call in [pool.submit(use) for _ in range(4)]}
    assert len(folders) == 1
    assert count.read_text() == "built\n"


def test_an_environment_that_was_changed_is_built_anew_and_beside_one_in_use(
    built: tuple[str, Path], environments: CodeEnvironments
) -> None:
    line, packages = built
    (packages / "tiny_pack" / "__init__.py").write_text("ANSWER = 'changed'\n")
    with environments.opened([line]) as other:
        assert other is not None
        assert other != packages
        assert (other / "tiny_pack" / "__init__.py").read_text() == "ANSWER = 42\n"
        (other / "tiny_pack" / "__init__.py").unlink()
    with environments.opened([line]) as again:
        assert again == other  # unused since, so it is repaired where it is
        assert (other / "tiny_pack" / "__init__.py").read_text() == "ANSWER = 42\n"


def test_beside_one_in_use_whose_record_was_removed_another_is_built(
    built: tuple[str, Path], environments: CodeEnvironments
) -> None:
    line, packages = built
    packages.with_name(f"{packages.name}.json").unlink()
    ticks: list[None] = []

    def note_progress() -> None:
        ticks.append(None)
        assert len(ticks) < 2_000, "it waits for the end of a process that may run for days"

    with environments.opened([line], note_progress) as other:
        assert other is not None
        assert other.name == f"{packages.name}-1"
        assert (other / "tiny_pack" / "__init__.py").read_text() == "ANSWER = 42\n"
    assert packages.is_dir(), "the other process still uses it"


def test_the_oldest_unused_environments_make_room(
    built: tuple[str, Path], wheels: Path, environments: CodeEnvironments
) -> None:
    _, in_use = built
    lines = [write_wheel(wheels, f"large{number}", "1", {"large.bin": os.urandom(2**20)}) for number in range(3)]
    folders = []
    for number, line in enumerate(lines):
        with environments.opened([line]) as packages:
            assert packages is not None
            folders.append(packages)
        os.utime(packages.with_name(f"{packages.name}.lock"), (number, number))
    assert all(one.exists() for one in folders)
    with replace(environments, max_bytes=5 * 2**19).opened([lines[0]]):
        assert [one.exists() for one in folders] == [True, False, True]
    with replace(environments, max_bytes=2**20 + 2**19).opened([lines[2]]):
        assert [one.exists() for one in folders] == [False, False, True]
    assert in_use.exists()


def test_unused_environments_make_room_while_another_is_built(
    built: tuple[str, Path], wheels: Path, environments: CodeEnvironments, tmp_path: Path
) -> None:
    """The program ends only when the unused environment is gone, which it would else outlive."""
    _, in_use = built
    with environments.opened([write_wheel(wheels, "large", "1", {"large.bin": os.urandom(2**20)})]) as unused:
        assert unused is not None
    program = tmp_path / "uv"
    program.write_text(
        f"""#!{sys.executable}
import os, pathlib, sys, time
pathlib.Path(sys.argv[sys.argv.index("--target") + 1], "next.bin").write_bytes(os.urandom(2**20))
while os.path.exists({str(unused)!r}):
    time.sleep(0.02)
"""
    )
    program.chmod(0o755)
    line = write_wheel(wheels, "next_pack", "1", {"next.bin": ""})
    limited = replace(environments, uv=str(program), max_bytes=3 * 2**19, timeout_s=120)
    with limited.opened([line]) as packages:
        assert packages is not None
        assert (packages / "next.bin").stat().st_size == 2**20
    assert not unused.exists()
    assert in_use.exists()


def failure(environments: CodeEnvironments, *requirements: str) -> str:
    with pytest.raises(FailedPrecondition) as caught, environments.opened(requirements):
        pass
    assert caught.value.specific_reason == "ENVIRONMENT_FAILED"
    left = [one.name for one in environments.folder.iterdir() if one.suffix != ".lock"]
    assert left == []
    return caught.value.message


def test_a_failed_build_has_uvs_message_and_leaves_nothing(wheels: Path, environments: CodeEnvironments) -> None:
    line = write_wheel(wheels, "tiny_pack", "1.5", {"tiny_pack.py": ""})
    assert "not-there" in failure(environments, line, f"not-there==1 {HASHED}")
    other = f"tiny_pack==1.5 {HASHED}"
    assert "Hash mismatch for `tiny-pack==1.5`" in failure(environments, other)
    (wheels / "tiny_pack-1.5-py3-none-any.whl").write_bytes(b"damaged")
    assert "tiny" in failure(environments, line)
    with environments.opened([write_wheel(wheels, "tiny_pack", "1.5", {"tiny_pack.py": ""})]) as packages:
        assert packages is not None


def test_the_remains_of_a_killed_build_are_no_environment(wheels: Path, environments: CodeEnvironments) -> None:
    line = write_wheel(wheels, "tiny_pack", "1.5", {"tiny_pack.py": ""})
    folder = environments.folder / digest_of_environment([line.replace("_", "-", 1)])
    left = write_files(folder, {"half.py": ""}), write_files(folder.with_name(f"{folder.name}.work"), {"cache": ""})
    with environments.opened([line]) as packages:
        assert packages == folder
        assert not (folder / "half.py").exists()
        assert not left[1].exists()


def test_loaded_code_has_what_its_bundle_requires(
    store: ObjectStore, wheels: Path, environments: CodeEnvironments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = write_wheel(wheels, "tiny_pack", "1.5", {"tiny_pack.py": "ANSWER = 42\n"})
    source = (
        "from importlib.metadata import version\nimport tiny_pack\nFOUND = tiny_pack.ANSWER, version('tiny-pack')\n"
    )
    bundle = store_bundle(store, {"code_with_pack.py": source, "requirements.lock": f"{line}\ntorch\n"})
    with code_of_this_process(), pytest.raises(FailedPrecondition, match="tiny_pack is not installed"):
        load_code(store, bundle.name, tmp_path / "code")
    monkeypatch.setenv("MILLRACE_CODE_ENVIRONMENTS", "uv")
    monkeypatch.setenv("MILLRACE_CODE_ENVIRONMENTS_FOLDER", str(environments.folder))
    with code_of_this_process():
        load_code(store, bundle.name, tmp_path / "code")
        assert find_entry(bundle.name, "code_with_pack:FOUND") == (42, "1.5")
    sys.modules.pop("tiny_pack")


def test_no_code_of_a_source_archive_runs(wheels: Path, environments: CodeEnvironments, tmp_path: Path) -> None:
    wheels.mkdir()
    source = f"open({str(tmp_path / 'ran')!r}, 'w')\n".encode()
    archive = wheels / "evil-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in {
            "setup.py": source,
            "PKG-INFO": b"Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
        }.items():
            member = tarfile.TarInfo(f"evil-1.0/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert "evil" in failure(environments, f"evil==1.0 --hash=sha256:{digest}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("limit", "said"),
    [({"max_bytes": 2**20}, "more than 1,048,576 bytes"), ({"max_files": 20}, "more than 20 files")],
)
def test_a_build_has_limits(wheels: Path, environments: CodeEnvironments, limit: dict[str, Any], said: str) -> None:
    bomb: dict[str, str | bytes] = {"bomb.bin": bytes(64 * 2**20), **{f"many/{number}.txt": "" for number in range(40)}}
    line = write_wheel(wheels, "bomb", "1", bomb)
    assert (wheels / "bomb-1-py3-none-any.whl").stat().st_size < 2**20
    assert said in failure(replace(environments, **limit), line)


def test_a_build_that_takes_too_long_is_ended(wheels: Path, environments: CodeEnvironments, tmp_path: Path) -> None:
    slow = tmp_path / "uv"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    ticks: list[int] = []
    line = write_wheel(wheels, "tiny_pack", "1.5", {"tiny_pack.py": ""})
    with pytest.raises(FailedPrecondition, match=r"it takes more than 0\.2 s"):
        replace(environments, uv=str(slow), timeout_s=0.2).lease([line], lambda: ticks.append(1))
    assert ticks


@pytest.mark.parametrize(
    "path",
    [
        "torch/__init__.py",
        "numpy/__init__.py",
        "shared/__init__.py",
        "train_service.py",
        "ray.py",
        "torch.pyc",
        "numpy/__init__.pyc",
        "numpy/__init__.abi3.so",
        "shared.abi3.so",
        "six/__init__.py",
        "google/__init__.py",
        "google/protobuf/__init__.pyc",
    ],
)
def test_no_package_takes_the_place_of_the_platforms(wheels: Path, environments: CodeEnvironments, path: str) -> None:
    line = write_wheel(wheels, "clash", "1", {path: ""})
    assert f"bring {path}, which takes the place of the image's own" in failure(environments, line)


def test_a_package_may_add_modules_beside_the_platforms(wheels: Path, environments: CodeEnvironments) -> None:
    added = ["google/tiny_pack/__init__.py", "tests/test_tiny_pack.py", "ray.txt", "numpy.libs/tiny.so", "torch-1.txt"]
    line = write_wheel(wheels, "tiny_pack", "1.5", dict.fromkeys(added, ""))
    with environments.opened([line]) as packages:
        assert packages is not None
        assert all((packages / path).exists() for path in added)


def test_a_wheel_cannot_write_outside_of_its_folder(
    wheels: Path, environments: CodeEnvironments, tmp_path: Path
) -> None:
    outside = {f"{'../' * depth}escaped.txt": "x" for depth in range(1, 5)} | {f"{tmp_path}/escaped.txt": "x"}
    line = write_wheel(wheels, "escape", "1", {**outside, "escape.py": ""})
    with suppress(FailedPrecondition), environments.opened([line]):
        pass
    assert not list(tmp_path.rglob("escaped.txt"))


def test_where_environments_are_off_a_node_says_what_it_lacks() -> None:
    with pytest.raises(
        FailedPrecondition, match=r"'not-there==1': not-there is not installed.*ENVIRONMENTS=uv on this"
    ):
        use_environment([f"not-there==1 {HASHED}"], {})
    assert use_environment(["torch"], {}) is None
    # The image was upgraded since the job was created.
    assert use_environment(["torch==0.1"], {}) is None
    with pytest.raises(FailedPrecondition, match="a setting of this node: MILLRACE_CODE_ENVIRONMENTS='pip'"):
        use_environment([], {"MILLRACE_CODE_ENVIRONMENTS": "pip"})


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"MILLRACE_CODE_ENVIRONMENTS": "on"}, "use off or uv"),
        ({"MILLRACE_CODE_ENVIRONMENTS_FOLDER": "here"}, "use an absolute path"),
        ({"MILLRACE_CODE_ENVIRONMENTS_GIB": "0"}, "use a number above 0"),
        ({"MILLRACE_CODE_ENVIRONMENTS_GIB": "nan"}, "use a number above 0"),
        ({"MILLRACE_CODE_ENVIRONMENTS_GIB": "many"}, "use a number above 0"),
    ],
)
def test_a_malformed_setting_names_its_variable_and_the_remedy(environ: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=text) as caught:
        code_environments(environ)
    assert next(iter(environ)) in str(caught.value)


@pytest.mark.parametrize("below", [0, 1], ids=["the folder", "its parent"])
@pytest.mark.parametrize("kind", ["writable", "link", "file", "another user's"])
def test_a_default_folder_that_others_can_change_is_refused(
    below: int, kind: str, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = write_wheel(wheels, "tiny_pack", "1.5", {"tiny_pack.py": ""})
    monkeypatch.setattr(code_environment, "DEFAULT_FOLDER", f"{tmp_path}/millrace-{{uid}}/environments")
    environments = code_environments({"MILLRACE_CODE_ENVIRONMENTS": "uv"})
    with environments.opened([line]) as packages:
        assert packages is not None
    changed = [environments.folder, environments.folder.parent][below]
    if kind == "writable":
        changed.chmod(0o770)
    elif kind == "another user's":
        user, lstat = os.getuid(), Path.lstat
        monkeypatch.setattr(
            Path,
            "lstat",
            lambda path: (
                os.stat_result((*lstat(path)[:4], user + 1, *lstat(path)[5:])) if path == changed else lstat(path)
            ),
        )
    else:
        changed.rename(tmp_path / "elsewhere")
        changed.touch() if kind == "file" else changed.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FailedPrecondition, match=f"{changed} is no folder of this user's alone: .*_FOLDER"):
        environments.lease([line])


def test_environments_are_off_by_default() -> None:
    assert code_environments({}).uv == ""


def test_an_environment_whose_folders_were_made_read_only_is_removed() -> None:
    """As a user without privileges: root may write everywhere."""
    code = """
import os, tempfile
from pathlib import Path

from shared.code_environment import _remove_folder

if os.geteuid() == 0:
    os.setuid(65534)
folder = Path(tempfile.mkdtemp(dir="/tmp"), "packages")
(folder / "a" / "b").mkdir(parents=True)
(folder / "a" / "b" / "c.py").write_text("")
(folder / "a" / "b").chmod(0o555)
(folder / "a").chmod(0)
folder.chmod(0o555)
_remove_folder(folder)
folder.parent.rmdir()
print("removed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert done.stdout == "removed\n", done.stderr
