"""Whether a program of a user's own can be run: its bundle, its requirements, its dataset version, its entry."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from shared.code_bundle import BundleRecord, load_bundle
from shared.code_requirements import unmet
from shared.errors import invalid_field, invalid_fields
from shared.own_code import OwnCode
from shared.storage import ObjectStore
from train_service.domain import spec_rules
from train_service.domain.spec import TrainingSpec
from train_service.jobs.entry_check import EntryCheck
from train_service.loading.preprocessing import fitted_program

BUNDLE_FIELD = "spec.program.code_bundle"
ENTRY_FIELD = "spec.program.entry"
# Of requirements that are not met, and of modules, at most so many are named.
MAX_NAMED = 20


class ProgramCheck:
    """`own_code` says whether callers' code is to run at all."""

    def __init__(self, store: ObjectStore, own_code: OwnCode | None = None, entries: EntryCheck | None = None) -> None:
        self._store = store
        self.own_code = own_code or OwnCode()
        self.entries = entries or EntryCheck(store)

    def checked(self, spec: TrainingSpec) -> TrainingSpec:
        """With the defaults that depend on the version. Raises what `CreateTrainingJob` says of a program."""
        program = spec.program
        assert program is not None
        self.own_code.require_own_code()
        spec_rules.check(spec)
        bundle = load_bundle(self._store, BUNDLE_FIELD, program.code_bundle)
        if not program.is_script:
            check_module(bundle, ENTRY_FIELD, program.entry)
        # What the request itself names comes before what its bundle needs, and that before a process is started.
        spec = fitted_program(self._store, spec)
        check_requirements(bundle, installed_version)
        self.entries.check(bundle.sha256, program.entry)
        return spec


def check_requirements(bundle: BundleRecord, installed: Callable[[str], str | None], field: str = BUNDLE_FIELD) -> None:
    """Raises `InvalidArgument` naming each requirement that this image does not meet, and the version that it has."""
    problems = unmet(bundle.requirements, installed)
    if problems:
        remedy = "install it in the image of the services and of Ray's nodes, or change the bundle's requirements"
        raise invalid_fields((field, text, f"{what}; {remedy}") for text, what in problems[:MAX_NAMED])


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_module(bundle: BundleRecord, field: str, entry: str) -> None:
    """Before a process is started for it. Raises `InvalidArgument` on `field` for a module that the bundle has not."""
    top = entry.partition(":")[0].partition(".")[0]
    if top not in bundle.modules:
        has = ", ".join(bundle.modules[:MAX_NAMED]) or "no module"
        raise invalid_field(field, entry, f"{bundle.name} has no module {top!r} at its top; it has {has}")
