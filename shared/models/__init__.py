"""Builds models from their specifications, in the same way for training and serving.

torch and torchvision take seconds to import, so they are imported at the first call.
"""

from shared.models.building import build_model, import_builder, input_dimensions, known_builders, load_weights

__all__ = ["build_model", "import_builder", "input_dimensions", "known_builders", "load_weights"]
