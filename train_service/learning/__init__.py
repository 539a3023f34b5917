"""The computation of a training step: model, loss, optimizer and metrics, on one rank or sharded over all."""
