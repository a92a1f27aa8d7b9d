"""A script around Lightning's Trainer."""

import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        print("loss", index, loss.item())
        return loss

    def validation_step(self, batch, index):
        self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(20, 8), torch.randint(0, 2, (20,))), batch_size=4)
pl.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(Classifier(), data, data)
