"""Whether a model of a user's own can be trained: its bundle, its requirements, its dataset version, and in a child
process the model itself."""

from __future__ import annotations

from dataclasses import replace

from shared.checkpoint import resolve
from shared.code_bundle import load_bundle
from shared.errors import invalid_field
from shared.storage import ObjectStore
from train_service.checkpoints.fine_tuning import FIELD as INITIAL_FIELD
from train_service.checkpoints.fine_tuning import check_name, weight_shapes
from train_service.domain import spec_rules
from train_service.domain.spec import OWN, OwnModelFacts, TrainingSpec, settled
from train_service.jobs.model_check import check_loss, check_names, check_parallel, check_stopping
from train_service.jobs.program_check import ProgramCheck, check_module, check_requirements, installed_version
from train_service.loading.preprocessing import check_classes, check_fits, fitted, steps_of_run

BUNDLE_FIELD, ENTRY_FIELD = "spec.model.code_bundle", "spec.model.entry"


class OwnModelCheck:
    def __init__(self, store: ObjectStore, programs: ProgramCheck) -> None:
        """`programs` says whether callers' code is to run at all, and looks at entries."""
        self._store = store
        self._programs = programs

    def checked(self, spec: TrainingSpec) -> TrainingSpec:
        """With all that follows from the version and from the model's code. Raises what `CreateTrainingJob` says of a
        specification, but for its initial checkpoint's scaling."""
        self._programs.own_code.require_own_code()
        spec, version, prepared = fitted(self._store, spec)
        bundle = load_bundle(self._store, BUNDLE_FIELD, spec.model.code_bundle)
        check_module(bundle, ENTRY_FIELD, spec.model.entry)
        check_requirements(bundle, installed_version, BUNDLE_FIELD)
        row_shape = tuple(prepared.shape)
        asked = {
            # Numbers that JSON gives back as they are; what the order of rows hangs on says nothing of the model.
            "spec": replace(spec, seed=0).as_config(),
            "row_shape": list(row_shape),
            "total_steps": steps_of_run(spec, version),
            "initial": self._initial_shapes(spec),
        }
        found = self._programs.entries.inspect_model(bundle.sha256, spec.model.entry, asked)
        try:
            facts = OwnModelFacts.from_config(found)
        except (TypeError, ValueError, KeyError):
            remedy = "its code has answered its check itself; leave that to the check"
            raise invalid_field(ENTRY_FIELD, spec.model.entry, remedy) from None
        spec = settled(spec, facts, row_shape)
        spec_rules.check(spec)
        check_fits(spec, version)
        check_classes(self._store, spec, version)
        check_parallel(spec)
        if facts.is_step:
            check_stopping(spec)  # what it logs is known once it runs
        else:
            check_names(spec, facts.metrics)
            self._check_installed(spec)
        return spec

    def _check_installed(self, spec: TrainingSpec) -> None:
        """A loss and a training step that the specification names, and that are none of the model's own."""
        from train_service.learning.training_steps import build_training_step

        build_training_step(spec.training_step)
        if spec.loss.name != OWN:
            check_loss(spec)

    def _initial_shapes(self, spec: TrainingSpec) -> dict[str, list[int]] | None:
        if not spec.initial_checkpoint:
            return None
        check_name(spec.initial_checkpoint)
        entry = resolve(self._store, INITIAL_FIELD, spec.initial_checkpoint)
        return {name: list(shape) for name, shape in weight_shapes(self._store, entry).items()}
