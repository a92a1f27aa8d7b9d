"""An image classifier with a DataLoader whose workers import torch, and a main guard."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(24, 1, 8, 8), torch.randint(0, 3, (24,)))
    context = sys.argv[1] if len(sys.argv) > 1 else "fork"
    loader = DataLoader(data, batch_size=6, num_workers=1, multiprocessing_context=context)
    step = 0
    for epoch in range(2):
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", step, loss.item())
            step += 1
        model.eval()
        with torch.no_grad():
            correct = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
        print("correct", epoch, correct)


if __name__ == "__main__":
    main()
