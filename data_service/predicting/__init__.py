"""Makes a version with a model's predictions out of another: Ray Data's workers keep the model, and take the parts."""
