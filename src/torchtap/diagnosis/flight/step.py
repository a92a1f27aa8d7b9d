"""One step of a training, kept to be run again: batch, weights, random state and what its backward passes received.

A pass is kept from its call until the optimizer has used it, and a few steps longer: copies of the arguments, the
random state, modes, autocast and buffers, and the gradients that backward passes hand to the model's outputs. With
these and the weights, forward and backward give the same bits again, for any loss. Kept passes take at most ``limit``
bytes; the oldest go first, and a step that lost a pass records it.

The file of a kept step is ``moment/rank-0.pt``, one for each rank, beside the run's own files. It holds tensors,
numbers and text in plain containers, so that ``torch.load`` reads it without running code. An argument of another
type is kept as the tensors in it; if even that is impossible it is None, and ``notes`` records it.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from torchtap._torch import graph_task, version_of
from torchtap.errors import RunFormatError, RunNotFoundError
from torchtap.forms.op.passes import PassHooks
from torchtap.hooks.leaves import Args, Kwargs, plain
from torchtap.spi import RandomState, ask_for_gradient, leaves, map_leaves, unwrap


def arithmetic() -> dict[str, object]:
    """How this process computes."""
    return {
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
    }


@contextmanager
def with_arithmetic(settings: dict[str, object]) -> Iterator[None]:
    """Compute as these settings say, and then as before."""
    before = arithmetic()
    _set({**before, **settings})
    try:
        yield
    finally:
        _set(before)


def _set(settings: dict[str, Any]) -> None:
    torch.set_num_threads(int(settings["threads"]))
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    torch.use_deterministic_algorithms(bool(settings["deterministic"]))
    torch.backends.cudnn.benchmark = bool(settings["cudnn_benchmark"])


class Autocast(NamedTuple):
    """One device's autocast, where it was on."""

    device: str
    dtype: torch.dtype

    @classmethod
    def now(cls) -> tuple[Autocast, ...]:
        """What is on in this thread."""
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return tuple(cls(d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))


@final
@dataclass(slots=True, eq=False)
class Pass:
    """One call of one model."""

    model: str
    args: Args
    kwargs: Kwargs
    random: RandomState
    modes: tuple[bool, ...]  # of all modules
    autocast: tuple[Autocast, ...]
    buffers: tuple[Tensor | None, ...]
    numbers: dict[
        tuple[int, str], Any
    ]  # plain attributes that change from pass to pass, by the module's position
    nbytes: int
    # backward pass -> output -> what it was handed. In the order in which they ran.
    seeds: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @contextmanager
    def conditions(self, model: nn.Module) -> Iterator[None]:
        """As the call found them: to be used inside `untouched`."""
        modules = list(unwrap(model).modules())
        if len(modules) == len(self.modes):
            for module, mode in zip(modules, self.modes, strict=True):
                module.training = mode
        for (holder, name), buffer in zip(_buffers_of(model), self.buffers, strict=False):
            if buffer is not None:
                holder._buffers[name] = buffer.clone()
        for (position, attribute), value in self.numbers.items():
            setattr(modules[position], attribute, value)
        self.random.put_back()
        with ExitStack() as stack:
            for each in self.autocast:
                stack.enter_context(torch.autocast(each.device, each.dtype))
            yield


@final
@dataclass(slots=True, eq=False)
class StepPasses:
    """The passes that led to one update."""

    step: int
    passes: list[Pass] = field(default_factory=list)
    dropped: int = 0  # passes that the limit did not leave room for


@final
class PassKeeper:
    """Keeps the passes of the last steps. ``where`` tells the number of the step that is open."""

    def __init__(
        self, models: Mapping[str, nn.Module], where: Callable[[], int], *, steps: int, limit: int
    ) -> None:
        self._where = where
        self._limit = limit
        self._held = 0
        self._paused = False
        self.current: StepPasses | None = None
        self.earlier: deque[StepPasses] = deque(maxlen=max(steps - 1, 0))
        self._listeners = [_OneModel(self, name, model) for name, model in models.items()]
        for each in self._listeners:
            each.hooks.switch_on()

    def add(self, kept: Pass) -> None:
        """A model was called."""
        if self.current is None:
            self.current = StepPasses(self._where())
        self.current.passes.append(kept)
        self._held += kept.nbytes
        while self._held > self._limit:
            self._drop_oldest()

    def take_seed(self, of: Pass, leaf: str, gradient: Tensor | None) -> None:
        """A backward pass has reached an output."""
        if not self._paused and gradient is not None:
            of.seeds.setdefault(graph_task(), {})[leaf] = gradient.detach()

    def next_step(self) -> None:
        """The optimizer has used the passes."""
        done, self.current = self.current, None
        if done is None:
            return
        for each in done.passes:
            each.seeds.clear()  # with these weights gone, they serve nothing
        if self.earlier.maxlen == 0 or len(self.earlier) == self.earlier.maxlen:
            gone = self.earlier.popleft() if self.earlier else done
            self._held -= sum(each.nbytes for each in gone.passes)
        if self.earlier.maxlen:
            self.earlier.append(done)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which calls are not kept."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def listens(self) -> bool:
        """Return True if a call that comes now is one of the training."""
        return not self._paused and torch.is_grad_enabled() and graph_task() == -1

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return self._held

    def stop(self) -> None:
        """Leave the models as they were."""
        for each in self._listeners:
            each.hooks.switch_off()
        self.current = None
        self.earlier.clear()
        self._held = 0

    def _drop_oldest(self) -> None:
        steps = [*self.earlier, *([self.current] if self.current is not None else [])]
        oldest = next(each for each in steps if each.passes)
        self._held -= oldest.passes.pop(0).nbytes
        oldest.dropped += 1


class _OneModel:
    """Hears the calls of one model."""

    def __init__(self, keeper: PassKeeper, name: str, model: nn.Module) -> None:
        self._keeper, self._name, self._model = keeper, name, model
        self._modules = list(unwrap(model).modules())
        self._buffers = _buffers_of(model)
        self._snapshot: list[tuple[Tensor | None, int, Tensor | None]] = [(None, -1, None)] * len(
            self._buffers
        )
        self._counters = _Counters(self._modules)
        self._open: list[Pass] = []
        self.hooks = PassHooks(model, self, self._returned, self._called)

    def begin_pass(self, training: bool | None = None) -> None:
        pass

    def end_pass(self) -> None:
        if self._open:
            self._open.pop()

    def _called(self, args: Args, kwargs: Kwargs) -> None:
        if not self._keeper.listens:
            return
        (own_args, own_kwargs), nbytes = copied((args, kwargs))
        kept = Pass(
            self._name, own_args, own_kwargs, RandomState.now(), tuple(m.training for m in self._modules),
            Autocast.now(), self._buffers_now(), self._counters.now(), nbytes,
        )  # fmt: skip
        self._open.append(kept)
        self._keeper.add(kept)

    def _returned(self, output: object) -> None:
        if self._open and self._keeper.listens:
            for leaf, tensor in leaves(output):
                if tensor.requires_grad:
                    ask_for_gradient(tensor, partial(self._keeper.take_seed, self._open[-1], leaf))

    def _buffers_now(self) -> tuple[Tensor | None, ...]:
        """Copies of the buffers; those that did not change since the last pass share theirs."""
        for position, (holder, name) in enumerate(self._buffers):
            buffer = holder._buffers.get(name)
            known, version, _ = self._snapshot[position]
            if buffer is None:
                self._snapshot[position] = (None, -1, None)
            elif buffer is not known or version_of(buffer) != version or version < 0:
                self._snapshot[position] = (buffer, version_of(buffer), buffer.detach().clone())
        return tuple(copy for _, _, copy in self._snapshot)


class _Counters:
    """Plain numbers that modules count for themselves, such as how often they were called.

    All are looked at in the first passes; those that have changed by then are kept from then on.
    """

    _LOOKS = 3

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._before: dict[tuple[int, str], object] = {}
        self._changing: set[tuple[int, str]] = set()
        self._looks = 0

    def now(self) -> dict[tuple[int, str], Any]:
        """The numbers that change, as they are."""
        if self._looks <= self._LOOKS:
            found = {
                (position, name): value
                for position, module in enumerate(self._modules)
                for name, value in module.__dict__.items()
                if type(value) in (int, float, bool) and name != "training"
            }
            self._changing |= {key for key, value in found.items() if self._before.get(key, value) != value}
            self._before = found
            self._looks += 1
            return found
        return {
            (position, name): self._modules[position].__dict__.get(name) for position, name in self._changing
        }


def copied(tree: object) -> tuple[Any, int]:
    """A structure with copies of its tensors, which need gradients as the tensors did, and the copies' size."""
    known: dict[int, Tensor] = {}

    def copy(_: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            own = tensor.detach().clone()
            known[id(tensor)] = own.requires_grad_() if tensor.requires_grad else own
        return known[id(tensor)]

    made = map_leaves(tree, copy)
    return made, sum(each.element_size() * each.nelement() for each in known.values())


def _buffers_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(module, name) for module in unwrap(model).modules() for name in module._buffers]


@final
@dataclass(slots=True, eq=False)
class Replayed:
    """What came of it. ``gradients`` are by the parameter's id; ``error`` is what a pass raised."""

    outputs: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    error: Exception | None = None

    def add(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Accumulate a gradient, as ``.grad`` would."""
        if gradient is not None:
            known = self.gradients.get(id(parameter))
            self.gradients[id(parameter)] = gradient if known is None else known + gradient


def replay(
    passes: Sequence[Pass], models: Mapping[str, nn.Module], inputs: Sequence[tuple[Any, Any]] | None = None
) -> Replayed:
    """Run passes again; to be called inside `untouched`. ``inputs``: arguments to use, else copies of the kept."""
    result = Replayed()
    waiting = _backwards(passes)
    try:
        for number, each in enumerate(passes):
            model = models[each.model]
            args, kwargs = inputs[number] if inputs is not None else copied((each.args, each.kwargs))[0]
            with each.conditions(model):
                output = model(*args, **kwargs)
            result.outputs.append(dict(leaves(output)))
            while waiting and max(waiting[0][1]) <= number:
                task, members = waiting.pop(0)
                _backward(result, passes, members, task, models)
            if not any(number in members for _, members in waiting):
                result.outputs[number] = {
                    leaf: value.detach() for leaf, value in result.outputs[number].items()
                }
    except Exception as error:  # a step that raised is replayed to see where
        result.error = error
    return result


def _backwards(passes: Sequence[Pass]) -> list[tuple[int, list[int]]]:
    """The backward passes in the order in which they ran, with the numbers of the passes that they went through."""
    members: dict[int, list[int]] = {}
    for number, each in enumerate(passes):
        for task in each.seeds:
            members.setdefault(task, []).append(number)
    return sorted(members.items())


def _backward(
    result: Replayed,
    passes: Sequence[Pass],
    members: Sequence[int],
    task: int,
    models: Mapping[str, nn.Module],
) -> None:
    """One backward pass through these passes; its gradients are added to the result's."""
    found: list[tuple[Tensor, Tensor]] = []
    for number in members:
        found += _independent(_roots(result.outputs[number], passes[number].seeds[task]))
    parameters = _trained(models[name] for name in {passes[number].model for number in members})
    if not found or not parameters:
        return
    targets, seeds = (list(each) for each in zip(*found, strict=True))
    try:
        gradients = list(
            torch.autograd.grad(targets, parameters, seeds, retain_graph=True, allow_unused=True)
        )
    except RuntimeError as error:
        if "checkpoint" not in str(error):
            raise
        gradients = _by_backward(targets, seeds, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        result.add(parameter, gradient)


def _roots(outputs: Mapping[str, Tensor], handed: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The outputs that a backward pass began at, each with what it was handed.

    One tensor may stand at several places of an output; its gradient counts once.
    """
    roots = {leaf: outputs[leaf] for leaf in handed if leaf in outputs and outputs[leaf].requires_grad}
    return list({id(root): (root, handed[leaf]) for leaf, root in roots.items()}.values())


def _trained(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of some models that take gradients, each once."""
    parameters = [each for model in models for each in model.parameters()]
    return list({id(each): each for each in parameters if each.requires_grad and each.is_leaf}.values())


def _by_backward(roots: list[Tensor], seeds: list[Tensor], parameters: list[nn.Parameter]) -> list[Any]:
    """Reentrant checkpoints know no other way. A hook that would step an optimizer now must not be there."""
    if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters):
        raise RuntimeError(
            "the model has reentrant checkpoints and hooks on accumulated gradients: no replay of its backward"
        )
    torch.autograd.backward(roots, seeds)
    gradients = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    return gradients


def _independent(found: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Without the outputs whose gradient came through another output alone, as logits' does through the loss.

    What an output was handed is the sum over everything that used it, so the part that the others account for is
    taken away again; there a last bit may differ, and the comparison of gradients tells.
    """
    if len(found) < 2:
        return found
    kept = []
    for position, (root, seed) in enumerate(found):
        others = [pair for number, pair in enumerate(found) if number != position]
        below = [pair for pair in others if _leads_to(pair[0], root)]
        if not below:
            kept.append((root, seed))
            continue
        targets, seeds = [pair[0] for pair in below], [pair[1] for pair in below]
        through = torch.autograd.grad(targets, [root], seeds, retain_graph=True)[0]
        if not torch.equal(through.nan_to_num(), seed.nan_to_num()):
            # Where the way through the others is not finite, nothing tells what came past it.
            kept.append((root, torch.where(through.isfinite(), seed - through, 0)))
    return kept


def _leads_to(result: Tensor, value: Tensor) -> bool:
    """Return True if ``result`` was computed from ``value``."""
    wanted, waiting, seen = value.grad_fn, _above(result.grad_fn), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node is wanted:
            return True
        seen.add(node)
        waiting += _above(node)
    return False


def _above(node: Node | None) -> list[Node | None]:
    return [] if node is None else [each for each, _ in node.next_functions]


_FORMAT = 1
_SIMPLE = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size)


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepSnapshot:
    """A step as it was just before the optimizer's update."""

    step: int
    reason: str
    steps: tuple[StepPasses, ...]  # the last is the step itself, those before it came before it
    weights: Mapping[str, Mapping[str, Tensor]]  # of each model; nothing where they were changed already
    notes: tuple[str, ...] = ()
    arithmetic: dict[str, object] = field(default_factory=arithmetic)

    @property
    def passes(self) -> list[Pass]:
        """Those of the step itself."""
        return self.steps[-1].passes if self.steps and self.steps[-1].step == self.step else []

    def save(self, folder: Path, rank: int) -> Path:
        """Write the file; a half-written one is never seen under its name."""
        path = folder / "moment" / f"rank-{rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)  # a link there is not written through
        torch.save(self._plain(), part)
        os.replace(part, path)
        return path

    def _plain(self) -> dict[str, object]:
        notes = list(self.notes)
        return {
            "format": _FORMAT,
            "step": self.step,
            "reason": self.reason,
            "steps": [
                {
                    "step": each.step,
                    "dropped": each.dropped,
                    "passes": [_plain_pass(one, notes) for one in each.passes],
                }
                for each in self.steps
            ],
            "weights": {name: _on_host(state) for name, state in self.weights.items()},
            "notes": list(dict.fromkeys(notes)),
            "arithmetic": self.arithmetic,
        }

    @classmethod
    def load(cls, folder: str | os.PathLike[str], rank: int = 0) -> Self:
        """Read the file of one rank. No code of whoever wrote it is run."""
        path = Path(folder) / "moment" / f"rank-{rank}.pt"
        if not path.is_file():
            raise RunNotFoundError(
                f"there is no kept moment at {path}: a dump of a flight recorder has one, any other run has none"
            )
        try:
            data = torch.load(path, map_location="cpu", weights_only=True)
            if data["format"] != _FORMAT:
                raise RunFormatError(
                    f"{path} has format {data['format']!r}; this torchtap reads {_FORMAT}: use a newer one"
                )
            steps = tuple(
                StepPasses(each["step"], [_read_pass(one) for one in each["passes"]], each["dropped"])
                for each in data["steps"]
            )
            notes = tuple(data["notes"])
            return cls(data["step"], data["reason"], steps, data["weights"], notes, data["arithmetic"])
        except RunFormatError:
            raise
        except Exception as error:
            raise RunFormatError(f"{path} is no kept moment that can be read: {error}") from error

    def load_weights(self, models: Mapping[str, nn.Module]) -> None:
        """Put the kept weights into models."""
        for name, model in models.items():
            unwrap(model).load_state_dict(self.weights[name])


def _plain_pass(each: Pass, notes: list[str]) -> dict[str, object]:
    return {
        "model": each.model,
        "args": [_storable(value, f"argument {number}", notes) for number, value in enumerate(each.args)],
        "kwargs": {name: _storable(value, name, notes) for name, value in each.kwargs.items()},
        "random": each.random.plain(),
        "modes": list(each.modes),
        "autocast": [list(one) for one in each.autocast],
        "buffers": [None if one is None else one.cpu() for one in each.buffers],
        "numbers": [[position, name, value] for (position, name), value in each.numbers.items()],
        "nbytes": each.nbytes,
        "seeds": {
            task: {leaf: seed.cpu() for leaf, seed in seeds.items()} for task, seeds in each.seeds.items()
        },
    }


def _read_pass(data: dict[str, Any]) -> Pass:
    return Pass(
        data["model"],
        tuple(data["args"]),
        dict(data["kwargs"]),
        RandomState.from_plain(data["random"]),
        tuple(data["modes"]),
        tuple(Autocast(device, dtype) for device, dtype in data["autocast"]),
        tuple(data["buffers"]),
        {(position, name): value for position, name, value in data["numbers"]},
        data["nbytes"],
        data["seeds"],
    )


def _storable(value: object, what: str, notes: list[str]) -> object:
    """An argument in plain containers; what cannot be had is None, and noted."""

    def other(one: object) -> Any:
        if isinstance(one, _SIMPLE):
            return one
        notes.append(f"{what}: a {type(one).__name__} cannot be kept in a file and is None there")
        return None

    whole = map_leaves(plain(value), lambda _, tensor: _to_host(tensor), other)
    if _is_safe(whole):
        return whole
    notes.append(f"{what}: a {type(value).__name__} cannot be kept in a file and is None there")
    return None


def _is_safe(value: object) -> bool:
    small = map_leaves(value, lambda _, tensor: torch.empty(0, dtype=tensor.dtype))
    buffer = io.BytesIO()
    try:
        torch.save(small, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:
        return False
    return True


def _to_host(tensor: Tensor) -> Tensor:
    own = tensor.detach().cpu()
    return own.requires_grad_() if tensor.requires_grad else own


def _on_host(state: Mapping[str, object]) -> dict[str, object]:
    return {name: value.detach().cpu() for name, value in state.items() if isinstance(value, Tensor)}
