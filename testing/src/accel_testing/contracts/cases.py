"""Cases of the contract suite, by topic: models, parts, edits, copies, optimizers, backwards, windows."""

from functools import partial

from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from accel_testing.contracts import loops, models, several
from accel_testing.contracts import samples as routes
from accel_testing.contracts.case import Case
from accel_testing.contracts.loops import with_loss

_ROUTED = with_loss(loops.routed_error)
_UNUSED = ("find_unused_parameters",)
#: Options with which users of these backends allow unused parameters in a step.
_MAY_SKIP = {name: {"find_unused_parameters": "true"} for name in ("ddp", "fsdp")}


def _gan() -> tuple[models.Stack, ...]:
    return models.Stack(), models.Stack(3, 1)


def _chain() -> tuple[models.Stack, ...]:
    return models.Stack(), models.Stack(3)


def _pair() -> tuple[models.Stack, ...]:
    return models.Stack(), models.Stack()


_PARTS = (
    Case("part unused", models.Unused, names=_UNUSED),
    Case(
        "part unused in every other step", models.Routed, _ROUTED, route=routes.other_part_in_odd_steps, names=_UNUSED
    ),
    Case("part unused on one rank", models.Routed, _ROUTED, route=routes.both_parts_but_in_one_half, names=_UNUSED),
    Case("ranks use different parts", models.Routed, _ROUTED, route=routes.a_part_for_each_half, names=_UNUSED),
    Case(
        "part unused in some micro-batches",
        models.Routed,
        _ROUTED,
        route=routes.other_part_in_one_micro_batch,
        accumulate=3,
        names=_UNUSED,
    ),
    Case(
        "part used in the last micro-batch only",
        models.Routed,
        _ROUTED,
        route=routes.other_part_in_last_micro_batch,
        accumulate=3,
        names=_UNUSED,
    ),
    Case(
        "part unused for a window",
        models.Routed,
        _ROUTED,
        route=routes.one_part_in_second_step,
        accumulate=3,
        since=2,
        names=_UNUSED,
    ),
    Case("experts of rank-different data", lambda: models.Routed(3), _ROUTED, route=routes.experts, names=_UNUSED),
)
_ALLOWED_PARTS = tuple(
    Case(
        f"{case.name}, allowed",
        case.build,
        case.train,
        since=case.since,
        accumulate=case.accumulate,
        route=case.route,
        options=_MAY_SKIP,
        names=_UNUSED,
    )
    for case in _PARTS
)

_MODELS = (
    Case("plain", models.Stack, since=None),
    Case("tied weights", models.Tied, with_loss(loops.next_token)),
    Case("shared block", models.SharedBlock),
    Case("frozen part", models.FrozenPart, since=None),
    Case("frozen root", models.FrozenRoot),
    Case("buffers changed in forward", models.Counting, copies=True),
    Case("batch norm", models.Normalised, copies=True),
    Case(
        "batch norm over all ranks",
        models.Normalised,
        options={"ddp": {"sync_batch_norm": "true"}},
        names=("sync_batch_norm",),
    ),
    Case("layer norm", lambda: models.Normalised("layer"), since=None),
    Case("scalar parameter", models.Scaled),
    Case("parameter list", models.Listed),
    Case("odd shapes", models.Odd),
    Case("lstm", models.Recurrent, with_loss(loops.token_error)),
    Case("rnn of two layers", lambda: models.Recurrent("rnn"), with_loss(loops.token_error)),
    Case("adapters", models.Adapted, partial(loops.train, optimizer=loops.trainable)),
    Case(
        "sparse embedding",
        lambda: models.Embedded(sparse=True),
        with_loss(loops.token_error, optimizer=lambda m: SGD(m.parameters(), lr=0.1)),
        names=("sparse",),
    ),
    Case("embedding with padding", lambda: models.Embedded(padding=3), with_loss(loops.token_error)),
    Case("activation checkpointing", models.Checkpointed),
    Case("activation checkpointing, reentrant", lambda: models.Checkpointed(reentrant=True), names=("reentrant",)),
    Case("other weights on other ranks", models.Stack, loops.other_weights, since=0),
    Case("another model on one rank", models.Growing, loops.other_model, since=0, names=("grown", "grown.weight")),
)
_CHANGES = (
    Case("part thawed later", models.FrozenPart, partial(loops.train, change=loops.thaw), since=3),
    Case(
        "part thawed and edited after an evaluation",
        models.FrozenRoot,
        partial(loops.train, change=loops.thaw_after_evaluation),
        since=3,
    ),
    Case("part frozen later", models.Stack, partial(loops.train, change=loops.freeze), since=3),
    Case(
        "layer added after prepare",
        models.Growing,
        partial(loops.train, change=loops.grow),
        since=3,
        names=("grown", "grown.weight", "add_param_group"),
    ),
)
_EDITS = (
    Case(
        "weights edited between steps",
        models.Stack,
        partial(loops.train, change=loops.clamp),
        names=("full_parameters",),
    ),
    Case(
        "weights loaded after prepare",
        models.Stack,
        partial(loops.train, change=loops.load),
        names=("load_state_dict",),
    ),
    Case("weights edited after evaluations", models.Stack, partial(loops.train, change=loops.halve_after_evaluation)),
    Case(
        "weights edited after evaluations, full between forward and backward",
        models.Stack,
        partial(loops.train, change=loops.halve_after_evaluation),
        options={"fsdp": {"reshard_after_forward": "false"}, "fsdp1": {"sharding_strategy": "SHARD_GRAD_OP"}},
        since=None,
    ),
    Case(
        "a forward without backward before the step",
        models.Stack,
        partial(loops.train, edit=loops.look_ahead),
        since=None,
    ),
    Case("learning rate changed by hand", models.Stack, partial(loops.train, change=loops.lower_rate), since=None),
    Case("gradients thrown away", models.Stack, loops.left_out, since=None),
    Case("gradients thrown away, weighted", models.Stack, partial(loops.left_out, weigh=True), since=None),
)
_COPIES = (
    Case("copy of the prepared model", models.Stack, several.copied, since=0, names=("deepcopy", "copy")),
    Case("copy of the bare model", models.Stack, several.bare_copy, since=None),
    Case("averaged weights", models.Stack, several.averaged, since=0, names=("deepcopy", "copy")),
)


_ONE_CALL = ("prepare",)
_SEVERAL = (
    Case("two optimizers", models.Stack, several.two_optimizers, since=0, names=("SGD", "AdamW")),
    Case("two models, two losses", _gan, several.adversaries, names=_ONE_CALL),
    Case("two models, two losses, prepared apart", _gan, partial(several.adversaries, apart=True)),
    Case("two models, one frozen for a loss", _gan, partial(several.adversaries, freeze=True), names=_ONE_CALL),
    Case(
        "two models, one frozen for a loss, prepared apart",
        _gan,
        partial(several.adversaries, freeze=True, apart=True),
    ),
    Case("two models side by side, windows", _pair, several.side_by_side, accumulate=3),
    Case("two models, one loss", _chain, several.one_loss_of_two, names=_ONE_CALL),
    Case("two models, one loss, prepared apart", _chain, partial(several.one_loss_of_two, apart=True)),
    Case(
        "two models, one loss, windows", _chain, partial(several.one_loss_of_two, apart=True), accumulate=3, short=True
    ),
    Case(
        "two models, one accumulated, windows",
        _chain,
        partial(several.one_loss_of_two, apart=True, second=False),
        accumulate=3,
        short=True,
        names=("accumulate",),
    ),
    Case("two models, one frozen", _pair, several.distilled, names=_ONE_CALL),
    Case("two models, one frozen, prepared apart", _pair, partial(several.distilled, apart=True)),
)
_OPTIMIZERS = (
    Case(
        "adamw",
        models.Stack,
        partial(loops.train, optimizer=lambda model: AdamW(model.parameters(), lr=0.01)),
        since=None,
    ),
    Case("closures", models.Stack, loops.closures, names=("closure", "LBFGS")),
    Case("sharpness-aware steps", models.Stack, loops.sharpness_aware, names=("grad",)),
    Case("two parameter groups", models.Stack, partial(loops.train, optimizer=several.groups)),
    Case("parameters of no optimizer", models.Stack, partial(loops.train, optimizer=several.blocks_only)),
    Case("schedule", models.Stack, partial(loops.train, scheduler=lambda o: StepLR(o, 1, 0.5)), since=None),
    Case(
        "schedule, windows",
        models.Stack,
        partial(loops.train, scheduler=lambda o: StepLR(o, 1, 0.5)),
        accumulate=3,
        since=None,
    ),
    Case("optimizer made of the prepared model", models.Stack, several.optimizer_of_prepared, names=("optimizer",)),
    Case("optimizer not prepared", models.Stack, several.unprepared_optimizer, names=("optimizer",)),
    Case("optimizer stepped as it was given", models.Stack, several.raw_optimizer, names=("optimizer",)),
)
_BACKWARDS = (
    Case("backward by hand", models.Stack, loops.backward_by_hand, names=("backward",)),
    Case("two backwards of one forward", models.Stack, loops.two_backwards, names=("retain_graph", "backward")),
    Case("two forwards of one backward", models.Stack, with_loss(loops.two_forwards)),
    Case("target of the same model", models.Stack, with_loss(loops.own_target)),
    Case("gradient penalty", models.Stack, with_loss(loops.gradient_penalty), names=("create_graph", "backward")),
    Case("hook in place on the loss", models.Stack, with_loss(loops.halved_in_place)),
    Case("hooks on parameters", models.Stack, loops.parameter_hooks),
    Case("hooks after accumulation", models.Stack, partial(loops.parameter_hooks, accumulated=True)),
    Case("hooks on modules", models.Stack, loops.module_hooks),
    Case("evaluation in between", models.Stack, with_loss(loops.evaluated_between), since=None),
    Case("gradients edited", models.Stack, partial(loops.train, edit=loops.edit_gradients), names=("grad",)),
    Case("clip by norm", models.Stack, partial(loops.train, edit=loops.clip_norm), since=None),
    Case("clip by value", models.Stack, partial(loops.train, edit=loops.clip_value), names=("clip_grad_value_",)),
    Case("weighted losses", models.Stack, loops.weighted, since=None),
    Case(
        "weighted losses, a rank without weight",
        models.Stack,
        partial(loops.weighted, routed=True),
        route=routes.a_part_for_each_half,
        since=None,
    ),
    Case("method other than forward", models.Stack, loops.method_call, names=("hidden", "forward")),
    Case("gradients set to zero", models.Stack, partial(loops.train, set_to_none=False), since=None),
)
_WINDOWS = (
    Case("windows of three", models.Stack, accumulate=3, since=None),
    Case("windows of three, the last one short", models.Stack, accumulate=3, short=True, since=None),
    Case("weighted losses, windows", models.Stack, loops.weighted, accumulate=3, since=None),
    Case(
        "no backward at the end of a window",
        models.Stack,
        partial(loops.skipped, edit=loops.clip_norm),
        accumulate=3,
        route=routes.other_part_in_all_of_last_micro_batch,
        since=None,
    ),
    Case(
        "no backward at the end of a window, weighted",
        models.Scaled,
        partial(loops.skipped, weigh=True),
        accumulate=3,
        route=routes.other_part_in_all_of_last_micro_batch,
        names=("dimension",),
    ),
    Case("gradients cleared first, windows", models.Stack, loops.cleared_first, accumulate=3, short=True, since=None),
    Case(
        "windows thrown away before their last backward",
        models.Stack,
        partial(loops.cleared_first, drop=True),
        accumulate=3,
        route=routes.other_part_in_last_micro_batch_of_second_step,
        since=None,
    ),
    Case("clip by norm, windows", models.Stack, partial(loops.train, edit=loops.clip_norm), accumulate=3, since=None),
    Case(
        "gradients set to zero, windows",
        models.Stack,
        partial(loops.train, set_to_none=False),
        accumulate=3,
        since=None,
    ),
    Case("tied weights, windows", models.Tied, with_loss(loops.next_token), accumulate=3),
    Case("windows by hand", models.Stack, loops.windows_by_hand, accumulate=3, by_hand=True, names=("no_sync",)),
    Case(
        "last backward triggers",
        models.Stack,
        partial(loops.windows_by_hand, trigger=True),
        accumulate=3,
        by_hand=True,
        names=("trigger_sync_in_backward", "no_sync"),
    ),
)

#: Every contract.
CASES: tuple[Case, ...] = (
    *_MODELS,
    *_PARTS,
    *_ALLOWED_PARTS,
    *_CHANGES,
    *_EDITS,
    *_COPIES,
    *_SEVERAL,
    *_OPTIMIZERS,
    *_BACKWARDS,
    *_WINDOWS,
)
