"""Candidates: the strategies that the planner compares."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Literal, final

from accel_backends.ops.optimizer_support import BEYOND_ELEMENTS, ON_HOST
from accel_state.errors import ConfigError

Kind = Literal["whole", "sharded", "zero", "compiled"]

CHECKPOINTING, OFFLOAD = "+ckpt", "+offload"


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    """One strategy.

    Attributes:
        name: its name in tables.
        backend: entry-point name of its backend.
        kind: memory model: every rank holds full parameters, units are gathered from shards, ZeRO's partitions, or one
            program for all devices.
        options: fields of the backend's configuration.
        checkpointing: activation checkpointing of the repeated blocks.
        offload: parameters and optimizer states are kept in host memory.
        keeps: gathered parameters are kept until after the backward.
        replicas: number of replicas of the sharded model: 1, "nodes" (one a node), or "all" (no sharding).
        needs: import name of a library that its backend needs in addition.
        optimizers: names of the classes of torch.optim that it supports; None: all but ``unfit``.
        unfit: names of the classes of torch.optim that it does not support.
        stage: ZeRO stage: 1 partitions optimizer states, 2 also gradients, 3 also parameters.
    """

    name: str
    backend: str
    kind: Kind
    options: Mapping[str, object] = field(default_factory=dict)
    checkpointing: bool = False
    offload: bool = False
    keeps: bool = False
    replicas: Literal["one", "nodes", "all"] = "one"
    stage: int = 0
    needs: str | None = None
    optimizers: frozenset[str] | None = None
    unfit: frozenset[str] = frozenset()

    def takes(self, optimizer: str) -> bool:
        """Returns whether it supports optimizers of the class of that name, ignoring case."""
        name = optimizer.lower()
        allowed = self.optimizers is None or name in map(str.lower, self.optimizers)
        return allowed and name not in map(str.lower, self.unfit)

    def degrees(self, devices: int, nodes: int) -> tuple[int, int]:
        """Returns the number of replicas and the shard degree."""
        if self.kind == "whole" or self.replicas == "all":
            return devices * nodes, 1
        return (nodes, devices) if self.replicas == "nodes" else (1, devices * nodes)


_SHARDINGS: tuple[tuple[str, bool, Literal["one", "nodes", "all"]], ...] = (
    ("NO_SHARD", True, "all"),
    ("SHARD_GRAD_OP", True, "one"),
    ("HYBRID_SHARD", False, "nodes"),
    ("FULL_SHARD", False, "one"),
)


_ON_XLA = (
    Candidate("xla", "xla", "compiled", {"shard_parameters": False}, replicas="all", needs="torch_xla"),
    Candidate("xla:shard", "xla", "compiled", {"shard_parameters": True}, keeps=True, needs="torch_xla"),
)


def candidates(devices: int, nodes: int = 1, *, blocks: bool = True, kind: str = "cuda") -> list[Candidate]:
    """Returns all strategies for ``devices`` devices on each of ``nodes`` nodes, roughly in order of simplicity.

    ``blocks``: the model has repeated blocks, which activation checkpointing needs. ``kind``: type of the devices; XLA
    devices have a backend of their own.
    """
    if kind == "xla":
        return list(_ON_XLA)
    return [
        candidate
        for base in _bases(devices * nodes, hybrid=nodes > 1 and devices > 1)
        for candidate in (_with(base, ckpt, off) for off in (False, True) for ckpt in (False, True))
        if (blocks or not candidate.checkpointing) and (not candidate.offload or _offloads(base))
    ]


def named(candidates: Collection[Candidate], names: Collection[str]) -> list[Candidate]:
    """Returns the candidates of those names, in the order given; a name without ``+`` selects all its variants.

    Raises:
        ConfigError: no candidate has that name.
    """
    chosen: list[Candidate] = []
    for name in names:
        text = name.strip().lower()
        mine = [c for c in candidates if c.name.lower() == text or c.name.lower().partition("+")[0] == text]
        if not mine:
            known = [candidate.name for candidate in candidates]
            near = get_close_matches(text, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"no candidate {name!r}; there are {', '.join(known)}{hint}")
        chosen += [candidate for candidate in mine if candidate not in chosen]
    return chosen


def _bases(ranks: int, *, hybrid: bool) -> Iterator[Candidate]:
    unfit = frozenset(BEYOND_ELEMENTS["fsdp"])
    if ranks == 1:
        yield Candidate("single", "single", "whole")
        yield Candidate("fsdp:full_shard", "fsdp", "sharded", {"sharding_strategy": "FULL_SHARD"}, unfit=unfit)
    else:
        yield Candidate("ddp", "ddp", "whole")
        for strategy, keeps, replicas in _SHARDINGS:
            if strategy == "HYBRID_SHARD" and not hybrid:
                continue
            options = {"sharding_strategy": strategy}
            name = f"fsdp:{strategy.lower()}"
            yield Candidate(name, "fsdp", "sharded", options, keeps=keeps, replicas=replicas, unfit=unfit)
    unfit = frozenset(BEYOND_ELEMENTS["deepspeed"])
    for stage in (1, 2, 3):
        yield Candidate(
            f"zero:{stage}", "deepspeed", "zero", {"zero_stage": stage}, stage=stage, needs="deepspeed", unfit=unfit
        )


def _offloads(base: Candidate) -> bool:
    """Whether a candidate can offload: unsharded parameters would be stored in host memory once for each rank."""
    return base.kind == "zero" or (base.kind == "sharded" and base.replicas != "all")


def _with(base: Candidate, checkpointing: bool, offload: bool) -> Candidate:
    options = dict(base.options)
    if base.kind == "sharded":
        options |= {"activation_checkpointing": True} if checkpointing else {}
        options |= {"cpu_offload": True} if offload else {}
    if base.kind == "zero" and offload:
        options["offload_optimizer_device"] = "cpu"
        if base.stage == 3:
            options["offload_param_device"] = "cpu"
    steps = frozenset(ON_HOST) if base.kind == "zero" and offload else None
    name = base.name + (CHECKPOINTING if checkpointing else "") + (OFFLOAD if offload else "")
    return replace(base, name=name, options=options, checkpointing=checkpointing, offload=offload, optimizers=steps)
