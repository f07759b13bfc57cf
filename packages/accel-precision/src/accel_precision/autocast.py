"""Autocast and dtype conversion around a module's calls, by changing the class of the instance and nothing else.

The user's ``forward`` is not touched: the instance gets a subclass of its class, of the same name, whose ``__call__``
enters the context. ``isinstance``, attributes, hooks, ``state_dict`` and signatures are therefore unchanged, wrappers
such as DDP call the module as before, and a copy or a pickle has the original class. Nothing is stored on the instance.
"""

import copy
import copyreg
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch import nn

from accel_precision.convert import converted_inputs, converter
from accel_precision.errors import PrecisionError
from accel_precision.options import AutocastKwargs
from accel_precision.policy import PrecisionPolicy

Context = Callable[[nn.Module], AbstractContextManager[Any]]
Converter = Callable[[Any], Any]


class _Swapped:
    """First base of every class made by ``subclass_with``.

    Has no ``__slots__``, which would change the layout of instances.
    """

    _accel_original: ClassVar[type[nn.Module]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Suppresses the original class's hook, so that registries of user classes do not list these subclasses."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        swapped = type(self)
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        original = _original(swapped)
        function, arguments = reduced[0], tuple(original if part is swapped else part for part in reduced[1])
        if (
            function is cast(Any, copyreg).__newobj__
        ):  # pickle would compare the class in the arguments with the instance's
            function = original.__new__
        return (original if function is swapped else function, arguments, *reduced[2:])


def autocast_module(
    model: nn.Module, policy: PrecisionPolicy, device_type: str, options: AutocastKwargs | None = None
) -> nn.Module:
    """Makes calls of the module compute as ``policy`` says; returns the same module.

    ``restore_module`` undoes the change.

    Under autocast, floating-point outputs are converted to ``policy.output``, in nested containers too. For a true
    policy floating-point inputs are converted to the parameters' dtype, because autocast does not do so. A policy
    without a compute dtype leaves the module alone. Parameters are not converted here (see ``cast_parameters``).

    Raises:
        PrecisionError: the class of the module does not let instances change it (its ``__slots__`` or metaclass).
    """
    outputs = None if policy.output is None else converter(policy.output)
    if policy.autocast:
        enabled, cached = (options.enabled, options.cache_enabled) if options is not None else (True, None)
        compute = policy.compute

        def context(module: nn.Module) -> AbstractContextManager[Any]:
            return torch.autocast(device_type, compute, enabled, cached)

        return call_within(model, context, outputs=outputs)
    if policy.compute is None and outputs is None:
        return model
    return call_within(model, None, inputs=policy.compute, outputs=outputs)


def call_within(
    model: nn.Module,
    context: Context | None,
    *,
    inputs: torch.dtype | None = None,
    outputs: Converter | None = None,
) -> nn.Module:
    """Runs each call of the module in ``context(module)``; returns the same module.

    Several contexts nest, the last outermost.

    Args:
        inputs: dtype to which floating-point tensors among the arguments are converted.
        outputs: applied to the module's outputs, outside the context.
    """
    original = type(model)
    try:
        model.__class__ = subclass_with(original, {"__call__": _make_call(original.__call__, context, inputs, outputs)})
    except TypeError as error:
        raise PrecisionError(
            f"{original.__module__}.{original.__qualname__} does not let an instance change its class ({error}), so "
            "its calls cannot run under autocast; wrap it in an nn.Module, or enter accelerator.autocast() yourself"
        ) from error
    return model


def subclass_with(original: type[nn.Module], members: Mapping[str, object]) -> type[nn.Module]:
    """Returns a subclass of the same name with ``members``, which an instance of ``original`` can get as its class.

    ``restore_module`` undoes the change of class; copies and pickles of the instance have the original class.

    Raises:
        TypeError: the class has a metaclass that makes no such subclass.
    """
    namespace = {
        **members,
        "__slots__": (),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_accel_original": original,
    }
    bases = (original,) if issubclass(original, _Swapped) else (_Swapped, original)
    metaclass: Any = type(original)
    made: type[nn.Module] = metaclass(original.__name__, bases, namespace)
    return made


def restore_module(model: nn.Module) -> nn.Module:
    """Restores a module's original class, and with it the original ``__call__``; does nothing to other modules."""
    original = _original(type(model))
    if original is not type(model):
        model.__class__ = original
    return model


def plain_module(model: nn.Module) -> nn.Module:
    """Returns a module of the original class that shares parameters, buffers and children with ``model``.

    ``model`` itself is unchanged, and is returned if its class was not made by ``subclass_with``.
    """
    return copy.copy(model) if isinstance(model, _Swapped) else model


def is_swapped(model: nn.Module) -> bool:
    """Whether the module's class was made by ``subclass_with``."""
    return isinstance(model, _Swapped)


def cast_parameters(model: nn.Module, policy: PrecisionPolicy) -> nn.Module:
    """Converts floating-point parameters to ``policy.params`` and buffers to ``policy.buffers``, in place.

    Parameters stay the same objects, so optimizers made before keep working.
    """
    if policy.params is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype != policy.params:
                parameter.data = parameter.data.to(policy.params)
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(policy.params)
    if policy.buffers is not None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(policy.buffers)
    return model


def _make_call(
    call: Callable[..., Any],
    context: Context | None,
    inputs: torch.dtype | None,
    outputs: Converter | None,
) -> Callable[..., Any]:
    """Returns the shortest ``__call__`` for the given context and conversions, because it runs in every step."""
    if inputs is not None:

        def converting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = converted_inputs(args, kwargs, inputs)
            result = call(self, *args, **kwargs)
            return result if outputs is None else outputs(result)

        return converting
    if context is None:

        def giving(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = call(self, *args, **kwargs)
            return result if outputs is None else outputs(result)

        return giving
    if outputs is None:

        def within(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with context(self):
                return call(self, *args, **kwargs)

        return within

    def within_giving(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with context(self):
            result = call(self, *args, **kwargs)
        return outputs(result)

    return within_giving


def _original(cls: type) -> type[nn.Module]:
    while "_accel_original" in cls.__dict__:
        cls = cls.__dict__["_accel_original"]
    return cast(type[nn.Module], cls)
