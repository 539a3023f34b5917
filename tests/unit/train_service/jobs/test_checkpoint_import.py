"""Weights from elsewhere become checkpoints: by the SDK, on the service's own servicer and a real store."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import millrace_client as mc
from inference_service.domain.signature import RAW, Rows
from inference_service.serve.served_model import ServedModel
from millrace.train.v1 import checkpoint_import_pb2, resources_pb2
from millrace_client import errors
from shared.checkpoint import load_checkpoint, resolve
from shared.errors import ResourceExhausted
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.models.loaded import LoadedModel
from shared.storage import ObjectStore
from tests.support.train_server import commanded, with_client
from tests.support.versions import commit_version, striped_digits
from tests.support.waiting import wait_until
from train_service.checkpoints.fine_tuning import load_initial
from train_service.jobs import checkpoint_import
from train_service.jobs.weights_child import read_weights

MLP = ModelSpec(builder="mlp", in_channels=4, num_classes=3, kwargs={"hidden": [5]})
State = dict[str, torch.Tensor]


def state_of(spec: ModelSpec = MLP, seed: int = 1) -> State:
    torch.manual_seed(seed)
    return dict(build_model(spec).state_dict())


def mlp_spec(**fields: Any) -> checkpoint_import_pb2.ImportSpec:
    given = {"model": "mlp", "in_channels": 4, "num_classes": 3, "model_kwargs": {"hidden": [5]}, "input_shape": [4]}
    return mc.import_spec(**{**given, **fields})


def imported(store: ObjectStore, source: Path, spec: Any = None, *, job: str = "imp", check: bool = False) -> Any:
    spec = spec or mlp_spec()
    return with_client(store, lambda train: train.import_checkpoint(job, source, spec, validate_only=check))


def saved(folder: Path, state: Mapping[str, Any], name: str = "model.pt") -> Path:
    path = folder / name
    if name.endswith(".safetensors"):
        safetensors.torch.save_file(dict(state), path)
    else:
        torch.save(state, path)
    return path


def loaded(store: ObjectStore, name: str) -> LoadedModel:
    entry = resolve(store, "name", name)
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    checkpoint.verify()
    return LoadedModel(checkpoint)


def nothing_is_left(store: ObjectStore) -> bool:
    return not [info.key for info in store.list("trainingJobs")]


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are read in this process: a child would import torch first, which takes longer than all the rest."""

    def ask(question: Mapping[str, Any], *_: Any) -> dict[str, str]:
        return {"problem": read_weights(question["weights"])}

    monkeypatch.setattr(checkpoint_import, "ask_in_child", ask)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.usefixtures("read_here")
def test_an_imported_state_dict_answers_with_the_logits_of_its_source_bit_for_bit(
    store: ObjectStore, tmp_path: Path, name: str
) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(3)
    source = resnet18(num_classes=7).eval()
    for module in source.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            module.running_mean.normal_()
    spec = mc.import_spec(model="torchvision.resnet18", in_channels=3, num_classes=7, input_shape=[3, 32, 32])
    made = imported(store, saved(tmp_path, source.state_dict(), name), spec)
    assert made.report.fits
    assert made.report.fitted_count == len(source.state_dict())
    assert made.checkpoint.name == "trainingJobs/imp/checkpoints/imported"
    images_BCHW = torch.randn(5, 3, 32, 32)
    logits = loaded(store, made.checkpoint.name)(images_BCHW.numpy())[0]
    with torch.inference_mode():
        assert logits.tobytes() == source(images_BCHW).numpy().tobytes()


@pytest.mark.usefixtures("read_here")
def test_an_imported_checkpoint_is_served_from_raw_pixels_as_its_source_answers(
    store: ObjectStore, tmp_path: Path
) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(3)
    source = resnet18(num_classes=7).eval()
    spec = mc.import_spec(
        model="torchvision.resnet18",
        in_channels=3,
        num_classes=7,
        input_shape=[32, 32, 3],
        input_dtype="uint8",
        transform=[mc.to_float(), mc.normalize([0.5, 0.4, 0.3], [0.2, 0.2, 0.2])],
    )
    name = imported(store, saved(tmp_path, source.state_dict()), spec).checkpoint.name
    entry = resolve(store, "name", name)
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    served = ServedModel(checkpoint)
    (raw,) = served.signature.raw
    assert (raw.name, raw.datatype, raw.shape) == ("image", "UINT8", (-1, 32, 32, 3))
    pixels_BHWC = np.random.default_rng(1).integers(0, 256, (4, 32, 32, 3), np.uint8)
    prepared = served.preprocessing.prepare(Rows(RAW, {"image": pixels_BHWC}))[0]
    logits = served.forward(Rows(RAW, {"image": pixels_BHWC})).arrays[0]
    with torch.inference_mode():
        assert logits.tobytes() == source(torch.from_numpy(prepared)).numpy().tobytes()


def test_the_job_of_an_import_is_one_that_succeeded_and_reports_its_source(store: ObjectStore, tmp_path: Path) -> None:
    state = state_of()
    path = saved(tmp_path, state)
    # Read in a child, as a service reads it.
    made = imported(store, path, mlp_spec(class_names=["a", "b", "c"]))
    kept = loaded(store, made.checkpoint.name).module.state_dict()
    assert all(torch.equal(kept[name], one) for name, one in state.items())
    job = made.training_job
    assert (job.state, job.best_checkpoint) == (resources_pb2.TrainingJob.STATE_SUCCEEDED, made.checkpoint.name)
    entry = resolve(store, "name", f"{job.name}/checkpoints/final")
    content = load_checkpoint(store, entry.folder, entry.manifest_sha256).content
    assert list(content.class_names) == ["a", "b", "c"]
    assert [(one["path"], one["size_bytes"]) for one in content.imported] == [("model.pt", path.stat().st_size)]
    sources = with_client(store, lambda train: train.get_imported_weights(job.name))
    assert [one.path for one in sources.files] == ["model.pt"]
    assert sources.report == made.report
    assert list(with_client(store, lambda train: list(train.list_checkpoints(job.name)))) == [made.checkpoint]


@pytest.mark.usefixtures("read_here")
def test_a_job_starts_from_imported_weights(store: ObjectStore, tmp_path: Path) -> None:
    state = state_of()
    made = imported(store, saved(tmp_path, state))
    model = build_model(MLP)
    entry, fit = load_initial(store, made.checkpoint.name, model)
    assert (entry.name, fit.anew, fit.unused) == (made.checkpoint.name, (), ())
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())


@pytest.mark.usefixtures("read_here")
def test_an_imported_checkpoint_is_deleted_as_that_of_any_job(store: ObjectStore, tmp_path: Path) -> None:
    path = saved(tmp_path, state_of())
    imported(store, path)

    def deleted(train: Any) -> None:
        train.delete_training_job("trainingJobs/imp")

    with_client(store, deleted)
    logs = ("trainingJobs/imp/log/", "trainingJobs/imp/checkpoints/log/")
    wait_until(lambda: all(one.key.startswith(logs) for one in store.list("trainingJobs")), "its files to go")
    assert imported(store, path).checkpoint.attempt == 2


@pytest.mark.usefixtures("read_here")
def test_names_are_mapped_dropped_and_allowed_to_be_missing(store: ObjectStore, tmp_path: Path) -> None:
    state = state_of()
    (last_weight, last_bias) = list(state)[-2:]
    there = {f"module.net.{name}": one for name, one in state.items() if name not in (last_weight, last_bias)}
    path = saved(tmp_path, {"state_dict": {**there, "module.ema": torch.ones(1)}, "epoch": 3})
    names = mc.name_map(
        prefixes={"module.": ""}, patterns={r"^net\.": ""}, drop=[r"module\.ema"], allow_missing=[r"output\..*"]
    )
    made = imported(store, path, mlp_spec(names=names))
    assert (made.report.key, made.report.dropped_count) == ("state_dict", 1)
    assert sorted(made.report.missing) == sorted([last_weight, last_bias])
    assert made.report.missing_allowed_count == 2
    kept = loaded(store, made.checkpoint.name).module.state_dict()
    assert all(torch.equal(kept[name.removeprefix("module.net.")], one) for name, one in there.items())
    assert kept[last_weight].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_floats_are_widened_without_loss(tmp_path: Path, dtype: torch.dtype) -> None:
    narrow = {name: one.to(dtype) for name, one in state_of().items()}
    (tmp_path / "files").mkdir()
    saved(tmp_path / "files", narrow, "model.safetensors")
    assert problem_with(tmp_path) == ""
    fitted = json.loads((tmp_path / "report.json").read_text())["fitted"]
    assert {one["widened_from"] for one in fitted} == {str(dtype).removeprefix("torch.")}
    kept = safetensors.torch.load_file(tmp_path / "output")
    assert all(torch.equal(kept[name], one.float()) for name, one in narrow.items())


def hugging_face_folder(folder: Path, state: State) -> Path:
    """In two shards, as `save_pretrained` writes them."""
    folder.mkdir()
    names = list(state)
    shards = {"model-00001-of-00002.safetensors": names[:1], "model-00002-of-00002.safetensors": names[1:]}
    for shard, held in shards.items():
        safetensors.torch.save_file({name: state[name] for name in held}, folder / shard)
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("not sent")
    return folder


@pytest.mark.usefixtures("read_here")
def test_a_hugging_face_folder_of_shards_is_one_checkpoint(store: ObjectStore, tmp_path: Path) -> None:
    state = state_of()
    made = imported(store, hugging_face_folder(tmp_path / "hf", state))
    assert made.report.format == "HUGGING_FACE"
    kept = loaded(store, made.checkpoint.name).module.state_dict()
    assert all(torch.equal(kept[name], one) for name, one in state.items())
    files = with_client(store, lambda train: train.get_imported_weights("trainingJobs/imp")).files
    assert "README.md" not in [one.path for one in files]


@pytest.mark.usefixtures("read_here")
def test_an_import_in_terms_of_a_version_has_its_columns_and_steps(store: ObjectStore, tmp_path: Path) -> None:
    version = "datasets/d/versions/v1"
    commit_version(store, version, {"train": striped_digits(30)})
    cnn = ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10)
    spec = mc.import_spec(
        model=cnn.builder, in_channels=1, num_classes=10, dataset_version=version, transform=[mc.to_float()]
    )
    made = imported(store, saved(tmp_path, state_of(cnn)), spec)
    content = load_checkpoint(store, *where(store, made.checkpoint.name)).content
    assert content.dataset_version == version
    assert [column.name for column in content.ingested] == ["image", "label"]
    assert content.serving().steps


def where(store: ObjectStore, name: str) -> tuple[str, str]:
    entry = resolve(store, "name", name)
    return entry.folder, entry.manifest_sha256


@pytest.mark.usefixtures("read_here")
def test_the_same_request_again_has_the_same_answer(store: ObjectStore, tmp_path: Path) -> None:
    path = saved(tmp_path, state_of())
    first = imported(store, path)
    with pytest.raises(errors.AlreadyExists):
        imported(store, path)
    assert with_client(store, lambda train: train.get_training_job("trainingJobs/imp")) == first.training_job


class Bomb:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/millrace-import-ran-code"),))


def cut(path: Path, by: int) -> Path:
    path.write_bytes(path.read_bytes()[:-by])
    return path


def raw_safetensors(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


ONE = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "code": (lambda folder: saved(folder, {"a": Bomb()}), "none of its code is run"),
    "whole module": (lambda folder: saved(folder, nn.Linear(2, 2)), "none of its code is run"),  # type: ignore[arg-type]
    "a list": (lambda folder: saved(folder, [1, 2]), "instead of a state dict"),  # type: ignore[arg-type]
    "no tensors": (lambda folder: saved(folder, {"epoch": 1}), "names.key"),
    "text": (lambda folder: written(folder / "a.pt", b"hello"), "no file of torch.save"),
    "cut torch": (lambda folder: cut(saved(folder, state_of()), 100), "damaged"),
    "cut data": (lambda folder: cut(saved(folder, state_of(), "a.safetensors"), 8), "cut off"),
    "short": (lambda folder: written(folder / "a.safetensors", b"123"), "cut off"),
    "header bomb": (lambda folder: raw_safetensors(folder / "a.safetensors", b"{}", length=1 << 60), "header"),
    "nested header": (lambda folder: raw_safetensors(folder / "a.safetensors", b"[" * 10**6), "deeply|header"),
    "no header": (lambda folder: raw_safetensors(folder / "a.safetensors", b"[1]"), "header"),
    "names twice": (
        lambda folder: raw_safetensors(folder / "a.safetensors", f'{{"w":{ONE},"w":{ONE}}}'.encode(), b"1234"),
        "'w' twice|w twice",
    ),
    "unknown kind": (lambda folder: written(folder / "weights.h5", b"123"), "no weights"),
}


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_words(tmp_path: Path, case: str) -> None:
    make, text = BAD[case]
    (tmp_path / "files").mkdir()
    make(tmp_path / "files")
    assert re.search(text, problem_with(tmp_path))
    assert not Path("/tmp/millrace-import-ran-code").exists()
    assert not (tmp_path / "output").exists()


def problem_with(folder: Path, **names: Any) -> str:
    """What the child says of the files in `folder`, without a child."""
    asked = {
        "files": str(folder / "files"),
        "names": {"key": "", "renames": [], "drop": [], "allow_missing": [], **names},
        "model": MLP.as_config(),
        "allow_non_finite": False,
        "report": str(folder / "report.json"),
        "output": str(folder / "output"),
    }
    return read_weights(asked)


def test_code_in_a_pickle_is_refused_by_the_service_and_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match="none of its code is run"):
        imported(store, saved(tmp_path, {"a": Bomb()}))
    assert nothing_is_left(store)
    assert not Path("/tmp/millrace-import-ran-code").exists()


def test_shards_that_do_not_agree_with_their_index_are_refused(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path / "files", state_of())
    assert problem_with(tmp_path) == ""
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "which was not sent" in problem_with(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "it is not" in problem_with(tmp_path)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"renames": [{"prefix": "", "pattern": "(", "replacement": ""}]}, "no regular expression"),
        ({"renames": [{"prefix": "", "pattern": "(l)", "replacement": r"\2"}]}, "does not fit the pattern"),
        ({"renames": [{"prefix": "", "pattern": "^.*$", "replacement": "w"}]}, "of both"),
        ({"key": "ema"}, "names.key"),
    ],
)
def test_a_bad_name_map_is_reported(tmp_path: Path, names: dict[str, Any], text: str) -> None:
    (tmp_path / "files").mkdir()
    saved(tmp_path / "files", state_of())
    assert text in problem_with(tmp_path, **names)


def test_tied_tensors_are_given_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    weights_child = sys.modules[read_weights.__module__]
    (tmp_path / "files").mkdir()
    weight = torch.randn(5, 4)
    saved(tmp_path / "files", {"embed.weight": weight}, "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_child, "build_model", lambda *_: Tied())
        assert problem_with(tmp_path) == ""
    assert json.loads((tmp_path / "report.json").read_text())["missing"] == []
    kept = safetensors.torch.load_file(tmp_path / "output")
    assert torch.equal(kept["head.weight"], weight)


@pytest.mark.usefixtures("read_here")
def test_weights_that_do_not_fit_are_reported_tensor_by_tensor(store: ObjectStore, tmp_path: Path) -> None:
    state = state_of()
    first, *_, last = state
    wrong = {**state, first: torch.zeros(2, 2), "head": torch.zeros(1)}
    del wrong[last]
    path = saved(tmp_path, wrong)
    report = imported(store, path, check=True).report
    assert not report.fits
    assert list(report.missing) == [first, last]
    assert list(report.unexpected) == ["head"]
    assert [(one.source, one.in_file, one.in_model) for one in report.misfits] == [
        (first, "float32 (2, 2)", "float32 (5, 4)")
    ]
    with pytest.raises(errors.InvalidArgument, match="head is unexpected") as refused:
        imported(store, path)
    assert refused.value.reason == "WEIGHTS_DO_NOT_FIT"
    assert nothing_is_left(store)


@pytest.mark.usefixtures("read_here")
def test_nan_weights_are_reported_and_refused_unless_they_are_meant(store: ObjectStore, tmp_path: Path) -> None:
    state = state_of()
    name = next(iter(state))
    state[name][0, :2] = torch.tensor([torch.nan, torch.inf])
    path = saved(tmp_path, state, "a.safetensors")
    with pytest.raises(errors.InvalidArgument, match=f"{name} \\(2\\)") as refused:
        imported(store, path)
    assert refused.value.reason == "NON_FINITE_WEIGHTS"
    assert nothing_is_left(store)
    made = imported(store, path, mlp_spec(allow_non_finite=True))
    assert [(one.source, one.count) for one in made.report.non_finite] == [(name, 2)]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": "none"}, "spec.model.builder"),
        ({"input_shape": [5]}, "spec.transform"),
        ({"input_shape": []}, "spec.input"),
        ({"input_shape": [0]}, "spec.input.shape"),
        ({"input_dtype": "text"}, "spec.input.dtype"),
        ({"class_names": ["a"]}, "spec.class_names"),
    ],
)
def test_a_bad_request_names_its_field(store: ObjectStore, tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=text):
        imported(store, saved(tmp_path, state_of()), mlp_spec(**fields))
    assert nothing_is_left(store)


def test_a_costly_expression_ends_the_child_and_not_the_service(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_import, "BASE_S", 8.0)
    monkeypatch.setattr(checkpoint_import, "BUSY_FACTOR", 100)
    path = saved(tmp_path, {**state_of(), "a" * 40: torch.ones(1)})
    with pytest.raises(errors.InvalidArgument, match=r"CPU time|SIGXCPU|SIGKILL"):
        imported(store, path, mlp_spec(names=mc.name_map(drop=[r"(a+)+b"])))
    assert nothing_is_left(store)


def test_a_file_that_takes_too_much_memory_is_refused(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_import, "BASE_MEMORY_BYTES", 300 << 20)
    with pytest.raises(errors.InvalidArgument, match=r"memory|ended the process"):
        imported(store, saved(tmp_path, state_of()))
    assert nothing_is_left(store)


@pytest.mark.usefixtures("read_here")
def test_a_store_that_fails_at_the_commit_leaves_no_job(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ResourceExhausted("the object store is full", reason="STORE_FULL")

    monkeypatch.setattr(checkpoint_import, "write_weights", refuse)
    with pytest.raises(errors.ResourceExhausted):
        imported(store, saved(tmp_path, state_of()))
    with pytest.raises(errors.NotFound):
        with_client(store, lambda train: train.get_training_job("trainingJobs/imp"))


@pytest.mark.usefixtures("read_here")
def test_a_stream_that_ends_early_or_says_too_little_makes_nothing(store: ObjectStore, tmp_path: Path) -> None:
    data = saved(tmp_path, state_of()).read_bytes()
    request = checkpoint_import_pb2.ImportCheckpointRequest

    def header(size: int, digest: str = "") -> Any:
        file = checkpoint_import_pb2.ImportedFile(
            path="a.pt", size_bytes=size, sha256=digest or hashlib.sha256(data).hexdigest()
        )
        return request(header=request.Header(training_job_id="imp", spec=mlp_spec(), files=[file]))

    def sent(*requests: Any) -> Any:
        def call(train: Any) -> Any:
            kind = checkpoint_import_pb2.ImportCheckpointResponse
            return train._caller.send(train._stub.ImportCheckpoint, lambda: iter(requests), kind, timeout_s=60)

        return with_client(store, call)

    for requests, text in (
        ([request(chunk=b"x")], "send it first"),
        ([header(len(data) + 1), request(chunk=data)], "did not come"),
        ([header(len(data) - 1, "0" * 64), request(chunk=data)], "have"),
        ([header(len(data), "0" * 64), request(chunk=data)], "send them again"),
        ([header(len(data)), request(chunk=data), request(chunk=b"x")], "more bytes came"),
        ([header(len(data)), header(len(data))], "send it once"),
    ):
        with pytest.raises(errors.InvalidArgument, match=text):
            sent(*requests)
    assert nothing_is_left(store)
    assert sent(header(len(data)), request(chunk=data[:7]), request(chunk=data[7:])).report.fits


@pytest.mark.usefixtures("read_here")
def test_the_command_imports_and_says_what_fits(store: ObjectStore, tmp_path: Path) -> None:
    wrapped = OrderedDict((f"module.{name}", one) for name, one in state_of().items())
    path = str(saved(tmp_path, wrapped))
    options = ["--model", "mlp", "--model-arg", "hidden=[5]", "--in-channels", "4", "--num-classes", "3"]
    options += ["--input-shape", "4"]
    dry = commanded(store, "train", "import", "imp", path, *options, "--dry-run")
    assert dry.exit_code == 1
    assert "4 unexpected: module." in dry.output
    refused = commanded(store, "train", "import", "imp", path, *options)
    assert (refused.exit_code, "spec.names.renames" in refused.output) == (4, True)
    assert nothing_is_left(store)
    made = commanded(store, "train", "import", "imp", path, *options, "--rename-prefix", "module.=")
    assert made.exit_code == 0, made.output
    assert "trainingJobs/imp/checkpoints/imported" in made.output
    listed = commanded(store, "train", "list")
    assert "trainingJobs/imp" in listed.output
    assert "trainingJobs/imp succeeded" in commanded(store, "train", "watch", "imp").output
    page = tmp_path / "page.html"
    reported = commanded(store, "train", "report", "imp", "--html", str(page))
    assert (reported.exit_code, page.exists()) == (0, True), reported.output
    again = commanded(store, "train", "import", "imp", path, *options, "--rename-prefix", "module.=")
    assert (again.exit_code, "imp" in again.output) == (4, True)
