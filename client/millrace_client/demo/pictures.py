"""Draws the contact sheet and the learning curves as PNGs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from millrace_client.cli.progress import Curves
from millrace_client.demo.run import Served

COLUMNS, ROWS = 12, 8
# At most half of the sheet, so that correct predictions are shown as well.
MAX_WRONG = COLUMNS * ROWS // 2
INK, MUTED, RIGHT, WRONG, ACCENT = "#1f2933", "#7b8794", "#2f855a", "#c53030", "#2b6cb0"


def contact_sheet(served: Served, path: Path) -> None:
    """Draw digits with labels and predictions: wrong ones first, framed in red, then correct ones."""
    plt = _pyplot()
    wrong = np.flatnonzero(served.predictions != served.labels)
    right = np.flatnonzero(served.predictions == served.labels)
    chosen = [*wrong[:MAX_WRONG], *right][: COLUMNS * ROWS]
    rows = -(-len(chosen) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(COLUMNS * 1.0, rows * 1.22 + 0.9), squeeze=False)
    figure.suptitle(
        f"{len(served.labels) - len(wrong):,} of {len(served.labels):,} test digits right ({served.accuracy:.1%})",
        color=INK,
        fontsize=14,
        fontweight="bold",
        x=0.02,
        y=1 - 0.22 / figure.get_figheight(),
        ha="left",
        va="top",
    )
    figure.text(
        0.02,
        1 - 0.56 / figure.get_figheight(),
        "label → prediction; wrong ones are framed"
        + (f" ({MAX_WRONG} of {len(wrong)} shown)" if len(wrong) > MAX_WRONG else "")
        + f" · {served.lineage.deployment}, version {served.lineage.model_version}",
        color=MUTED,
        fontsize=9,
        ha="left",
        va="top",
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, index in zip(axes.flat, chosen, strict=False):
        label, prediction = served.labels[index], served.predictions[index]
        axis.imshow(served.images[index], cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
        is_right = label == prediction
        axis.set_title(
            f"{label} → {prediction}",
            color=RIGHT if is_right else WRONG,
            fontsize=9,
            fontweight="normal" if is_right else "bold",
            pad=3,
        )
        if not is_right:
            side = served.images[index].shape[0]
            axis.add_patch(
                plt.Rectangle((-0.5, -0.5), side, side, fill=False, edgecolor=WRONG, linewidth=3, clip_on=False)
            )
    top = 1 - 1.0 / figure.get_figheight()
    figure.subplots_adjust(left=0.02, right=0.98, top=top, bottom=0.02, wspace=0.12, hspace=0.32)
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)


def learning_curves(curves: Curves, served: Served, path: Path) -> None:
    """Draw loss and accuracy over the steps of training and validation, with the served model's test accuracy."""
    plt = _pyplot()
    figure, (loss_axis, accuracy_axis) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, column, title in ((loss_axis, 1, "Loss"), (accuracy_axis, 2, "Accuracy")):
        if curves.training:
            training = np.array(curves.training)
            axis.plot(training[:, 0], training[:, column], color=ACCENT, linewidth=1.4, label="training")
        if curves.validation:
            validation = np.array(curves.validation)
            axis.plot(
                validation[:, 0], validation[:, column], color=RIGHT, marker="o", linewidth=1.8, label="validation"
            )
        axis.set_title(title, loc="left", color=INK, fontweight="bold")
        axis.set_xlabel("step", color=MUTED)
        axis.tick_params(colors=MUTED)
        axis.grid(axis="y", color="#e4e7eb")
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.spines["bottom"].set_color("#cbd2d9")
    loss_axis.set_ylim(bottom=0)
    accuracy_axis.axhline(
        served.accuracy, color=WRONG, linestyle="--", linewidth=1.2, label=f"test, as served ({served.accuracy:.1%})"
    )
    accuracy_axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    accuracy_axis.set_ylim(top=1.005)
    loss_axis.legend(frameon=False)
    accuracy_axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt
