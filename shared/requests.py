"""`request_id`: the same id with the same body gets the first answer; with another body it is refused."""

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

# After these the creation may have happened all the same.
OUTCOME_UNKNOWN = (Unavailable, DeadlineExceeded, Cancelled, Internal)


@dataclass(frozen=True)
class Claim:
    """`name` is what the first call chose; `repeated` tells that this call is not the first."""

    name: str
    repeated: bool


def body_digest(request: Message) -> str:
    """SHA-256 in hex of a request without its `request_id`, the same for equal messages."""
    body = type(request)()
    body.CopyFrom(request)
    body.ClearField("request_id")
    return hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()


def uid_of(request_id: str, name: str) -> str:
    """For the job `name` that a call makes: the same when the call is repeated, so that what the first one claimed and
    marked is the second one's too, and what it made is known when it is gone."""
    return uuid.uuid5(uuid.UUID(request_id), name).hex if request_id else uuid.uuid4().hex


@contextmanager
def claimed(
    store: ObjectStore, service: str, request_id: str, digest: str, name: str, turn: int = 1
) -> Iterator[Claim]:
    """Claims a request id for the creation of `name` while the body runs; lets it go again if the creation is refused,
    but not when an outage leaves open whether it happened.

    A repeated call must return the resource that the claim names, or, where the first call died before it was made,
    make it. Where others have taken that name meanwhile, and the caller left it to us, the claim of the next `turn`
    names another: a claim is never changed, so that all who repeat a call come to the same one.
    Raises `AlreadyExists` when the id was used with another body. An empty id claims nothing.
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
            with suppress(Unavailable):  # then the claim stays, and a repeated call tries once more
                store.delete(key)
        raise


def claimed_before(store: ObjectStore, service: str, request_id: str, digest: str, turn: int = 1) -> str | None:
    """What an earlier call with this id named in that turn; it need not have been made. What it was made of may be gone
    since, so look before a repeated call is checked again. Raises as `claimed`."""
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
            continue  # the first call was refused just now, and let it go


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
