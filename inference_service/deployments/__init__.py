"""Deployments and roll-outs as clients wish them: checked, and recorded in the object store."""
