"""DDP under torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 4)).square().mean()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print("loss", step, loss.item(), flush=True)
dist.destroy_process_group()
