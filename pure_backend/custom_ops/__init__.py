"""JAX and Pallas functions as torch operators.

`signature` reads a function's annotations, `flat` runs JAX functions of flat tensors, `jax_op` makes operators of them; in
`kernels` are those that come with the package. Importing this package imports no JAX, importing one of its modules does.
"""
