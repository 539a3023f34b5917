"""Pure batch transforms: the same code prepares data, feeds training and runs in serving."""

from shared.transforms.pipeline import Pipeline, TensorSpec
from shared.transforms.steps import Normalize, Step, ToFloat

__all__ = ["Normalize", "Pipeline", "Step", "TensorSpec", "ToFloat"]
