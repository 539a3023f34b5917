"""Finds digits for the demo: the first source that works, as IDX files in one folder."""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
# torchvision tries several mirrors; without a network each fails at once.
DOWNLOAD_TIMEOUT_S = 120.0
SKLEARN_TRAIN_ROWS = 1500
SIDE = 28

# Run in its own process, because the client does not import torch.
DOWNLOAD = "import sys, torchvision; torchvision.datasets.MNIST(sys.argv[1], download=True)"


class NoDigits(Exception):
    """No source worked. The text has each source's problem."""


@dataclass(frozen=True)
class Digits:
    """MNIST's four IDX files in `folder`; each name ends with `suffix` (`.gz` or nothing)."""

    source: str
    folder: Path
    suffix: str

    def files(self) -> list[Path]:
        return [self.folder / f"{name}{self.suffix}" for name in FILES]


def find_digits(cache: Path, environ: Mapping[str, str] = os.environ) -> Digits:
    """Try MNIST_ROOT, ../shared/data/mnist, torchvision's download and scikit-learn's digits, in this order.

    Downloaded or generated files are kept in `cache`. Raises `NoDigits`.
    """
    refusals = []
    for source, locate in _sources(cache, environ):
        try:
            found = _look_in(locate())
        except (OSError, subprocess.SubprocessError) as error:
            refusals.append(f"{source}: {error}")
            continue
        if found is not None:
            return Digits(source, *found)
        refusals.append(f"{source}: no IDX files of MNIST's names there")
    raise NoDigits("found no digits; " + "; ".join(refusals))


def _sources(cache: Path, environ: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], Path]]]:
    given = environ.get("MNIST_ROOT")
    if given:
        yield f"MNIST_ROOT={given}", lambda: Path(given)
    yield "../shared/data/mnist", lambda: Path("../shared/data/mnist")
    yield "torchvision's download", lambda: _download(cache / "torchvision")
    yield "scikit-learn's 8×8 digits, scaled up", lambda: _small_digits(cache / "scikit-learn")


def _look_in(root: Path) -> tuple[Path, str] | None:
    """Return the folder and the suffix of the files, at `root` or where torchvision puts them below it."""
    for folder in (root / "MNIST" / "raw", root / "raw", root):
        for suffix in (".gz", ""):
            if all((folder / f"{name}{suffix}").is_file() for name in FILES):
                return folder.resolve(), suffix
    return None


def _download(root: Path) -> Path:
    if _look_in(root) is None:
        root.mkdir(parents=True, exist_ok=True)
        _python(DOWNLOAD, str(root))
    return root


def _small_digits(root: Path) -> Path:
    """Write 1,797 digits of 8×8 pixels, 0..16, as 28×28 pixels, 0..255."""
    if _look_in(root) is None:
        with gzip.open(_sklearn_folder() / "datasets" / "data" / "digits.csv.gz", "rt") as file:
            rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        # Neighbouring rows come from the same writer; shuffled, each split has all writers.
        rows = np.random.default_rng(0).permutation(rows)
        images = np.stack([_scaled_up(one) for one in rows[:, :64].reshape(-1, 8, 8)])
        labels = np.ascontiguousarray(rows[:, 64])
        root.mkdir(parents=True, exist_ok=True)
        for part, chosen in (("train", slice(0, SKLEARN_TRAIN_ROWS)), ("t10k", slice(SKLEARN_TRAIN_ROWS, None))):
            write_idx(root / f"{part}-images-idx3-ubyte", images[chosen])
            write_idx(root / f"{part}-labels-idx1-ubyte", labels[chosen])
    return root


def _sklearn_folder() -> Path:
    """Return scikit-learn's folder, whose data can be read without importing it."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("scikit-learn is not installed")
    return Path(found.submodule_search_locations[0])


def _scaled_up(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    from PIL import Image

    small = Image.fromarray((image * 15).astype(np.uint8))
    return np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.uint8)


def write_idx(path: Path, array: npt.NDArray[np.uint8]) -> None:
    """Write uint8 values of any shape in the IDX format."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 0x08, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


def _python(code: str, *arguments: str) -> None:
    command = (sys.executable, "-c", code, *arguments)
    done = subprocess.run(command, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise OSError(last[0] if last else f"exit status {done.returncode}")
