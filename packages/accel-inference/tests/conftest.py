"""Small models whose sizes in bytes the tests state."""

import pytest
from torch import nn


class ThreeLayers(nn.Module):
    """linear1 has 64 bytes, batchnorm 72, linear2 100."""

    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x):
        return self.linear2(self.batchnorm(self.linear1(x)))


@pytest.fixture
def three_layers():
    return ThreeLayers
