"""Where the demonstration's digits come from."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from millrace_client.cli import demo
from millrace_client.cli.demo import FILES, NoDigits, find_digits, write_idx


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without `../shared/data/mnist`, and no network for torchvision."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(demo, "DOWNLOAD", "import sys; sys.exit('no network')")
    return tmp_path


def put_files(folder: Path, suffix: str = "") -> None:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / f"{name}{suffix}").touch()


def test_mnist_root_comes_first(somewhere: Path) -> None:
    put_files(somewhere / "mine" / "MNIST" / "raw", ".gz")
    put_files(somewhere / "shared" / "data" / "mnist" / "MNIST" / "raw")
    found = find_digits(somewhere / "cache", {"MNIST_ROOT": str(somewhere / "mine")})
    assert found.folder == somewhere / "mine" / "MNIST" / "raw"
    assert found.suffix == ".gz"
    assert "MNIST_ROOT" in found.source


def test_mnist_root_may_be_the_folder_of_the_files_itself(somewhere: Path) -> None:
    put_files(somewhere / "raw")
    assert find_digits(somewhere / "cache", {"MNIST_ROOT": str(somewhere / "raw")}).folder == somewhere / "raw"


def test_a_folder_without_the_files_gives_way_to_the_next_source(somewhere: Path) -> None:
    put_files(somewhere / "shared" / "data" / "mnist" / "MNIST" / "raw")
    found = find_digits(somewhere / "cache", {"MNIST_ROOT": str(somewhere / "empty")})
    assert found.source == "../shared/data/mnist"
    assert ".." not in found.folder.parts


def test_without_anything_scikit_learns_digits_are_scaled_up(somewhere: Path) -> None:
    found = find_digits(somewhere / "cache", {})
    assert "scikit-learn" in found.source
    train_images, train_labels, test_images, test_labels = (path.read_bytes() for path in found.files())
    assert train_images[:16] == bytes.fromhex("00000803 000005dc 0000001c 0000001c")
    assert len(train_images) == 16 + 1500 * 28 * 28
    assert len(test_images) == 16 + 297 * 28 * 28
    assert np.bincount(np.frombuffer(train_labels[8:], np.uint8), minlength=10).min() > 100
    assert np.bincount(np.frombuffer(test_labels[8:], np.uint8), minlength=10).min() > 10
    assert np.frombuffer(train_images[16:], np.uint8).max() > 200


def test_with_no_source_left_every_refusal_is_reported(somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NoDigits, match=r"MNIST_ROOT=.*shared/data/mnist.*no network.*not installed"):
        find_digits(somewhere / "cache", {"MNIST_ROOT": "/nowhere"})


def test_idx_files_are_what_mnists_are(tmp_path: Path) -> None:
    write_idx(tmp_path / "labels", np.array([7, 2], np.uint8))
    assert (tmp_path / "labels").read_bytes() == bytes.fromhex("00000801 00000002 07 02")
