"""``accel plan``: memory, communication and time of every strategy for a model, and the best choice."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from accel_launch.cli.options import as_json
from accel_launch.cli.printing import print_json, table_of
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from accel_planner import Decision, Hardware, MemoryPlan, ModelProfile


_PARTS = ("param>", "grad>", "optim>", "activ>", "comm>")
_PAGE = 1000
_COLUMNS = ("", "strategy", *_PARTS, "peak>", "host>", "sent>", "step>", "fits")


@click.command()
@click.argument("build", metavar="MODULE:BUILD|CONFIG")
@click.option(
    "--devices", metavar="NxSIZE", help="Devices of a node and their memory: 8x80GB, 8xH100. Not given: here."
)
@click.option("--nodes", type=int, metavar="N", help="Nodes of such devices.")
@click.option("--optimizer", default="adamw", metavar="NAME", help="Of torch.optim, or module:Class. Default: adamw.")
@click.option("--mixed_precision", default="no", metavar="NAME", help="no, bf16, fp16, fp8, bf16-true, or roles.")
@click.option("--batch_size", type=int, metavar="N", help="Samples of one device's micro-batch.")
@click.option(
    "--global_batch",
    type=int,
    metavar="N",
    help="With CONFIG: samples of an optimizer step. Default: a micro-batch of each rank.",
)
@click.option("--seq_length", type=int, metavar="N", help="Tokens of a sample, for language models.")
@click.option("--sample", metavar="MODULE:FN", help="Function of batch size and sequence length that makes a batch.")
@click.option(
    "--loss", metavar="MODULE:FN", help="Function of model and batch that gives the loss; else it is guessed."
)
@click.option(
    "--margin", type=float, default=0.1, metavar="PART", help="Part of the memory to leave free. Default: 0.1."
)
@click.option("--candidates", metavar="NAMES", help="Only these, with commas: ddp,fsdp:full_shard,zero:3.")
@click.option("--intra_bandwidth", metavar="RATE", help="Between devices of a node, a device: 300GB/s.")
@click.option("--inter_bandwidth", metavar="RATE", help="Between nodes, a node: 50GB/s.")
@click.option("--host_bandwidth", metavar="RATE", help="Between a device and its node's memory: 25GB/s.")
@click.option("--host_memory", metavar="SIZE", help="Of a node, for what is offloaded. Not given: not checked.")
@click.option("--flops", type=float, metavar="RATE", help="Operations a second that a device reaches: 4e14.")
@as_json
def plan(build: str, *, devices: str | None, nodes: int | None, as_json: bool, **options: Any) -> int:
    """Predicts memory and communication of every strategy for the model that MODULE:BUILD() builds, and chooses one.

    Nothing is allocated: the model is built on the meta device and a step is traced without computing it.
    For CONFIG, a config.json of transformers or its folder, it proposes degrees of tensor, context, pipeline, expert
    and data parallelism in bf16 with Adam, from the sizes alone.
    """
    if Path(build).exists():
        from accel.cli.plan_axes import plan_axes_of

        return plan_axes_of(Path(build), _hardware(devices, nodes, options), options, as_json=as_json)
    if ":" not in build:
        raise ConfigError(f"there is no file or folder {build}; expected module:name, a config.json or its folder")
    if options.pop("global_batch") is not None:
        raise ConfigError(f"--global_batch is for a configuration file, and {build} is none; --batch_size counts here")
    from accel_planner import PlanError, choose, optimizer_facts, plan_all, profile_model, ranked
    from accel_planner.candidate import named
    from accel_planner.cost.plan import candidates_on
    from accel_planner.profile.named_objects import load_function, load_object
    from accel_planner.select import plan_document
    from accel_precision import PrecisionError, PrecisionPolicy

    try:
        policy = PrecisionPolicy.parse(options["mixed_precision"])
    except PrecisionError as error:
        raise ConfigError(str(error)) from error
    hardware = _hardware(devices, nodes, options)
    sample, loss = options["sample"], options["loss"]
    profile = profile_model(
        load_object(build, "the model"),
        None if sample is None else load_function(sample, "--sample"),
        batch_size=options["batch_size"],
        seq_length=options["seq_length"],
        loss=None if loss is None else load_function(loss, "--loss"),
        policy=policy,
        device_type=hardware.kind,
    )
    facts = optimizer_facts(options["optimizer"], profile.parameters, foreach=hardware.kind != "cpu")
    every = candidates_on(hardware, blocks=bool(profile.blocks))
    found = [candidate for candidate in every if candidate.takes(facts.name)]
    if options["candidates"]:
        found = named(found, options["candidates"].split(","))
    plans = ranked(plan_all(profile, facts, hardware, found))
    decision, problem = None, None
    try:
        decision = choose(plans, margin=options["margin"])
    except PlanError as error:
        problem = str(error)
    if as_json:
        print_json(plan_document(profile, hardware, plans, decision, problem, options["margin"]))
    else:
        _show(profile, hardware, plans, decision, options["margin"])
        if problem is not None:
            print(f"accel: {problem}", file=sys.stderr)
    return int(problem is not None)


def _hardware(devices: str | None, nodes: int | None, options: dict[str, Any]) -> "Hardware":
    from dataclasses import replace

    from accel_planner import Hardware, parse_size

    hardware = Hardware.here() if devices is None else Hardware.parse(devices, nodes=nodes)
    if devices is None and nodes is not None:
        hardware = replace(hardware, nodes=nodes)
    rates = {"intra_bandwidth": "local", "inter_bandwidth": "remote", "host_bandwidth": "host"}
    changes: dict[str, Any] = {
        field: float(parse_size(options[name], what=f"--{name}")) for name, field in rates.items() if options[name]
    }
    if options["host_memory"]:
        changes["host_memory"] = parse_size(options["host_memory"], what="--host_memory")
    if options["flops"] is not None:
        changes["flops"] = options["flops"]
    return replace(hardware, **changes)


def _table(rows: list[tuple[str, ...]], fitting: list[bool], hidden: Sequence[str]) -> "Table":
    shown = [
        number
        for number, column in enumerate(_COLUMNS)
        if column not in hidden and (column != "host>" or any(row[number] for row in rows))
    ]
    cells = [[row[number] for number in shown] for row in rows]
    return table_of([_COLUMNS[number] for number in shown], cells, dimmed=[not fit for fit in fitting])


def _print_rows(rows: list[tuple[str, ...]], fitting: list[bool]) -> None:
    """Prints one line for each strategy; omits the parts of the peak if the table is wider than the terminal.

    Without a terminal, the table has its full width.
    """
    from rich.console import Console

    console, page = Console(highlight=False), Console(highlight=False, width=_PAGE)
    table, narrow = _table(rows, fitting, ()), _table(rows, fitting, _PARTS)
    whole = page.measure(table).maximum
    if not console.is_terminal or whole <= console.width:
        Console(highlight=False, width=whole).print(table)
        return
    # A terminal that is even narrower wraps the lines itself, so that no number is separated from its unit.
    Console(highlight=False, width=max(console.width, page.measure(narrow).maximum)).print(narrow)
    print(f"({', '.join(part.rstrip('>') for part in _PARTS)}: in a terminal of {whole} columns, or with --json)")


def _show(
    profile: "ModelProfile",
    hardware: "Hardware",
    plans: "list[MemoryPlan]",
    decision: "Decision | None",
    margin: float,
) -> None:
    from accel_planner.select import fits
    from accel_state.sizes import readable_count

    print(f"{profile.name}: {readable_count(profile.numel)} parameters, precision {profile.policy.name}, on {hardware}")
    chosen = None if decision is None else decision.plan
    alike: dict[tuple[str, ...], list[MemoryPlan]] = {}
    for plan in plans:
        alike.setdefault((*_numbers(plan), "yes" if fits(plan, hardware.memory, margin) else "no"), []).append(plan)
    rows, fitting = [], []
    for numbers, same in alike.items():
        shown = next((plan for plan in same if plan is chosen), same[0])
        others = f" +{len(same) - 1}" if len(same) > 1 else ""
        rows.append(("->" if shown is chosen else "", f"{shown.candidate.name}{others}", *numbers))
        fitting.append(numbers[-1] == "yes")
    _print_rows(rows, fitting)
    for same in alike.values():
        if len(same) > 1:
            print(f"alike: {', '.join(plan.candidate.name for plan in same)}")
    if decision is not None:
        print(f"{decision.plan.candidate.name}: {'; '.join(decision.reasons)}")
        for change in decision.changes:
            print(f"  {change}")
    for note in profile.notes:
        print(f"note: {note}")


def _numbers(plan: "MemoryPlan") -> tuple[str, ...]:
    """Memory and time of a plan, as the columns between its name and whether it fits."""
    from accel_state.sizes import readable_bytes

    parts = plan.parts
    return (
        *map(readable_bytes, (parts.parameters, parts.gradients, parts.optimizer, parts.activations)),
        readable_bytes(parts.communication),
        readable_bytes(plan.peak),
        readable_bytes(plan.host_of_node) if parts.host else "",
        readable_bytes(plan.traffic.total),
        f"{plan.seconds:.3g} s",
    )
