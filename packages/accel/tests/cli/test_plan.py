"""accel plan and accel estimate-memory: tables for people, JSON for programs, and errors that say what would work."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accel_launch.cli.app import run

MODELS = """
import torch
from torch import nn

def build():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    return nn.Sequential(blocks, nn.Linear(64, 10))

def batch(size, length):
    return torch.zeros(size, 64), torch.zeros(size, dtype=torch.long)

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def words():
    return Words()

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)

    def forward(self, tokens):
        return self.embedding(tokens)

answer = 42
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "planned_models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("planned_models", None)


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    assert run([*argv, "--json"]) == status
    return json.loads(capsys.readouterr().out)


PLAN = ("plan", "planned_models:build", "--sample", "planned_models:batch", "--loss", "planned_models:loss")


def test_a_plan_is_a_table_with_the_choice_and_its_reasons(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--devices", "8x80GB", "--batch-size", "16"]) == 0
    out = capsys.readouterr().out
    assert "->" in out
    assert "fsdp:shard_grad_op+ckpt+offload" in out
    assert "none is faster" in out


@pytest.mark.parametrize(
    "columns", [60, *(pytest.param(columns, marks=pytest.mark.slow) for columns in (80, 110, 200))]
)
@pytest.mark.slow
def test_a_plan_keeps_its_units_in_a_terminal_of_any_width(columns: int, models: Path) -> None:
    """In a real terminal: every row ends in whether it fits, and every number has its unit."""
    keyboard, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    argv = [sys.executable, "-m", "accel", *PLAN, "--devices", "8x80GB", "--batch_size", "16"]
    shell = subprocess.Popen(argv, cwd=models, env=env, stdout=terminal, stderr=terminal)
    os.close(terminal)
    said = b""
    with suppress(OSError):  # the end of a terminal
        while part := os.read(keyboard, 4096):
            said += part
    assert shell.wait() == 0
    os.close(keyboard)
    text = re.sub(r"\x1b\[[0-9;]*m", "", said.decode()).replace("\r", "")
    head, *rows = text[text.index("strategy") :].split("\n")
    rows = rows[: next(number for number, row in enumerate(rows) if not re.search(r" (yes|no) *$", row))]
    assert len(rows) > 5
    assert "\u2026" not in text
    assert head.split()[-1] == "fits"
    for row in rows:
        assert len(re.findall(r" [\d.e+-]+ ([KMGT]i)?B\b", row)) >= head.count("peak") + head.count("sent"), row
        assert re.search(r"[\d.]+ s  +(yes|no) *$", row), row
    assert ("param" in head) == (columns > 110)


def test_strategies_that_take_the_same_are_one_row(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--devices", "1x80GB", "--batch_size", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [" ".join(line.split("+")[-1].split()[1:]) for line in lines if line.rstrip().endswith((" yes", " no"))]
    assert len(rows) == len(set(rows))
    assert any(line.startswith("alike: ") for line in lines)
    assert re.search(r"[\d,]+ parameters, .* on 1 x 74\.51 GiB", lines[0])


def test_a_plan_as_json_has_every_byte(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, *PLAN, "--devices", "4x80GB", "--nodes", "2", "--mixed_precision", "bf16", "--optimizer=sgd")
    by_name = {plan["strategy"]: plan for plan in data["plans"]}
    size = 4 * data["model"]["parameters"]
    assert by_name["ddp"]["parameters"] == by_name["ddp"]["gradients"] == by_name["ddp"]["communication"] == size
    assert by_name["ddp"]["optimizer"] == 0
    assert data["hardware"]["nodes"] == 2
    assert data["choice"]["strategy"] == data["plans"][0]["strategy"]
    assert all(plan["fits"] for plan in data["plans"])


def test_a_file_of_python_is_found_where_it_lies(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, "plan", "planned_models.py:words", "--seq_length", "8", "--devices", "2x1GB")
    assert data["model"]["parameters"] == 1600


def test_what_does_not_fit_is_shown_and_ends_with_one(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--devices", "8x1kB"]) == 1
    captured = capsys.readouterr()
    assert "nothing fits 8 x 1000 B with a margin of 10%. Nearest is" in captured.err
    assert "ddp" in captured.out
    assert as_json(capsys, *PLAN, "--devices", "8x1kB", status=1)["choice"] is None


def test_only_the_named_strategies_are_compared(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, *PLAN, "--devices", "8x1GB", "--candidates", "ddp,zero:3+ckpt")
    assert {plan["strategy"] for plan in data["plans"]} == {"ddp", "ddp+ckpt", "zero:3+ckpt"}


def test_slower_links_make_plans_slower(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = (
        as_json(capsys, *PLAN, "--devices", "8x1GB", "--intra-bandwidth", rate)["plans"][0]["seconds"]
        for rate in ("900GB/s", "1kB/s")
    )
    assert slow > fast


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["planned_models"], "expected module:name"),
        (["planned_models:biuld"], "has no biuld; did you mean build?"),
        (["nowhere:build"], "nowhere cannot be imported"),
        (["planned_models:answer"], "a int is no model"),
        (["planned_models:build", "--devices", "8y80GB"], "is no size"),
        (["planned_models:build", "--optimizer", "adamm"], "did you mean 'adam"),
        (["planned_models:build", "--mixed_precision", "bf17"], "unknown precision"),
        (["planned_models:build", "--sample", "planned_models:answer"], "is a int; expected a function"),
        (["planned_models:words", "--sample", "planned_models:batch"], "cannot be run with a batch of"),
        (["planned_models:build", "--candidates", "ddd"], "no candidate 'ddd'"),
        (["planned_models:build", "--batch_size", "3"], "does not say what Sequential is called with"),
    ],
)
def test_a_mistake_is_answered_with_what_would_work(
    argv: list[str], words: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--devices" not in argv:
        argv = [*argv, "--devices", "2x1GB"]
    assert run(["plan", *argv]) == 2
    assert words in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- estimate-memory


def test_an_estimate_has_a_row_for_each_dtype(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = as_json(capsys, "estimate-memory", "planned_models:build")["rows"]
    total = 4 * (4 * 64 * 65 + 650)
    assert [row["dtype"] for row in rows] == ["float32", "float16", "int8", "int4"]
    assert [row["total"] for row in rows] == [total, total // 2, total // 4, total // 8]
    assert rows[0]["largest_layer"] == 4 * 4 * 64 * 65
    assert rows[0]["training"] == {"model": total, "gradients": total, "optimizer": 2 * total, "step": 4 * total}
    assert rows[2]["training"] is None


@pytest.mark.parametrize(
    "argv",
    [
        ["--dtypes", "float32", "int8", "planned_models:build"],
        ["--dtypes", "fp32", "int8", "planned_models:build"],
        ["planned_models:build", "--dtypes", "fp32,int8"],
        ["planned_models:build", "--dtypes", "float32", "int8"],
        ["planned_models:build", "--dtypes", "float32,int8"],
        ["planned_models:build", "--dtypes", "float32", "--dtypes", "int8"],
    ],
)
def test_dtypes_are_taken_however_they_are_listed(
    argv: list[str], models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = as_json(capsys, "estimate-memory", *argv)["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "int8"]


def test_a_folder_of_safetensors_is_read_by_its_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"layers.0.a.weight": torch.zeros(10, 10), "layers.0.b": torch.zeros(10)}, tmp_path / "m-1.safetensors")
    save_file({"layers.1.a.weight": torch.zeros(10, 10).half()}, tmp_path / "m-2.safetensors")
    for place in (tmp_path, tmp_path / "m-1.safetensors"):
        row = as_json(capsys, "estimate-memory", str(place))["rows"][0]
        assert row["largest_layer"] == 440
    assert as_json(capsys, "estimate-memory", str(tmp_path))["rows"][0]["total"] == 840


def test_an_estimate_is_a_table(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate-memory", "planned_models:build"]) == 0
    out = capsys.readouterr().out
    assert "Memory usage for loading planned_models:build" in out
    assert all(words in out for words in ("Largest layer", "Total size", "Training using Adam", "N/A"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bert-base-cased"], "Models of a hub are not downloaded here"),
        (["x:y", "--dtypes", "float31"], "no dtype 'float31'; known: float32"),
        (["one:a", "two:b"], "expected one model, and got one:a, two:b"),
    ],
)
def test_what_cannot_be_estimated_is_explained(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate-memory", *argv]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_without_weights_or_with_damaged_ones_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate-memory", str(tmp_path)]) == 2
    assert "holds neither *.safetensors nor a config.json" in capsys.readouterr().err
    (tmp_path / "m.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert run(["estimate-memory", str(tmp_path)]) == 2
    assert "cannot be read as safetensors" in capsys.readouterr().err


SIZES = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
HEADS = {"model_type": "llama", "num_attention_heads": 64, "num_key_value_heads": 8}
CLUSTER = ("--devices", "8xH100", "--nodes", "8", "--seq-length", "8192", "--global-batch", "1024")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **HEADS}), encoding="utf-8")
    return str(tmp_path)


def test_degrees_are_proposed_from_a_configuration_alone(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "plan", llama, *CLUSTER)
    assert found["model"]["parameters"] == 70553706496
    chosen = next(plan for plan in found["plans"] if plan["name"] == found["choice"]["name"])
    assert chosen["fits"]
    for key in ("degrees", "checkpointing", "sync_each_batch"):
        assert chosen[key] == found["choice"][key]
    assert found["choice"]["checkpointing"]
    assert run(["plan", f"{llama}/config.json", *CLUSTER]) == 0
    out = capsys.readouterr().out
    assert "70.6 billion parameters, bf16, on 8 nodes of 8 x" in out
    assert f"->  {chosen['name']} " in out
    assert f"{chosen['name']}: it needs " in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (CLUSTER[:4], "--seq_length is missing"),
        ((*CLUSTER, "--optimizer", "sgd"), "--optimizer needs a model that can be traced"),
        ((*CLUSTER, "--mixed-precision", "fp16"), "--mixed_precision fp16: degrees are planned in bf16"),
        ((*CLUSTER[:-1], "7", "--batch-size", "2"), "global_batch=7 does not divide"),
        ((*CLUSTER[:-1], "0"), "global_batch is 0; expected at least 1"),
        ((*CLUSTER, "--batch-size", "0"), "micro_batch is 0; expected at least 1"),
        ((*CLUSTER, "--margin", "1"), "margin is 1.0; expected a fraction"),
        ((*CLUSTER, "--host_memory", "1TB"), "--host_memory: nothing is offloaded"),
    ],
)
def test_what_a_configuration_cannot_answer_is_refused(
    llama: str, argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", llama, *argv]) == 2
    assert words in capsys.readouterr().err


def test_a_missing_configuration_is_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "models/none.json", *CLUSTER]) == 2
    assert "there is no file or folder models/none.json" in capsys.readouterr().err


def test_a_global_batch_needs_a_configuration(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--devices", "8x80GB", "--global-batch", "8"]) == 2
    assert "--global_batch is for a configuration file" in capsys.readouterr().err


def test_nothing_that_fits_is_said_with_the_nearest(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", llama, "--devices", "8x16GB", "--seq-length", "8192"]) == 1
    assert "Nearest is " in capsys.readouterr().err
