"""Load for a served model: requests that are made beforehand, sent in a closed or an open loop, and what came of them.

It speaks the Open Inference Protocol, so it measures any server of it.
"""
