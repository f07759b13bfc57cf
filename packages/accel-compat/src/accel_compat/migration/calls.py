"""Calls of Accelerate that mean something else with accel, found in a syntax tree."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import final

from accel_compat.finder import NAME
from accel_compat.migration.arguments import callables, methods, missing_attribute, missing_member, unknown_arguments
from accel_compat.migration.differences import by_rule
from accel_compat.migration.findings import Finding
from accel_compat.migration.imports import Imports
from accel_compat.migration.known_names import home_of, object_here
from accel_compat.migration.objects import (
    ACCELERATOR,
    Objects,
    argument,
    blocks,
    is_constant,
    own_calls,
    parents,
)
from accel_compat.migration.renaming import texts
from accel_compat.migration.source import ScriptSource

_STATES = ("AcceleratorState", "GradientState", "PartialState")
_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
_MODEL = re.compile(r"model|net|encoder|decoder|module", re.IGNORECASE)
Check = Callable[["Calls", ast.Call], None]


@final
class Calls:
    """Findings about the calls of one script.

    Attributes:
        findings: in no order.
    """

    def __init__(self, source: ScriptSource, imports: Imports) -> None:
        self._source, self._imports = source, imports
        self._objects = Objects(source.tree, imports)
        self._parents = parents(source.tree)
        self.findings: list[Finding] = []
        self._made: list[ast.Call] = []
        self._accumulated: dict[str, ast.Call] = {}
        self._once: set[str] = set()
        nodes = list(ast.walk(source.tree))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        self._accumulates = any(self._objects.method(node) == "accumulate" for node in calls)
        for node in calls:
            self._check_call(node)
        for other in nodes:
            if isinstance(other, ast.Attribute):
                self._check_attribute(other)
            elif isinstance(other, ast.Subscript):
                self._check_variable(other, other.value, other.slice)
        self._check_windows()
        for block in blocks(source.tree):
            self._check_block(block)
        for text in texts(source.tree):
            self._tell(text, "text", repr(text.value))

    def _tell(self, node: ast.expr, rule: str, named: str = "", remedy: str = "") -> None:
        one = by_rule(rule)
        message = one.message.format(named)
        self.findings.append(Finding(*self._source.place(node), one.kind, rule, message, remedy or one.remedy))

    def _tell_once(self, node: ast.expr, rule: str, named: str = "") -> None:
        if rule not in self._once:
            self._once.add(rule)
            self._tell(node, rule, named)

    # Calls

    def _check_call(self, node: ast.Call) -> None:
        method, found = self._objects.method(node), self._imports.resolve(node.func)
        if method is not None:
            self._compare(node, method, methods(method))
            check = _METHODS.get(method)
        elif found is not None:
            self._compare(node, found[1], callables(*found))
            check = _OBJECTS.get(found[1])
        else:
            check = _OTHERS.get(_last(node.func))
            if self._objects.is_schedule_maker(node):
                self._check_schedule(node)
        if check is not None:
            check(self, node)

    def _compare(self, node: ast.Call, name: str, pair: tuple[object, object]) -> None:
        if name not in ("AcceleratorState", "GradientState"):
            for value, rule, named, remedy in unknown_arguments(node, name, pair):
                self._tell(value, rule, named, remedy)

    def _accelerator(self, node: ast.Call) -> None:
        if any(self._runs_with(node, other) for other in self._made):
            self._tell(node, "several-accelerators")
        self._made.append(node)
        split = argument(node, "split_batches", 1)
        if split is not None and not (is_constant(split, False) or is_constant(split, None)):
            self._tell(split, "split-batches")
        precision = argument(node, "mixed_precision", 2)
        if precision is not None and _is_text(precision, "fp16") and is_constant(argument(node, "cpu", 4), True):
            self._tell(precision, "fp16-cpu")
        steps = argument(node, "gradient_accumulation_steps", 3)
        if steps is not None and not (isinstance(steps, ast.Constant) and steps.value == 1):
            self._tell(steps, "short-window")
        trackers = argument(node, "log_with")
        if trackers is not None and any(_is_text(part, "tensorboard") for part in ast.walk(trackers)):
            self._tell(trackers, "tensorboard-folder")

    def _accumulation(self, node: ast.Call) -> None:
        self._tell(node, "short-window")

    def _project(self, node: ast.Call) -> None:
        each = argument(node, "save_on_each_node", 5)
        if each is not None and not is_constant(each, False):
            self._tell(each, "each-node")

    def _parallelism(self, node: ast.Call) -> None:
        degree = argument(node, "sp_size")
        if degree is not None and not (isinstance(degree, ast.Constant) and degree.value in (None, 1)):
            self._tell(degree, "sp-loss")
            self._tell(degree, "sp-loader")

    def _state(self, node: ast.Call) -> None:
        is_private = (parent := self._parents.get(node)) is not None and _last(parent).startswith("_")
        if not node.args and not node.keywords and not is_private:
            self._tell(node, "state-of", _last(node.func))

    def _save(self, node: ast.Call) -> None:
        path = argument(node, "f", 1)
        end = _end(path)
        if end is None:
            self._tell(node, "save-path")
        elif not end.endswith(".safetensors"):
            self._tell(node, "save-pickle", end)

    def _save_model(self, node: ast.Call) -> None:
        safe = argument(node, "safe_serialization", 3)
        if is_constant(safe, False):
            self._tell(node, "unsafe-model", "save_model")

    def _accumulate(self, node: ast.Call) -> None:
        named = ", ".join(ast.unparse(one) for one in node.args)
        self._accumulated.setdefault(named, node)

    def _clip(self, node: ast.Call) -> None:
        if self._accumulates and not self._is_under(node, "sync_gradients"):
            self._tell(node, "clip-in-window", _last(node.func))

    def _reduce(self, node: ast.Call) -> None:
        scale = argument(node, "scale", 2)
        if scale is not None:
            self._tell(scale, "reduce-scale")

    def _loader(self, node: ast.Call) -> None:
        order = argument(node, "in_order")
        if is_constant(order, False):
            assert order is not None
            self._tell(order, "in-order")

    def _variable(self, node: ast.Call) -> None:
        """``os.getenv(name)`` and ``os.environ.get(name)``."""
        if isinstance(node.func, ast.Attribute) and node.args:
            owner = node.func.value if node.func.attr == "get" else node.func
            self._check_variable(node, owner, node.args[0])

    def _step(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and self._objects.is_schedule(node.func.value):
            prepares = any(isinstance(one, ast.Call) and self._prepares(one) for one in ast.walk(self._source.tree))
            if prepares:
                self._tell_once(node, "scheduler-steps", ast.unparse(node.func))

    def _prepares(self, node: ast.Call) -> bool:
        return self._objects.method(node) in ("prepare", "prepare_scheduler") and any(
            self._objects.is_schedule(one) for one in node.args
        )

    def _check_schedule(self, node: ast.Call) -> None:
        """A schedule whose number of steps is multiplied by the number of processes."""
        for given in [*node.args, *(keyword.value for keyword in node.keywords)]:
            for part in ast.walk(given):
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
                    factor = next((one for one in (part.left, part.right) if _last(one) == "num_processes"), None)
                    if factor is not None:
                        self._tell(part, "scheduler-factor", ast.unparse(factor))

    # Attributes and variables

    def _check_attribute(self, node: ast.Attribute) -> None:
        if self._objects.is_accelerator(node.value):
            missing = missing_attribute(node.attr)
            if missing is not None:
                self._tell(node, "attribute", *missing)
        elif node.attr in ("_reset_state", "_shared_state") and self._is_state(node.value):
            self._tell(node, "own-state", ast.unparse(node))
        elif node.attr == "__version__" and self._imports.module_of(node.value) == NAME:
            self._tell(node, "version")
        elif (found := self._imports.resolve(node.value)) is not None:
            home = home_of(*found)
            remedy = None if home is None else missing_member(object_here(home, found[1]), node.attr)
            if remedy is not None:
                self._tell(node, "member", ast.unparse(node), remedy)

    def _is_state(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            node = node.func
        found = self._imports.resolve(node)
        if found is not None:
            return found[1] in (*_STATES, ACCELERATOR)
        is_field = isinstance(node, ast.Attribute) and node.attr in ("state", "gradient_state")
        return isinstance(node, ast.Attribute) and is_field and self._objects.is_accelerator(node.value)

    def _check_variable(self, node: ast.expr, owner: ast.expr, name: ast.expr) -> None:
        """A variable that is read; launchers and shells may set it, so that assignments stay."""
        if _last(owner) not in ("environ", "getenv") or not isinstance(name, ast.Constant):
            return
        reads = not isinstance(node, ast.Subscript) or isinstance(node.ctx, ast.Load)
        if reads and isinstance(name.value, str) and name.value.startswith(_VARIABLES):
            self._tell(node, "environment", name.value)

    # Order of statements

    def _check_windows(self) -> None:
        for node in list(self._accumulated.values())[1:]:
            self._tell(node, "separate-windows")

    def _check_block(self, block: list[ast.stmt]) -> None:
        """A model that is prepared twice, and a save between backward and the optimizer's step."""
        prepared: set[str] = set()
        is_open = False
        for statement in block:
            for node in sorted(own_calls(statement), key=self._source.place):
                method = self._objects.method(node)
                if method == "backward":
                    is_open = True
                elif _last(node.func) == "step" and isinstance(node.func, ast.Attribute):
                    is_open = is_open and self._objects.is_schedule(node.func.value)
                elif method == "save_state" and is_open and self._is_directly_in(node, block):
                    self._tell(node, "save-in-window")
            call = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
            if isinstance(call, ast.Call) and self._objects.method(call) == "prepare":
                names = {one.id for one in call.args if isinstance(one, ast.Name) and _MODEL.search(one.id)}
                for name in sorted(names & prepared):
                    self._tell(call, "prepared-twice", name)
                prepared |= names
            else:
                bound = [one for one in ast.walk(statement) if isinstance(one, ast.Name) and _is_stored(one)]
                anew = any(self._objects.is_accelerator(one) for one in bound)
                prepared = set() if anew else prepared - {one.id for one in bound}

    def _is_directly_in(self, node: ast.AST, block: list[ast.stmt]) -> bool:
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node in block

    def _runs_with(self, node: ast.AST, other: ast.AST) -> bool:
        """Whether both are in the same function, and not in two branches of one ``if``."""
        here, there = dict(self._branches(node)), dict(self._branches(other))
        scopes = [next((one for one in found if not isinstance(one, ast.If)), None) for found in (here, there)]
        return scopes[0] is scopes[1] and all(here[one] == there[one] for one in here.keys() & there.keys())

    def _branches(self, node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
        """Functions and ``if`` statements around a node, from within; for an ``if``, whether the node is in its body."""
        while node in self._parents:
            inner, node = node, self._parents[node]
            if isinstance(node, ast.If | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield node, inner in node.body if isinstance(node, ast.If) else True

    def _is_under(self, node: ast.AST, name: str) -> bool:
        """Whether an ``if`` around a node tests something of this name."""
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.If) and any(_last(one) == name for one in ast.walk(node.test)):
                return True
        return False


def _once(rule: str) -> Check:
    return lambda calls, node: calls._tell_once(node, rule)


_METHODS: Mapping[str, Check] = MappingProxyType(
    {
        "save": Calls._save,
        "save_model": Calls._save_model,
        "accumulate": Calls._accumulate,
        "clip_grad_norm_": Calls._clip,
        "clip_grad_value_": Calls._clip,
        "reduce": Calls._reduce,
        "save_state": _once("save-state"),
        "load_state": _once("load-state"),
        "skip_first_batches": _once("position"),
        "register_for_checkpointing": _once("custom-objects"),
    }
)
_OBJECTS: Mapping[str, Check] = MappingProxyType(
    {
        ACCELERATOR: Calls._accelerator,
        "GradientAccumulationPlugin": Calls._accumulation,
        "ProjectConfiguration": Calls._project,
        "ParallelismConfig": Calls._parallelism,
        "AcceleratorState": Calls._state,
        "GradientState": Calls._state,
        "skip_first_batches": _once("position"),
    }
)
_OTHERS: Mapping[str, Check] = MappingProxyType(
    {"DataLoader": Calls._loader, "getenv": Calls._variable, "get": Calls._variable, "step": Calls._step}
)


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _end(node: ast.expr | None) -> str | None:
    """End of a text, as far as the source has it; None: unknown."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return _end(node.values[-1])
    if isinstance(node, ast.BinOp):
        return _end(node.right)
    if isinstance(node, ast.Call) and node.args and _last(node.func) in ("join", "Path", "str"):
        return _end(node.args[-1])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_text(node: ast.AST, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)
