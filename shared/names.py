"""Resource names, such as `datasets/digits/versions/v1`."""

from __future__ import annotations

import re
import uuid

from shared.errors import invalid_field

ID = re.compile(r"[a-z][a-z0-9-]{0,62}")
SPLIT = re.compile(r"[a-z][a-z0-9_-]{0,62}")
ID_REMEDY = "use 1 to 63 of a-z, 0-9 and '-', beginning with a letter"
SPLIT_REMEDY = "use 1 to 63 of a-z, 0-9, '_' and '-', beginning with a letter"


def check_id(field: str, value: str) -> str:
    """Return `value` if it is a resource id, else refuse `field`."""
    if not ID.fullmatch(value):
        raise invalid_field(field, value, ID_REMEDY)
    return value


def check_request_id(field: str, value: str) -> str:
    """Return the request id in lower case, or refuse `field`. An empty id makes the call not idempotent."""
    if value:
        try:
            parsed = uuid.UUID(value)
        except ValueError:
            parsed = None
        if parsed is None or parsed.version != 4 or str(parsed) != value.lower():
            raise invalid_field(field, value, "use a UUID4 such as 3f2b8c1e-0c5e-4b7e-9d2a-5f1c2b3a4d5e")
    return value.lower()


def parse(field: str, name: str, pattern: str) -> tuple[str, ...]:
    """Return the ids in a name of the form `pattern`, e.g. `datasets/{d}/versions/{v}`, or refuse `field`."""
    wanted, given = pattern.split("/"), name.split("/")
    if len(wanted) == len(given) and all(
        ID.fullmatch(part) if want.startswith("{") else part == want for want, part in zip(wanted, given, strict=True)
    ):
        return tuple(part for want, part in zip(wanted, given, strict=True) if want.startswith("{"))
    raise invalid_field(field, name, f"use a name of the form {pattern}; ids: {ID_REMEDY}")
