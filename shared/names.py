"""Names and limits of every call: headers, resource names such as `datasets/digits/versions/v1`, and pages of lists.

Clients and services share this module, so it needs only the standard library. A page's token is the last name sent, so
a page of a list that is sorted by name never repeats or skips one.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from collections.abc import Sequence

from shared.errors import invalid_field

# --- Headers and limits ---

# The id of a call: in its headers, its trailers, and each line that a server logs about it.
REQUEST_ID = "x-request-id"
# In the trailers of a failed call: a `google.rpc.Status` with the details of the error.
STATUS = "grpc-status-details-bin"
# The value is `Bearer TOKEN`.
AUTHORIZATION = "authorization"

# Names the file with the token. gRPC limits a call's headers to 8 KiB in total.
TOKEN_FILE_VARIABLE = "MILLRACE_TOKEN_FILE"
MAX_TOKEN_CHARACTERS = 1024

MAX_MESSAGE_BYTES = 64 * 1024 * 1024


# --- Resources ---

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


# --- Pages ---

DEFAULT_SIZE = 100
MAX_SIZE = 1000
# Most clients accept messages of at most 4 MiB, so a page ends before it exceeds this size.
PAGE_BYTES = 3 * 1024 * 1024 + 512 * 1024


def page(keys: Sequence[str], size: int, token: str) -> tuple[list[str], str]:
    """Return one page of `keys` (sorted here) and the token of the next, empty on the last."""
    size = checked_size(size)
    after = key_of(token)
    wanted = sorted(key for key in keys if key > after) if after else sorted(keys)
    taken = wanted[:size]
    more = len(wanted) > len(taken)
    return taken, token_of(taken[-1]) if more else ""


def checked_size(size: int, default: int = DEFAULT_SIZE, most: int = MAX_SIZE) -> int:
    """Return the `page_size` of a request, or the default if it is 0."""
    if not 0 <= size <= most:
        raise invalid_field("page_size", size, f"use 0 (for {default:,}) to {most:,}")
    return size or default


def token_of(key: str) -> str:
    """Return the token of the page after `key`."""
    return base64.urlsafe_b64encode(key.encode()).decode()


def key_of(token: str) -> str:
    """Return the last key of the previous page. Empty for the first page."""
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise invalid_field("page_token", token, "send a next_page_token as it came, or none") from None
