"""Small models that every form takes, one for each structure that a module may return or be given.

Each has an inner module ``made`` that returns the structure and uses every tensor of it, so that gradients reach
all of them. They are typed for TorchScript.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple  # noqa: UP035 - TorchScript reads these

import torch
from torch import Tensor, nn


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class OneTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class TwoTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        y = self.linear(x)
        return torch.tanh(y), torch.sin(y)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Pair:
        y = self.linear(x)
        return Pair(torch.tanh(y), torch.sin(y))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> List[Tensor]:  # noqa: UP006
        y = self.linear(x)
        return [torch.tanh(y), torch.sin(y), y * 2]


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Dict[str, Tensor]:  # noqa: UP006
        y = self.linear(x)
        return {"tanh": torch.tanh(y), "sine": torch.sin(y)}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tuple[List[Tensor], Dict[str, Tensor]]]:  # noqa: UP006
        y = self.linear(x)
        return torch.tanh(y), ([torch.sin(y), torch.cos(y)], {"twice": y * 2})


class Asking(nn.Module):
    """Several arguments of several types, some left out, some by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        others: list[Tensor],
        mask: Tensor | None = None,
        times: int = 2,
    ) -> Tensor:
        y = self.linear(x)
        for other in others:
            y = y + other
        if mask is not None:
            y = y * mask
        return y * times


class UsesTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = OneTensor()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.made(x))


class UsesTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = TwoTensors()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.made(x)
        return self.head(first + 2 * second)


class UsesNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = Named()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        pair = self.made(x)
        return self.head(pair.first + 2 * pair.second)


class UsesList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = Listed()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made = self.made(x)
        return self.head(made[0] + 2 * made[1] + made[2])


class UsesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = Keyed()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made = self.made(x)
        return self.head(made["tanh"] + 2 * made["sine"])


class UsesNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = Nested()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, (listed, keyed) = self.made(x)
        return self.head(first + listed[0] + 2 * listed[1] + 3 * keyed["twice"])


class UsesKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = Asking()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.made(x, [x * 2, x * 3], mask=torch.sigmoid(x)))


class Repeated(nn.Module):
    """One module called three times, another whose result is changed in place, two of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(4, 4)
        self.twin = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.made(x))
        return self.head(self.relu(self.twin(x)))


STRUCTURES: dict[str, type[nn.Module]] = {
    "tensor": UsesTensor,
    "tuple": UsesTuple,
    "namedtuple": UsesNamed,
    "list": UsesList,
    "dict": UsesDict,
    "nested": UsesNested,
    "keywords": UsesKeywords,
    "repeated": Repeated,
}
