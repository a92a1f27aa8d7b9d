"""Trainings of the sample project: each function returns a new model and a function that does one step."""

import torch
import torch.nn.functional as F
from torch import nn

from models import config, load


def train_gpt():
    model = load("gpt").train()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=4)

    def step(number):
        ids = torch.randint(0, 90, (4, 25), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss

    return model, step


def train_resnet():
    model = load("resnet").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    def step(number):
        generator = torch.Generator().manual_seed(number)
        images = torch.rand(8, 3, 32, 32, generator=generator) * 2 - 1
        labels = torch.randint(0, 10, (8,), generator=generator)
        total = 0.0
        optimizer.zero_grad()
        for part, truth in zip(images.chunk(2), labels.chunk(2)):
            loss = F.cross_entropy(model(part), truth, label_smoothing=0.1) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return model, step
