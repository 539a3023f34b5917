"""The data beside the repository, `../shared/data`: digits, photographs and tables that others made."""

from __future__ import annotations

from pathlib import Path

from tests.support.needs import Missing

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


def real_data() -> Path:
    """Its folder. Without it the test is skipped, or fails where MILLRACE_REQUIRE_DATA is set."""
    if not REAL.is_dir():
        text = f"{REAL} is not there: a clone alone has no data, put `shared` beside it"
        Missing(text, "MILLRACE_REQUIRE_DATA").end_test()
    return REAL
