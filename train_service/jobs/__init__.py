"""Training jobs as clients know them: checked, created, changed on request, and deleted with everything they made."""
