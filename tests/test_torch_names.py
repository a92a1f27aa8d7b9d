"""What is private to torch stands in one file, and a name that is gone costs its own form alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtap as tt
from torchtap import _torch
from torchtap.errors import FormError

SOURCE = Path(__file__).parents[1] / "src" / "torchtap"


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(tree: ast.AST) -> Iterator[str]:
    """The private names of torch that a file asks for: by import, as attributes, as the names of modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", ast.unparse(node)):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = node.value.startswith(("torch.", "_torchdynamo")) and " " not in node.value
            yield from [node.value] if is_name else []


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "_torch.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_other_file_asks_torch_for_a_private_name(path: Path) -> None:
    file = path.relative_to(SOURCE).as_posix()
    found = {name for name in private_names(ast.parse(path.read_text())) if is_private(name)}
    asked = sorted(found)
    assert not asked, f"{file} asks for {', '.join(asked)}: put it into _torch.py"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C import StringType",
        "from torch.utils import _pytree as pytree",
        "def f():\n    return torch._C._functorch.maybe_get_bdim",
        "import sys; sys.modules.get('torch._dynamo.eval_frame')",
    ],
)
def test_each_way_of_asking_is_noticed(source: str) -> None:
    assert any(is_private(name) for name in private_names(ast.parse(source)))


def test_importing_the_names_loads_no_compiler() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import torchtap._torch; "
        "print([name for name in set(sys.modules) - before if name.startswith('torch.')])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


def seen_in(model: nn.Module) -> torch.Tensor:
    with tt.capture(model, "inner:output") as seen:
        model(torch.ones(1, 3))
    return seen["inner:output"]


def test_a_torch_without_a_compilers_name_refuses_compiled_models_and_records_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._dynamo.eval_frame

    from torchtap.forms import compiled

    monkeypatch.delattr(torch._dynamo.eval_frame, "skip_code")
    compiled._never_compile_alone.cache_clear()
    model = Net()
    with pytest.raises(
        FormError, match=r"no torch\._dynamo\.eval_frame\.skip_code.*record inside compiled models"
    ):
        seen_in(torch.compile(model, backend="eager"))
    torch.testing.assert_close(seen_in(model), model.inner(torch.ones(1, 3)))
    compiled._never_compile_alone.cache_clear()


def test_a_torch_without_a_scripts_name_refuses_scripted_models_and_records_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Net()
    scripted = torch.jit.script(model)
    monkeypatch.delattr(torch._C, "StringType")
    with pytest.raises(FormError, match=r"no torch\._C\.StringType"):
        seen_in(scripted)
    torch.testing.assert_close(seen_in(model), model.inner(torch.ones(1, 3)))


def test_a_torch_without_a_shortcut_takes_the_longer_way(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [torch.randn(3, 4), torch.randn(5)]
    together = list(_torch.foreach_norm(values, 2, None))
    monkeypatch.delattr(torch, "_foreach_norm")
    torch.testing.assert_close(list(_torch.foreach_norm(values, 2, None)), together)


def test_where_torch_does_not_tell_the_careful_answer_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _torch.has_global_hooks()
    monkeypatch.delattr(torch.nn.modules.module, "_has_any_global_hook")
    assert _torch.has_global_hooks()


def test_a_users_backend_is_found_inside_of_what_dynamo_wraps_around_it() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        return graph.forward

    compiled = torch.compile(nn.Linear(2, 2), backend=backend)
    found = _torch.user_backend(compiled.dynamo_ctx.callback)
    assert backend in (found, getattr(found, "compiler_fn", None))  # a function is kept with its options
