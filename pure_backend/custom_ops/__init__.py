"""JAX and Pallas functions as torch operators.

`signature` reads a function's annotations, `flat` runs JAX functions of flat tensors, `jax_op` makes operators of them.
"""
