"""Sources of rank processes: forked from servers of this machine, or started by a launcher."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, final

from accel_testing.ranks import hash_seeds
from accel_testing.ranks.environment import rank_environment
from accel_testing.ranks.processes import ForkServer, Rank

_KIND = "accel_testing.ranks.rank"


class Ranks(Protocol):
    """Processes that serve as ranks, kept between jobs and replaced when one of them is gone."""

    def prepare(self, size: int) -> Mapping[str, str]:
        """Prepares ``size`` ranks in the background; returns the variables that they start with."""

    def team(self, size: int) -> list[Rank]:
        """``size`` running ranks, in order."""

    def discard(self) -> None:
        """Ends the ranks; ``team`` starts others."""

    def close(self) -> None:
        """Ends all processes."""


@final
class ForkedRanks:
    """Ranks of one machine, each forked from its own server."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """``preload`` names modules that each server imports before it forks."""
        self._preload = tuple(preload)
        self._environment: dict[str, str] = {}
        self._folder: Path | None = None
        self._servers: list[ForkServer] = []
        self._ranks: list[Rank] = []

    def prepare(self, size: int) -> Mapping[str, str]:
        """Starts the servers of ``size`` ranks, which import torch in the background."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="accel-ranks-"))
            self._environment = rank_environment(os.environ)
        for rank in range(len(self._servers), size):
            variables = {**self._environment, **hash_seeds.of_rank(rank, self._environment)}
            self._servers.append(ForkServer(_KIND, self._folder / str(rank), variables, preload=self._preload))
        return self._environment

    def team(self, size: int) -> list[Rank]:
        """The first ``size`` ranks; all are replaced if one of them, or its server, is gone."""
        if not all(server.alive for server in self._servers):
            self.close()
        self.prepare(size)
        if any(rank.is_gone() for rank in self._ranks):
            self.discard()
        self._ranks += [server.fork_rank() for server in self._servers[len(self._ranks) : size]]
        return self._ranks[:size]

    def discard(self) -> None:
        """Ends the ranks, and keeps their servers."""
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()

    def close(self) -> None:
        """Ends the ranks and their servers."""
        self.discard()
        for server in self._servers:
            server.close()
        self._servers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
