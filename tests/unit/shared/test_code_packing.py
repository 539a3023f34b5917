"""Packing: the same folder gives the same bytes, and only such bytes are taken for a bundle."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import zipfile
from itertools import pairwise, product
from pathlib import Path

import pytest

from shared import code_packing
from shared.code_packing import MAX_FILES, NotABundle, check, digest_of_folder, pack, unmet, unpack
from tests.support.cpu_time import cpu_at_most


def folder_of(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def packed(source: Path) -> bytes:
    file = io.BytesIO()
    pack(source, file)
    return file.getvalue()


def tar_of(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def refusal(data: bytes) -> str:
    with pytest.raises(NotABundle) as caught:
        check(io.BytesIO(data))
    return str(caught.value)


def test_the_bytes_depend_on_names_and_contents_alone(tmp_path: Path) -> None:
    names = {"train.py": "x = 1\n", "pkg/__init__.py": "", "pkg/b.py": "y", "a.txt": "z"}
    one = folder_of(tmp_path / "one", names)
    other = folder_of(tmp_path / "other", dict(reversed(names.items())))
    (other / "train.py").chmod(0o755)
    os.utime(other / "pkg/b.py", (0, 0))
    assert packed(one) == packed(other)
    # Fixed for ever: jobs of other machines and releases name bundles by it.
    assert hashlib.sha256(packed(one)).hexdigest() == (
        "7e4bf82abcac006992465ff1daffb3933e675b74d70b3c013b41c09dc1219158"
    )


def test_other_programs_can_read_a_bundle(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "code", {"train.py": "x", f"{'d' * 90}/{'e' * 90}.py": "y", "é.py": "z"})
    with tarfile.open(fileobj=io.BytesIO(packed(folder))) as archive:
        assert archive.getnames() == sorted(archive.getnames(), key=str.encode)
        assert {one.name: archive.extractfile(one).read() for one in archive} == {  # type: ignore[union-attr]
            "train.py": b"x",
            f"{'d' * 90}/{'e' * 90}.py": b"y",
            "é.py": b"z",
        }


def test_unpacking_and_packing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    files = {"train.py": "x", "pkg/__init__.py": "", ".millraceignore": "data/\n", "data/large.bin": "0" * 9999}
    data = packed(folder_of(tmp_path / "code", files))
    (tmp_path / "out").mkdir()
    facts = unpack(io.BytesIO(data), tmp_path / "out")
    assert facts == check(io.BytesIO(data))
    assert packed(tmp_path / "out") == data
    assert digest_of_folder(tmp_path / "out") == facts.sha256 == hashlib.sha256(data).hexdigest()
    assert (facts.size_bytes, facts.file_count, facts.unpacked_size_bytes) == (len(data), 3, 7)


def test_a_bundle_reports_its_modules_and_requirements(tmp_path: Path) -> None:
    files = {
        "train.py": "",
        "pkg/__init__.py": "",
        "space/deep/x.py": "",
        "data/x.csv": "",
        "not-a-name.py": "",
        "requirements.txt": "# c\ntorch>=2 \\\n  --hash=sha256:ab\n--index-url http://x/\nnumpy==2.1  # why\n",
    }
    file = io.BytesIO()
    facts = pack(folder_of(tmp_path / "code", files), file)
    assert facts.modules == ("pkg", "space", "train")
    assert facts.requirements == ("torch>=2 --hash=sha256:ab", "numpy==2.1")


@pytest.mark.parametrize("line", ["-r other.txt", "-e .", "./wheels/x.whl", "https://x/y.whl", "/a/b"])
def test_a_requirement_that_cannot_be_checked_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    folder = folder_of(tmp_path / "code", {"train.py": "", "requirements.txt": f"torch\n{line}\n"})
    with pytest.raises(NotABundle, match=r"requirements.txt:2: .* cannot be checked"):
        packed(folder)


@pytest.mark.parametrize(
    ("marker", "problem"),
    [
        ("(" * 2_500 + "python_version > '3'" + ")" * 2_500, "nested too deep"),
        (f"python_version == '{'9' * 5_000}'", "4300 digits"),
        ("os_name ~= 'posix'", "Undefined"),
    ],
    ids=["nested", "long", "incomparable"],
)
def test_a_marker_that_cannot_be_evaluated_is_a_problem_of_its_requirement(marker: str, problem: str) -> None:
    [(text, what)] = unmet([f"one==1; {marker}", "two==2"], {"one": "1", "two": "2"}.get)
    assert text.startswith("one==1")
    assert what.startswith("it is no requirement: ")
    assert problem in what


def test_repositories_caches_environments_and_what_is_ignored_stay_out(tmp_path: Path) -> None:
    kept = {"train.py": "", "src/data/keep.txt": "", "notes.md": "", "deep/x/y.keep": ""}
    ignored = "# comment\n/data\n*.ckpt\nout/**/tmp?\n\nbuild/\n"
    left_out = (
        *(".git/HEAD", "src/__pycache__/a.pyc", "b.pyc", ".venv/x.py", "env/pyvenv.cfg", "env/lib/y.py"),
        *("data/big", "a.ckpt", "deep/b.ckpt", "out/tmp1", "out/a/b/tmp2/z", "deep/build/q"),
    )
    folder = folder_of(tmp_path / "code", {**kept, ".millraceignore": ignored, **dict.fromkeys(left_out, "x")})
    with tarfile.open(fileobj=io.BytesIO(packed(folder))) as archive:
        assert set(archive.getnames()) == {*kept, ".millraceignore"}


@pytest.mark.parametrize(
    "pattern",
    ["*" * 30 + "b", "*a" * 20 + "b", "**a" * 20 + "b", "**/" * 20 + "b", "a/" + "**/*a" * 20 + "b", "?*" * 30 + "b"],
)
def test_a_pattern_of_many_stars_is_matched_at_once(tmp_path: Path, pattern: str) -> None:
    name = "a" * 60
    kept = {f"{name}.py": "", f"{name}/{name}.py": ""}
    folder = folder_of(tmp_path / "code", {**kept, ".millraceignore": f"{pattern}\n"})
    with tarfile.open(fileobj=io.BytesIO(packed(folder))) as archive:
        assert set(archive.getnames()) == {*kept, ".millraceignore"}


def test_patterns_match_as_their_regular_expressions_do(tmp_path: Path) -> None:
    expressions = {"a": "a", "/": "/", "?": "[^/]", "*": "[^/]*", "**": ".*", "**/": "(?:.*/)?"}
    paths = [path for size in (1, 2, 3, 4) for path in map("".join, product("ab/", repeat=size)) if "//" not in path]
    paths = [path for path in paths if path == path.strip("/")]
    compared = 0
    for tokens in product(expressions, repeat=3):
        # What runs into each other would be read as other tokens.
        line = "".join(("x/", *tokens, "b"))
        if "***" in line or "//" in line or ("*", "*") in pairwise(tokens) or ("**", "/") in pairwise(tokens):
            continue
        (tmp_path / ".millraceignore").write_text(f"{line}\n")
        (pattern,) = code_packing._ignore_patterns(tmp_path / ".millraceignore")
        expression = re.compile("x/" + "".join(expressions[one] for one in tokens) + "b")
        for path in paths:
            found, expected = pattern.matches(f"x/{path}"), expression.fullmatch(f"x/{path}") is not None
            assert found == expected, (line, path)
            compared += 1
    assert compared > 1_000


def test_a_pattern_that_takes_others_back_is_refused_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(NotABundle, match=r"\.millraceignore:2"):
        packed(folder_of(tmp_path / "code", {"a.py": "", ".millraceignore": "*.bin\n!keep.bin\n"}))


def test_links_and_pipes_in_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "code", {"train.py": ""})
    (folder / "data").symlink_to("/etc")
    with pytest.raises(NotABundle, match=r"'data' is a symbolic link: keep it out by a line in \.millraceignore"):
        packed(folder)
    (folder / "data").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(NotABundle, match="'pipe' is no regular file"):
        packed(folder)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "code", {"train.py": ""})
    Path(os.fsdecode(bytes(folder) + b"/\xff.txt")).write_text("")
    with pytest.raises(NotABundle, match="is not UTF-8"):
        packed(folder)


def test_names_that_some_file_system_takes_for_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotABundle, match="one name where case"):
        packed(folder_of(tmp_path / "code", {"Model/a.py": "", "model/b.py": ""}))


def test_a_folder_without_files_and_a_path_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotABundle, match="no file is in it"):
        packed(tmp_path / "empty")
    (tmp_path / "x.zip").write_bytes(b"PK")
    with pytest.raises(NotABundle, match="name a folder"):
        packed(tmp_path / "x.zip")
    with pytest.raises(FileNotFoundError):
        packed(tmp_path / "missing")


def test_limits_are_reported_with_their_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "code", {f"{number}.py": "x" * 100 for number in range(6)})
    monkeypatch.setattr(code_packing, "MAX_FILES", 5)
    with pytest.raises(NotABundle, match=r"more than 5 files: .*millraceignore") as caught:
        packed(folder)
    assert caught.value.too_large
    monkeypatch.setattr(code_packing, "MAX_FILES", 6)
    monkeypatch.setattr(code_packing, "MAX_BUNDLE_BYTES", 4096)
    with pytest.raises(NotABundle, match="dataset version") as caught:
        packed(folder)
    assert caught.value.too_large


def test_a_wheel_is_laid_out_as_installed(tmp_path: Path) -> None:
    wheel = tmp_path / "own-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("own/__init__.py", "def loop(config): ...\n")
        archive.writestr("own-1.0.data/purelib/more.py", "")
        archive.writestr("own-1.0.data/scripts/run", "")
        archive.writestr("own-1.0.dist-info/METADATA", "Name: own\nRequires-Dist: torch>=2\nRequires-Dist: numpy\n")
    file = io.BytesIO()
    facts = pack(wheel, file)
    assert facts.modules == ("more", "own")
    assert facts.requirements == ("torch>=2", "numpy")
    assert check(io.BytesIO(file.getvalue())) == facts


@pytest.mark.timed
def test_a_wheel_that_lies_or_is_a_bomb_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "own-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.bin", bytes(80 * 1024 * 1024))
    with cpu_at_most(5), pytest.raises(NotABundle) as caught:
        packed(wheel)
    assert caught.value.too_large
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../out.py", "")
    with pytest.raises(NotABundle, match=r"'\.\./out\.py' has a part"):
        packed(wheel)
    wheel.write_bytes(b"no zip")
    with pytest.raises(NotABundle, match="is not a wheel"):
        packed(wheel)


HOSTILE = {
    "leaves the root": (tar_of((member("../evil.py"), b"x")), "'../evil.py' has a part"),
    "is absolute": (tar_of((member("/etc/passwd"), b"x")), "is no relative path"),
    "has a dot": (tar_of((member("./a.py"), b"x")), "has a part"),
    "symbolic link": (tar_of((member("a", tarfile.SYMTYPE, "/etc"), b"")), "'a' is a symbolic link"),
    "hard link": (tar_of((member("a", tarfile.LNKTYPE, "b"), b"")), "'a' is a hard link"),
    "device": (tar_of((member("a", tarfile.CHRTYPE), b"")), "'a' is a device"),
    "pipe": (tar_of((member("a", tarfile.FIFOTYPE), b"")), "'a' is a named pipe"),
    "folder": (tar_of((member("a", tarfile.DIRTYPE), b"")), "is a folder of its own"),
    "sparse": (tar_of((member("a", tarfile.GNUTYPE_SPARSE), b"")), "another kind"),
    "backslash": (tar_of((member("a\\b.py"), b"x")), "backslash"),
    "control character": (tar_of((member("a\nb.py"), b"x")), "control character"),
    "other form": (tar_of((member("é.py".replace("é", "e\u0301")), b"x")), "normal form C"),
    "pax": (tar_of((member("ü" * 120), b"x"), form=tarfile.PAX_FORMAT), "is an entry of another kind"),
    "gnu": (tar_of((member("a.py"), b"x"), form=tarfile.GNU_FORMAT), "another form"),
    "owner": (tar_of((member("a.py"), b"x")).replace(b"0000644", b"0000755", 1), "another form"),
    "garbage": (b"garbage" * 1000, "no tar archive"),
    "gzip": (b"\x1f\x8b" + bytes(1022), "no tar archive"),
    "nothing": (b"", "ends within an entry"),
    "no file": (bytes(1024), "no file is in it"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_that_are_no_bundle_are_refused_and_say_why(name: str, tmp_path: Path) -> None:
    data, text = HOSTILE[name]
    assert text in refusal(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(NotABundle):
        unpack(io.BytesIO(data), tmp_path / "out")
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def entries(*files: tuple[str, bytes]) -> bytes:
    """Entries in Millrace's form, in any order, without the check that packing makes."""
    blocks = b"".join(code_packing._header(path, len(data)) + data + bytes(-len(data) % 512) for path, data in files)
    return blocks + bytes(1024)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (("a.py", "a.py"), "is there twice"),
        (("b.py", "a.py"), "comes too late"),
        (("A.py", "a.py"), "one name where case"),
        (("a", "a/b.py"), "is a file and a folder"),
        (("a", "a-b", "a/b"), "is a file and a folder"),
        (("ﬁ.py", "ﬁ.pz"), ""),
        (("fi.py", "ﬁ.py"), "one name where case"),
    ],
)
def test_paths_that_do_not_go_together_are_refused(files: tuple[str, ...], text: str) -> None:
    data = entries(*((path, b"x") for path in files))
    if text:
        assert text in refusal(data)
    else:
        assert check(io.BytesIO(data)).file_count == len(files)


def test_every_single_changed_byte_is_refused_or_another_bundle(tmp_path: Path) -> None:
    data = packed(folder_of(tmp_path / "code", {"a.py": "x = 1", "b.py": "y"}))
    digest = hashlib.sha256(data).hexdigest()
    accepted = set()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        try:
            facts = check(io.BytesIO(bytes(changed)))
        except NotABundle:
            continue
        accepted.add(place)
        assert facts.sha256 == hashlib.sha256(changed).hexdigest() != digest
    # Only what files contain may be anything.
    assert accepted == {*range(512, 517), 1536}


def test_bytes_behind_the_end_and_a_cut_bundle_are_refused(tmp_path: Path) -> None:
    data = packed(folder_of(tmp_path / "code", {"a.py": "x"}))
    assert "bytes follow the end" in refusal(data + b"\0")
    for cut in (1, 511, 512, 600, len(data) - 512, len(data) - 1):
        assert "ends within an entry" in refusal(data[:cut])


def test_a_million_entries_are_refused_at_once() -> None:
    one = entries(("x", b""))[:512]

    class Endless(io.RawIOBase):
        given = 0

        def read(self, size: int = -1) -> bytes:
            self.given += 1
            path = f"{self.given:07d}"
            return one if size != 512 else code_packing._header(path, 0)

    source = Endless()
    with pytest.raises(NotABundle, match="more than 10,000 files") as caught:
        check(source)  # type: ignore[arg-type]
    assert caught.value.too_large
    assert source.given == MAX_FILES + 1


def test_a_size_beyond_the_limit_is_refused_before_its_bytes_are_read() -> None:
    header = code_packing._header("a", code_packing.MAX_BUNDLE_BYTES + 1)
    file = io.BytesIO(header + bytes(512))
    with pytest.raises(NotABundle, match="more than a bundle may have"):
        check(file)
    assert file.tell() == 512
