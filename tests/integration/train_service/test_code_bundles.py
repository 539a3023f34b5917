"""Code of a user's own, through the SDK: pushed, named by a job, and deleted once no job names it.

No job of this file is ever run: each wants more workers than there are.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import millrace_client as mc
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client import errors
from shared.code_bundle_registry import unpack_on_node
from tests.support.code_folders import write_files
from tests.support.refusals import refused
from tests.support.stores import S3_IN_CHAOS
from tests.support.training import State, TrainStack
from tests.support.waiting import wait_until

LOOP = "import torch\n\ndef loop(config):\n    torch.zeros(config['rows'])\n"


@pytest.fixture
def millrace(stack: TrainStack) -> Iterator[mc.Millrace]:
    with mc.connect(train=stack.service.address) as connected:
        yield connected


# tests/contract/code_bundles has what the store has a say in.
@pytest.mark.parametrize("stack", S3_IN_CHAOS, indirect=True)
def test_a_bundle_lives_as_long_as_a_job_names_it(stack: TrainStack, millrace: mc.Millrace, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "code", {"train.py": LOOP + f"# {uuid.uuid4()}\n", "data/x.bin": "x"})
    (folder / ".millraceignore").write_text("data\n")
    bundle = millrace.train.push_code(folder)
    assert millrace.train.push_code(str(folder)) == bundle == millrace.train.get_code_bundle(bundle.name)
    assert bundle in list(millrace.train.list_code_bundles())
    unpacked = unpack_on_node(stack.store, bundle.name.partition("/")[2], tmp_path / "node")
    assert sorted(path.name for path in unpacked.iterdir()) == [".millraceignore", "train.py"]

    spec = mc.program_spec(bundle, "train:loop", config={"rows": 3, "rate": 0.5}, num_workers=60)
    job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
    assert job.spec.program.config_json == '{"rows": 3, "rate": 0.5}'
    assert job.name in [one.name for one in millrace.train.list_training_jobs()]
    with pytest.raises(errors.FailedPrecondition) as caught:
        millrace.train.delete_code_bundle(bundle.name)
    assert caught.value.reason == "IN_USE"

    millrace.train.cancel_training_job(job.name)
    assert millrace.train.wait_training_job(job.name).state == State.STATE_CANCELLED
    millrace.train.delete_training_job(job.name)
    wait_until(lambda: _is_gone(stack, job.name), f"the end of {job.name}")
    millrace.train.delete_code_bundle(bundle.name)
    with pytest.raises(errors.NotFound):
        millrace.train.get_code_bundle(bundle.name)


def test_a_module_that_cannot_be_imported_is_reported_by_its_line(
    stack: TrainStack, millrace: mc.Millrace, tmp_path: Path
) -> None:
    bundle = millrace.train.push_code(write_files(tmp_path, {"train.py": "\nimport no_such_module\n"}))
    job_id = f"j{uuid.uuid4().hex[:12]}"
    with pytest.raises(errors.InvalidArgument, match=r"train\.py:2: ModuleNotFoundError"):
        millrace.train.create_training_job(job_id, mc.program_spec(bundle, "train:loop"))
    assert _is_gone(stack, f"trainingJobs/{job_id}")


def test_a_stream_that_breaks_off_leaves_no_bundle(stack: TrainStack) -> None:
    before = stack.all_keys()
    header = pb.CreateCodeBundleRequest.Header(sha256="a" * 64, size_bytes=10**6)
    requests = [pb.CreateCodeBundleRequest(header=header), pb.CreateCodeBundleRequest(chunk=b"half")]
    refusal = refused(lambda: stack.client.rpc.CreateCodeBundle(iter(requests), timeout=60))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert list(refusal.fields) == ["header.size_bytes"]
    assert not [key for key in set(stack.all_keys()) - set(before) if key.startswith("codeBundles/")]


def _is_gone(stack: TrainStack, name: str) -> bool:
    request = pb.GetTrainingJobRequest(name=name)
    try:
        stack.client.rpc.GetTrainingJob(request, timeout=60)
    except grpc.RpcError as error:
        return bool(error.code() == grpc.StatusCode.NOT_FOUND)
    return False
