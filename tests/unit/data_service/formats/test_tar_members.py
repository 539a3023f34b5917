from __future__ import annotations

import io
import tarfile
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.formats import images
from data_service.formats.images import TarError, members
from tests.support.damage import flips, truncations
from tests.support.images import tar_of

LAYOUTS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def read(data: bytes) -> dict[str, bytes]:
    return {member.name: member.read() for member in members(io.BytesIO(data))}


def with_member(member: tarfile.TarInfo, data: bytes = b"", layout: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=layout) as archive:
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.size, made.linkname = kind, size, "/etc/passwd" if kind in (b"1", b"2") else ""
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    files=st.dictionaries(
        st.from_regex(r"[a-zé ]{1,60}(/[a-z日]{1,60}){0,3}", fullmatch=True), st.binary(max_size=1500), max_size=5
    )
)
def test_tars_that_python_writes_are_read_whatever_the_layout(layout: int, files: dict[str, bytes]) -> None:
    files = {name: data for name, data in files.items() if len(name.encode()) <= 90 or layout != tarfile.USTAR_FORMAT}
    if files:
        assert read(tar_of(files, layout)) == files


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_names_are_read(layout: int) -> None:
    name = "/".join(["n" * 60] * 3)
    assert read(tar_of({name: b"x"}, layout)) == {name: b"x"}


def test_names_are_kept_as_the_bytes_that_they_are() -> None:
    composed, decomposed = "\u00e9/a.png", "e\u0301/a.png"
    assert list(read(tar_of({composed: b"1", decomposed: b"2"}))) == [composed, decomposed]


def test_empty_and_dot_parts_of_a_path_do_not_count() -> None:
    assert list(read(tar_of({"./train//ants/x.jpg": b"x"}))) == ["train/ants/x.jpg"]


def test_members_that_nobody_reads_are_skipped() -> None:
    names = [one.name for one in members(io.BytesIO(tar_of({"a": b"x" * 700, "b": b"y"})))]
    assert names == ["a", "b"]


def test_folders_are_no_members() -> None:
    assert read(with_member(member("ants", tarfile.DIRTYPE))) == {}


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (member("../../etc/cron"), r"'../../etc/cron' has '..'"),
        (member("a/../../b"), r"has '..'"),
        (member("/etc/passwd"), "absolute path"),
        (member("link", tarfile.SYMTYPE), "'link' is a symbolic link"),
        (member("link", tarfile.LNKTYPE), "'link' is a hard link"),
        (member("null", tarfile.CHRTYPE), "'null' is a device"),
        (member("disk", tarfile.BLKTYPE), "'disk' is a device"),
        (member("pipe", tarfile.FIFOTYPE), "'pipe' is a pipe"),
        (member("holes", tarfile.GNUTYPE_SPARSE), "'holes' is a sparse file"),
        (member("odd", b"Z"), "unknown kind"),
    ],
    ids=lambda value: value.name if isinstance(value, tarfile.TarInfo) else "",
)
def test_a_hostile_member_is_refused_by_name(hostile: tarfile.TarInfo, said: str) -> None:
    with pytest.raises(TarError, match=said):
        read(with_member(hostile))


def test_a_sparse_file_of_pax_is_refused() -> None:
    made = member("holes")
    made.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    with pytest.raises(TarError, match="'holes' is a sparse file"):
        read(with_member(made))


def test_a_zero_byte_in_a_name_is_refused() -> None:
    made = member("x")
    made.pax_headers = {"path": "a\0b"}
    with pytest.raises(TarError, match="zero byte"):
        read(with_member(made))


def test_a_name_that_is_no_utf_8_is_refused() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT, encoding="latin-1") as archive:
        archive.addfile(member("caf\u00e9/x.jpg"))
    with pytest.raises(TarError, match="not UTF-8"):
        read(buffer.getvalue())


@pytest.mark.parametrize("layout", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_name_that_is_too_long_is_refused_and_shown_in_part(layout: int) -> None:
    with pytest.raises(TarError, match="at most 65536 are read") as caught:
        read(tar_of({"c/" + "n" * 900_000: b"x"}, layout))
    assert len(str(caught.value)) < 400


def test_the_length_of_a_name_is_counted_in_bytes() -> None:
    longest = "é" * (images.MAX_NAME_BYTES // 2)
    assert list(read(tar_of({longest: b"x"}))) == [longest]
    with pytest.raises(TarError, match=r"'éé.*….* has a name of 65537 bytes"):
        read(tar_of({longest + "n": b"x"}))


@pytest.mark.parametrize("kind", ["a link", "a large file", "a truncated one", "no UTF-8"])
def test_a_message_shows_a_long_name_in_part(kind: str) -> None:
    name = "n" * 60_000
    data = {
        "a link": with_member(member(name, tarfile.SYMTYPE)),
        "a large file": member(name, size=2**41).tobuf(tarfile.PAX_FORMAT),
        "a truncated one": tar_of({name: b"x"})[:-10_000],
        "no UTF-8": with_member(member(name)).replace(b"n" * 60_000, b"\xff" * 60_000),
    }[kind]
    with pytest.raises(TarError, match="member") as caught:
        read(data)
    assert len(str(caught.value)) < 400


def test_a_member_that_claims_terabytes_costs_nothing() -> None:
    for header in (member("big", size=2**41).tobuf(tarfile.GNU_FORMAT), member("big", size=2**41).tobuf()):
        with pytest.raises(TarError, match="at most 268435456 are read"):
            read(header)


def test_an_extended_header_that_claims_gigabytes_costs_nothing() -> None:
    header = member("x", tarfile.XHDTYPE, size=2**31).tobuf(tarfile.USTAR_FORMAT)
    with pytest.raises(TarError, match="an extended header has 2147483648 bytes"):
        read(header + bytes(1024))


def test_too_many_members_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_MEMBERS", 3)
    with pytest.raises(TarError, match="more than 3 members"):
        read(tar_of({str(i): b"" for i in range(4)}))


@pytest.mark.parametrize(
    "records", [b"5 path=x\n", b"999 path=x\n", b"path=x\n", b"-1 a=b\n", b"10 pathxxx\n", b"8 size=\n"]
)
def test_damaged_extended_headers_are_refused(records: bytes) -> None:
    header = member("x", tarfile.XHDTYPE, size=len(records)).tobuf(tarfile.USTAR_FORMAT)
    with pytest.raises(TarError):
        read(header + records.ljust(512, b"\0") + tar_of({"y": b"z"}))


def test_every_truncated_copy_is_refused() -> None:
    # What tar pads its last block with is not missed.
    data = tar_of({f"c/{i}": bytes([i]) * 700 for i in range(5)}).rstrip(b"\0")
    whole = data + bytes(-len(data) % 512)
    for _, part in truncations(whole):
        with pytest.raises(TarError):
            read(part)
    assert len(read(whole + bytes(512))) == 5


def test_an_archive_after_an_archive_is_not_lost_in_silence() -> None:
    with pytest.raises(TarError, match="goes on after its end"):
        read(tar_of({"a": b"x"}) * 2)


def test_flipped_bits_are_refused_or_in_a_content() -> None:
    data = tar_of({"c/a": b"x" * 100, "c/b": b"y" * 100}, tarfile.USTAR_FORMAT)[: 4 * 512 + 512]
    for _, damaged in flips(data, 200):
        with suppress(TarError):
            assert list(read(damaged)) == ["c/a", "c/b"]


@given(data=st.binary(max_size=2000))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    with pytest.raises(TarError):
        read(data)
