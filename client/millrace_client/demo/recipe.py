"""What the demonstration trains, and for how long."""

from __future__ import annotations

from millrace.data.v1 import data_service_pb2
from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace.train.v1.resources_pb2 import TrainingSpec
from millrace_client.demo.digits import FILES
from millrace_client.specs import hold_out, idx_source, optimizer, training_spec
from millrace_client.steps import normalize, to_float

SEED = 17
VALIDATION_SHARE = 1 / 7
# MNIST's own, over its training pixels.
MEAN, STD = 0.1307, 0.3081
WORKERS = 2
GLOBAL_BATCH_ROWS = 128
# Enough for 98 % on MNIST: several epochs of a small set, one of the full one.
ROWS_TO_SEE = 18_000
MOST_EPOCHS = 15


def sources(folder_uri: str, suffix: str) -> list[data_service_pb2.ImportSource]:
    """MNIST's four files below a URI, as the splits `train` and `test`."""
    base = folder_uri.rstrip("/")
    train_images, train_labels, test_images, test_labels = (f"{base}/{name}{suffix}" for name in FILES)
    return [idx_source("train", train_images, train_labels), idx_source("test", test_images, test_labels)]


def hold_outs() -> list[data_service_pb2.HoldOut]:
    return [hold_out("train", "validation", VALIDATION_SHARE, seed=SEED)]


def spec(version: DatasetVersion, epochs: int = 0) -> TrainingSpec:
    """ResNet-18 on the version's training rows; `epochs` 0: by the number of rows."""
    (rows,) = (split.row_count for split in version.splits if split.name == "train")
    return training_spec(
        version.name,
        model="torchvision.resnet18",
        in_channels=1,
        num_classes=10,
        transform=[to_float(), normalize(MEAN, STD)],
        optimizer=optimizer("AdamW", 0.002, cosine=True),
        epochs=epochs or max(1, min(MOST_EPOCHS, round(ROWS_TO_SEE / rows))),
        global_batch_size=GLOBAL_BATCH_ROWS,
        num_workers=WORKERS,
        threads_per_worker=1,
        seed=SEED,
    )
