"""A regression's target and the model's outputs, from the target's own unit to the scaled one and back."""

from __future__ import annotations

from torch import Tensor

from shared.model_spec import TargetScaling


def scale_target(scaling: TargetScaling | None, labels: Tensor) -> Tensor:
    """Of labels (B, K) in their own unit what the model learns, (B, K) of the same dtype; as they are without one."""
    if scaling is None:
        return labels
    exact = labels.double()
    return ((exact - exact.new_tensor(scaling.mean)) / exact.new_tensor(scaling.deviation)).to(labels.dtype)


def undo_scaling(scaling: TargetScaling | None, outputs: Tensor) -> Tensor:
    """Of the model's outputs (B, K) the values in the target's own unit, float32 (B, K); the same without a scaling."""
    if scaling is None:
        return outputs
    exact = outputs.double()
    return (exact * exact.new_tensor(scaling.deviation) + exact.new_tensor(scaling.mean)).float()
