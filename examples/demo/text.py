"""The text that the demo learns: the Python standard library's own sources, which every machine has."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

HELD_OUT_EVERY = 20


def stdlib_bytes(max_bytes: int = 8_000_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out text as uint8 tensors; every twentieth file is held out, files in sorted order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file for file in sorted(folder.rglob("*.py")) if "site-packages" not in file.parts and "test" not in file.parts
    ]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for number, file in enumerate(files):
        text = file.read_bytes()
        parts[number % HELD_OUT_EVERY == 0].append(text)
        total += len(text)
        if total >= max_bytes:
            break
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Overlap-free windows of ``length`` bytes, each with the byte after every one of its bytes as target."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.length
        window = self.text[start : start + self.length + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def bigram_loss(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Held-out loss, in nats per byte, of the best model that sees only one byte back (add-one smoothed)."""
    counts = torch.bincount(train[:-1].long() * 256 + train[1:].long(), minlength=65536).view(256, 256).double() + 1
    log_probability = (counts / counts.sum(1, keepdim=True)).log()
    return -log_probability[held_out[:-1].long(), held_out[1:].long()].mean().item()
