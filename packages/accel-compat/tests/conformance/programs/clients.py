"""What the client programs share: tiny models, tokens that can be learnt, figures on standard output."""

import gc
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

TOKENS, LENGTH = 128, 24


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens that count up by 1, 2 or 3."""

    def __init__(self, count: int, seed: int = 0) -> None:
        chosen = random.Random(seed)
        pairs = [(chosen.randrange(TOKENS), chosen.choice([1, 2, 3])) for _ in range(count)]
        places = torch.arange(LENGTH)
        self.rows = [(start + step * places) % TOKENS for start, step in pairs]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row.clone(), "attention_mask": torch.ones_like(row)}


def tiny_model(seed: int = 0, tokens: int = TOKENS) -> Any:
    """A Llama of two layers."""
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.LlamaConfig(
        vocab_size=tokens, num_key_value_heads=4, max_position_embeddings=64, **sizes, **ends
    )
    return transformers.LlamaForCausalLM(config)


def rank() -> int:
    """Rank of this process."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def of_all_ranks(value: int) -> list[int]:
    """The value of every rank."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def losses(trainer: Any, name: str = "loss") -> list[float]:
    """Losses that a trainer logged."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def run(variants: Mapping[str, Callable[[Path], Mapping[str, Any]]], wanted: list[str]) -> None:
    """Runs the variants in turn, each in a folder that all ranks have, and prints the figures of each on rank 0.

    Raises:
        SystemExit: a variant that is not known is wanted.
    """
    if unknown := [name for name in wanted if name not in variants]:
        raise SystemExit(f"no variants {unknown}; there are {list(variants)}")
    with tempfile.TemporaryDirectory(dir=".") as own:
        for name in wanted:
            folder = Path(f"work-{name}" if world_size() > 1 else own) / name
            folder.mkdir(parents=True, exist_ok=True)
            found = variants[name](folder.resolve())
            if rank() == 0:
                print("FIGURES", json.dumps([name, found]), flush=True)
            gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
