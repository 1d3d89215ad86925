"""Our JAX lowerings of torch operators, one file a family; importing the package registers them all."""

from pure_backend.jax_bridge.lowerings import activations as activations
from pure_backend.jax_bridge.lowerings import attention as attention
from pure_backend.jax_bridge.lowerings import control_flow as control_flow
from pure_backend.jax_bridge.lowerings import convolution as convolution
from pure_backend.jax_bridge.lowerings import derivatives as derivatives
from pure_backend.jax_bridge.lowerings import elementwise as elementwise
from pure_backend.jax_bridge.lowerings import factories as factories
from pure_backend.jax_bridge.lowerings import flex_attention as flex_attention
from pure_backend.jax_bridge.lowerings import foreach as foreach
from pure_backend.jax_bridge.lowerings import indexing as indexing
from pure_backend.jax_bridge.lowerings import linalg as linalg
from pure_backend.jax_bridge.lowerings import losses as losses
from pure_backend.jax_bridge.lowerings import matmul as matmul
from pure_backend.jax_bridge.lowerings import normalization as normalization
from pure_backend.jax_bridge.lowerings import pooling as pooling
from pure_backend.jax_bridge.lowerings import random as random
from pure_backend.jax_bridge.lowerings import reductions as reductions
from pure_backend.jax_bridge.lowerings import resize as resize
from pure_backend.jax_bridge.lowerings import scatter as scatter
from pure_backend.jax_bridge.lowerings import shapes as shapes
from pure_backend.jax_bridge.lowerings import special as special
from pure_backend.jax_bridge.lowerings import transformer as transformer
from pure_backend.jax_bridge.lowerings import views as views
from pure_backend.jax_bridge.lowerings.registry import Site as Site
from pure_backend.jax_bridge.lowerings.registry import find as find
from pure_backend.jax_bridge.lowerings.registry import lowers as lowers
