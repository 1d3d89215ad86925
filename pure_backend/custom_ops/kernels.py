"""The kernels that come with the package, as torch operators `torch.ops.pure_backend.*`.

Each is one file: a readable reference in plain JAX, the Pallas kernel for TPU, its gradient, the operator. On other platforms
the kernels are interpreted, which is for tests and not for speed.

Example:
    >>> from pure_backend.custom_ops import kernels
    >>> y = kernels.rms_norm(x, weight)
"""

from pure_backend.custom_ops.flash_attention import flash_attention as flash_attention
from pure_backend.custom_ops.kv_cache_update import kv_cache_update_ as kv_cache_update_
from pure_backend.custom_ops.quantized_matmul import quantized_matmul as quantized_matmul
from pure_backend.custom_ops.rms_norm import rms_norm as rms_norm
