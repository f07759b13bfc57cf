"""A tiny network of the kind that removes noise from latent images: residual blocks, attention to a text, skips."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class UNetConfig:
    """Channels of the two levels, of the text, and of the time's embedding."""

    channels: tuple[int, int] = (16, 32)
    text: int = 24
    time: int = 32


class Residual(nn.Module):
    def __init__(self, inputs, outputs, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        inner = self.conv1(nn.functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(nn.functional.silu(self.norm2(inner)))


class TextAttention(nn.Module):
    def __init__(self, channels, text):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.query, self.out = nn.Linear(channels, channels, bias=False), nn.Linear(channels, channels)
        self.key, self.value = nn.Linear(text, channels, bias=False), nn.Linear(text, channels, bias=False)

    def forward(self, x, text):
        flat = x.flatten(2).transpose(1, 2)
        heads = [
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in (self.query(self.norm(flat)), self.key(text), self.value(text))
        ]
        found = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x + self.out(found).transpose(1, 2).view_as(x)


class Output(tuple):
    """What the model returns, as those of transformers do."""

    def to_tuple(self):
        return tuple(self)


class UNet(nn.Module):
    """Predicts the noise of ``sample`` at ``timestep``, with a text's states beside it."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        small, large = config.channels
        self.register_buffer("frequencies", torch.linspace(0.1, 1, config.time // 2), persistent=False)
        self.time = nn.Sequential(nn.Linear(config.time, config.time), nn.SiLU(), nn.Linear(config.time, config.time))
        self.first = nn.Conv2d(4, small, 3, padding=1)
        self.down = nn.ModuleList([Residual(small, small, config.time), Residual(small, large, config.time)])
        self.halve = nn.Conv2d(small, small, 3, stride=2, padding=1)
        self.middle, self.attend = Residual(large, large, config.time), TextAttention(large, config.text)
        self.widen = nn.ConvTranspose2d(large, small, 2, stride=2)
        self.up = nn.ModuleList([Residual(2 * large, large, config.time), Residual(2 * small, small, config.time)])
        self.last = nn.Sequential(nn.GroupNorm(4, small), nn.SiLU(), nn.Conv2d(small, 4, 3, padding=1))

    def forward(self, sample, timestep, encoder_hidden_states):
        angles = timestep[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        high = self.down[0](self.first(sample), time)
        low = self.down[1](self.halve(high), time)
        middle = self.attend(self.middle(low, time), encoder_hidden_states)
        middle = self.attend(middle, encoder_hidden_states)  # weights that are used twice in one forward
        up = self.widen(self.up[0](torch.cat([middle, low], 1), time))
        return Output((self.last(self.up[1](torch.cat([up, high], 1), time)),))


def inputs():
    return {
        "sample": torch.linspace(-1, 1, 2 * 4 * 8 * 8).view(2, 4, 8, 8),
        "timestep": torch.tensor([3.0, 7.0]),
        "encoder_hidden_states": torch.linspace(-1, 1, 2 * 5 * 24).view(2, 5, 24),
    }


def denoised(model, steps=4):
    """The sample after some steps from noise, as a pipeline makes it: what generating is for such a model."""
    found = inputs()
    for step in range(steps, 0, -1):
        noise = model(**{**found, "timestep": torch.full((2,), float(step))})[0]
        found["sample"] = found["sample"] - noise / steps
    return found["sample"]
