"""A report shows what the journal holds, over restarts, and looks like something in a real browser."""

import json
import math
import os
import re
import shutil
import struct
import sys
import time
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, ProjectConfiguration
from accel_observe.report import find_run, page_of, plots_of, read_history
from accel_observe.report.history import history_of
from accel_observe.report.pictures import _BROWSERS, _SIZE, screenshot
from accel_observe.report.plots import curve, number_text, running_median, ticks
from accel_observe.tracking import QueueOptions
from accel_observe.tracking.run_log import JOURNAL
from accel_state.errors import ConfigError
from accel_testing.programs.runs import run_command

QUICKLY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BROWSER = next((found for name in _BROWSERS if (found := shutil.which(name))), None)


def logged(step: int, loss: float, at: float) -> dict[str, Any]:
    return {"kind": "logged", "time": at, "step": step, "values": {"loss": loss}}


def test_a_loss_that_became_nan_is_shown_as_the_last_one() -> None:
    history = history_of([logged(0, 2.0, 1.0), logged(1, 1.5, 2.0), {**logged(2, 0, 3.0), "values": {"loss": "nan"}}])
    assert [step for step, _ in history.curves["loss"]] == [0, 1, 2]
    page = page_of(history)
    assert "<span>loss</span><b>nan</b><small>lowest 1.5 at step 1</small>" in page
    assert "<span>last step</span><b>2</b>" in page


@pytest.fixture(scope="module", params=[0.02, 1000.0], ids=["delivered", "not-delivered"])
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run that was taken up again after two steps too many.

    What had been logged by the checkpoint was in the journal by then, or was on its way there and is in the checkpoint.
    """
    queue = QueueOptions(interval=request.param)
    folder = tmp_path_factory.mktemp("run")
    for life in range(2):
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True),
        )
        loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
        model, loader = accelerator.prepare(nn.Linear(8, 8), loader)
        if life:
            accelerator.load_state("latest")
        accelerator.init_trackers("shown", {"lr": 0.1, "net": {"<width>": 8}}, queue=queue)
        meter = accelerator.meter(every=2, tokens=lambda batch: batch[0].numel(), flops_per_sample=10, peak_flops=1e6)
        for batch in meter.watch(loader):
            with accelerator.accumulate(model):
                loss = model(batch[0]).square().mean()
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                meter.step(loss)
                accelerator.log({"loss": loss, "lr": 0.1 / meter.steps}, step=meter.steps)
                if meter.steps == 4 and not life:
                    wait_for_delivery(accelerator, request.param)
                    accelerator.save_state()
                if meter.steps == 6 and not life:
                    break
        tracking = accelerator._log.tracking
        assert tracking is not None
        tracking.finish()
    return folder


def wait_for_delivery(accelerator: Accelerator, interval: float) -> None:
    """Waits until the journal holds all there is, where it is ever to."""
    tracking = accelerator._log.tracking
    assert tracking is not None
    deadline = time.monotonic() + 60
    while interval < 1 and tracking.lanes[0].state_dict()["held"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Wellformed(HTMLParser):
    """Every element that is opened is closed, and nothing is fetched."""

    EMPTY = frozenset({"meta", "line", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_holds_the_run_and_fetches_nothing(run: Path) -> None:
    page = page_of(read_history(find_run(run)))
    reader = Wellformed()
    reader.feed(page)
    assert reader.open == []
    assert reader.fetched == []
    text = " ".join(reader.text)
    for part in (
        "2 starts",
        "2 steps done again",
        "net.<width>",
        "effective batch 8 in 2 micro-batches; 8 steps an epoch; each sample is read once",
        "checkpoint_0",
        "gradient_accumulation_steps",
        "resumed",
        "saved",
        "precision no",
        "0.1 at step 1",
        "72 float32",
    ):
        assert part in text, part


def test_curves_over_a_restart_hold_each_step_once(run: Path) -> None:
    history = read_history(find_run(run))
    assert [step for step, _ in history.curves["loss"]] == list(range(1, len(history.curves["loss"]) + 1))
    assert [[step for step, _ in part] for part in history.lost["loss"]] == [[5, 6]]
    assert history.restarts == [5]
    assert [event.step for event in history.events if event.kind == "saved"] == [4]
    steps = [reading["step"] for reading in history.readings]
    assert steps == sorted(set(steps))


@QUICKLY
@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 13))
def test_what_counts_and_what_was_lost_are_all_there_was(first: int, mark: int, second: int, waiting: int) -> None:
    """``waiting``: values that were on their way to the journal when the checkpoint was saved, and so are in both."""
    lines = [{"kind": "begun", "time": 0.0}]
    lines += [logged(step, 1.0, 1.0 + step) for step in range(first)]
    after = min(mark, first - 1) + 1
    delivered = max(after - waiting, 0)
    lines += [{"kind": "resumed", "time": 50.0, "marks": {"loss": delivered - 1} if delivered else {}}]
    lines += [logged(step, 1.0, 1.0 + step) for step in range(delivered, after)]
    lines += [logged(step, 2.0, 60.0 + step) for step in range(after, after + second)]
    history = history_of(lines)
    assert [step for step, _ in history.curves["loss"]] == list(range(after + second))
    assert [step for part in history.lost.get("loss", []) for step, _ in part] == list(range(after, first))
    assert history.lives == [0.0, 50.0]


class CountedStep(int):
    """Step that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        CountedStep.comparisons += 1
        return int(self) < int(other)

    def __ge__(self, other: int) -> bool:
        return not self < other


def test_a_reading_is_compared_with_those_that_it_repeats_only() -> None:
    def reading(step: int, time: int) -> dict[str, Any]:
        return {"kind": "reading", "time": float(time), "values": {"step": CountedStep(step)}}

    lines = [{"kind": "begun", "time": 0.0}, *(reading(step, step) for step in range(300))]
    lines += [{"kind": "resumed", "time": 300.0}, *(reading(step, 300 + step) for step in range(200, 300))]
    readings = history_of(lines).readings
    assert [one["step"] for one in readings] == list(range(300))
    assert [one["life"] for one in readings] == [1] * 200 + [2] * 100
    assert CountedStep.comparisons < 1000


def test_a_restart_before_anything_was_delivered_is_drawn_where_it_was() -> None:
    """The checkpoint holds the values themselves, so its marks are empty; they are written by the later process."""
    lines = [{"kind": "begun", "time": 0.0}]
    lines += [{"kind": "resumed", "time": 50.0, "since": 49.0, "marks": {}}]
    lines += [logged(step, 1.0, 1.0 + step) for step in range(4)] + [logged(step, 1.0, 49.5 + step) for step in (4, 5)]
    history = history_of(lines)
    assert history.restarts == [4]
    assert plots_of(history)[0].svg.count('class="restart"') == 1


def test_skipped_steps_and_warnings_are_events(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import logging, torch\nfrom accel import Accelerator\n"
        "accelerator = Accelerator(cpu=True, mixed_precision='fp16', project_dir='.')\n"
        "accelerator.init_trackers('p')\nnet = torch.nn.Linear(2, 1)\n"
        "model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))\n"
        "for step in range(3):\n"
        "    accelerator.backward(model(torch.full((1, 2), 1e4 if step == 1 else 0.1)).sum())\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n    accelerator.log({'loss': 1.0}, step=step)\n"
        "logging.getLogger('accel.checkpoints').warning('the newest one is %s', 'broken')\n"
        "accelerator.end_training()\n"
    )
    said = run_command([sys.executable, script], cwd=tmp_path, timeout=120).check().output
    assert said.count("the newest one is broken") == 1  # nobody else listens, so it is still shown, once
    events = [(one.kind, one.text) for one in read_history(find_run(tmp_path)).events]
    assert ("warning", "the newest one is broken") in events
    assert [kind for kind, _ in events].count("skipped") >= 1


def test_a_journal_that_was_cut_off_is_read(tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    journal.write_text(json.dumps(logged(0, 1.0, 5.0)) + "\n" + '{"kind": "log')
    assert read_history(journal).curves == {"loss": [(0, 1.0)]}


def test_the_newest_run_below_a_folder_is_found(run: Path, tmp_path: Path) -> None:
    assert find_run(run) == find_run(find_run(run).parent)
    with pytest.raises(ConfigError, match="init_trackers"):
        find_run(tmp_path)


def test_of_runs_written_at_the_same_time_the_last_by_name_is_the_newest(tmp_path: Path) -> None:
    for name in ("b", "d", "a", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / JOURNAL).write_text("{}")
        os.utime(tmp_path / name / JOURNAL, (5, 5))
    assert find_run(tmp_path).parent.name == "d"


@pytest.mark.parametrize("losses", [(1e308, -1e308), (1.7e308, 1.0), (5e-324, 1e-323), (1e-320, 1e-320)], ids=str)
def test_the_largest_and_the_least_numbers_are_drawn(losses: tuple[float, float]) -> None:
    assert "<svg" in curve([(float(step), loss) for step, loss in enumerate(losses)])


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
@example(900719925.9882812, 1e-06)
@QUICKLY
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    high = low + width
    marks = ticks(low, high)
    slack = (high - low) * 1e-6
    assert len(marks) <= 12
    assert marks == sorted(set(marks))
    assert all(low - slack <= mark <= high + slack for mark in marks)


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (1000, "1000"), (12500, "12.5k"), (3e6, "3M"), (2.5e9, "2.5G"), (0, "0")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(0, math.nan)], [(0, 1.0), (1, 1.0)], [(0, math.inf), (1, 2.0)]])
def test_odd_curves_are_drawn_all_the_same(points: list[tuple[int, float]]) -> None:
    drawn = curve(points)
    assert drawn.startswith("<svg")
    assert "nan" not in drawn
    assert "inf" not in drawn.replace("infinity", "")


def test_a_value_far_off_does_not_flatten_the_others() -> None:
    points = [(float(step), step / 50) for step in range(50)]
    points[20] = (20.0, 1e6)
    drawn = curve(points)
    assert drawn.count('class="dot outside"') == 1
    highest = max(float(text) for text in re.findall(r'class="tick"[^>]*text-anchor="end">([\d.]+)<', drawn))
    assert highest == 1


def test_a_curve_says_its_values_under_a_pointer() -> None:
    drawn = curve([(0.0, 0.123456), (1000.0, 2.0)])
    assert re.findall(r'class="spot"[^>]*><title>([^<]*)</title>', drawn) == ["step 0: 0.12346", "step 1,000: 2"]
    assert curve([(float(step), 1.0) for step in range(100_000)]).count('class="spot"') <= 121


def test_what_happened_is_said_in_words() -> None:
    lines = [
        {"kind": "saved", "time": 1.0, "step": 3, "path": "project/checkpoint_0", "seconds": 0.0732},
        {"kind": "mine", "time": 2.0, "step": 4, "score": 0.51234},
    ]
    assert [event.text for event in history_of(lines).events] == ["project/checkpoint_0 in 0.07 s", "score 0.512"]


def test_what_two_processes_lost_are_two_lines() -> None:
    drawn = curve([(0, 1.0), (9, 1.0)], lost=[[(2, 1.0), (3, 2.0)], [(7, 3.0)], []])
    assert drawn.count('<path class="lost"') == drawn.count('<circle class="dot lost"') == 1


def test_a_running_median_ignores_an_outlier() -> None:
    points = [(float(step), 1.0) for step in range(100)]
    points[50] = (50.0, 100.0)
    assert max(y for _, y in running_median(points)) == 1.0


@pytest.mark.sampled(1)
def test_the_command_writes_the_page(run: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "accel", "report", run, "-o", tmp_path / "r.html"]
    assert run_command(words, timeout=120).check().output.strip().endswith("r.html")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def pixels(path: Path) -> tuple[int, int, set[bytes]]:
    """Width, height and some colours of an RGB or RGBA PNG without interlacing."""
    data = path.read_bytes()
    width, height, _, kind = struct.unpack(">IIBB", data[16:26])
    size = {2: 3, 6: 4}[kind]
    body, position = b"", 8
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        if data[position + 4 : position + 8] == b"IDAT":
            body += data[position + 8 : position + 8 + length]
        position += length + 12
    raw = zlib.decompress(body)
    return width, height, {raw[at : at + size] for at in range(1, len(raw) - size, 97)}


def test_ranks_are_compared_by_what_each_spent_in_which_phase() -> None:
    tables = [
        [{"data": 9.0, "compute": 9.0}] * 3,  # of an earlier process, with three ranks
        [{"data": 0.5, "compute": 3.0}, {"data": 2.5, "compute": 1.0}],
        [{"data": 0.25, "compute": 3.0}, {"data": 2.25, "compute": 1.25}],
    ]
    lines = [
        {"kind": "reading", "time": 1.0 + step, "step": step, "values": {"step": step, "shares": {}}, "ranks": table}
        for step, table in enumerate(tables)
    ]
    compared = next(plot for plot in plots_of(history_of(lines)) if plot.name == "ranks")
    assert compared.title == "ranks compared, seconds"
    told = re.findall(r"<title>(rank \d: (?:data|compute) [^<]*)", compared.svg)
    assert told == ["rank 0: data 0.75", "rank 0: compute 6", "rank 1: data 4.75", "rank 1: compute 2.25"]


def test_each_picture_has_a_file_of_its_own() -> None:
    values = {"eval/loss": 1.0, "eval_loss": 2.0, "Eval loss": 3.0, "memory": 4.0}
    lines = [{"kind": "logged", "time": 1.0 + step, "step": step, "values": values} for step in range(2)]
    reading = {"step": 1, "memory": 2**20, "shares": {"compute": 1.0}}
    history = history_of([*lines, {"kind": "reading", "time": 3.0, "step": 1, "values": reading}])
    plots = plots_of(history)
    assert [plot.title for plot in plots] == [*values, "memory, MiB", "where the time of rank 0 went"]
    assert len({plot.name.lower() for plot in plots}) == len(plots)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome: apt install chromium")
@pytest.mark.parametrize("run", [0.02], indirect=True, ids=["delivered"])
def test_a_browser_shows_the_page_and_draws_each_plot(run: Path, tmp_path: Path) -> None:
    history = read_history(find_run(run))
    page = tmp_path / "page.html"
    page.write_text(page_of(history))
    screenshot(str(BROWSER), page, tmp_path / "page.png", (1200, 1600))
    width, height, colours = pixels(tmp_path / "page.png")
    assert (width, height) == (1200, 1600)
    assert len(colours) > 20
    words = [sys.executable, "-m", "accel", "report", run, "-o", tmp_path / "r.html", "--png", tmp_path / "png"]
    _, *drawn = run_command(words, timeout=300).check().output.splitlines()
    names = [plot.name for plot in plots_of(history)]
    assert names == [Path(line).stem for line in drawn]
    assert set(names) >= {"loss", "lr", "samples_per_second", "tokens_per_second", "mfu", "memory", "goodput", "shares"}
    pictures = [pixels(Path(line)) for line in drawn]
    assert {picture[:2] for picture in pictures} == {_SIZE}
    assert all(len(colours) > 3 for _, _, colours in pictures)
