"""Starting from another job's weights: what fits is taken, what does not is told, and what cannot work is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, load_checkpoint
from shared.checkpoint.format import WEIGHTS
from shared.checkpoint.references import live_references
from shared.errors import FailedPrecondition, InvalidArgument, NotFound
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.snapshots import CONTENT
from tests.support.versions import commit_version, striped_digits
from tests.unit.train_service.conftest import VERSION
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.worker.test_loop import events, new_job, run_of
from train_service.checkpoints.fine_tuning import check_fits, fit, load_initial
from train_service.checkpoints.writing_and_restoring import CheckpointWriter
from train_service.domain.spec import FSDP, TrainingSpec
from train_service.jobs.training_jobs import TrainingJobs
from train_service.learning.ranks import Ranks
from train_service.learning.sharding import whole_weights
from train_service.records.event_log import EventKind

SOURCE = "trainingJobs/source"
MODEL = ModelSpec(builder="torchvision.shufflenet_v2_x0_5", in_channels=1, num_classes=10)
SPEC = TrainingSpec(
    dataset_version=VERSION,
    transform={"steps": [{"toFloat": {}}]},
    model=MODEL,
    epochs=1,
    global_batch_size=20,
    initial_checkpoint=f"{SOURCE}/checkpoints/step-00000005",
)


@pytest.fixture
def source(store: ObjectStore) -> CheckpointEntry:
    """A checkpoint of `MODEL` at step 5, the last."""
    torch.manual_seed(7)
    with CheckpointWriter(store, CheckpointRegistry(store, SOURCE), 1, lambda _: None) as writer:
        content = replace(CONTENT, training_job=SOURCE, step=5, model=MODEL)
        writer.save(lambda: content, build_model(MODEL).state_dict(), {}, final=True)
        writer.wait()
    return CheckpointRegistry(store, SOURCE).entries()[0]


@pytest.fixture(autouse=True)
def small_version(store: ObjectStore) -> None:
    commit_version(store, VERSION, {"train": striped_digits(40)})


def weights(store: ObjectStore, entry: CheckpointEntry) -> dict[str, torch.Tensor]:
    import safetensors.torch

    return safetensors.torch.load(load_checkpoint(store, entry.folder, entry.manifest_sha256).read(WEIGHTS))


def tuned_shards(ranks: Ranks, settings: StoreSettings) -> dict[str, torch.Tensor]:
    """Whole weights, on rank 0, of a sharded model that began from the checkpoint."""
    torch.manual_seed(8)
    model = ranks.wrap(build_model(MODEL), FSDP)
    load_initial(open_store(settings), SPEC.initial_checkpoint, model)
    return whole_weights(model)


def tuned_with_another_head(ranks: Ranks, settings: StoreSettings) -> dict[str, torch.Tensor]:
    torch.manual_seed(8)
    model = ranks.wrap(build_model(replace(MODEL, num_classes=3)), FSDP)
    load_initial(open_store(settings), SPEC.initial_checkpoint, model)
    return whole_weights(model)


def test_tensors_agree_in_name_and_shape() -> None:
    found = fit({"a": (2, 3), "b": (2,), "c": ()}, {"a": (2, 3), "b": (3,), "d": (1,)})

    assert (found.taken, found.anew, found.unused) == (("a",), ("b", "c"), ("b", "d"))
    assert found.left_out() == "b, c start anew; b, d are not used"
    assert fit({"a": ()}, {"a": ()}).left_out() == ""


def test_shards_take_what_a_whole_model_takes(store: ObjectStore, source: CheckpointEntry, tmp_path: Path) -> None:
    expected = weights(store, source)
    for work, anew in ((tuned_shards, set()), (tuned_with_another_head, {"fc.weight", "fc.bias"})):
        folder = tmp_path / work.__name__
        folder.mkdir()
        first, second = in_ranks(2, work, folder, store.settings)
        assert second == {}
        assert first.keys() == expected.keys()
        assert {name for name in first if not torch.equal(first[name], expected[name])} == anew


def test_everything_is_taken_where_the_model_is_the_same(store: ObjectStore, source: CheckpointEntry) -> None:
    torch.manual_seed(8)
    model = build_model(MODEL)

    entry, found = load_initial(store, SPEC.initial_checkpoint, model)

    assert entry == source
    assert found.left_out() == ""
    expected = weights(store, source)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_last_layer_of_other_classes_starts_anew(store: ObjectStore, source: CheckpointEntry) -> None:
    model = build_model(replace(MODEL, num_classes=3))
    head = {name: value.clone() for name, value in model.state_dict().items() if name.startswith("fc.")}

    _, found = load_initial(store, SPEC.initial_checkpoint, model)

    assert set(found.anew) == {"fc.weight", "fc.bias"}
    assert "fc.weight" in found.left_out()
    state, expected = model.state_dict(), weights(store, source)
    assert all(torch.equal(state[name], value) for name, value in head.items())
    assert torch.equal(state["conv1.0.weight"], expected["conv1.0.weight"])


def test_a_checkpoint_of_another_model_is_refused_by_its_field(store: ObjectStore, source: CheckpointEntry) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_fits(store, source, ModelSpec(builder="torchvision.squeezenet1_1", in_channels=1, num_classes=10))
    assert refused.value.fields[0][0] == "spec.initial_checkpoint"


def create(store: ObjectStore, name: str) -> TrainingSpec:
    spec = replace(SPEC, initial_checkpoint=name)
    view = TrainingJobs(store).create("a", spec, "", "digest", validate_only=False)
    return TrainingSpec.from_config(view.record.spec["training"])


def test_creating_marks_it_and_reports_which_one_was_meant(store: ObjectStore, source: CheckpointEntry) -> None:
    made = create(store, f"{SOURCE}/checkpoints/final")

    assert made.initial_checkpoint == source.name
    assert live_references(store, source.name, 1e12) == ["trainingJobs/a"]


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("name", ["x", SOURCE, "trainingJobs/source/checkpoints/UP", "datasets/d/versions/v"])
def test_an_invalid_name_of_a_checkpoint_is_refused(store: ObjectStore, name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        create(store, name)
    assert refused.value.fields[0][0] == "spec.initial_checkpoint"


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("name", ["trainingJobs/none/checkpoints/final", f"{SOURCE}/checkpoints/step-00000006"])
def test_one_that_is_not_there_is_not_found_and_leaves_nothing(store: ObjectStore, name: str) -> None:
    before = sorted(info.key for info in store.list())

    with pytest.raises(NotFound) as refused:
        create(store, name)

    assert refused.value.fields[0][0] == "spec.initial_checkpoint"
    assert sorted(info.key for info in store.list()) == before


@pytest.mark.parametrize("path", ["manifest.json", WEIGHTS])
def test_a_damaged_one_is_refused(store: ObjectStore, source: CheckpointEntry, path: str) -> None:
    store.put(f"{source.folder}/{path}", b"\0" * 5)

    with pytest.raises(FailedPrecondition) as refused:
        create(store, source.name)
    assert refused.value.fields[0][0] == "spec.initial_checkpoint"


def test_a_run_begins_from_it_reports_what_was_left_out_and_every_checkpoint_names_it(
    store: ObjectStore, source: CheckpointEntry
) -> None:
    name = "trainingJobs/tuned"
    new_job(store, name)
    spec = replace(SPEC, model=replace(MODEL, num_classes=11), checkpoint_every_steps=1)

    run_of(store, name, spec=spec).run()

    (warning,) = events(store, name, EventKind.WARNING)
    assert "fc.weight" in warning.payload["text"]
    for entry in CheckpointRegistry(store, name).entries():
        content = load_checkpoint(store, entry.folder, entry.manifest_sha256).content
        assert content.initial_checkpoint == source.name
        assert content.initial_checkpoint_sha256 == source.manifest_sha256


def test_a_run_whose_first_weights_are_gone_fails_for_good(store: ObjectStore, source: CheckpointEntry) -> None:
    name = "trainingJobs/tuned"
    new_job(store, name)
    store.delete(f"{source.folder}/{WEIGHTS}")

    with pytest.raises(FailedPrecondition, match=r"initial_checkpoint"):
        run_of(store, name, spec=SPEC).run()
