"""Wrapper subclasses for tests, each of another kind."""

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class Held(torch.Tensor):
    """Tensors in a wrapper that shows `like`'s shape and dtype; every operator computes with `value()`."""

    names: tuple[str, ...] = ()
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, *tensors, shape, dtype, metadata=None):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=tensors[0].device)

    def __init__(self, *tensors, shape, dtype, metadata=None):
        self.metadata = metadata
        for name, tensor in zip(self.names, tensors, strict=True):
            setattr(self, name, tensor)

    def __tensor_flatten__(self):
        return list(self.names), (self.dtype, self.metadata)

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        dtype, metadata = context
        return cls(*(tensors[name] for name in cls.names), shape=size, dtype=dtype, metadata=metadata)

    def value(self) -> torch.Tensor:
        """The plain tensor that this one stands for."""
        raise NotImplementedError

    def like_this(self, function) -> "Held":
        """The same with `function` of each tensor."""
        tensors = [function(getattr(self, name)) for name in self.names]
        return type(self)(*tensors, shape=self.shape, dtype=self.dtype, metadata=self.metadata)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op in (aten.detach.default, aten.clone.default, aten.alias.default):
            return args[0].like_this(op)
        if op is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0].like_this(lambda tensor: tensor.to(kwargs.get("device")))
        args, kwargs = pytree.tree_map_only(Held, lambda held: held.value(), (args, kwargs or {}))
        return op(*args, **kwargs)


class Scaled(Held):
    """`q * s`: integers and the scale of each row."""

    names = ("q", "s")

    @classmethod
    def of(cls, q, s):
        return cls(q, s, shape=q.shape, dtype=s.dtype)

    def value(self):
        return self.q.to(self.s.dtype) * self.s


class Shifted(Held):
    """`a + metadata`."""

    names = ("a",)

    @classmethod
    def of(cls, a, by):
        return cls(a, shape=a.shape, dtype=a.dtype, metadata=by)

    def value(self):
        return self.a + self.metadata


class Rounded(Held):
    """`a`, rounded."""

    names = ("a",)

    @classmethod
    def of(cls, a):
        return cls(a, shape=a.shape, dtype=a.dtype)

    def value(self):
        return (self.a * 4).round() / 4

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op in (aten.t.default, aten.transpose.int):
            return cls.of(op(args[0].a, *args[1:]))
        if op is aten.mm.default:  # both operands, also the one that is no wrapper: an activation
            args = [((arg.a if isinstance(arg, Rounded) else arg) * 4).round() / 4 for arg in args]
            return op(*args)
        return super().__torch_dispatch__(op, types, args, kwargs)


class Pair(Held):
    """Two tensors of one shape, wherever they lie; operators compute each."""

    names = ("a", "b")

    @classmethod
    def of(cls, a, b):
        return cls(a, b, shape=a.shape, dtype=a.dtype)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        sides = [pytree.tree_map_only(Pair, lambda pair, name=name: getattr(pair, name), (args, kwargs)) for name in "ab"]
        a, b = (op(*args, **(kwargs or {})) for args, kwargs in sides)
        return args[0] if op._schema.is_mutable else cls.of(a, b)


class Nested(Held):
    """Another wrapper, and a tensor that is added to it."""

    names = ("held", "more")

    @classmethod
    def of(cls, held, more):
        return cls(held, more, shape=held.shape, dtype=held.dtype)

    def value(self):
        return self.held + self.more


def scaled(seed=0, shape=(4, 3)):
    """Some `Scaled`, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-9, 9, shape, dtype=torch.int8, generator=generator)
    return Scaled.of(q, torch.rand(shape[0], 1, generator=generator) + 0.5)
