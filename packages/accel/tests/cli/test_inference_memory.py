"""accel estimate-memory for inference: weights, KV cache, and device maps that leave room for it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.cli.estimate import parse_max_memory
from accel_inference import init_empty_weights
from accel_launch.cli.app import run

MODELS = """
from types import SimpleNamespace
from torch import nn

def plain():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(
            num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, hidden_size=64
        )
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

class Latent(Decoder):
    def __init__(self):
        super().__init__()
        self.config.kv_lora_rank = 8
"""
LAYER = 64 * 64 * 2
"""Bytes of a layer of the decoder in float16."""
CACHE = 2 * 2 * 8 * 2
"""Bytes of a layer's cache for a token in float16."""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "served_models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("served_models", None)


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert run(["estimate-memory", *argv, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["inference"]
    return found


def test_weights_shrink_with_the_dtype_and_the_cache_only_to_two_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "served_models:Decoder", "--batch-size", "3", "--length", "10")
    assert [row["weights"] for row in found] == [8 * LAYER, 4 * LAYER, 2 * LAYER, LAYER]
    cache = 4 * 3 * 10 * CACHE
    assert [row["kv_cache"] for row in found] == [2 * cache, cache, cache, cache]
    assert all(row["total"] == row["weights"] + row["kv_cache"] for row in found)


def test_a_map_leaves_room_for_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("served_models:Decoder", "--dtypes", "float16", "--max-memory", f"0={11 * LAYER},1={11 * LAYER},cpu=1GB")
    (alone,) = rows(capsys, *argv)
    assert alone["devices"]["0"]["weights"] == 4 * LAYER
    length = 2 * LAYER // CACHE  # a layer's cache is as large as two layers
    (cached,) = rows(capsys, *argv, "--length", str(length))
    for device in "01":
        held = cached["devices"][device]
        assert held["weights"] + held["kv_cache"] <= held["budget"]
    assert set(cached["device_map"].values()) == {0, 1}
    assert sum(held["weights"] for held in cached["devices"].values()) == cached["weights"]


def test_the_cache_of_offloaded_layers_is_on_the_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("served_models:Decoder", "--dtypes", "float16", "--max-memory", f"0={3 * LAYER}", "--max-memory", "cpu=1GB")
    (row,) = rows(capsys, *argv, "--length", "8")
    assert row["devices"]["cpu"]["weights"] > 0
    assert row["devices"]["0"]["kv_cache"] == row["kv_cache"] == 4 * 8 * CACHE
    assert row["fits"]
    (row,) = rows(capsys, *argv, "--length", "8000")
    assert not row["fits"]


def test_a_configuration_of_transformers_is_built_with_its_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_head=4, n_embd=32, vocab_size=50, n_positions=16)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "gpt2")
    (row,) = rows(
        capsys, str(tmp_path / "gpt2"), "--dtypes", "float32", "--length", "16", "--max-memory", "0=1GB,cpu=1GB"
    )
    with init_empty_weights():
        model = transformers.GPT2LMHeadModel(config)
    assert row["weights"] == sum(p.numel() * torch.float32.itemsize for p in model.parameters())
    assert row["kv_cache"] == 2 * 3 * 32 * 16 * 4
    assert row["device_map"] == {"": 0}


def test_the_estimate_is_two_tables(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["served_models:Decoder", "--length", "10", "--max-memory", "0=1MB,cpu=1GB"]
    assert run(["estimate-memory", *argv]) == 0
    out = capsys.readouterr().out
    assert "Memory usage for inference of 1 x 10 tokens" in out
    assert all(words in out for words in ("KV cache", "Device map", "Budget"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["served_models:plain", "--length", "8"], "with num_hidden_layers, and it has None"),
        (["served_models:Latent", "--length", "8"], "layers with latent attention"),
        (["served_models:Decoder", "--batch-size", "8"], "needs --length"),
        (["served_models:Decoder", "--max-memory", "10GB"], "expected device=size"),
        (["served_models:Decoder", "--max-memory", "0=ten"], "--max-memory: "),
    ],
)
def test_what_cannot_be_served_is_explained(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate-memory", *argv]) == 2
    assert words in capsys.readouterr().err


def test_budgets_are_listed_in_one_word_or_several() -> None:
    expected = {0: "10GB", "cpu": "30GB"}
    assert parse_max_memory(["0=10GB,cpu=30GB"]) == parse_max_memory(["0=10GB", "cpu=30GB"]) == expected
    assert parse_max_memory([]) is None
