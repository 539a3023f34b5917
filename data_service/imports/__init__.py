"""An import: sources in, a committed version out."""
