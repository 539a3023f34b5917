"""Building a model from its specification, the same for training and serving.

Importing torch and torchvision takes seconds, so it happens at the first call.
"""

from shared.models.building import build_model, import_builder, input_dimensions, known_builders, load_weights

__all__ = ["build_model", "import_builder", "input_dimensions", "known_builders", "load_weights"]
