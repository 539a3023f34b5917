"""Training steps of a user's own for tests: rows of 6 numbers to 3 classes, and a GAN of such rows."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "own-models.md"


def of_the_page(file: str) -> str:
    """The code of that file of the documents' project."""
    (code,) = re.findall(rf"`project/{re.escape(file)}`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(code)


# The methods of a LightningModule, without Lightning. EMA of the weights, schedulers of steps and of epochs, noise.
CLASSIFIER = """
import random

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Classifier(nn.Module):
    def __init__(self, width=16, rate=0.05, interval="step", noise=0.01, norm=True):
        super().__init__()
        self.rate, self.interval, self.noise = rate, interval, noise
        self.body = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width) if norm else nn.Identity(), nn.ReLU(), nn.Linear(width, 3)
        )
        self.average = AveragedModel(self.body, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.epochs = 0

    def forward(self, inputs):
        return (self.body if self.training else self.average)(inputs)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.body.parameters(), lr=self.rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        if self.noise:
            inputs = inputs + self.noise * (random.random() + torch.rand(()))
        outputs = self(inputs)
        loss = nn.functional.cross_entropy(outputs, labels)
        self.log("train_accuracy", (outputs.argmax(1) == labels).float().mean(), prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update_parameters(self.body)

    def on_train_epoch_end(self):
        self.epochs += 1
        self.log("epochs_done", float(self.epochs))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["epochs"] = self.epochs

    def on_load_checkpoint(self, checkpoint):
        self.epochs = checkpoint["epochs"]

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        outputs = self(inputs)
        self.log("val_accuracy", (outputs.argmax(1) == labels).float().mean())
        self.log("val_epochs", float(self.epochs))
        return nn.functional.cross_entropy(outputs, labels)
"""

# It logs metrics of torchmetrics themselves, which no mean of batches gives.
MEASURED = (
    CLASSIFIER
    + """
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC


class Measured(Classifier):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.train_hits = MulticlassAccuracy(3, average="micro")
        self.auroc = MulticlassAUROC(3)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        outputs = self(inputs)
        self.train_hits(outputs, labels)
        self.log("train_hits", self.train_hits)
        return nn.functional.cross_entropy(outputs, labels)

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.auroc.update(self(inputs).softmax(1), labels)
        self.log("auroc", self.auroc)
"""
)

# Two optimizers, each with a scheduler, stepped by hand; each uses a part of the parameters.
GAN = of_the_page("gan.py")

# A LightningModule as its documents have it.
LIGHTNING = """
import lightning as L
import torch
from torch import nn


class Lit(L.LightningModule):
    def __init__(self, width=16, rate=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3))

    def forward(self, inputs):
        return self.body(inputs)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        self.log("train_loss", loss, on_step=True, prog_bar=True)
        self.log("at", float(self.current_epoch + self.global_step))
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        self.log("val_loss", loss, sync_dist=True)
"""
