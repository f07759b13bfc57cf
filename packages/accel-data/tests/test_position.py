"""The position of a loader, as a machine with states, against a reference of what a script may expect."""

import json
from functools import cache

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule, run_state_machine_as_test
from torch.utils.data import DataLoader

from accel_data import Cursor, LoaderOptions, prepare_loader, skip_first_batches
from accel_state.parallelism.config import DataShard

SIZE, BATCH = 10, 4


class Keyed:
    """A sampler that only its owner understands: it has to be walked."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(7 * number + self.epoch) % SIZE for number in range(SIZE)])

    def __len__(self):
        return SIZE


SAMPLINGS = {"computed": lambda: {"shuffle": True}, "walked": lambda: {"sampler": Keyed()}}


def made(sampling):
    loader = DataLoader(range(SIZE), BATCH, collate_fn=list, **SAMPLINGS[sampling]())
    return prepare_loader(loader, DataShard(), options=LoaderOptions(data_seed=5))


@cache
def order(sampling, epoch):
    loader = made(sampling)
    loader.set_epoch(epoch)
    return [index for batch in loader for index in batch]


class Run:
    """A pass of the reference: an epoch, and the samples of it that were delivered."""

    def __init__(self, epoch, at):
        self.epoch, self.at = epoch, at


class Reference:
    """What a script may expect of one loader: which pass counts, and where the next begins."""

    def __init__(self):
        self.next, self.main, self.idle, self.saved, self.loaded = (0, 0), None, False, (0, 0), False
        self.of_sampler = 0

    def epoch(self):
        return self.next[0] if self.main is None else self.main.epoch

    def skip(self, batches):
        epoch = self.saved[0] if self.main is None else self.main.epoch
        if self.loaded and self.next[0] != epoch and min(batches * BATCH, SIZE) < SIZE:
            epoch = self.next[0]
        self.next = (epoch, min(batches * BATCH, SIZE))

    def begin(self, *, nests=True):
        if nests and self.main is not None and not self.idle:
            self.idle, self.of_sampler = True, self.main.epoch
            return Run(self.main.epoch, 0)
        if not (nests and self.loaded and self.next[1] >= SIZE):  # nothing is read
            self.of_sampler = self.next[0]
        self.main, self.next, self.idle, self.loaded = Run(*self.next), (self.next[0] + 1, 0), False, False
        return self.main

    def deliver(self, run):
        run.at = min(run.at + BATCH, SIZE)
        self.idle = self.idle and run is not self.main

    def end(self, run, *, broken):
        if run is self.main:
            self.main, self.saved = None, (run.epoch, run.at) if broken else self.next

    def position(self):
        return self.saved if self.main is None else (self.main.epoch, self.main.at)

    def choose(self, epoch):
        if self.main is not None:
            self.next = (epoch + (epoch == self.main.epoch), 0)
            self.idle = self.idle or epoch != self.main.epoch
        elif self.loaded and self.saved[0] == epoch:
            self.next = self.saved
        elif self.next != (epoch, 0):
            self.next, self.saved, self.loaded = (epoch, 0), (epoch, 0), False

    def load(self, epoch, at):
        self.saved, self.main, self.loaded = (epoch, at), None, True
        self.next = (epoch, at) if at < SIZE else (epoch + 1, 0)


class Loop(RuleBasedStateMachine):
    """Loops of a script over one loader, several at a time, with everything that may happen in between."""

    runs, states = Bundle("runs"), Bundle("states")

    @rule(sampling=st.sampled_from(sorted(SAMPLINGS)))
    def prepare(self, sampling):
        if not hasattr(self, "loader"):
            self.sampling, self.loader, self.reference = sampling, made(sampling), Reference()

    @rule(target=runs)
    def begin(self):
        self.prepare_any()
        run, iterator = self.reference.begin(), iter(self.loader)
        if self.take(run, iterator):
            return run, iterator
        return multiple()

    @rule(target=runs, one=consumes(runs))
    def advance(self, one):
        return one if self.take(*one) else multiple()

    @rule(one=consumes(runs))
    def leave(self, one):
        run, iterator = one
        iterator.close()
        self.reference.end(run, broken=True)
        self.compare()

    @rule(one=consumes(runs))
    def finish(self, one):
        while self.take(*one):
            pass

    @rule(epoch=st.integers(0, 5))
    def set_epoch(self, epoch):
        self.prepare_any()
        self.loader.set_epoch(epoch)
        self.reference.choose(epoch)
        self.compare()

    @rule(target=runs, epoch=st.integers(0, 5))
    def begin_after_set_epoch_of_the_sampler(self, epoch):
        self.prepare("walked")
        if self.sampling == "walked":
            if epoch != self.reference.of_sampler:
                self.reference.choose(epoch)
            self.reference.of_sampler = epoch
            self.loader.batch_sampler.sampler.set_epoch(epoch)
        return self.begin()

    @rule(target=runs, batches=st.integers(0, 3), epoch=st.none() | st.integers(0, 5))
    def skip(self, batches, epoch):
        self.prepare_any()
        skipped = skip_first_batches(self.loader, batches)
        self.reference.skip(batches)
        if epoch is not None:
            self.loader.set_epoch(epoch)
            self.reference.choose(epoch)
            self.reference.next = (epoch, min(batches * BATCH, SIZE))
        run, iterator = self.reference.begin(nests=False), iter(skipped)
        return (run, iterator) if self.take(run, iterator) else multiple()

    @rule(target=states)
    def save(self):
        self.prepare_any()
        state = json.loads(json.dumps(self.loader.state_dict()))
        return state, self.reference.position()

    @rule(state=states, refused=st.booleans())
    def load(self, state, refused):
        undo = self.loader.undo()
        self.loader.load_state_dict(state[0])
        if refused:
            undo()
        else:
            self.reference.load(*state[1])
        self.reference.of_sampler = self.reference.epoch()
        self.compare()

    @rule(state=states, counts=st.booleans())
    def resume_elsewhere(self, state, counts):
        epoch, at = state[1]
        other = made(self.sampling)
        other.load_state_dict(state[0])
        if counts:
            other.set_epoch(epoch)
        expected = order(self.sampling, epoch)[at:]
        if not expected and not counts:
            expected = order(self.sampling, epoch + 1)
        assert [index for batch in other for index in batch] == expected

    def prepare_any(self):
        self.prepare("computed")

    def take(self, run, iterator):
        expected = order(self.sampling, run.epoch)[run.at : run.at + BATCH]
        assert next(iterator, []) == expected
        if expected:
            self.reference.deliver(run)
        else:
            self.reference.end(run, broken=False)
        self.compare()
        return bool(expected)

    def compare(self):
        epoch, at = self.reference.position()
        position = self.loader.position
        assert position in (Cursor(epoch, at), Cursor(epoch + 1, 0) if at == SIZE else None)


def test_loops_over_a_loader_read_what_a_script_expects():
    run_state_machine_as_test(
        Loop, settings=settings(max_examples=2000, stateful_step_count=12, deadline=None, database=None)
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(20))  # of 50,000 loops, which together would be most of a tenth
def test_many_loops_over_a_loader_read_what_a_script_expects(part):
    run_state_machine_as_test(
        Loop,
        settings=settings(
            max_examples=2500,
            stateful_step_count=30 if part % 4 == 0 else 12,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
