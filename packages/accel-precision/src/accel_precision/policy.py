"""Precision policies: the dtype of each role (parameters, computing, reduction, output) in a run."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, final

import torch

from accel_precision.errors import PrecisionError, did_you_mean
from accel_precision.facts import HALVES, DeviceFacts
from accel_precision.options import AutocastKwargs
from accel_precision.recipes import AORecipeKwargs, Fp8Recipe, FP8RecipeKwargs, TERecipeKwargs

Scaling = Literal["none", "dynamic", "static"]

DTYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "fp64": torch.float64,
        "float16": torch.float16,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "float": torch.float32,
        "float64": torch.float64,
        "double": torch.float64,
        "none": None,
    }
)
ROLES = ("params", "compute", "reduce", "buffers", "output")
SCALINGS: tuple[Scaling, ...] = ("none", "dynamic", "static")


@final
@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Dtype of each role; ``None`` leaves a role as it is.

    Attributes:
        name: name that the user gave, which tables and error messages show.
        params: dtype in which parameters are kept; None: as the model was built.
        compute: dtype of matrix products, by autocast or because the parameters have that dtype.
        reduce: dtype in which gradients are summed over ranks; None: the dtype of the parameters.
        buffers: dtype in which floating-point buffers are kept; None: as the model was built.
        output: dtype of the model's floating-point outputs (fp32 and wider only ever widen).
        autocast: whether ``torch.autocast`` casts to ``compute``.
        scaling: how the loss is scaled against underflow of fp16 gradients.
        fp8: recipe by which linear layers compute in 8 bits, within ``compute``.

    Mixed policies (fp16, bf16, fp8) keep trainable parameters in fp32 at least (a model built in bf16 or fp16 is
    widened by ``prepare``), leave frozen parameters alone, compute by autocast and return fp32 outputs. True policies
    (fp16-true, bf16-true, fp64) convert parameters, buffers and floating-point inputs, and leave outputs as computed.
    """

    Named: ClassVar[Mapping[str, "PrecisionPolicy"]]

    name: str = "no"
    params: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffers: torch.dtype | None = None
    output: torch.dtype | None = None
    autocast: bool = False
    scaling: Scaling = "none"
    fp8: Fp8Recipe | None = None

    @classmethod
    def parse(
        cls,
        spec: "str | PrecisionPolicy | None",
        *,
        device_type: str | None = None,
        facts: DeviceFacts | None = None,
        fp8: Fp8Recipe | FP8RecipeKwargs | None = None,
    ) -> "PrecisionPolicy":
        """Parses a name ("bf16"), roles ("params=fp32,compute=bf16,reduce=fp32"), or both ("bf16,output=none").

        ``scaling=none|dynamic|static`` is accepted beside the roles. With ``facts``, or with a ``device_type`` to
        probe, the policy is checked against the device and its fp8 recipe is completed.

        Raises:
            PrecisionError: an unknown name, role or dtype; or a device that does not support the policy, with the
                nearest policy that the device supports.
        """
        policy = spec if isinstance(spec, PrecisionPolicy) else _read(spec or "no")
        if isinstance(fp8, FP8RecipeKwargs):
            fp8 = fp8.recipe()
        if fp8 is not None:
            if policy.fp8 is None:
                raise PrecisionError(
                    f"{type(fp8).__name__} was given, but the precision is {policy.name!r}; such a recipe "
                    "goes with precision 'fp8'"
                )
            policy = replace(policy, fp8=fp8)
        if facts is None and device_type is not None and policy != cls():
            facts = DeviceFacts.probe(device_type)
        return policy if facts is None else resolve(policy, facts, recipe_given=fp8 is not None)

    @property
    def true(self) -> bool:
        """Whether parameters and computation share one dtype, to which inputs are converted."""
        return self.compute is not None and not self.autocast

    def autocast_context(self, device_type: str, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Returns the policy's autocast context for computations outside forward; a null context without autocast."""
        if not self.autocast:
            return nullcontext()
        options = options or AutocastKwargs()
        return torch.autocast(
            device_type, dtype=self.compute, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    def table(self) -> str:
        """Returns the policy as a text table, one line for each role."""
        left_alone = {"params": "as built", "compute": "as params", "reduce": "as params", "buffers": "as built"}
        lines = [f"precision {self.name}"]
        for role in ROLES:
            dtype = getattr(self, role)
            text = dtype_name(dtype) if dtype is not None else left_alone.get(role, "as computed")
            lines.append(f"  {role:<8} {text}{' (autocast)' if role == 'compute' and self.autocast else ''}")
        lines.append(f"  {'scaling':<8} {self.scaling}")
        if self.fp8 is not None:
            lines.append(f"  {'fp8':<8} {self.fp8.library}")
        return "\n".join(lines)


def _mixed(name: str, compute: torch.dtype, scaling: Scaling = "none", fp8: Fp8Recipe | None = None) -> PrecisionPolicy:
    return PrecisionPolicy(name, compute=compute, output=torch.float32, autocast=True, scaling=scaling, fp8=fp8)


def _true(name: str, dtype: torch.dtype) -> PrecisionPolicy:
    return PrecisionPolicy(name, params=dtype, compute=dtype, buffers=dtype)


PrecisionPolicy.Named = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            PrecisionPolicy(),
            _mixed("fp16", torch.float16, "dynamic"),
            _mixed("bf16", torch.bfloat16),
            _mixed("fp8", torch.bfloat16, fp8=AORecipeKwargs()),
            _true("fp16-true", torch.float16),
            _true("bf16-true", torch.bfloat16),
            _true("fp32-true", torch.float32),
            _true("fp64-true", torch.float64),
        )
    }
)
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "none": "no",
        "fp32": "no",
        "32": "no",
        "32-true": "fp32-true",
        "16-mixed": "fp16",
        "bf16-mixed": "bf16",
        "fp16-mixed": "fp16",
        "16-true": "fp16-true",
        "half": "fp16-true",
        "fp64": "fp64-true",
        "64": "fp64-true",
        "64-true": "fp64-true",
        "double": "fp64-true",
    }
)


def dtype_name(dtype: torch.dtype | None) -> str:
    """Returns the short name of a dtype ("bf16"), or torch's name if there is no short one."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


def _read(text: str) -> PrecisionPolicy:
    """Parses a text to a policy, whether or not any device supports it."""
    tokens = [token.strip().lower() for token in str(text).split(",") if token.strip()]
    name = tokens[0] if tokens and "=" not in tokens[0] else "no"
    base = PrecisionPolicy.Named.get(ALIASES.get(name, name))
    if base is None:
        known = [*PrecisionPolicy.Named, *ALIASES]
        raise PrecisionError(
            f"unknown precision {name!r}; known: {', '.join(PrecisionPolicy.Named)}, or roles such as "
            f"'params=fp32,compute=bf16,reduce=fp32,output=fp32'{did_you_mean(name, known)}"
        )
    given: dict[str, Any] = {}
    for token in tokens[0 if "=" in tokens[0] else 1 :] if tokens else ():
        role, separator, value = (part.strip() for part in token.partition("="))
        if not separator or role not in (*ROLES, "scaling") or role in given:
            problem = "a role given twice" if role in given else "not a role"
            raise PrecisionError(
                f"{token!r} in precision {text!r}: {problem}; roles are {', '.join(ROLES)} and scaling"
                f"{did_you_mean(role, [*ROLES, 'scaling'])}"
            )
        known = list(SCALINGS) if role == "scaling" else list(DTYPES)
        if value not in known:
            raise PrecisionError(
                f"{token!r} in precision {text!r}: expected one of {', '.join(known)}{did_you_mean(value, known)}"
            )
        given[role] = value if role == "scaling" else DTYPES[value]
    return _complete(base, given) if given else base


def _complete(base: PrecisionPolicy, given: Mapping[str, Any]) -> PrecisionPolicy:
    """Completes a policy with the fields that follow from the given roles: autocast, scaling, output and name."""
    policy = replace(base, **given)
    mixed = policy.compute in HALVES and policy.compute != policy.params
    if policy.compute is not None and not mixed and policy.params is None:
        policy = replace(policy, params=policy.compute)
    if policy.compute is not None and not mixed and policy.params != policy.compute:
        raise PrecisionError(
            f"params={dtype_name(policy.params)},compute={dtype_name(policy.compute)}: computation in another dtype "
            "than the parameters' goes through autocast, to fp16 or bf16 only; nearest: "
            f"'params={dtype_name(policy.compute)},compute={dtype_name(policy.compute)}'"
        )
    if policy.params is not None and policy.compute is None:
        policy = replace(policy, compute=policy.params)
    if mixed and not base.autocast and "output" not in given:
        policy = replace(policy, output=torch.float32)
    scaling = given.get("scaling", "dynamic" if mixed and policy.compute == torch.float16 else "none")
    if scaling != "none" and policy.params in HALVES:
        raise PrecisionError(
            f"scaling={scaling} with params={dtype_name(policy.params)}: gradients in half precision cannot be "
            "unscaled without losing what the scale saved; nearest: 'params=fp32,compute=fp16'"
        )
    roles = ",".join(
        f"{role}={dtype_name(getattr(policy, role))}" for role in ROLES if getattr(policy, role) is not None
    )
    name = f"fp8,{roles}" if policy.fp8 is not None else roles or "no"
    return replace(policy, name=name, autocast=mixed, scaling=scaling)


def resolve(policy: PrecisionPolicy, facts: DeviceFacts, *, recipe_given: bool = True) -> PrecisionPolicy:
    """Returns the policy as this device executes it; pure.

    Raises:
        PrecisionError: the device or the installed libraries do not support the policy; with the reason and the nearest
            policy that works.
    """
    only_te = facts.fp8 and facts.fp8_libraries == (TERecipeKwargs.library,)
    if policy.fp8 is not None and not recipe_given and only_te:  # the default recipe, which does not run here
        policy = replace(policy, fp8=TERecipeKwargs())
    reason = unsupported(policy, facts)
    if reason is None:
        return policy
    chain = ("fp8", "bf16", "fp16", "no") if policy.autocast else ("bf16-true", "fp16-true", "bf16", "no")
    nearest = next(name for name in chain if unsupported(PrecisionPolicy.Named[name], facts) is None)
    recipe = " with AORecipeKwargs() (torchao)" if nearest == "fp8" and policy.fp8 is not None else ""
    raise PrecisionError(f"precision {policy.name!r}: {reason}; nearest that works here: {nearest!r}{recipe}")


def unsupported(policy: PrecisionPolicy, facts: DeviceFacts) -> str | None:
    """Returns the reason why a device with these facts does not support the policy; None if it does."""
    if policy.fp8 is not None:
        known = policy.fp8.library
        if known in ("torchao", "transformer_engine") and known not in facts.fp8_libraries:
            return f"{known} is not installed (pip install {known.replace('_', '-')})"
        if known == "transformer_engine" and not facts.fp8:
            return (
                f"TransformerEngine needs a GPU with fp8 (NVIDIA Ada, Hopper or newer); this device is {facts.type!r}"
            )
    if policy.autocast:
        if policy.compute not in facts.autocasts:
            return f"torch.autocast does not compute {dtype_name(policy.compute)} on device type {facts.type!r}"
    elif policy.compute is not None and policy.compute not in facts.computes:
        return f"device type {facts.type!r} does not compute {dtype_name(policy.compute)}"
    return None
