"""Passes over Dynamo's FX graph. Torch only: nothing here imports JAX.

Order: `normalize` (a private copy whose attributes are inputs), `propagate` (what every node's value looks like in memory),
`mutation` (writes and views become values and write-backs).
"""
