"""Passes over Dynamo's FX graph. Torch only: nothing here imports JAX.

Each module is one pass, or a part of one; `pipeline.py` has their order.
"""
