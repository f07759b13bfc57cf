"""``accel plan CONFIG``: degrees of parallelism for a transformer of which only the configuration is known."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_launch.cli.printing import print_json, print_table
from accel_state.errors import ConfigError
from accel_state.sizes import readable_bytes, readable_count

if TYPE_CHECKING:
    from accel_planner.cost.axis_plan import AxisPlan
    from accel_planner.cost.hardware import Hardware
    from accel_planner.select_axes import AxisProposal

_SHOWN = 12
_TRACED_ONLY = {"sample": None, "loss": None, "candidates": None, "optimizer": "adamw"}
_OFFLOADED_ONLY = ("host_memory", "host_bandwidth")
_PRECISIONS = ("no", "bf16")
_PAGE = 1000
_SIZES = ("param>", "grad>", "optim>", "activ>", "comm>", "peak>", "in node>", "between>", "bubble>", "step>")
_COLUMNS = ("", "degrees", *_SIZES, "fits")


def plan_axes_of(path: Path, hardware: "Hardware", options: Mapping[str, Any], *, as_json: bool) -> int:
    """Prints the plans of a configuration and the proposal; returns the exit status, 1 if nothing fits.

    Raises:
        ConfigError: the file is no configuration of a known model, or an option needs a model.
    """
    from accel_planner.cost.axis_plan import Batching
    from accel_planner.cost.transformer_shape import TransformerShape
    from accel_planner.errors import PlanError
    from accel_planner.select_axes import axes_document, plan_axes, propose_axes

    _check_options(path, options)
    shape = TransformerShape.from_config(_read(path))
    micro = 1 if options["batch_size"] is None else options["batch_size"]
    samples = hardware.ranks * micro if options["global_batch"] is None else options["global_batch"]
    batching = Batching(samples, micro, options["seq_length"])
    plans, margin = plan_axes(shape, hardware, batching), options["margin"]
    proposal, problem = None, None
    try:
        proposal = propose_axes(plans, hardware, margin)
    except PlanError as error:
        problem = str(error)
    room = int(hardware.memory * (1 - margin))
    if as_json:
        print_json(axes_document(shape, hardware, batching, plans, proposal, problem, room))
        return int(problem is not None)
    print(
        f"{shape.name}: {readable_count(shape.numel)} parameters, bf16, on {hardware}, {batching.global_batch} samples"
    )
    _print_table(plans, proposal, room)
    if proposal is None:
        print(f"accel: {problem}", file=sys.stderr)
        return 1
    print(f"{proposal.plan.name}: {proposal.reasons[0]}")
    for reason in proposal.reasons[1:]:
        print(f"  {reason}")
    return 0


def _check_options(path: Path, options: Mapping[str, Any]) -> None:
    for name, default in _TRACED_ONLY.items():
        if options[name] != default:
            raise ConfigError(f"--{name} needs a model that can be traced; name module:build instead of {path}")
    for name in _OFFLOADED_ONLY:
        if options[name] is not None:
            raise ConfigError(f"--{name}: nothing is offloaded where degrees are planned; omit it")
    if options["mixed_precision"] not in _PRECISIONS:
        raise ConfigError(f"--mixed_precision {options['mixed_precision']}: degrees are planned in bf16; drop it")
    if options["seq_length"] is None:
        raise ConfigError("--seq_length is missing: tokens of a sample, on which activations and traffic depend")


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a configuration from {file}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} has a {type(found).__name__}; expected the fields of a configuration")
    return found


def _print_table(plans: "Sequence[AxisPlan]", proposal: "AxisProposal | None", room: int) -> None:
    """Prints the fastest plans that fit, or those with the lowest peak if none does."""
    fitting = [plan for plan in plans if plan.peak <= room]
    shown = (fitting or sorted(plans, key=lambda plan: plan.peak))[:_SHOWN]
    rows = []
    for plan in shown:
        sizes = (plan.parameters, plan.gradients, plan.optimizer, plan.activations, plan.communication, plan.peak)
        sent = (sum(plan.local.values()), sum(plan.remote.values()))
        chosen = proposal is not None and plan is proposal.plan
        cells = (
            "->" if chosen else "",
            plan.name,
            *map(readable_bytes, (*sizes, *sent)),
            f"{plan.bubble:.1%}",
            f"{plan.seconds:.3g} s",
            "yes" if plan.peak <= room else "no",
        )
        rows.append(cells)
    print_table(_COLUMNS, rows, width=_PAGE)
    if len(plans) > len(shown):
        print(f"({len(fitting)} of {len(plans)} combinations fit; all with --json)")
