"""Each library's way to prepare a DataLoader, and datasets that cost nearly nothing to read."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops import fabric_engine

Prepare = Callable[["DataLoader[Any]"], Any]


def accel(ranks: int, **options: Any) -> Prepare:
    """``prepare`` of an Accelerator with these choices about loaders."""
    from accel import Accelerator
    from accel.utils import DataLoaderConfiguration

    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)).prepare


def accelerate(ranks: int, **options: Any) -> Prepare:
    """The same of Hugging Face Accelerate, with its defaults."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)).prepare


def fabric(ranks: int) -> Prepare:
    """The same of Lightning Fabric."""
    return fabric_engine(ranks).setup_dataloaders


def preparers(ranks: int, *, peers: bool) -> dict[str, Prepare]:
    """By library."""
    makers = {"accel": accel, **({"accelerate": accelerate, "fabric": fabric} if peers else {})}
    return {name: make(ranks) for name, make in makers.items()}


def exhaust(loader: Iterable[Any]) -> int:
    """Reads all batches; how many there were."""
    return sum(1 for _ in loader)


def nth(loader: Iterable[Any], number: int) -> Any:
    """Batch ``number``, after reading those before it."""
    return next(islice(iter(loader), number, None))


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """``size`` samples of ``width`` numbers each, whatever ``size`` is in little memory, with their indices."""

    def __init__(self, size: int, width: int = 32) -> None:
        self.size = size
        self.rows = torch.randn(4096, width)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index % 4096], index


class Blocks(Rows):
    """The same, which reads a whole batch at once: nothing is left but what the loader itself costs."""

    def __getitems__(self, indices: list[int]) -> Any:
        at = torch.tensor(indices)
        return self.rows[at % 4096], at


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Small images with the arithmetic that is usual: bytes to normalised floats, mirrored every other time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pixels = torch.randint(0, 256, (512, 3, 64, 64), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.pixels[index % 512].float().div_(255).sub_(0.5).div_(0.25)
        return image.flip(-1) if index % 2 else image, index % 10


def unchanged(batch: Any) -> Any:
    """A ``collate_fn`` for datasets that read whole batches."""
    return batch
