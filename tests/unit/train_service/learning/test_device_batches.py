"""Batches get to the device whole, in order and bit for bit, by a thread ahead of the steps; on a CPU, too."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.gpu import DEVICES
from tests.support.waiting import wait_until
from tests.unit.train_service.learners import NUMBERS, SPEC, batch
from train_service.domain.spec import Acceleration, TrainingSpec
from train_service.learning.learner import split_into_micro_batches
from train_service.learning.ranks import DeviceBatches
from train_service.loading.loader import Batch


def given(count: int, made: list[int] | None = None) -> Generator[Batch, None, None]:
    for step in range(count):
        if made is not None:
            made.append(step)
        yield batch(step=step)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_every_batch_comes_whole_and_in_its_order(device: str, ahead: int) -> None:
    batches = list(DeviceBatches(SPEC, torch.device(device), ahead=ahead).batches(given(20)))

    assert [one.step for one in batches] == list(range(20))
    for one in batches:
        expected = batch(step=one.step)
        assert isinstance(one.device_inputs, torch.Tensor)
        assert one.device_inputs.device.type == one.device_labels.device.type == device
        np.testing.assert_array_equal(one.device_inputs.cpu().numpy(), expected.inputs)
        np.testing.assert_array_equal(one.device_labels.cpu().numpy(), expected.labels)
        np.testing.assert_array_equal(one.row_ids, expected.row_ids)


@pytest.mark.parametrize("device", DEVICES)
def test_so_many_are_made_ahead_and_no_more(device: str) -> None:
    made: list[int] = []
    batches = DeviceBatches(SPEC, torch.device(device), ahead=2).batches(given(10, made))

    next(batches)
    # Two are ready, and one is at hand for when there is room.
    wait_until(lambda: len(made) == 4, "batches ahead", timeout_s=120)
    next(batches)
    wait_until(lambda: len(made) == 5, "one more", timeout_s=120)
    batches.close()
    assert len(made) <= 6


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_of_the_loader_is_raised_after_the_batches_before(ahead: int) -> None:
    def broken() -> Generator[Batch, None, None]:
        yield from given(3)
        raise ValueError("row 7 is broken")

    batches = DeviceBatches(SPEC, torch.device("cpu"), ahead=ahead).batches(broken())
    assert [next(batches).step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="row 7 is broken"):
        next(batches)


@pytest.mark.parametrize("ahead", [0, 2])
def test_closed_early_it_closes_the_loader_and_ends_its_thread(ahead: int) -> None:
    before, closed = set(threading.enumerate()), list[bool]()

    def endless() -> Generator[Batch, None, None]:
        try:
            while True:
                yield batch()
        finally:
            closed.append(True)

    batches = DeviceBatches(SPEC, torch.device("cpu"), ahead=ahead).batches(endless())
    next(batches)
    batches.close()

    assert closed == [True]
    assert not [one for one in set(threading.enumerate()) - before if one.name == "device-batches"]


@pytest.mark.parametrize("device", DEVICES)
def test_the_parts_of_a_step_are_those_of_a_batch_that_is_not_there_yet(device: str) -> None:
    spec = replace(NUMBERS, accumulation_steps=3)
    plain = batch(spec=spec)
    (copied,) = DeviceBatches(spec, torch.device(device), ahead=1).batches(one for one in [plain])

    pairs = zip(*(split_into_micro_batches(one, spec, 1, torch.device(device)) for one in (plain, copied)), strict=True)
    for there, here in pairs:
        torch.testing.assert_close(here.inputs, there.inputs, rtol=0, atol=0)
        torch.testing.assert_close(here.labels, there.labels, rtol=0, atol=0)
        assert here.labels.shape[1:] == (1,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [0, 2])
def test_images_lie_as_the_specification_says(device: str, ahead: int) -> None:
    images = np.random.default_rng(1).random((4, 3, 6, 5), np.float32)
    one = Batch(0, 0, images, np.zeros(4, np.int64), np.arange(4), 4)
    for channels_last in (False, True):
        (made,) = DeviceBatches(laid_out(channels_last), torch.device(device), ahead=ahead).batches(b for b in [one])
        assert isinstance(made.device_inputs, torch.Tensor)
        assert made.device_inputs.is_contiguous(memory_format=torch.channels_last) is channels_last
        np.testing.assert_array_equal(made.device_inputs.cpu().numpy(), images)


def laid_out(channels_last: bool) -> TrainingSpec:
    return replace(SPEC, acceleration=Acceleration(channels_last=channels_last))
