"""Writes pytest's cache of the test files, whose asserts pytest rewrites before it imports them.

Each of the pytest processes that share the tests would otherwise rewrite all files by itself, and none of them writes
the cache where PYTHONDONTWRITEBYTECODE is set. pytest has no public function for this. It checks each entry against a
hash of the source, and rewrites a file whose entry is absent or of other source.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc_fp, get_cache_dir

TESTS = Path(__file__).parents[1] / "tests"


def write_cache(source: Path) -> None:
    """Rewrite the asserts of one file, unless the cache has them."""
    cached = get_cache_dir(source) / (source.name.removesuffix(".py") + PYC_TAIL)
    if _read_pyc(source, cached) is not None:
        return
    digest, code = _rewrite_test(source, None)  # type: ignore[arg-type]  # pytest's settings change nothing here
    cached.parent.mkdir(parents=True, exist_ok=True)
    # A reader never sees half an entry.
    whole = cached.with_name(f"{cached.name}.{os.getpid()}")
    with whole.open("wb") as file:
        _write_pyc_fp(file, digest, code)
    whole.replace(cached)


def main() -> None:
    sources = sorted(path for pattern in ("test_*.py", "conftest.py") for path in TESTS.rglob(pattern))
    with ProcessPoolExecutor() as processes:
        list(processes.map(write_cache, sources, chunksize=8))


if __name__ == "__main__":
    main()
