"""4-bit Shampoo in Lightning, on scikit-learn's digits: one line of ``configure_optimizers``.

Run it, and resume from a checkpoint (needs ``lightning``)::

    python examples/lightning_module.py
    python examples/lightning_module.py --epochs 20 --checkpoint "runs/lightning/epoch=9.ckpt"
"""

from __future__ import annotations

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kronbit import Shampoo


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        base = torch.optim.AdamW(self.parameters(), lr=3e-3)
        optimizer = Shampoo(base, first_refresh=5, update_every=10, refresh_every=20)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="runs/lightning")
    parser.add_argument("--checkpoint", help="resume from this checkpoint")
    arguments = parser.parse_args()

    lightning.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    trainer = lightning.Trainer(
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(arguments.out, filename="{epoch}", save_top_k=-1)],
        default_root_dir=arguments.out,
        logger=False,
        enable_progress_bar=False,
    )
    module = Digits()
    loader = DataLoader(data, batch_size=128, shuffle=True)
    # Checkpoints of kronbit hold only tensors and plain numbers, so weights_only=True works.
    trainer.fit(module, loader, ckpt_path=arguments.checkpoint, weights_only=True)
    print(f"loss {trainer.callback_metrics['loss']:.4f}")
    print(module.optimizers().optimizer.summary())


if __name__ == "__main__":
    main()
