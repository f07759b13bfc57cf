"""Private names of torch: they do in this torch what they are read for, and without them there is a fallback."""

import os
import sys
import threading
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, get_worker_info

from accel_data import private


def test_a_copy_keeps_options_and_no_iterator():
    loader = DataLoader(range(4), batch_size=2, num_workers=1, persistent_workers=True)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert private.kept_iterator(loader) is not None
    other = private.copied(loader, persistent_workers=False)
    assert private.kept_iterator(other) is None
    assert (other.batch_size, other.num_workers, other.persistent_workers) == (2, 1, False)
    private.drop_iterator(loader)
    assert private.kept_iterator(loader) is None


def test_workers_are_listed_and_stopped():
    iterator = iter(DataLoader(range(4), num_workers=2))
    workers = private.workers_of(iterator)
    assert [(worker.is_alive(), reads) for worker, reads in workers] == [(True, True)] * 2
    private.shut_down(iterator)
    assert not any(worker.is_alive() for worker, _ in workers)


class Ending:
    """Its worker ends at the first sample, with a status that torch's signal handler overlooks."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        os._exit(0)


@pytest.mark.slow
def test_a_thread_that_waits_for_a_stopped_worker_ends():
    iterator = iter(DataLoader(Ending(), num_workers=1))
    raised = []

    def read():
        try:
            next(iterator)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    ((worker, _),) = private.workers_of(iterator)
    worker.join(60)
    thread.start()
    while "_try_get_data" not in [at.name for at in traceback.extract_stack(sys._current_frames().get(thread.ident))]:
        assert thread.is_alive()
    private.shut_down(iterator)
    thread.join(60)
    assert len(raised) == 1


def test_an_iterator_of_another_kind_has_no_workers():
    assert private.workers_of(iter(())) == []
    private.shut_down(iter(()))


@pytest.mark.parametrize("number", [None, 3])
def test_the_given_number_of_samples_is_told_from_the_length(number):
    assert private.fixed_num_samples(RandomSampler(range(8), num_samples=number)) == number


def test_without_the_private_number_the_public_one_is_taken():
    sampler = RandomSampler(range(8))
    del sampler._num_samples
    type_of = type("Sampler", (RandomSampler,), {"num_samples": 8})
    sampler.__class__ = type_of
    assert private.fixed_num_samples(sampler) == 8


def test_worker_info_is_shown_and_hidden():
    info = private.worker_info(1, 2, range(4))
    try:
        private.show_worker_info(info)
        assert get_worker_info() is info
    finally:
        private.show_worker_info(None)
    assert get_worker_info() is None


def test_a_torch_that_keeps_worker_info_elsewhere_is_named(monkeypatch):
    monkeypatch.setattr(private, "get_worker_info", lambda: None)
    try:
        with pytest.raises(RuntimeError, match=r"torch 2\.9 to 2\.15"):
            private.show_worker_info(torch.Size())
    finally:
        monkeypatch.undo()
        private.show_worker_info(None)
