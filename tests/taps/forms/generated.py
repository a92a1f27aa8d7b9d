"""Random small models in every form, held against plain hooks: ``python -m tests.taps.forms.generated 200``.

A model is Python source that is written from a seed: layers that are used again, optional arguments and results, tuples
and dictionaries, aliases, tied and parametrized weights, views, in-place changes, layers that hand on what they are
given, values that leave by a side door. The oracle registers torch's own hooks and knows nothing of torchtap.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.taps.forms.making import saved_model, saved_program, saved_script
from torch import Tensor, fx, nn

import torchtap as tt

KINDS = ("input", "output", "grad_input", "grad_output")
TAPS = tuple(f"*:{kind}" for kind in KINDS)

_PARTS = '''
from contextvars import ContextVar
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 4
SIDE: Dict[str, Tensor] = {}
KEPT: ContextVar = ContextVar("kept")


class Opt(nn.Module):
    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        return x * 2 if mask is None else x * mask


class Maybe(nn.Module):
    """Hands on what it is given if there is no mask."""

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        if mask is None:
            return x
        return x * mask + 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        b = x.tanh()
        return self.a(b), b


class PairBuilt(nn.Module):
    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        made = (x * 5, x * 2)
        return made


class OptOut(nn.Module):
    def forward(self, x: Tensor, second: bool) -> Tuple[Tensor, Optional[Tensor]]:
        extra: Optional[Tensor] = None
        if second:
            extra = x.sin()
        return x.cos(), extra


class OptFirst(nn.Module):
    def forward(self, x: Tensor, first: bool) -> Tuple[Optional[Tensor], Tensor]:
        extra: Optional[Tensor] = None
        if first:
            extra = x.sin()
        return extra, x.cos()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Dict[str, Tensor]:
        return {"h": self.l(x), "t": x.sigmoid()}


class Nested(nn.Module):
    def forward(self, x):
        return {"h": x * 3, "parts": [x + 1, (x - 1, x.exp())]}


class OneTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tuple[Tensor]:
        return (self.l(x).relu(),)


class OneBuilt(nn.Module):
    def forward(self, x):
        out = (x * 2,)
        out += ()
        return out


class Through(nn.Module):
    """Returns what a module inside returns, which is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = PairBuilt()

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        return self.inner(x)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        h = self.l(x)
        return h[:, :WIDTH], h[:, WIDTH:]


class ViewAndBase(nn.Module):
    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        h = x * 3
        return h, h.view(-1)


class Equal(nn.Module):
    """Returns a tensor that is given, beside an equal copy that is used inside."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, b: Tensor) -> Tuple[Tensor, Tensor]:
        c = b + 0.0
        return self.l(x) * c + c, b


class EqualCopy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, b: Tensor) -> Tuple[Tensor, Tensor]:
        c = b.clone()
        return self.l(x) * b + b, c


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x).tanh() * 1.0
        y.add_(1.0)
        return y


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, h: Optional[Tensor] = None) -> Tensor:
        y = self.x(x)
        if h is not None:
            y = y + self.h(h)
        return y.tanh()


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: Tensor) -> Tensor:
        h = self.cell(x)
        for _ in range(2):
            h = self.cell(x, h)
        return h


class Frozen(nn.Module):
    """The first call is under no_grad, so that it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = self.l(x)
        return self.l(x * a) * a


class Late(nn.Module):
    """The result of the first call is used after that of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a = self.l(x)
        b = self.l(x * 2)
        return b.sin() * 2 + a


class Listed(nn.Module):
    def forward(self, xs: List[Tensor], scale: float = 2.0) -> Tensor:
        total = xs[0] * scale
        for x in xs[1:]:
            total = total + x.tanh()
        return total


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.l(self.l(x).tanh())


class KeepsSelf(nn.Module):
    def forward(self, x):
        self.last = x * 2
        return x + 1


class UsesKept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = KeepsSelf()

    def forward(self, x):
        self.k(x)
        return self.k.last + 3


class CallsBack(nn.Module):
    def forward(self, x, tell):
        tell(x * 2)
        return x + 1


class UsesCallback(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = CallsBack()

    def forward(self, x):
        told = []
        self.k(x, told.append)
        return told[0] + 3


class InContext(nn.Module):
    def forward(self, x):
        KEPT.set(x * 2)
        return x + 1


class UsesContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = InContext()

    def forward(self, x):
        self.k(x)
        return KEPT.get() + 3


class Plain(nn.Module):
    def forward(self, x):
        return x + 1


def keep(module, args, output):
    SIDE["kept"] = args[0] * 2


class UsesHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = Plain()
        self.k.register_forward_hook(keep)

    def forward(self, x):
        self.k(x)
        return SIDE["kept"] + 3


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = Plain()
        own = self.k.forward
        self.k.forward = lambda x: (SIDE.update(kept=x * 2), own(x))[1]

    def forward(self, x):
        self.k(x)
        return SIDE["kept"] + 3


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o = Opt()

    def forward(self, x: Tensor) -> Tensor:
        return self.o(x) + self.o(x, mask=x.sin()) + self.o(mask=x.cos(), x=x)


class Shape(nn.Module):
    """Uses its input for its shape only."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.e(torch.arange(x.shape[0]))


class FromBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("t", torch.randn(3, WIDTH))
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.l(self.t)
'''

# How a part is used: ``{m}`` is the module, ``{x}`` and ``{y}`` are values, ``{o}`` is the new value.
_USES: dict[str, list[str]] = {
    "nn.Linear(WIDTH, WIDTH)": ["{o} = {m}({x})"],
    "nn.LayerNorm(WIDTH)": ["{o} = {m}({x})"],
    "nn.Tanh()": ["{o} = {m}({x})"],
    "nn.ReLU(inplace=True)": ["{o} = {m}({x} * 1.0)"],
    "nn.Identity()": ["{o} = {m}({x})"],
    "nn.Dropout(0.5)": ["{o} = {m}({x})"],
    "nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))": ["{o} = {m}({x})"],
    "Opt()": ["{o} = {m}({x})", "{o} = {m}({x}, {y})"],
    "Maybe()": ["{o} = {m}({x}) + 1", "{o} = {m}({x}, {y})"],
    "Pair()": ["{o}a, {o}b = {m}({x})\n{o} = {o}a + {o}b", "{o} = {m}({x})[0]", "{o} = {m}({x})[1] * 2"],
    "PairBuilt()": ["{o} = {m}({x})[1] + {x}", "{o}a, {o}b = {m}({x})\n{o} = {o}a - {o}b"],
    "OptOut()": [
        "{o}a, {o}b = {m}({x}, True)\nassert {o}b is not None\n{o} = {o}a + {o}b",
        "{o} = {m}({x}, False)[0]",
    ],
    "OptFirst()": [
        "{o}a, {o}b = {m}({x}, True)\nassert {o}a is not None\n{o} = {o}a + {o}b",
        "{o} = {m}({x}, False)[1]",
    ],
    "Named()": ["{o}d = {m}({x})\n{o} = {o}d['h'] + {o}d['t']", "{o} = {m}({x})['t']"],
    "Nested()": ["{o}d = {m}({x})\n{o} = {o}d['h'] + {o}d['parts'][1][0]"],
    "OneTuple()": ["{o} = {m}({x})[0]"],
    "OneBuilt()": ["{o} = {m}({x})[0]"],
    "Through()": ["{o} = {m}({x})[0]", "{o}a, {o}b = {m}({x})\n{o} = {o}a * {o}b"],
    "Views()": ["{o}a, {o}b = {m}({x})\n{o} = {o}a * {o}b", "{o} = {m}({x})[1]"],
    "ViewAndBase()": ["{o}a, {o}b = {m}({x})\n{o} = {o}a + {o}b.sum()"],
    "Equal()": ["{o}a, {o}b = {m}({x}, {y} * 1.5)\n{o} = {o}a + {o}b"],
    "EqualCopy()": ["{o}a, {o}b = {m}({x}, {y} * 1.5)\n{o} = {o}a + {o}b"],
    "InPlace()": ["{o} = {m}({x})"],
    "Cell()": ["{o} = {m}({x})", "{o} = {m}({x}, {y})"],
    "Rnn()": ["{o} = {m}({x})"],
    "Frozen()": ["{o} = {m}({x})"],
    "Late()": ["{o} = {m}({x})"],
    "Listed()": ["{o} = {m}([{x}, {y}])", "{o} = {m}([{x}], 3.0)"],
    "Tied()": ["{o} = {m}({x})"],
    "Aliased()": ["{o} = {m}({x})"],
    "Normed()": ["{o} = {m}({x})"],
    "UsesKept()": ["{o} = {m}({x})"],
    "UsesCallback()": ["{o} = {m}({x})"],
    "UsesContext()": ["{o} = {m}({x})"],
    "UsesHook()": ["{o} = {m}({x})"],
    "Replaced()": ["{o} = {m}({x})"],
    "ByKeyword()": ["{o} = {m}({x})"],
    "Shape()": ["{o} = {m}({x}) + {x}"],
    "FromBuffer()": ["{o} = {m}({x})"],
}
# An export does not tell two names of one module from two modules if they have no parameters (docs/forms.md).
_WITH_PARAMETERS = (
    "nn.Linear(WIDTH, WIDTH)",
    "nn.LayerNorm(WIDTH)",
    "Pair()",
    "Named()",
    "Cell()",
    "InPlace()",
)
_RETURNS = [
    "return {v}",
    "return {v}",
    "return {v}, {w} * 1.0",
    "return {{'a': {v}, 'b': {w} * 1.0}}",
    "return {v}, {v}[:, :2]",
]
_TYPES = ["Tensor", "Tensor", "Tuple[Tensor, Tensor]", "Dict[str, Tensor]", "Tuple[Tensor, Tensor]"]


def source_of(seed: int) -> str:
    """The source of the model with this number: its class is ``Model``."""
    chance = random.Random(seed)
    parts = chance.sample(list(_USES), chance.randint(2, 4))
    fields = [f"self.m{n} = {part}" for n, part in enumerate(parts)]
    if chance.random() < 0.2 and parts[0] in _WITH_PARAMETERS:
        fields.append("self.again = self.m0")
    lines, values = [], ["x"]
    optional = chance.random() < 0.3
    for step in range(chance.randint(2, 6)):
        which = chance.randrange(len(parts))
        use = chance.choice(_USES[parts[which]])
        named = (
            "self.again"
            if which == 0 and len(fields) > len(parts) and chance.random() < 0.5
            else f"self.m{which}"
        )
        x, y = chance.choice(values), chance.choice(values)
        new = f"h{step}"
        lines += use.format(m=named, x=x, y=y, o=new).split("\n")
        values.append(new)
    number = chance.randrange(len(_RETURNS))
    total = " + ".join(values[1:])
    lines.append(f"out = {total}")
    lines += _RETURNS[number].format(v="out", w=chance.choice(values)).split("\n")
    given = "x: Tensor, more: Optional[Tensor] = None" if optional else "x: Tensor"
    body = "\n        ".join(lines)
    made = "\n        ".join(fields)
    return (
        f"{_PARTS}\n\nclass Model(nn.Module):\n    def __init__(self) -> None:\n        super().__init__()\n"
        f"        {made}\n\n    def forward(self, {given}) -> {_TYPES[number]}:\n        {body}\n"
    )


@contextlib.contextmanager
def generated(seed: int) -> Iterator[tuple[nn.Module, Tensor]]:
    """The model with this number, and an input. Its source is a file for as long as the block lasts."""
    name = f"generated_{seed}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.py"
        file.write_text(source_of(seed))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            torch.manual_seed(seed)
            x = torch.randn(3, 4)
            yield module.Model().eval(), x.requires_grad_() if seed % 2 else x
        finally:
            del sys.modules[name]


# -- the oracle ---------------------------------------------------------------------------------------------------


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, (list, tuple, dict)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, f"{name}.{key}")


def _keep_gradient(found: dict[str, Tensor], where: str, gradient: Tensor) -> None:
    found[where] = gradient.clone()


def oracle(model: nn.Module, x: Tensor, parameters: dict[str, list[str]]) -> dict[str, Tensor]:
    """Every input, output and gradient of one pass and its backward, by torch's hooks."""
    found: dict[str, Tensor] = {}
    handles: list[Any] = []

    def note(path: str, kind: str, call: int, leaves: list[tuple[str, Tensor]]) -> None:
        for leaf, tensor in leaves:
            end = f"{leaf}#{call}" if call else leaf
            found[f"{path}:{kind}{end}"] = tensor.detach().clone()
            if tensor.requires_grad:
                where = f"{path}:grad_{kind}{end}"
                hook = partial(_keep_gradient, found, where)
                handles.append(tensor.register_hook(hook))  # a parameter would keep it

    for path, module in model.named_modules():
        calls = Counter[str]()
        names = parameters[path]

        def before(
            _: Any, args: Any, kwargs: Any, path: str = path, calls: Any = calls, names: Any = names
        ) -> None:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            leaves = [
                each
                for key, value in given.items()
                for each in _leaves(value, f".{key}" if len(names) > 1 else "")
            ]
            note(path, "input", calls["input"], leaves)
            calls["input"] += 1

        def after(_: Any, args: Any, output: Any, path: str = path, calls: Any = calls) -> None:
            note(path, "output", calls["output"], list(_leaves(output)))
            calls["output"] += 1

        handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]
    try:
        back(loss(model(fresh(x))))
    finally:
        for handle in handles:
            handle.remove()
    return found


def loss(output: Any) -> Tensor:
    """A number that every tensor of a result counts in, each otherwise."""
    return sum(((n + 2) * tensor.square()).sum() for n, (_, tensor) in enumerate(_leaves(output)))  # type: ignore[return-value]


def back(total: Tensor) -> None:
    """Run a backward if there is anything to differentiate."""
    if total.requires_grad:
        total.backward()


def fresh(x: Tensor) -> Tensor:
    """The same input without hooks of an earlier pass."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def parameter_names(model: nn.Module) -> dict[str, list[str]]:
    """The names of each module's parameters, from its class."""
    import inspect

    return {
        path: [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
        for path, module in model.named_modules()
    }


# -- forms --------------------------------------------------------------------------------------------------------


def _script(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.script(model)


def _trace(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(model, x, check_trace=False, strict=False)


def _export(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,), strict=False).module()


def _inst(model: nn.Module) -> nn.Module:
    return tt.instrument(model, *TAPS)  # type: ignore[no-any-return]


FORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "eager": lambda model, x: model,
    "compile, eager": lambda model, x: torch.compile(model, backend="eager"),
    "compile, aot_eager": lambda model, x: torch.compile(model, backend="aot_eager"),
    "script": _script,
    "script, instrumented": lambda model, x: saved_script(_script(_inst(model), x)),
    "trace": _trace,
    "trace, loaded": lambda model, x: saved_script(_trace(model, x)),
    "trace, instrumented": lambda model, x: saved_script(_trace(_inst(model), x)),
    "export": _export,
    "export, strict": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "export, loaded": lambda model, x: saved_program(torch.export.export(model, (x,), strict=False)).module(),
    "export, instrumented": lambda model, x: saved_program(
        torch.export.export(_inst(model), (x,), strict=False)
    ).module(),
    "FX": lambda model, x: fx.symbolic_trace(model),
    "FX, instrumented": lambda model, x: fx.symbolic_trace(_inst(model)),
    "pickle": lambda model, x: tt.instrument(saved_model(_inst(model))),
}
_WITH_MODEL = ("trace", "trace, loaded", "export", "export, loaded", "FX")


class Judged(NamedTuple):
    """What one form gave of one model."""

    sites: int
    right: int  # under the eager name
    plain: int  # under a unique plain name
    wrong: list[str]
    missing: list[str]  # neither, with the coverage's words


def _close(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and torch.allclose(value, other, rtol=1e-4, atol=1e-5)


def _without_leaf(name: str) -> str:
    path, _, rest = name.partition(":")
    kind, _, call = rest.partition("#")
    return f"{path}:{kind.partition('.')[0]}" + (f"#{call}" if call else "")


def judge(form: Any, x: Tensor, true: dict[str, Tensor], **options: Any) -> Judged:
    """Capture a form and hold each value against the oracle's."""
    x = fresh(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tt.capture(form, *TAPS, **options) as seen:
            back(loss(form(x)))
        wrong = []
        for name in seen:
            value = seen[name]
            if name in true:
                if value.shape != true[name].shape or not torch.allclose(
                    value, true[name], rtol=1e-4, atol=1e-5
                ):
                    wrong.append(f"{name}: another value")
            elif "@" not in name:
                first = "m0" + name.removeprefix("again") if name.startswith("again") else ""
                if first not in true or not _close(value, true[first]):
                    wrong.append(f"{name}: no such site")
        came = set(seen)
        right = [name for name in true if name in came]
        plain, missing = 0, []
        for name in (name for name in true if name not in came):
            bare = _without_leaf(name)
            value = seen.get(bare)
            several = [true[each] for each in true if _without_leaf(each) == bare]
            if not isinstance(value, Tensor):
                missing.append(name)
            elif not any(_close(value, each) for each in several):
                wrong.append(f"{name}: another value by its plain name")
            else:
                plain += 1 if len(several) == 1 else 0
                missing += [name] if len(several) > 1 else []
    return Judged(len(true), len(right), plain, wrong, missing)


def judge_seed(seed: int, forms: tuple[str, ...] = tuple(FORMS)) -> Iterator[tuple[str, Judged | str]]:
    """Each form of one model, with and without the model at hand; a text where torch cannot make the form."""
    with generated(seed) as (model, x):
        names = parameter_names(model)
        true = oracle(model, x, names)
        for form in forms:
            torch._dynamo.reset()
            model.zero_grad()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made = FORMS[form](model, x)
                    again = loss(made(x))  # torch alone: is it the same model?
                if not torch.allclose(again, loss(model(x)), rtol=1e-4, atol=1e-5):
                    yield form, "torch: another result"
                    continue
            except Exception as error:
                yield form, f"torch: {type(error).__name__}: {str(error)[:100]}"
                continue
            for label, options in ((form, {}), (f"{form}, like", {"like": model, "inputs": (x,)})):
                if label != form and form not in _WITH_MODEL:
                    continue
                try:
                    yield label, judge(made, x, true, **options)
                except Exception as error:
                    yield label, f"torchtap: {type(error).__name__}: {str(error)[:200]}"


def main(count: int, first: int = 0, forms: tuple[str, ...] = tuple(FORMS)) -> int:
    """Judge many models and print the counts of each form."""
    sums: dict[str, Counter[str]] = {}
    failed = 0
    for seed in range(first, first + count):
        for label, result in judge_seed(seed, forms):
            each = sums.setdefault(label, Counter())
            if isinstance(result, str):
                each["torch" if result.startswith("torch:") else "failed"] += 1
                if not result.startswith("torch:"):
                    failed += 1
                    print(seed, label, result, flush=True)
                continue
            each.update(models=1, sites=result.sites, right=result.right, plain=result.plain)
            each.update(wrong=len(result.wrong), missing=len(result.missing))
            failed += len(result.wrong)
            for line in result.wrong[:3]:
                print(seed, label, "WRONG", line, flush=True)
            full = (
                not any(word in label for word in ("trace", "export", "FX"))
                or "inst" in label
                or "like" in label
            )
            if full and result.missing:
                print(seed, label, "missing", result.missing[:4], flush=True)
    for label, each in sums.items():
        share = 100 * (each["right"] + each["plain"]) / max(1, each["sites"])
        print(f"{label:28}", dict(each), f"{share:.1f} %")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), *(int(each) for each in sys.argv[2:]))))
