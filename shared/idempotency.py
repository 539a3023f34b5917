"""Idempotency by `request_id`.

The same id with the same body gets the first answer; with another body it is refused.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from google.protobuf.message import Message

from shared.errors import AlreadyExists, Cancelled, DeadlineExceeded, Internal, MillraceError, Unavailable
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

# After these errors the resource may have been created all the same.
OUTCOME_UNKNOWN = (Unavailable, DeadlineExceeded, Cancelled, Internal)


@dataclass(frozen=True)
class Claim:
    """A claimed request id. `name` is the first call's choice; `repeated` means that this call is not the first."""

    name: str
    repeated: bool


def body_digest(request: Message) -> str:
    """Return the SHA-256 in hex of a request without its `request_id`, the same for equal messages."""
    body = type(request)()
    body.CopyFrom(request)
    body.ClearField("request_id")
    return hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()


def uid_of(request_id: str, name: str) -> str:
    """Return the uid of the job `name` that a call creates.

    A repeated call gets the same uid. It therefore shares the first call's claims and markers, and recognises a job
    that was created and has been deleted since.
    """
    return uuid.uuid5(uuid.UUID(request_id), name).hex if request_id else uuid.uuid4().hex


@contextmanager
def claimed(
    store: ObjectStore, service: str, request_id: str, digest: str, name: str, turn: int = 1
) -> Iterator[Claim]:
    """Claim a request id for the creation of `name` while the body runs.

    The claim is removed if the creation is refused, but not if an outage leaves its outcome open. A repeated call must
    return the resource that the claim names, or create it if the first call died before. If other callers have taken
    that name meanwhile, and the caller left its choice to the service, the claim of the next `turn` names another. A
    claim is never changed, so that all repetitions of a call reach the same name. Raises `AlreadyExists` if the id was
    used with another body. An empty id claims nothing.
    """
    if not request_id:
        yield Claim(name, repeated=False)
        return
    key = _key(service, request_id, turn)
    claim = _claim(store, key, request_id, digest, name)
    try:
        yield claim
    except MillraceError as error:
        if not claim.repeated and not isinstance(error, OUTCOME_UNKNOWN):
            with suppress(Unavailable):  # then the claim stays, and a repeated call tries again
                store.delete(key)
        raise


def claimed_before(store: ObjectStore, service: str, request_id: str, digest: str, turn: int = 1) -> str | None:
    """Return the name that an earlier call with this id claimed in that turn.

    The resource need not exist. Call this before checking a repeated call again, because the call's inputs may have
    been deleted since. Raises as `claimed`.
    """
    if not request_id:
        return None
    try:
        return _first_name(store.get(_key(service, request_id, turn)), request_id, digest)
    except ObjectMissing:
        return None


def _claim(store: ObjectStore, key: str, request_id: str, digest: str, name: str) -> Claim:
    while True:
        with suppress(ObjectExists):
            store.put_if_absent(key, json.dumps({"body_sha256": digest, "name": name}).encode())
            return Claim(name, repeated=False)
        try:
            return Claim(_first_name(store.get(key), request_id, digest), repeated=True)
        except ObjectMissing:
            continue  # the first call was refused just now, and removed its claim


def _first_name(claim: bytes, request_id: str, digest: str) -> str:
    first = json.loads(claim)
    if first["body_sha256"] != digest:
        raise AlreadyExists(
            f"request_id {request_id} was used with another body, for {first['name']}; use a new UUID4",
            reason="REQUEST_ID_REUSED",
            metadata={"request_id": request_id, "resource": first["name"]},
            fields=[("request_id", "used before with another body; use a new UUID4")],
        )
    return str(first["name"])


def _key(service: str, request_id: str, turn: int) -> str:
    return f"requests/{service}/{request_id}{f'.{turn}' if turn > 1 else ''}.json"
