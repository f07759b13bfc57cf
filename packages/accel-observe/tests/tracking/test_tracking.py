"""What is logged reaches every tracker once and in order, is true of all ranks, and never holds up or ends the run."""

import csv
import io
import json
import logging
import math
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel import Accelerator
from accel_observe.tracking import (
    GeneralTracker,
    IncompleteTrackerError,
    QueueOptions,
    RunLogTracker,
    TrackingError,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from accel_observe.tracking.base import Continuation
from accel_observe.tracking.delivery_queue import DeliveryQueue
from accel_observe.tracking.reductions import reduction_of
from accel_observe.tracking.registry import registered_trackers, unregister_tracker_class
from accel_observe.tracking.spool import Spool, SpooledCall
from accel_observe.tracking.values import as_json, flatten, numbers, pictures, plain, snapshot
from accel_state.errors import ConfigError
from accel_testing.equivalence.compare import assert_close_state
from accel_testing.faults.faults import limited_file_size, small_file_system
from accel_testing.programs.runs import run_command

QUICKLY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
QUICK = QueueOptions(interval=0.01, patience=30, pause=0.05)


class Kept(GeneralTracker):
    """Keeps what it is given; fails as often as it is told to."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self, failures: dict[str, int] | None = None) -> None:
        super().__init__()
        self.failures = failures or {}
        self.entries: list[tuple[int | None, dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []
        self.configuration: dict[str, Any] | None = None
        self.resumed: Continuation | None = None
        self.threads: set[str] = set()
        self.finished = False

    def _maybe_fail(self, where: str) -> None:
        self.threads.add(threading.current_thread().name)
        if self.failures.get(where, 0) > 0:
            self.failures[where] -= 1
            raise ConnectionError(f"no answer in {where}")

    @property
    def tracker(self) -> Any:
        return self.entries

    def start(self) -> None:
        self._maybe_fail("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.configuration = values

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self._maybe_fail("log")
        if "poison" in values:
            raise ConnectionError("this entry never goes")
        if "bad" in values:
            raise ValueError("not a value")
        self.entries.append((step, values))
        self.options.append(kwargs)

    def resume(self, run: Continuation) -> None:
        self.resumed = run

    def state_dict(self) -> dict[str, Any]:
        return {"id": "kept-1"}

    def finish(self) -> None:
        self.finished = True


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The table of the one run in ``folder``."""
    (path,) = folder.glob("*/*/metrics.csv")
    return list(csv.DictReader(path.open(newline="")))


def events_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*/*/run.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------- values


def test_a_tensor_counts_as_it_was_when_it_was_logged() -> None:
    running = torch.tensor([1.0, 2.0])
    taken = snapshot({"loss": torch.tensor(3.0, requires_grad=True), "all": running})
    running += 5
    assert plain(taken) == {"loss": 3.0, "all": [1.0, 2.0]}


def test_what_the_loop_changes_after_it_was_logged_is_recorded_as_it_was() -> None:
    class Gallery(Kept):
        def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
            self.entries.append((step, {"brightest": values["frame"].max()}))

        def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
            self.entries.append((step, {table_name: kwargs["data"]}))

    kept = Gallery()
    accelerator = Accelerator(cpu=True, log_with=[kept])
    config = {"lr": 1.0, "betas": [0.9, 0.99]}
    accelerator.init_trackers("p", config, queue=QueueOptions(interval=60))
    sums, losses, rows, frame = np.zeros(2), [torch.tensor(1.0)], [["a", 1]], np.zeros((4, 4, 3), dtype=np.uint8)
    accelerator.log({"sums": sums, "losses": losses}, step=0)
    accelerator.log_table("samples", columns=["text", "length"], data=rows, step=0)
    accelerator.log_images({"frame": frame}, step=0)
    sums += 5
    losses.append(torch.tensor(2.0))
    rows.append(["b", 2])
    frame += 7
    config["betas"].append(config.pop("lr"))
    accelerator.end_training()
    assert kept.configuration == {"lr": 1.0, "betas": [0.9, 0.99]}
    assert kept.entries == [
        (0, {"sums": [0.0, 0.0], "losses": [1.0]}),
        (0, {"samples": [["a", 1]]}),
        (0, {"brightest": 0}),
    ]


@QUICKLY
@given(st.recursive(st.floats() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_anything_nested_becomes_json_and_what_json_has_comes_back(value: Any) -> None:
    def expected(given: Any) -> Any:
        if isinstance(given, dict):
            return {name: expected(item) for name, item in given.items()}
        return str(given) if isinstance(given, float) and not math.isfinite(given) else given

    assert json.loads(json.dumps(as_json(value), allow_nan=False)) == expected(value)


@given(
    st.dictionaries(st.text("ab", min_size=1), st.dictionaries(st.text("cd", min_size=1), st.integers(), min_size=1))
)
def test_flat_names_lead_back_to_the_values(nested: dict[str, dict[str, int]]) -> None:
    flat = dict(flatten(nested, "|"))
    assert flat == {f"{outer}|{inner}": value for outer, items in nested.items() for inner, value in items.items()}


RED = np.zeros((2, 5, 7, 3), dtype="uint8") + np.array([255, 51, 0], dtype="uint8")


@pytest.mark.parametrize(
    "images",
    [
        RED,
        RED.transpose(0, 3, 1, 2),
        torch.from_numpy(RED.transpose(0, 3, 1, 2).copy()) / 255,
        [RED[0], torch.from_numpy(RED[1])],
        list(RED.transpose(0, 3, 1, 2) / 255 * 1.0001),
    ],
    ids=["last", "first", "floats", "list", "slightly-over-1"],
)
def test_images_in_any_form_become_what_every_library_takes(images: Any) -> None:
    shown = list(pictures(images))
    assert [picture.dtype for picture in shown] == ["uint8"] * 2
    assert all(np.array_equal(picture, RED[0]) for picture in shown)


@pytest.mark.parametrize(
    ("shape", "shapes"),
    [
        ((4, 9, 8), [(9, 8, 4)]),
        ((9, 8), [(9, 8)]),
        ((5, 9, 8), [(9, 8)] * 5),
        ((2, 1, 9, 8), [(9, 8)] * 2),
        ((2, 9, 8, 1), [(9, 8)] * 2),
        ((3, 9, 8), [(9, 8, 3)]),
        ((9, 8, 4), [(9, 8, 4)]),
    ],
)
def test_one_image_is_told_from_a_batch(shape: tuple[int, ...], shapes: list[tuple[int, ...]]) -> None:
    assert [picture.shape for picture in pictures(np.zeros(shape))] == shapes


def test_images_of_any_dtype_are_copied_when_they_are_logged(tmp_path: Path) -> None:
    class Album(Kept):
        name = "album"

        def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
            self.entries += [(step, {name: list(pictures(images))}) for name, images in values.items()]

    album = Album()
    accelerator = Accelerator(cpu=True, log_with=[album])
    accelerator.init_trackers("p", queue=QUICK)
    batch = torch.ones(1, 3, 4, 4, dtype=torch.bfloat16)
    accelerator.log_images({"samples": batch}, step=0)
    batch.zero_()
    accelerator.end_training()
    ((step, images),) = album.entries
    assert step == 0
    assert (images["samples"][0] == 255).all()


def test_numbers_leave_text_out() -> None:
    values = {"a": {"b": 1, "c": "x"}, "d": 0.5, "e": True, "f": np.float32(0.5), "g": np.int64(3), "h": 1j}
    assert numbers(values) == {"a/b": 1, "d": 0.5, "e": 1, "f": 0.5, "g": 3}


@pytest.mark.parametrize(
    ("name", "expected"), [("loss", "mean"), ("eval/acc", "max"), ("tokens", "sum"), ("other", "last")]
)
def test_the_first_pattern_that_fits_says_how_ranks_become_one(name: str, expected: str) -> None:
    assert reduction_of(name, {"loss": "mean", "eval/*": "max", "tok*": "sum"}) == expected


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3), 3.0, np.float32(3.0)], ids=repr)
def test_a_step_of_any_integer_type_is_saved_as_an_integer(tmp_path: Path, step: Any) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("p")
    accelerator.log({"loss": 0.5}, step=step)
    assert json.loads(json.dumps(accelerator.state_dict_of_trackers()))["logged"] == {"loss": 3}
    accelerator.end_training()
    assert [row["step"] for row in rows_of(tmp_path)] == ["3"]


@pytest.mark.parametrize("step", [2.5, "3", torch.tensor(0.5), float("nan")], ids=repr)
def test_another_step_is_refused_where_it_is_logged(tmp_path: Path, step: Any) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("p")
    with pytest.raises(ConfigError, match=r"step is .*; expected an integer"):
        accelerator.log({"loss": 0.5}, step=step)
    with pytest.raises(ConfigError, match="expected values by name"):
        accelerator.log(0.5, step=1)  # type: ignore[arg-type]
    accelerator.end_training()


def test_a_value_named_step_leaves_the_steps_alone(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("p")
    accelerator.log({"loss": 0.5, "step": 7.5}, step=1)
    accelerator.log({"loss": 0.25, "step": 1}, step=2)
    accelerator.log({"later": 1.0}, step=3)  # a new column writes all rows again
    accelerator.end_training()
    rows = [(row["step"], row["logged step"], row["loss"]) for row in rows_of(tmp_path)]
    assert rows == [("1", "7.5", "0.5"), ("2", "1", "0.25"), ("3", "", "")]


# ------------------------------------------------------------------------------------------------------- on two ranks


@pytest.mark.ranks(2)
def test_values_are_reduced_by_name_at_any_depth_and_texts_stay(rank: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("p", reductions="mean")
    values = {"a": 1.0 + rank, "b": 10.0 + rank, "eval": {"c": 5 + rank}, "text": f"of {rank}", "none": None}
    accelerator.log(values if rank == 0 else dict(reversed(values.items())), step=1)
    accelerator.end_training()
    if rank == 0:
        (row,) = rows_of(tmp_path)
        assert row == {"step": "1", "a": "1.5", "b": "10.5", "eval/c": "5.5", "text": "of 0", "none": ""}
    with pytest.raises(ConfigError, match="no reduction 3"):
        accelerator.log({"a": 1.0}, reduce=3)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("whose", [0, 1])
def test_a_rank_with_nan_is_not_left_out_of_a_reduction(rank: int, whose: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("p", reductions={"largest": "max", "least": "min", "loss": "mean", "fine": "max"})
    value = math.nan if rank == whose else 1.0
    accelerator.log({"largest": value, "least": value, "loss": value, "fine": float(rank)}, step=0)
    accelerator.end_training()
    if rank == 0:
        assert rows_of(tmp_path) == [{"step": "0", "largest": "nan", "least": "nan", "loss": "nan", "fine": "1.0"}]


@pytest.mark.ranks(2)
def test_what_is_logged_is_true_of_all_ranks(rank: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("p", reductions={"loss": "mean", "tokens": "sum", "slow*": "max", "fast*": "min"})
    values = {
        "loss": torch.tensor(1.0 + rank),
        "tokens": 10 * (rank + 1),
        "slowest": rank,
        "fastest": rank,
        "own": rank,
    }
    accelerator.log(values, step=1)
    accelerator.log({"other": rank + 1.0}, step=2, reduce="sum")
    accelerator.end_training()
    if rank == 0:
        first, second = rows_of(tmp_path)
        logged = {name: float(value) for name, value in first.items() if value}
        assert logged == {"step": 1, "loss": 1.5, "tokens": 30, "slowest": 1, "fastest": 0, "own": 0}
        assert float(second["other"]) == 3.0


@pytest.mark.ranks(2)
def test_other_ranks_have_no_trackers_and_pay_nothing(rank: int, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("p")
    threads = threading.active_count()
    for step in range(3):
        accelerator.log({"loss": 1.0}, step=step)
    assert bool(accelerator.trackers) == (rank == 0)
    assert rank == 0 or threading.active_count() == threads
    blank = accelerator.get_tracker("accel")
    blank.log({"loss": 2.0}, step=4) if rank else None
    assert rank == 0 or (isinstance(blank, GeneralTracker) and blank.tracker is None)
    accelerator.end_training()
    if rank == 0:
        assert [int(row["step"]) for row in rows_of(tmp_path)] == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------- the own log


def test_a_run_without_trackers_has_its_own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("mine", {"lr": 0.1, "net": {"width": 8}})
    accelerator.log({"loss": 0.5})
    accelerator.log({"loss": 0.25, "eval": {"acc": 1.0}})
    accelerator.end_training()
    assert [(row["step"], row["loss"], row["eval/acc"]) for row in rows_of(tmp_path / "runs")] == [
        ("0", "0.5", ""),
        ("1", "0.25", "1.0"),
    ]
    kinds = [event["kind"] for event in events_of(tmp_path / "runs")]
    assert kinds == ["begun", "configured", "described", "logged", "logged", "ended"]


def test_values_of_one_step_share_a_row(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.init_trackers("p")
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.log({"acc": 0.5}, step=3)
    accelerator.log({"loss": 0.9}, step=4)
    accelerator.end_training()
    assert rows_of(tmp_path) == [
        {"step": "3", "loss": "1.0", "acc": "0.5"},
        {"step": "4", "loss": "0.9", "acc": ""},
    ]


@pytest.mark.parametrize("text", ["over\rwritten", "two\r\nlines", 'a "word", more\n'], ids=["cr", "crlf", "quotes"])
def test_a_column_that_is_added_keeps_texts_and_what_stands_beside_them(tmp_path: Path, text: str) -> None:
    log = RunLogTracker("p", tmp_path, "r")
    log.start()
    log.log({"text": text, "loss": 1.0}, 0)
    log.log({"acc": 0.5}, 1)
    log.finish()
    assert rows_of(tmp_path) == [
        {"step": "0", "text": text, "loss": "1.0", "acc": ""},
        {"step": "1", "text": "", "loss": "", "acc": "0.5"},
    ]


def test_a_list_longer_than_python_reads_in_a_cell_of_csv_does_not_end_the_table(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    log = RunLogTracker("p", tmp_path, "r")
    log.start()
    log.log({"weights": [0.125] * limit}, 0)
    log.log({"loss": 1.0}, 1)
    log.finish()
    again = RunLogTracker("p", tmp_path, "x")
    again.resume(Continuation({"run_id": "r"}, {"loss": 1, "weights": 0}))
    again.start()
    again.finish()
    head, long, last = (tmp_path / "p" / "r" / "metrics.csv").read_text().splitlines()
    assert (head, long.count("0.125"), last) == ("step,weights,loss", limit, "1,,1.0")
    assert csv.field_size_limit() == limit


def test_a_column_that_the_disk_has_no_room_for_is_added_later(tmp_path: Path) -> None:
    log = RunLogTracker("p", tmp_path, "r")
    log.start()
    log.log({"loss": 1.0}, 0)
    log.flush()
    with limited_file_size(16), pytest.raises(OSError, match="File too large"):
        log.log({"acc": 0.5}, 1)
    log.log({"loss": 0.9}, 1)
    log.log({"acc": 0.5}, 1)
    log.finish()
    assert rows_of(tmp_path) == [
        {"step": "0", "loss": "1.0", "acc": ""},
        {"step": "1", "loss": "0.9", "acc": "0.5"},
    ]


@QUICKLY
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.dictionaries(st.sampled_from("abc"), st.floats(-9, 9), min_size=1)), max_size=12
    ),
    st.integers(-1, 20),
)
def test_a_table_cut_at_a_mark_holds_exactly_what_came_before(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[tuple[int, dict[str, float]]], mark: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    log = RunLogTracker("p", folder, "r")
    log.start()
    step, expected = 0, {}
    for gap, values in gaps:
        step += gap
        log.log(values, step)
        kept = {name: value for name, value in values.items() if step <= mark}
        if kept:
            expected.setdefault(step, {}).update(kept)
    log.finish()
    again = RunLogTracker("p", folder, "other")
    again.resume(Continuation({"run_id": "r"}, dict.fromkeys("abc", mark)))
    again.start()
    again.finish()
    rows = rows_of(folder)
    found = {int(row.pop("step")): {name: float(value) for name, value in row.items() if value} for row in rows}
    assert found == expected
    assert list(found) == sorted(found)


# ------------------------------------------------------------------------------------------ failing and slow trackers


def deliver(tracker: Kept, entries: list[dict[str, Any]], folder: Path | None = None) -> DeliveryQueue:
    lane = DeliveryQueue(tracker, QUICK, lambda: folder)
    for step, values in enumerate(entries):
        lane.put(SpooledCall("log", values, step, {}))
    lane.finish()
    return lane


@pytest.mark.parametrize("where", ["start", "log"])
def test_a_tracker_that_fails_for_a_while_gets_everything_once_and_in_order(where: str) -> None:
    tracker = Kept({where: 3})
    lane = DeliveryQueue(tracker, QUICK)
    for step in range(20):
        lane.put(SpooledCall("log", {"loss": float(step)}, step, {}))
    until = time.monotonic() + 30
    while len(tracker.entries) < 20 and time.monotonic() < until:
        time.sleep(0.01)
    lane.finish()
    assert [step for step, _ in tracker.entries] == list(range(20))
    assert threading.current_thread().name not in tracker.threads


def test_trouble_is_told_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        deliver(Kept({"log": 10_000}), [{"loss": 1.0}] * 50, tmp_path)
    told = [record.message for record in caplog.records if record.name == "accel_observe.tracking"]
    assert len(told) == 2
    assert "kept cannot be reached" in told[0]
    assert str(tmp_path / "undelivered-kept.jsonl") in told[1]


def test_what_a_dead_tracker_could_not_be_given_waits_in_a_file(tmp_path: Path) -> None:
    deliver(Kept({"start": 10_000}), [{"loss": torch.tensor(0.5)}, {"loss": math.inf}], tmp_path)
    spool = Spool(tmp_path / "undelivered-kept.jsonl")
    waiting = spool.take()
    assert [(entry.values, entry.step) for entry in waiting] == [({"loss": 0.5}, 0), ({"loss": math.inf}, 1)]
    assert not spool.path.exists()


AT_EXIT = """
import atexit
from accel_observe.tracking import GeneralTracker, QueueOptions
from accel_observe.tracking.group import RunTracking

class Library(GeneralTracker):
    name = "library"
    requires_logging_directory = False
    values = []

    @property
    def tracker(self):
        return self

    def start(self):
        atexit.register(lambda: print(self.values))

    def log(self, values, step, **kwargs):
        self.values.append(values)

tracking = RunTracking("p", None, run_id="r", options=QueueOptions(interval=60))
tracking.add(Library(), None)
assert tracking.lanes[0].ensure_started(60)
tracking.log({"accuracy": 0.5}, 1, {})
"""


def test_the_last_values_arrive_before_the_library_ends_its_run_at_exit() -> None:
    assert run_command([sys.executable, "-c", AT_EXIT]).check().output == "[{'accuracy': 0.5}]\n"


def test_a_value_that_is_refused_does_not_stop_the_others() -> None:
    tracker = Kept()
    deliver(tracker, [{"a": 1}, {"bad": 1}, {"b": 1}])
    assert [values for _, values in tracker.entries] == [{"a": 1}, {"b": 1}]


def test_an_entry_that_never_goes_is_passed_over() -> None:
    tracker = Kept()
    lane = DeliveryQueue(tracker, QUICK)
    for values in ({"poison": 1}, {"a": 1}, {"b": 1}):
        lane.put(SpooledCall("log", values, None, {}))
    until = time.monotonic() + 30
    while len(tracker.entries) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    lane.finish()
    assert [values for _, values in tracker.entries] == [{"a": 1}, {"b": 1}]


def test_a_tracker_that_does_not_return_holds_nothing_up() -> None:
    release = threading.Event()

    class Hanging(Kept):
        def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
            release.wait()

    tracker = Hanging()
    lane = DeliveryQueue(tracker, QueueOptions(interval=0.01, patience=0.2, limit=5))
    started = time.monotonic()
    for step in range(10):
        lane.put(SpooledCall("log", {"loss": 1.0}, step, {}))
    lane.finish()
    assert time.monotonic() - started < 30
    assert isinstance(lane.problem, TimeoutError)
    assert not tracker.finished
    release.set()
    until = time.monotonic() + 30
    while not tracker.finished and time.monotonic() < until:
        time.sleep(0.01)
    assert tracker.finished  # late, but its library's threads and files are closed


def test_a_spool_leaves_out_a_line_that_was_cut_off(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s.jsonl")
    spool.append([SpooledCall("log", {"a": 1}, 1, {}), SpooledCall("log", {"a": 2}, 2, {})])
    text = spool.path.read_text()
    spool.path.write_text(text[:-5])
    assert [entry.step for entry in spool.take()] == [1]


def test_numbers_that_json_lacks_come_back_from_a_spool_as_numbers(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s.jsonl")
    spool.append([SpooledCall("log", {"loss": math.nan, "eval": {"worst": -math.inf}, "note": "not a number"}, 1, {})])
    (entry,) = spool.take()
    assert math.isnan(entry.values.pop("loss"))
    assert entry.values == {"eval": {"worst": -math.inf}, "note": "not a number"}


def trained(tmp_path: Path, trackers: Any, *, patience: float = 5, text: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, log_with=trackers, project_dir=tmp_path)
    model, optimizer = accelerator.prepare((net := torch.nn.Linear(4, 2)), torch.optim.SGD(net.parameters(), lr=0.1))
    queue = QueueOptions(interval=0.01, patience=patience, pause=0.05)
    accelerator.init_trackers("p", {"lr": 0.1}, queue=queue)
    for step in range(10):
        loss = model(torch.ones(3, 4) * step / 10).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss, **({"text": text} if text else {})}, step=step)
    accelerator.end_training()
    return {name: value.clone() for name, value in model.state_dict().items()}


class Unmade(Kept):
    name = "unmade"

    def __init__(self, run_name: str) -> None:
        raise OSError("no such service")


class Posting(Kept):
    """Sends every value to a service on this machine."""

    name = "posting"
    port = 0

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(json.dumps(values).encode())
            connection.recv(1)


def test_no_failure_of_a_tracker_changes_the_weights(tmp_path: Path) -> None:
    expected = trained(tmp_path / "none", None)
    register_tracker_class(Unmade)
    dead = Kept({"start": 10**9})
    assert_close_state(trained(tmp_path / "dead", [dead, "unmade"]), expected, rtol=0)
    assert len(rows_of(tmp_path / "dead")) == 10


@pytest.mark.parametrize("listening", [False, True], ids=["closed", "silent"])
def test_a_dead_endpoint_does_not_change_the_weights(
    listening: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens, so that connections are refused; or somebody does, and never answers."""
    expected = trained(tmp_path / "none", None)
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))  # the port is taken for as long, and refuses until it listens
        if listening:
            service.listen()
        monkeypatch.setattr(Posting, "port", service.getsockname()[1])
        weights = trained(tmp_path / "dead", [Posting()], patience=2)
    assert_close_state(weights, expected, rtol=0)
    assert len(rows_of(tmp_path / "dead")) == 10
    (waiting,) = tmp_path.glob("dead/p/*/undelivered-posting.jsonl")
    assert len(waiting.read_text().splitlines()) == 10


@pytest.mark.fault
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_files_that_cannot_grow_do_not_change_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch.utils.tensorboard")  # imported now, so that it is tried while files cannot grow
    expected = trained(tmp_path / "none", None)
    with limited_file_size(64):
        weights = trained(tmp_path / "full", "tensorboard")
    assert_close_state(weights, expected, rtol=0)


def fill(path: Path, size: int) -> None:
    """Writes as much of ``size`` bytes as there is room for."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        for _ in range(size // 4096):
            file.write(b"x" * 4096)


@pytest.mark.fault
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("trackers", [None, "tensorboard"])
@pytest.mark.parametrize("fills", ["before", "during"])
def test_a_full_disk_does_not_change_the_weights(
    trackers: str | None, fills: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(tmp_path / "none", None)
    (tmp_path / "full").mkdir()
    with ExitStack() as stack:
        try:
            stack.enter_context(small_file_system(tmp_path / "full", size=2**16))
        except PermissionError as error:
            pytest.skip(str(error))
        # Nothing is left, or room for what is opened and for little more.
        fill(tmp_path / "full" / "other", 2**16 if fills == "before" else 2**16 - 5 * 4096)
        weights = trained(tmp_path / "full", trackers, patience=2, text="x" * 4096 if fills == "during" else "")
    assert_close_state(weights, expected, rtol=0)
    assert "No space left on device" in caplog.text


# ---------------------------------------------------------------------------------------------------- custom trackers


def test_a_tracker_of_ones_own_is_used_and_unwrapped(tmp_path: Path) -> None:
    tracker = Kept()
    accelerator = Accelerator(cpu=True, log_with=[tracker], project_dir=tmp_path)
    accelerator.init_trackers("p", {"lr": 0.1}, queue=QUICK)
    accelerator.log({"loss": 1.0}, step=0, log_kwargs={"kept": {"commit": True}})
    assert accelerator.get_tracker("kept") is tracker
    assert accelerator.get_tracker("kept", unwrap=True) is tracker.entries
    with pytest.raises(ConfigError, match="kept"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    assert tracker.entries == [(0, {"loss": 1.0})]
    assert tracker.options == [{"commit": True}]
    assert tracker.configuration == {"lr": 0.1}
    assert tracker.finished


def test_an_incomplete_tracker_is_refused_with_what_it_lacks() -> None:
    class Incomplete(GeneralTracker):
        name = "incomplete"

    with pytest.raises(IncompleteTrackerError, match="`requires_logging_directory`, `tracker`") as caught:
        Incomplete()
    assert isinstance(caught.value, NotImplementedError)


def test_its_own_object_of_a_tracker_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=[Kept({"start": 10**9})])
    accelerator.init_trackers("p", queue=QueueOptions(interval=0.01, patience=1))
    with pytest.raises(TrackingError, match="no answer in start"):
        accelerator.get_tracker("kept", unwrap=True)
    accelerator.end_training()


def test_classes_are_registered_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Named(Kept):
        name = "named"

    register_tracker_class(Named)
    assert filter_trackers("named") == ["named"]
    with caplog.at_level(logging.WARNING):
        register_tracker_class(Named)
    assert "'named' is replaced" in caplog.text
    assert registered_trackers()["named"] is Named
    unregister_tracker_class("named")
    assert "named" not in registered_trackers()
    with pytest.raises(ConfigError, match="named"):
        filter_trackers("named")
    for wrong in (int, type("Bare", (GeneralTracker,), {})):
        with pytest.raises(ConfigError):
            register_tracker_class(wrong)


def test_names_are_checked_when_the_accelerator_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Unsupported logging capability: 'tensorbord'; did you mean 'tensorboard'"):
        Accelerator(cpu=True, log_with="tensorbord")
    with pytest.raises(ConfigError, match="requires a `logging_dir`"):
        Accelerator(cpu=True, log_with="tensorboard")


FOREIGN = """
from accel_observe.tracking import GeneralTracker


class Lines(GeneralTracker):
    name = "lines"
    requires_logging_directory = True

    def __init__(self, project, folder, suffix=".txt"):
        super().__init__()
        self.file = folder / f"{project}{suffix}"

    @property
    def tracker(self):
        return self.file

    def log(self, values, step, **kwargs):
        with self.file.open("a") as file:
            file.write(f"{step} {values}\\n")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed package that offers trackers; ``lines.py`` is to be written there."""
    folder = tmp_path / "package"
    facts = folder / "lines_of_text-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: lines_of_text\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[accel.trackers]\nlines = lines_of_text:Lines\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "lines_of_text", raising=False)
    return folder


def test_a_tracker_of_another_package_is_used_by_its_name(package: Path, tmp_path: Path) -> None:
    (package / "lines_of_text.py").write_text(FOREIGN)
    accelerator = Accelerator(cpu=True, log_with="lines", project_dir=tmp_path)
    accelerator.init_trackers("p", init_kwargs={"lines": {"suffix": ".log"}}, queue=QUICK)
    for step in range(2):
        accelerator.log({"loss": 1.0}, step=step)
    accelerator.end_training()
    assert (tmp_path / "p.log").read_text().splitlines() == ["0 {'loss': 1.0}", "1 {'loss': 1.0}"]
    with pytest.raises(ConfigError, match="did you mean 'lines'"):
        filter_trackers("lnes")


@pytest.mark.parametrize(
    ("text", "words"),
    [("raise RuntimeError('broken')", "broken"), ("", "has no attribute 'Lines'")],
    ids=["raises", "empty"],
)
def test_a_package_that_does_not_import_stops_no_run(
    text: str, words: str, package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (package / "lines_of_text.py").write_text(text)
    expected = trained(tmp_path / "none", None)
    assert_close_state(trained(tmp_path / "broken", ["lines"]), expected, rtol=0)
    assert len(rows_of(tmp_path / "broken")) == 10
    assert "tracker lines cannot be loaded, so the run does without" in caplog.text
    assert words in caplog.text


def test_all_means_every_library_that_is_there(tmp_path: Path) -> None:
    own = Kept()
    chosen = filter_trackers(["all", own], tmp_path)
    assert chosen[0] is own
    assert chosen[1:] == get_available_trackers()
    if find_spec("tensorboard") is not None:
        assert "tensorboard" in map(str, chosen[1:])


def test_making_a_tracker_opens_nothing(tmp_path: Path) -> None:
    from accel_observe.tracking import LOGGER_TYPE_TO_CLASS
    from accel_state.session import Session

    before = Session.current()
    for tracker_class in LOGGER_TYPE_TO_CLASS.values():
        tracker_class("p", tmp_path) if tracker_class.requires_logging_directory else tracker_class("p")
    assert Session.current() is before
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------- through checkpoints


def test_a_checkpoint_brings_what_was_not_delivered(tmp_path: Path) -> None:
    never = QueueOptions(interval=10_000, patience=30)
    first = Accelerator(cpu=True, log_with=[Kept()], project_dir=tmp_path)
    first.init_trackers("p", queue=never)
    for step in range(4):
        first.log({"loss": float(step)}, step=step)
    state = first.state_dict_of_trackers()
    second_tracker = Kept()
    second = Accelerator(cpu=True, log_with=[second_tracker], project_dir=tmp_path)
    second.init_trackers("p", queue=QUICK)
    second.continue_trackers(json.loads(json.dumps(state)))
    second.log({"loss": 4.0}, step=4)
    second.end_training()
    assert [step for step, _ in second_tracker.entries] == [0, 1, 2, 3, 4]
    assert second_tracker.resumed is not None
    first.end_training()


def test_two_trackers_of_one_name_resume_their_own_runs(tmp_path: Path) -> None:
    class Numbered(Kept):
        def state_dict(self) -> dict[str, Any]:
            return {"id": self.failures["id"]}

    def run(*trackers: Numbered) -> Accelerator:
        accelerator = Accelerator(cpu=True, log_with=list(trackers), project_dir=tmp_path)
        accelerator.init_trackers("p", queue=QUICK)
        return accelerator

    accelerator = run(Numbered({"id": 1}), Numbered({"id": 2}))
    accelerator.log({"loss": 1.0}, step=0)
    assert all(accelerator.get_tracker(name).failures["id"] == one for one, name in ((1, "kept"), (2, "kept-2")))
    accelerator.save_state(tmp_path / "c")
    accelerator.end_training()
    first, second = Numbered({"id": 3}), Numbered({"id": 4})
    resumed = run(first, second)
    resumed.load_state(tmp_path / "c")
    resumed.log({"loss": 0.5}, step=1)
    resumed.end_training()
    assert [one.resumed and one.resumed.state for one in (first, second)] == [{"id": 1}, {"id": 2}]


def test_a_resumed_run_is_over_when_training_ends(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=[Kept()], project_dir=tmp_path)
    accelerator.init_trackers("p", queue=QUICK)
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.save_state(tmp_path / "c")
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.load_state(tmp_path / "c")  # the best one, at the end
    accelerator.end_training()
    accelerator.init_trackers("q", queue=QUICK)
    (kept,) = (one for one in accelerator.trackers if isinstance(one, Kept))
    kept.resumed = None
    accelerator.log({"loss": 2.0}, step=0)
    accelerator.end_training()
    (first,), (second,) = (list((tmp_path / project).iterdir()) for project in "pq")
    assert first.name != second.name
    assert kept.resumed is None


def test_values_without_a_step_survive_a_resume(tmp_path: Path) -> None:
    def run() -> Accelerator:
        accelerator = Accelerator(cpu=True, project_dir=tmp_path)
        accelerator.init_trackers("p", queue=QUICK)
        return accelerator

    accelerator = run()
    for value in (0.0, 1.0):
        accelerator.log({"loss": value})
    accelerator.save_state(tmp_path / "c")
    accelerator.log({"loss": 2.0})
    accelerator.end_training()
    resumed = run()
    resumed.load_state(tmp_path / "c")
    for value in (2.5, 3.5):
        resumed.log({"loss": value})
    resumed.end_training()
    assert [(row["step"], row["loss"]) for row in rows_of(tmp_path)] == [
        ("0", "0.0"),
        ("1", "1.0"),
        ("2", "2.5"),
        ("3", "3.5"),
    ]


@pytest.mark.parametrize("logged_before", [0, 4])
def test_a_run_begun_after_its_checkpoint_is_gone_on_with(tmp_path: Path, logged_before: int) -> None:
    """A slow library may begin its run only after a checkpoint was saved; which one is not to be lost then."""
    first = Accelerator(cpu=True, log_with=[Kept()], project_dir=tmp_path)
    first.init_trackers("p", queue=QueueOptions(interval=10_000, patience=30))
    for step in range(logged_before):
        first.log({"loss": float(step)}, step=step)
    state = json.loads(json.dumps(first.state_dict_of_trackers()))
    first.log({"loss": 9.0}, step=logged_before)
    first.end_training()
    again = Kept()
    second = Accelerator(cpu=True, log_with=[again], project_dir=tmp_path)
    second.init_trackers("p", queue=QUICK)
    second.continue_trackers(state)
    second.log({"loss": 4.0}, step=logged_before)
    second.end_training()
    assert again.resumed is not None
    assert again.resumed.state == {"id": "kept-1"}
    assert [step for step, _ in again.entries] == list(range(logged_before + 1))


def test_a_life_that_logs_nothing_hands_the_run_on() -> None:
    states = []
    for life in range(3):
        tracker = Kept()
        accelerator = Accelerator(cpu=True, log_with=[tracker])
        accelerator.init_trackers("p", queue=QUICK)
        if states:
            accelerator.continue_trackers(states[-1])
        if life != 1:
            accelerator.log({"loss": 1.0}, step=life)
        states.append(accelerator.state_dict_of_trackers())
        accelerator.end_training()
    assert len({state["run"] for state in states}) == 1
    assert tracker.resumed is not None
    assert tracker.resumed.marks.get("loss", 0) == 0


def test_a_checkpoint_of_an_untracked_run_loads_into_a_tracked_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    plain_run = Accelerator(cpu=True)
    plain_run.prepare(model)
    plain_run.save_state(tmp_path / "c")
    tracked = Accelerator(cpu=True, project_dir=tmp_path)
    tracked.init_trackers("p")
    tracked.prepare(torch.nn.Linear(2, 1))
    tracked.load_state(tmp_path / "c")
    tracked.log({"loss": 1.0}, step=0)
    tracked.save_state(tmp_path / "d")
    tracked.end_training()
    (folder,) = tmp_path.glob("p/*")
    untracked = Accelerator(cpu=True)
    untracked.prepare(torch.nn.Linear(2, 1))
    untracked.load_state(tmp_path / "d")
    assert untracked.state_dict_of_trackers()["run"] == folder.name


def test_a_row_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    log = RunLogTracker("p", tmp_path, "r")
    log.start()
    log.log({"loss": 1.0}, 0)
    log.finish()
    table = tmp_path / "p" / "r" / "metrics.csv"
    table.write_text(table.read_text() + "1,0.", newline="")
    again = RunLogTracker("p", tmp_path, "x")
    again.resume(Continuation({"run_id": "r"}, {"loss": 5}))
    again.start()
    again.log({"loss": 2.0}, 1)
    again.finish()
    assert list(csv.reader(io.StringIO(table.read_text()))) == [["step", "loss"], ["0", "1.0"], ["1", "2.0"]]


@pytest.mark.ranks(2)
def test_what_is_logged_before_init_trackers_is_said_to_be_lost_once(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel_observe.tracking").addHandler(handler)
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 2.0})
    accelerator.get_tracker("wandb").log({"loss": 3.0}, step=3)
    logging.getLogger("accel_observe.tracking").removeHandler(handler)
    told = "log keeps nothing: there are no trackers; call init_trackers first, and log before end_training"
    assert said == ([told] if rank == 0 else [])
