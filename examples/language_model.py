"""A small language model on lines of different lengths: the loss of a token counts the same wherever it stands.

Each micro-batch holds another number of tokens. ``backward(sum of losses, weight=number of tokens)`` makes the gradient
of one big batch of them, so that ``--accumulate 4 --batch_size 4`` trains as ``--accumulate 1 --batch_size 16`` does,
and as two processes with ``--accumulate 2 --batch_size 4``.
"""

import argparse
import inspect
import textwrap
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel.utils import set_seed
from accel_data import PaddingCollator

IGNORED = -100


class LanguageModel(torch.nn.Module):
    """Bytes (batch, length) to logits (batch, length, 256)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.recurrent = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


def lines(count: int = 320) -> list[dict[str, list[int]]]:
    """Lines of Python as bytes, each with the byte that follows as the target."""
    source = inspect.getsource(textwrap) + inspect.getsource(argparse)
    encoded = [list(line.encode()) for line in source.splitlines() if len(line) > 1][:count]
    return [{"tokens": line[:-1], "targets": line[1:]} for line in encoded]


def main(arguments: Sequence[str] | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=4, help="lines of one micro-batch on one process")
    parser.add_argument("--accumulate", type=int, default=4)
    options = parser.parse_args(arguments)

    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulate, dataloader_config=DataLoaderConfiguration(data_seed=0)
    )
    set_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    collate = PaddingCollator(pad_value={"targets": IGNORED})
    loader = DataLoader(lines(), batch_size=options.batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(options.epochs):
        total = torch.zeros(2, device=accelerator.device)
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch["tokens"])
                loss = cross_entropy(
                    logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
                )
                tokens = (batch["targets"] != IGNORED).sum()
                accelerator.backward(loss, weight=tokens)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            total += torch.stack([loss.detach(), tokens])
        loss_sum, token_sum = accelerator.reduce(total).tolist()
        mean = loss_sum / token_sum
        accelerator.print(f"epoch {epoch}: {mean:.3f} nats per byte over {token_sum:.0f} bytes")
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    return mean, weights


if __name__ == "__main__":
    main()
