"""Two models, two optimizers, one loop."""

import torch
from torch import nn

torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x):
        return self.main(x)


netG, netD = Generator(), Discriminator()
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for step in range(5):
    netD.zero_grad()
    errD_real = criterion(netD(torch.randn(6, 8)), torch.ones(6, 1))
    errD_real.backward()
    fake = netG(torch.randn(6, 4))
    errD_fake = criterion(netD(fake.detach()), torch.zeros(6, 1))
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    errG = criterion(netD(fake), torch.ones(6, 1))
    errG.backward()
    optimizerG.step()
    print("loss", step, (errD_real + errD_fake + errG).item())
