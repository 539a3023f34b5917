"""Training jobs as clients know them: checked, created, changed at their wish, deleted with all they made."""
