"""Training jobs that run a program: what is checked before there is a job, and what keeps its bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from millrace.train.v1 import code_bundle_pb2 as code
from millrace.train.v1 import resources_pb2 as res
from shared.code_bundle_registry import BundleRecord, CodeBundles
from shared.code_environment import CodeEnvironments, code_environments
from shared.errors import FailedPrecondition, InvalidArgument, NotFound
from shared.jobs import Jobs
from shared.jobs.transitions import confirm_cancel
from shared.settings import OwnCode
from shared.storage import ObjectStore
from tests.support.code_folders import LOOP, store_bundle
from tests.support.training import VERSION, commit_digits
from tests.support.wheels import OFFLINE, write_wheel
from train_service.convert import job_to_proto
from train_service.convert_specs import spec_from_proto, spec_to_proto
from train_service.domain.spec import TrainingSpec
from train_service.jobs.deletion import Deletions
from train_service.jobs.own_code import BUNDLE_FIELD, ProgramCheck
from train_service.jobs.training_jobs import JobView, TrainingJobs
from train_service.records.event_log import TRAIN_KIND


@pytest.fixture
def bundle(store: ObjectStore) -> BundleRecord:
    return store_bundle(store, {"train.py": LOOP})


def message(bundle: BundleRecord, **program: Any) -> res.TrainingSpec:
    fields = {"code_bundle": bundle.name, "entry": "train:loop", **program}
    return res.TrainingSpec(program=code.Program(**fields), num_workers=2)


def create(store: ObjectStore, spec: res.TrainingSpec, job_id: str = "a") -> JobView:
    jobs = TrainingJobs(store, programs=ProgramCheck(store, OwnCode(is_trusted=True)))
    return jobs.create(job_id, spec_from_proto(spec, ()), "", "digest", validate_only=False)


def test_a_program_needs_neither_a_model_nor_a_version(store: ObjectStore, bundle: BundleRecord) -> None:
    job = job_to_proto(create(store, message(bundle)))
    assert job.spec.program.code_bundle == bundle.name
    assert job.spec.program.config_json == "{}"
    assert job.spec.program.data_resume == code.Program.DATA_RESUME_REPLAY
    assert job.spec.program.remainder == code.Program.REMAINDER_DROP
    assert job.spec.program.stop_within.seconds == 300
    assert not job.spec.program.HasField("hang_after")
    assert job.spec.dataset_version == ""
    assert not job.spec.HasField("model")


def test_a_returned_specification_can_be_sent_again(store: ObjectStore, bundle: BundleRecord) -> None:
    spec = message(bundle, config_json='{"lr": 1}', data_resume=2, remainder=2)
    spec.program.hang_after.FromSeconds(90)
    spec.checkpoints.best_metric = "loss"
    reported = job_to_proto(create(store, spec)).spec
    again = job_to_proto(create(store, json_format.Parse(json_format.MessageToJson(reported), res.TrainingSpec()), "b"))
    assert again.spec == reported
    kept = TrainingSpec.from_config(json.loads(json.dumps(spec_from_proto(reported, ()).as_config())))
    assert spec_to_proto(kept) == reported


def test_a_field_that_only_millraces_loop_reads_is_refused_by_name(bundle: BundleRecord) -> None:
    spec = message(bundle)
    spec.model.builder = "mlp"
    spec.epochs = 3
    spec.metrics.append("accuracy")
    spec.transform.steps.add().to_float.SetInParent()
    spec.checkpoints.every.FromSeconds(9)
    spec.placement.parallel = "FSDP"
    with pytest.raises(InvalidArgument) as caught:
        spec_from_proto(spec, ())
    assert [field for field, _ in caught.value.fields] == [
        "spec.checkpoints.every",
        "spec.epochs",
        "spec.metrics",
        "spec.model",
        "spec.placement.parallel",
        "spec.transform",
    ]


@pytest.mark.parametrize(
    ("program", "field"),
    [
        ({"entry": ""}, "spec.program.entry"),
        ({"entry": "train"}, "spec.program.entry"),
        ({"entry": "train:loop:more"}, "spec.program.entry"),
        ({"entry": "train.:loop"}, "spec.program.entry"),
        ({"entry": "../train:loop"}, "spec.program.entry"),
        ({"entry": "../train.py"}, "spec.program.entry"),
        ({"entry": "/train.py"}, "spec.program.entry"),
        ({"entry": "./train.py"}, "spec.program.entry"),
        ({"entry": ".py"}, "spec.program.entry"),
        ({"entry": "other.py"}, "spec.program.entry"),
        ({"entry": "train:class"}, "spec.program.entry"),
        ({"entry": "other:loop"}, "spec.program.entry"),
        ({"entry": "train:nothing"}, "spec.program.entry"),
        ({"config_json": "[]"}, "spec.program.config_json"),
        ({"config_json": "{"}, "spec.program.config_json"),
        ({"config_json": '{"a": NaN}'}, "spec.program.config_json"),
        ({"config_json": '{"a": ' + "[" * 20_000 + "]" * 20_000 + "}"}, "spec.program.config_json"),
        ({"config_json": '{"a": "' + "x" * 65_536 + '"}'}, "spec.program.config_json"),
        ({"data_resume": 9}, "spec.program.data_resume"),
        ({"remainder": 9}, "spec.program.remainder"),
        ({"code_bundle": "codeBundles/x"}, "spec.program.code_bundle"),
    ],
)
def test_a_wrong_program_is_refused_by_its_field_and_leaves_nothing(
    store: ObjectStore, bundle: BundleRecord, program: dict[str, Any], field: str
) -> None:
    before = sorted(info.key for info in store.list())
    with pytest.raises(InvalidArgument) as caught:
        create(store, message(bundle, **program))
    assert [one for one, _ in caught.value.fields] == [field]
    assert sorted(info.key for info in store.list()) == before


def test_durations_and_what_local_mode_lacks_are_bounded(store: ObjectStore, bundle: BundleRecord) -> None:
    spec = message(bundle)
    spec.num_workers = 0
    spec.placement.gpus_per_worker = 1
    spec.program.hang_after.FromMilliseconds(1)
    spec.program.stop_within.FromSeconds(10**7)
    with pytest.raises(InvalidArgument) as caught:
        create(store, spec)
    assert {field for field, _ in caught.value.fields} == {
        "spec.placement.gpus_per_worker",
        "spec.program.hang_after",
        "spec.program.stop_within",
    }


def test_a_missing_bundle_and_a_missing_version_are_not_found(store: ObjectStore, bundle: BundleRecord) -> None:
    with pytest.raises(NotFound, match="millrace code push"):
        create(store, message(bundle, code_bundle=f"codeBundles/{'0' * 64}"))
    spec = message(bundle)
    spec.dataset_version = VERSION
    with pytest.raises(NotFound, match=r"spec\.dataset_version: datasets/.* does not exist") as caught:
        create(store, spec)
    assert [field for field, _ in caught.value.fields] == ["spec.dataset_version"]


def test_fields_of_the_request_are_checked_before_requirements_of_its_bundle(
    store: ObjectStore, bundle: BundleRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the requirements were checked first")

    monkeypatch.setattr(CodeEnvironments, "check", never)
    spec = message(bundle)
    spec.dataset_version = VERSION
    with pytest.raises(NotFound):
        create(store, spec)


def test_a_version_of_a_program_gives_its_splits(store: ObjectStore, bundle: BundleRecord) -> None:
    commit_digits(store)
    spec = message(bundle)
    spec.dataset_version = VERSION
    view = create(store, spec)
    assert view.record.spec["train_split"]["name"] == "train"
    assert job_to_proto(view).spec.validation_split == "validation"
    spec.train_split = "other"
    with pytest.raises(InvalidArgument, match=r"spec\.train_split"):
        create(store, spec, "b")


def test_without_own_code_no_job_of_a_program_is_made(store: ObjectStore, bundle: BundleRecord) -> None:
    jobs = TrainingJobs(store)
    with pytest.raises(FailedPrecondition) as caught:
        jobs.create("a", spec_from_proto(message(bundle), ()), "", "digest", validate_only=False)
    assert caught.value.specific_reason == "OWN_CODE_OFF"


def test_a_bundle_stays_until_the_last_job_that_names_it_is_deleted(store: ObjectStore, bundle: BundleRecord) -> None:
    create(store, message(bundle))
    bundles, jobs = CodeBundles(store), TrainingJobs(store, programs=ProgramCheck(store, OwnCode(is_trusted=True)))
    with pytest.raises(FailedPrecondition, match="is named by trainingJobs/a; delete the jobs first"):
        bundles.delete(bundle.name)
    jobs.cancel("trainingJobs/a", "")
    Jobs(store, TRAIN_KIND).transition("trainingJobs/a", lambda job: confirm_cancel(job, job.update_time))
    with pytest.raises(FailedPrecondition):  # its checkpoints name the bundle still
        bundles.delete(bundle.name)
    Deletions(store).begin("trainingJobs/a")
    Deletions(store).finish("trainingJobs/a")
    bundles.delete(bundle.name)
    assert not list(store.list("codeBundles"))


def test_requirements_are_compared_with_what_is_installed(store: ObjectStore) -> None:
    lines = "numpy==1.0 --hash=sha256:ab\nnot-there>=2\ntorch>=2\nonly-elsewhere==1; sys_platform == 'win32'\n!!\n"
    bundle = store_bundle(store, {"train.py": LOOP, "requirements.txt": lines})
    installed = {"numpy": "2.1", "torch": "2.15.0+cu132"}.get
    with pytest.raises(InvalidArgument) as caught:
        CodeEnvironments().check(bundle.requirements, BUNDLE_FIELD, installed)
    texts = [text for _, text in caught.value.fields]
    assert [text.partition(";")[0] for text in texts[:2]] == [
        "'numpy==1.0': numpy 2.1 is installed",
        "'not-there>=2': not-there is not installed",
    ]
    assert "'!!': it is no requirement" in texts[2]
    assert all("install it in the image" in text for text in texts)


def test_unmet_requirements_refuse_the_job(store: ObjectStore) -> None:
    bundle = store_bundle(store, {"train.py": LOOP, "requirements.txt": "numpy==0.0.1\n"})
    with pytest.raises(InvalidArgument, match=r"spec\.program\.code_bundle: 'numpy==0\.0\.1': numpy .* is installed"):
        create(store, message(bundle))


def test_an_entry_is_checked_with_the_packages_that_its_bundle_requires(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**OFFLINE, "UV_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    line = write_wheel(tmp_path, "only_here", "2", {"only_here.py": ""})
    files = {"train.py": f"import only_here\n{LOOP}", "requirements.txt": f"{line}\n"}
    spec = spec_from_proto(message(store_bundle(store, files)), ())
    settings = {"MILLRACE_CODE_ENVIRONMENTS": "uv", "MILLRACE_CODE_ENVIRONMENTS_FOLDER": str(tmp_path / "made")}
    programs = ProgramCheck(store, OwnCode(is_trusted=True), environments=code_environments(settings))
    programs.checked(spec)
    with pytest.raises(InvalidArgument, match="only_here is not installed; install it in the image"):
        ProgramCheck(store, OwnCode(is_trusted=True)).checked(spec)

    write_wheel(tmp_path, "only_here", "2", {"only_here.py": "another = 1"})
    shutil.rmtree(tmp_path / "made")
    with pytest.raises(FailedPrecondition, match=r"cannot be built: .*Hash mismatch") as caught:
        ProgramCheck(store, OwnCode(is_trusted=True), environments=code_environments(settings)).checked(spec)
    assert caught.value.specific_reason == "ENVIRONMENT_FAILED"
