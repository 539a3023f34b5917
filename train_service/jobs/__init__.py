"""Training jobs as clients know them.

They are checked, created, changed on request, and deleted with everything they made.
"""
