"""What a model may be made of that is sharded."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load as load_safetensors
from torch import nn

from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.example import install_example
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.learners import INPUT, SPEC, WIDTH, commit_table
from tests.unit.train_service.sharded_models import install_models, model_spec, what_shards_learn
from tests.unit.train_service.worker.test_loop import (
    config_of,
    entries,
    events,
    lose_and_begin,
    new_job,
    run_of,
    saved,
)
from train_service.domain.spec import FSDP, OptimizerSpec, Placement, TrainingSpec
from train_service.jobs import model_check
from train_service.jobs.model_check import check_model, sharding_problem
from train_service.learning import learner as learner_module
from train_service.learning.ranks import Ranks
from train_service.learning.sharding import (
    LARGEST_UNIT_BYTES,
    SMALLEST_UNIT_BYTES,
    find_units,
    put_some_weights,
    put_weights,
    shard,
    units_of,
)
from train_service.records.event_log import EventKind
from train_service.worker.loop import LoopConfig, Run


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_layers_that_begin_in_place_are_sharded_and_compute_the_same() -> None:
    """As the classifiers of torchvision's MNASNet and EfficientNet do, with a dropout."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True)),
        nn.Linear(8, 8),
        nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(8, 3)),
    )
    plain = copy.deepcopy(model)
    results = []
    for one in (plain, shard(model, "cpu", 1)):
        torch.manual_seed(4)
        one.train()
        outputs = one(torch.ones(5, 6))
        outputs.square().sum().backward()
        gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in one.parameters()]
        results.append([outputs.detach(), *gradients])

    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_ranks_may_have_read_the_weights_in_different_orders(tmp_path: Path) -> None:
    """As they do: safetensors gives tensors in an order that each process draws anew."""
    assert all(in_ranks(2, put_in_own_order, tmp_path))


def put_in_own_order(ranks: Ranks) -> bool:
    widths = [(8, 4), (4, 64), (64, 2), (2, 32)]
    model = nn.Sequential(*[nn.Linear(*width) for width in widths])
    names = list(model.state_dict())
    names = names[::-1] if ranks.rank else names
    weights = {name: torch.full_like(model.state_dict()[name], float(len(name))) for name in names}
    shard(model, "cpu", ranks.world_size)
    put_weights(model, weights)
    put_some_weights(model, weights)
    shards: Any = model.named_parameters()
    return all(torch.equal(shard.full_tensor(), weights[name]) for name, shard in shards)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders with the models of `sharded_models` and of the example package."""
    return [
        str(install_models(tmp_path_factory.mktemp("models") / "site")),
        str(install_example(tmp_path_factory.mktemp("example"))),
    ]


@pytest.fixture
def installed(sites: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may take minutes to import torch in the check's child.
    monkeypatch.setattr(model_check, "LIMIT_S", 500.0)
    for site in sites:
        monkeypatch.syspath_prepend(site)


@pytest.mark.parametrize(
    "builder", ["blocks", "nested", "tied-tokens", "borrowed", "shared-block", "small-maxvit", "transformer"]
)
def test_shards_of_any_model_learn_what_whole_models_do_and_are_resumed_on_other_numbers_of_ranks(
    builder: str, sites: list[str], tmp_path: Path
) -> None:
    first, second = in_ranks(2, what_shards_learn, tmp_path, sites, builder)

    for run in ("sharded", "resumed"):
        torch.testing.assert_close(first[run], first["whole"], rtol=1e-4, atol=1e-5)
    if builder != "small-maxvit":  # BatchNorm sees the rows of a rank
        for run in ("from one", "to one"):
            torch.testing.assert_close(first[run], first["whole"], rtol=1e-3, atol=1e-4)
    for rank in (first, second):
        torch.testing.assert_close(rank["sharded answers"], rank["whole answers"], rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("builder", "units"),
    [
        ("blocks", ["blocks.0", "blocks.1", "blocks.2"]),
        ("nested", ["0", "1.0", "1.1.1", "2.1"]),
        # Of the two that share their weights neither is one.
        ("tied-tokens", ["body.1.0", "layers.0"]),
        ("borrowed", ["blocks.0"]),
        ("shared-block", []),
        ("transformer", ["encoder.layers.0", "encoder.layers.1"]),
    ],
)
def test_units_are_the_blocks_whose_parameters_no_other_uses(builder: str, units: list[str]) -> None:
    assert units_of(model_spec(builder), (WIDTH,)) == units


def test_beside_blocks_large_children_are_units_and_what_is_too_large_is_searched_within() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = SMALLEST_UNIT_BYTES // 4
            self.small, self.large = nn.Linear(width - 8, 1, bias=False), nn.Linear(width, 1)
            self.huge = nn.ModuleList([Within(LARGEST_UNIT_BYTES // 4)])

    class Within(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one, self.other, self.rest = nn.Linear(width, 1), nn.Linear(width, 1), nn.Linear(8, 8)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs

    with torch.device("meta"):
        model = Model()

    assert find_units(model) == ["large", "huge.0.one", "huge.0.other", "huge.0"]


def sharded_by(builder: str) -> TrainingSpec:
    return replace(SPEC, model=model_spec(builder), placement=Placement(parallel=FSDP))


@pytest.mark.usefixtures("installed", "group")
@pytest.mark.parametrize("builder", ["blocks", "tied-tokens", "borrowed"])
def test_a_job_may_shard_a_model_of_any_shape(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: the child of the check is that of the next test."""
    problems = []

    def check_here(model: ModelSpec, row_shape: Sequence[int]) -> None:
        with torch.device("meta"):
            problems.append(sharding_problem(build_model(model, "spec.model"), row_shape))

    monkeypatch.setattr(model_check, "check_sharding", check_here)
    check_model(sharded_by(builder), INPUT)
    assert problems == [""]


@pytest.mark.usefixtures("installed")
def test_a_job_may_shard_a_model() -> None:
    check_model(sharded_by("transformer"), INPUT)


@pytest.mark.usefixtures("installed")
def test_a_model_that_cannot_be_sharded_is_refused_before_a_job_is_made_naming_the_module_and_the_remedy() -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_model(replace(SPEC, model=model_spec("scalar"), placement=Placement(parallel=FSDP)), INPUT)

    ((field, reported),) = refused.value.fields
    assert field == "spec.placement.parallel"
    assert "blocks.0" in reported
    assert "scale" in reported
    assert "use DDP" in reported
    check_model(replace(SPEC, model=model_spec("scalar")), INPUT)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("builder", ["tied-tokens", "transformer"])
def test_a_run_of_two_shards_is_resumed_from_its_checkpoint_by_one_worker(
    builder: str, store: ObjectStore, sites: list[str], tmp_path: Path
) -> None:
    commit_table(store)
    momentum = OptimizerSpec(name="SGD", learning_rate=0.05, kwargs={"momentum": 0.9})
    whole = replace(SPEC, model=model_spec(builder), optimizer=momentum, num_workers=2, lanes=24, epochs=2)
    sharded = replace(whole, placement=Placement(parallel=FSDP))
    for name in ("trainingJobs/whole", "trainingJobs/shards"):
        new_job(store, name)
    run_of(store, "trainingJobs/whole", spec=whole).run()

    in_ranks(2, run_shards, tmp_path, sites, config_of(store, "trainingJobs/shards", spec=replace(sharded, epochs=1)))
    lose_and_begin(store, "trainingJobs/shards")
    run_of(store, "trainingJobs/shards", attempt=2, spec=sharded).run()

    ours, theirs = (entries(store, name) for name in ("trainingJobs/shards", "trainingJobs/whole"))
    assert sorted(ours) == sorted(theirs)
    for step, entry in ours.items():
        weights, expected = (load_safetensors(saved(store, one)[0]) for one in (entry, theirs[step]))
        torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
    assert [event.payload["step"] for event in events(store, "trainingJobs/shards", EventKind.ATTEMPT_STARTED)] == [
        0,
        min(ours),
    ]


def run_shards(ranks: Ranks, sites: list[str], config: LoopConfig) -> None:
    sys.path[:0] = sites
    Run(config, ranks).run()


@pytest.mark.usefixtures("installed")
def test_shards_are_saved_and_restored_by_their_ranks_bit_for_bit(
    store: ObjectStore, sites: list[str], tmp_path: Path
) -> None:
    """And no rank has anything whole: neither a file nor a tensor."""
    commit_table(store)
    adam = OptimizerSpec(name="AdamW", learning_rate=0.01)
    spec = replace(SPEC, model=model_spec("transformer"), optimizer=adam, num_workers=2, lanes=24, epochs=2)
    spec = replace(spec, placement=Placement(parallel=FSDP))
    for name in (ONE_PIECE, BROKEN):
        new_job(store, name)
    in_ranks(2, run_one_piece_and_broken, tmp_path, sites, store.settings, spec)

    one_piece, broken = entries(store, ONE_PIECE), entries(store, BROKEN)
    assert sorted(one_piece) == sorted(broken)
    assert len(one_piece) == 2
    for step, entry in one_piece.items():
        assert saved(store, entry) == saved(store, broken[step])
    last = max(broken)
    files = sorted(info.key.rpartition("/")[2] for info in store.list(broken[last].folder))
    shards = [f"{name}-0000{rank}-of-00002.safetensors" for name in ("model", "optimizer") for rank in (0, 1)]
    assert files == sorted(["manifest.json", *shards])
    sizes = [store.size(f"{broken[last].folder}/{shards[rank]}") or 0 for rank in (0, 1)]
    assert abs(sizes[0] - sizes[1]) < 0.2 * sum(sizes)
    started = events(store, BROKEN, EventKind.ATTEMPT_STARTED)
    assert [event.payload["step"] for event in started] == [0, min(broken)]


ONE_PIECE, BROKEN = "trainingJobs/one-piece", "trainingJobs/broken"


def run_one_piece_and_broken(ranks: Ranks, sites: list[str], settings: StoreSettings, spec: TrainingSpec) -> None:
    sys.path[:0] = sites
    store = open_store(settings)
    # Whatever gathers fails here: only torch's shards and ours may be used.
    for name in ("whole_weights", "whole_optimizer_state", "put_weights", "put_optimizer_state"):
        setattr(learner_module, name, None)
    Run(config_of(store, ONE_PIECE, spec=spec), ranks).run()
    Run(config_of(store, BROKEN, spec=replace(spec, epochs=1)), ranks).run()
    if ranks.rank == 0:
        lose_and_begin(store, BROKEN)
    dist.barrier()
    Run(config_of(store, BROKEN, attempt=2, spec=spec), ranks).run()
