"""Random training loops, each with an oracle of plain hooks that knows nothing of torchtap.

`Program.from_seed` chooses a loop. `run` executes it: once with an `Oracle`, once recorded. The program knows by its
construction to which step and phase each pass, number and update belongs; the oracle keeps the values.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Key = tuple[int, str, str]  # step, phase, site
Label = tuple[int, str] | None
SITES = ["*:output", "*:grad_output", "*:param", "*:param_grad", "*:update"]


class Reused(nn.Module):
    """A module that is called twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Structured(nn.Module):
    """A model that returns a dict with an output that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class Wrapped(nn.Module):
    """A wrapper that takes a module's place, as adapters do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 2)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)),
    "convolution": convolution,
    "reused": Reused,
    "structured": Structured,
}


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: moves the weights, asks for a second gradient, moves back and updates."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["old"] = each.detach().clone()
                if each.grad is not None:
                    each.add_(each.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.copy_(self.state[each]["old"])
        self.base.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.first_step()
        loss = torch.enable_grad()(closure)()
        self.second_step()
        return loss


class Oracle:
    """Keep what plain hooks see under the label that the program gives."""

    def __init__(self) -> None:
        self.values: dict[Key, list[Tensor]] = {}
        self.numbers: dict[tuple[int, str], float] = {}
        self.label: Label = None
        self._models: list[tuple[str, nn.Module]] = []
        self._handles: list[Any] = []

    def see(self, model: nn.Module, prefix: str) -> None:
        self._models.append((prefix, model))
        self._hook_all(model, prefix)

    def see_again(self) -> None:
        """The models have other modules now."""
        while self._handles:
            self._handles.pop().remove()
        for prefix, model in self._models:
            self._hook_all(model, prefix)

    def _hook_all(self, model: nn.Module, prefix: str) -> None:
        calls: dict[str, int] = {}
        self._handles.append(model.register_forward_pre_hook(lambda *_: calls.clear()))
        for name, module in model.named_modules():
            path = ".".join(filter(None, (prefix, name)))
            self._handles.append(module.register_forward_hook(self._hook(path, calls)))

    def _hook(self, path: str, calls: dict[str, int]) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            number = calls[path] = calls.get(path, -1) + 1
            if self.label is None:
                return
            step, phase = self.label
            call = f"#{number}" if number else ""
            self.values.setdefault((step, phase, f"{path}:output{call}"), []).append(output.detach().clone())
            if output.requires_grad:
                site = (step, phase, f"{path}:grad_output{call}")
                output.register_hook(lambda g: self.values.setdefault(site, []).append(g.detach().clone()))

        return hook

    def parameters(self, step: int, kind: str, of: set[int], values: dict[int, Tensor]) -> None:
        """Keep a tensor for each of these parameters."""
        for prefix, model in self._models:
            for name, parameter in model.named_parameters():
                if id(parameter) in of and id(parameter) in values:
                    path, _, leaf = ".".join(filter(None, (prefix, name))).rpartition(".")
                    self.values[step, "train", f"{path}:{kind}.{leaf}"] = [values[id(parameter)]]


@dataclass(frozen=True)
class Program:
    """One training loop."""

    seed: int
    model: str
    optimizer: str
    style: str
    steps: int
    every: int
    micro: int
    clip: bool
    scaler: bool
    training: bool  # the mode in which the model is trained
    extras: tuple[tuple[int, str, str], ...]  # step, place, kind
    aborted: tuple[int, ...]  # steps at which a forward raises first
    log: str
    change: tuple[int, str]  # before this step a module is wrapped or replaced
    resumed: int  # at this step another watch goes on; 0: never

    @classmethod
    def from_seed(cls, seed: int) -> Program:
        pick = random.Random(seed)
        optimizer = pick.choice(OPTIMIZERS)
        style = "follow" if optimizer in ORDERS else pick.choice(["follow", "follow", "blocks", "set_step"])
        steps = pick.randint(3, 6)
        places = ("pre", "inside", "post")
        kinds = ("eval", "no_grad", "unused", "eval_grad")
        extras = [
            (step, place, pick.choice(kinds))
            for step in range(steps)
            for place in places
            if pick.random() < 0.25
        ]
        plain = optimizer in ("sgd", "adamw", "late group", "again")
        return cls(
            seed=seed,
            model="mlp" if optimizer in ORDERS else pick.choice(list(MODELS)),
            optimizer=optimizer,
            style=style,
            steps=steps,
            every=pick.choice([1, 1, 2, 3]),
            micro=pick.choice([1, 1, 2, 3]),
            clip=pick.random() < 0.3,
            scaler=plain and pick.random() < 0.25,
            training=pick.random() < 0.8,
            extras=tuple(extras),
            aborted=tuple(step for step in range(steps) if pick.random() < 0.1),
            log=pick.choice(["after", "before", "after extra", "none"]),
            change=(pick.randint(1, steps - 1), pick.choice(["wrap", "swap", "none", "none", "none"])),
            resumed=0 if optimizer in ORDERS or pick.random() < 0.75 else pick.randint(1, steps - 1),
        )


# For several models, each with its own optimizer: who updates, and the step of each update.
ORDERS: dict[str, Callable[[int], list[tuple[str, int]]]] = {
    "turns": lambda n: [(name, step) for step in range(n) for name in "DG"],
    "critic": lambda n: [
        each for k in range(n) for each in (("C", 2 * k), ("C", 2 * k + 1), ("A", 2 * k + 1))
    ],
    "phases": lambda n: [(("A" if k < n else "B"), k) for k in range(2 * n)],
    "idle": lambda n: [("A", step) for step in range(n)],
}
OPTIMIZERS = (
    "sgd", "adamw", "closure", "lbfgs", "sam", "sam by hand", "split", "head then all", "late group", "again", *ORDERS
)  # fmt: skip


class Recorder:
    """What a run of a program tells the recording; subclasses mark steps, follow optimizers and log."""

    def __init__(self, watch: Any = None, style: str = "") -> None:
        self.watch, self.style = watch, style

    def follow(self, *optimizers: Any) -> None:
        if self.watch is not None and self.style == "follow":
            self.watch.follow(*optimizers)

    def step(self, number: int) -> AbstractContextManager[Any]:
        if self.watch is not None and self.style == "blocks":
            return self.watch.step(number)
        if self.watch is not None and self.style == "set_step":
            self.watch.set_step(number)
        return nullcontext()

    def log(self, value: Tensor) -> None:
        if self.watch is not None:
            self.watch.log(loss=value)


class Run:
    """Execute a program once, with an oracle or with a recorder."""

    def __init__(self, program: Program, watching: Callable[[Any], Any] | None) -> None:
        self.program = program
        self.oracle = Oracle() if watching is None else None
        torch.manual_seed(program.seed)
        if program.optimizer in ORDERS:
            order = ORDERS[program.optimizer](program.steps)
            names = sorted({name for name, _ in order} | ({"B"} if program.optimizer == "idle" else set()))
            self.models = {name: MODELS["mlp"]() for name in names}
            target: Any = self.models
        else:
            self.models = {"": MODELS[program.model]()}
            target = self.models[""]
        for name, model in self.models.items():
            model.train(program.training)
            if self.oracle is not None:
                self.oracle.see(model, name)
        self._watching, self._target = watching, target
        self.watch = None if watching is None else watching(target)
        self.lost: list[str] = []
        self.recorder = Recorder(self.watch, program.style)
        self.last = -1  # the newest step with an update
        self.first = 0  # of the open watch
        self.losses: list[float] = []

    @property
    def final(self) -> int:
        """The last step of the open watch."""
        return self.program.resumed - 1 if self.first < self.program.resumed else self.program.steps - 1

    def close(self) -> None:
        """End the open watch."""
        if self.watch is not None:
            self.watch.close()
            self.lost += self.watch.lost

    def resume(self, step: int, optimizers: list[Any]) -> None:
        """Go on with another watch, as a script does that was started again."""
        self.close()
        self.first = step
        self.last = -1
        if self._watching is not None:
            self.watch = self._watching(self._target)
            self.recorder = Recorder(self.watch, self.program.style)
            if self.program.style == "follow":
                self.watch.follow(*optimizers, start=step)

    def change(self, model: nn.Module) -> None:
        """Wrap or replace the module that was called last."""
        name, old = list(model.named_children())[-1]
        assert isinstance(old, nn.Linear)
        made = (
            Wrapped(old) if self.program.change[1] == "wrap" else nn.Linear(old.in_features, old.out_features)
        )
        setattr(model, name, made.train(self.program.training))
        if self.oracle is not None:
            self.oracle.see_again()

    @contextmanager
    def labelled(self, label: Label) -> Iterator[None]:
        if self.oracle is None:
            yield
            return
        before, self.oracle.label = self.oracle.label, label
        try:
            yield
        finally:
            self.oracle.label = before

    def extra(self, step: int, place: str, kind: str) -> None:
        """A pass that is no training, in any mode and place."""
        program = self.program
        model = next(iter(self.models.values()))
        evaluates = kind.startswith("eval")
        if evaluates:
            model.eval()
        grad = kind in ("unused", "eval_grad")
        with self.labelled(self.label_of(step, place, evaluates or not program.training, grad)):
            with nullcontext() if grad else torch.no_grad():
                model(torch.randn(3, 4))
        model.train(program.training)

    def label_of(self, step: int, place: str, evaluates: bool, grad: bool) -> Label:
        """The step and phase of a pass that no backward runs through."""
        style, final, first = self.program.style, self.final, self.first
        if place == "inside" or style == "set_step":
            return step, "eval" if evaluates else "forward"
        if style == "blocks":
            if place == "pre" and step == first:
                if not evaluates and grad:
                    return None
                return first, "eval" if evaluates else "forward"
            if not evaluates and grad:
                return None
            return (step - 1 if place == "pre" else step), "eval"
        if evaluates:
            return (max(self.last, first) if place == "pre" else step), "eval"
        if place == "pre":
            return step, "forward"
        if step < final:
            return step + 1, "forward"
        # No hooks where the next step would be. Two optimizers may still take turns in the first step of a watch.
        open_turns = self.program.optimizer == "split" and final == first and step % self.program.every == 0
        return (step, "eval") if self.program.every == 1 or open_turns else None

    def extras(self, step: int, place: str) -> None:
        for at, where, kind in self.program.extras:
            if (at, where) == (step, place):
                self.extra(step, place, kind)

    def log(self, step: int, loss: Tensor) -> None:
        self.recorder.log(loss.detach())
        if self.oracle is not None:
            self.oracle.numbers[step, "loss"] = float(loss.detach())

    def abort(self, step: int, model: nn.Module) -> None:
        """A forward that raises halfway, which the loop catches."""
        label = (step, "forward" if model.training else "eval")
        follows = self.program.style == "follow"
        if not model.training and follows:
            label = (max(self.last, self.first), "eval")
        handle = list(model.modules())[-1].register_forward_pre_hook(_fail)
        try:
            with self.labelled(label):
                model(torch.randn(2, 4))
        except ArithmeticError:
            pass
        finally:
            handle.remove()

    # -- one update ---------------------------------------------------------------------------------------

    def forward(self, step: int, model: nn.Module, log: bool = False) -> Tensor:
        with self.labelled((step, "train")):
            loss = model(torch.randn(3, 4)).pow(2).mean() / self.program.micro
        if log and self.program.log == "before":
            self.log(step, loss)
        return loss

    def before(self, optimizer: Any) -> dict[int, Tensor]:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        return {id(each): each.detach().clone() for each in held}

    def gradients(self, step: int, model: nn.Module) -> None:
        """What the optimizer uses."""
        if self.oracle is not None:
            found = {
                id(each): each.grad.detach().clone() for each in model.parameters() if each.grad is not None
            }
            self.oracle.parameters(step, "param_grad", set(found), found)

    def after(self, step: int, model: nn.Module, before: dict[int, Tensor], moved: bool = True) -> None:
        if self.oracle is not None:
            every = {id(each): each.detach().clone() for each in model.parameters()}
            self.oracle.parameters(step, "param", set(every), every | before)
            if moved:
                change = {key: every[key] - value for key, value in before.items() if key in every}
                self.oracle.parameters(step, "update", set(change), change)
        self.last = step


def _fail(*_: object) -> None:
    raise ArithmeticError("a bad batch")


def run(program: Program, watching: Callable[[Any], Any] | None = None) -> Run:
    """Execute a program; ``watching`` makes a watch of its model or models."""
    made = Run(program, watching)
    if program.optimizer in ORDERS:
        _several(made)
    else:
        _single(made)
    made.close()
    return made


def _several(made: Run) -> None:
    program = made.program
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.1) for name, model in made.models.items()}
    made.recorder.follow(*optimizers.values())
    seen: set[str] = set()
    for name, step in ORDERS[program.optimizer](program.steps):
        model, optimizer = made.models[name], optimizers[name]
        optimizer.zero_grad()
        for _ in range(program.micro):
            made.forward(step, model).backward()
        before = made.before(optimizer)
        made.gradients(step, model)
        optimizer.step()
        made.after(step, model, before)
        seen.add(name)
    _idle_parameters(made)


def _idle_parameters(made: Run) -> None:
    """Parameters that no update of a step touched are recorded as they are at its end; gradients, too."""
    if made.oracle is None:
        return
    made.oracle.values = {
        key: value
        for key, value in made.oracle.values.items()
        if not key[2].partition(":")[2].startswith("param")
    }


def _optimizer(program: Program, model: nn.Module) -> list[Any]:
    parameters = list(model.parameters())
    match program.optimizer:
        case "adamw":
            return [torch.optim.AdamW(parameters, 1e-2)]
        case "lbfgs":
            return [torch.optim.LBFGS(parameters, 0.1, max_iter=3)]
        case "sam" | "sam by hand":
            return [Sam(parameters, lr=0.1)]
        case "split":
            return [torch.optim.SGD(parameters[:2], 0.1), torch.optim.SGD(parameters[2:], 0.1)]
        case "head then all":
            return [torch.optim.Adam(parameters[-2:], 1e-2), torch.optim.Adam(parameters, 1e-3)]
        case "late group":
            return [torch.optim.SGD(parameters[:2], 0.1)]
    return [torch.optim.SGD(parameters, 0.1)]


def _single(made: Run) -> None:
    program, model = made.program, made.models[""]
    optimizers = _optimizer(program, model)
    made.recorder.follow(*optimizers)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000, enabled=program.scaler)
    for step in range(program.steps):
        if step and step == program.resumed:
            made.resume(step, optimizers)
        if program.change[1] != "none" and step == program.change[0]:
            made.change(model)
        if program.style == "set_step":
            made.recorder.step(step)
        made.extras(step, "pre")
        if program.optimizer == "again" and step == 2:
            optimizers = _optimizer(program, model)
            made.recorder.follow(*optimizers)
        if program.optimizer == "late group" and step == 1:
            optimizers[0].add_param_group({"params": list(model.parameters())[2:]})
        used = optimizers
        if program.optimizer == "head then all":
            used = optimizers[:1] if step < program.steps // 2 else optimizers[1:]
        with made.recorder.step(step) if program.style == "blocks" else nullcontext():
            if step in program.aborted:
                made.abort(step, model)
            loss = _update(made, step, model, used, scaler)
        made.losses.append(float(loss.detach()))
        if program.log == "after extra":
            made.extra(step, "post", "unused") if program.style == "follow" else None
        if program.log.startswith("after"):
            made.log(step, loss)
        made.extras(step, "post")


def _update(made: Run, step: int, model: nn.Module, used: list[Any], scaler: Any) -> Tensor:
    program = made.program
    if program.optimizer in ("closure", "lbfgs", "sam"):
        return _by_closure(made, step, model, used[0])
    model.zero_grad()
    for each in used:
        each.zero_grad()
    loss = torch.zeros(())
    inside = True
    for number in range(program.micro):
        loss = made.forward(step, model, log=number == program.micro - 1)
        if inside:
            made.extras(step, "inside")
            inside = False
        if program.scaler and step % 3 == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
    if program.optimizer == "sam by hand":
        used[0].first_step()
        made.forward(step, model).backward()
        used[0].second_step_pending = True
    return _apply(made, step, model, used, scaler, loss)


def _apply(made: Run, step: int, model: nn.Module, used: list[Any], scaler: Any, loss: Tensor) -> Tensor:
    program = made.program
    if program.scaler:
        scaler.unscale_(used[0])
    if program.clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    made.gradients(step, model)
    before: dict[int, Tensor] = {}
    for each in used:
        if program.optimizer == "sam by hand":
            before |= {id(p): state["old"].clone() for p, state in each.state.items()}
            each.second_step()
            continue
        before |= made.before(each)
        scaler.step(each)
    if program.scaler:
        scaler.update()
    made.after(step, model, before, moved=not (program.scaler and step % 3 == 1))
    return loss


def _by_closure(made: Run, step: int, model: nn.Module, optimizer: Any) -> Tensor:
    x = torch.randn(3, 4)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        optimizer.zero_grad()
        with made.labelled((step, "train")):
            loss = model(x).pow(2).mean()
        loss.backward()
        calls += 1
        return loss

    if made.program.optimizer == "sam":
        loss = closure()
    before = made.before(optimizer)
    loss = optimizer.step(closure)
    made.gradients(step, model)
    made.after(step, model, before)
    return loss if isinstance(loss, Tensor) else torch.tensor(float(loss))


def compare(program: Program, oracle: Oracle, kept: Any) -> list[str]:
    """Return every difference between what plain hooks saw and what was recorded."""
    reported = {tuple(map(str, each)) for each in kept.reported}
    expected = {
        key: value
        for key, value in oracle.values.items()
        if key[0] % program.every == 0 and (str(key[0]), key[1]) not in reported
    }
    recorded = {
        key: value
        for key, value in kept.numbers().items()
        if "count" in value
        and (program.optimizer not in ORDERS or ":param" not in key[2])
        and (str(key[0]), key[1]) not in reported
    }
    wrong = [f"only by hand: {key}" for key in sorted(expected.keys() - recorded.keys())]
    wrong += [f"only recorded: {key}" for key in sorted(recorded.keys() - expected.keys())]
    for key in expected.keys() & recorded.keys():
        whole = torch.cat([tensor.double().flatten() for tensor in expected[key]])
        finite = whole[whole.isfinite()]
        numbers = {"count": float(len(whole)), "l2": finite.norm().item()}
        if len(finite):
            numbers |= {"mean": finite.mean().item(), "absmax": finite.abs().max().item()}
        for statistic, number in numbers.items():
            got = recorded[key][statistic]
            if not math.isclose(got, number, rel_tol=1e-5, abs_tol=1e-6):
                wrong.append(f"{key} {statistic}: {got} instead of {number}")
    logged = {
        (key[0], "loss"): value["value"] for key, value in kept.numbers().items() if key[2] == ":value.loss"
    }
    if logged.keys() != oracle.numbers.keys():
        wrong.append(f"logged at {sorted(logged)} instead of {sorted(oracle.numbers)}")
    for at, number in oracle.numbers.items():
        if not math.isclose(logged.get(at, math.nan), number, rel_tol=1e-6, abs_tol=1e-9) and math.isfinite(
            number
        ):
            wrong.append(f"{at}: logged {logged.get(at)} instead of {number}")
    return wrong
