"""The disk cache: what one process compiled, another one calls without tracing or lowering; what is damaged is made anew."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import pytest
import torch
from conftest import DEVICES
from oracle import compiled
from torch import nn

import pure_backend
from pure_backend import __main__ as command
from pure_backend.jax_bridge import disk_cache
from pure_backend.jax_bridge.disk_cache import DiskCache

ROOT = Path(pure_backend.__file__).parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A fresh cache folder that is switched on."""
    monkeypatch.setenv("PURE_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def forget():
    """Be like another process: nothing compiled is known, counters are zero."""
    torch._dynamo.reset()
    pure_backend.clear_caches()
    gc.collect()
    pure_backend.reset_statistics()


def counts():
    s = pure_backend.statistics()
    return s.traces, s.lowerings, s.disk_hits


# ----------------------------------------------------------------------------------------------- another process

TRAIN = """
import json, logging, os, sys
import torch
device = "cpu"
if sys.argv[1] == "xla":
    import torch_xla
    device = torch_xla.device()
import pure_backend
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
torch.manual_seed(0)
nn = torch.nn
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
x = torch.randn(2, 8).to(device)
def step(f):
    net.zero_grad()
    loss = f(x).square().sum()
    loss.backward()
    return [loss.item(), *(p.grad.cpu().flatten().tolist() for p in net.parameters())]
want, got = step(net), step(torch.compile(net, backend="assume_pure"))
flat = lambda results: torch.cat([torch.tensor(r).flatten() for r in results])
torch.testing.assert_close(flat(got), flat(want), rtol=1e-4, atol=1e-5)
s = pure_backend.statistics()
print(json.dumps([s.traces, s.lowerings, s.disk_hits, s.calls]))
"""


def start(code: str, *args: str, **env: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-W", "ignore", "-c", code, *args]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[list[int], str]:
    """What a process counted, and what it logged."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.strip().splitlines()[-1]), err


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_process_traces_and_lowers_nothing(device, folder):
    assert finish(start(TRAIN, device))[0] == [1, 2, 0, 2]
    assert finish(start(TRAIN, device))[0] == [0, 0, 2, 2]
    assert len(list(folder.iterdir())) == 2


def test_processes_at_once(folder):
    """Both compile, both store; whoever comes later finds whole entries."""
    processes = [start(TRAIN, "cpu") for _ in range(2)]
    for process in processes:
        assert finish(process)[0][3] == 2
    assert finish(start(TRAIN, "cpu"))[0] == [0, 0, 2, 2]


def test_a_full_disk_warns_once_and_works(folder):
    limit = "import resource, torch._dynamo; resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
    counted, log = finish(start(TRAIN.replace("want, got", f"{limit}want, got"), "cpu", PYTHONDONTWRITEBYTECODE="1"))
    assert counted == [1, 2, 0, 2]
    assert log.count("cannot write to the disk cache") == 1
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_warns_once_and_works(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PURE_BACKEND_CACHE_DIR", str(tmp_path / "file" / "cache"))
    step(*net_and_input())
    assert counts() == (1, 2, 0)
    assert caplog.text.count("cannot write to the disk cache") == 1


def test_a_folder_that_is_read_only_is_read(folder, monkeypatch, caplog):
    step(*net_and_input())
    forget()

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    for name in ("utime", "replace", "unlink"):
        monkeypatch.setattr(disk_cache.os, name, refuse)
    monkeypatch.setattr(disk_cache.tempfile, "mkstemp", refuse)
    step(*net_and_input())
    assert counts() == (0, 0, 2)
    compiled(torch.sin)(torch.ones(3))
    compiled(torch.cos)(torch.ones(3))
    assert caplog.text.count("cannot write to the disk cache") == 1


# ----------------------------------------------------------------------------------- what comes from the disk is right


def net_and_input():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(2, 8)


def step(net, x, **kwargs):
    """Loss and gradients of a compiled step, and of an eager one."""
    got = torch.autograd.grad(compiled(net)(x).square().sum(), list(net.parameters()), **kwargs)
    want = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    torch.testing.assert_close(got, want)
    return got


def test_create_graph_after_a_hit(folder):
    step(*net_and_input())
    forget()
    net, x = net_and_input()
    x.requires_grad_()

    def second(f):
        (grad,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), list(net.parameters()))

    second(compiled(net))
    forget()
    torch.testing.assert_close(second(compiled(net)), second(net))
    assert counts()[0] == 1  # the graph was still there to be traced
    assert counts()[2] == 2  # forward and backward


def two_heads(x, w):
    return (x @ w).sin(), (x @ w).cos() * w.sum()


@pytest.mark.parametrize("masks", [(0, 1), (1, 0), (0, 2)])
def test_a_backward_for_other_cotangents_after_a_hit(folder, masks):
    """The backward is made anew from the graph, and takes the residuals of the forward from the disk."""

    def make():
        return (torch.linspace(0, 1, 6).view(2, 3).requires_grad_(), torch.linspace(1, 2, 12).view(3, 4).requires_grad_())

    for mask in masks:
        forget()
        got, want = make(), make()
        for f, args in ((compiled(two_heads), got), (two_heads, want)):
            outputs = f(*args)
            sum(out.sum() for i, out in enumerate(outputs) if mask in (i, 2)).backward()
        torch.testing.assert_close([t.grad for t in got], [t.grad for t in want])
    assert counts() == (1, 1, 1)


def test_a_forward_that_another_trace_does_not_give_is_refused(folder, monkeypatch):
    args = [torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)]
    compiled(two_heads)(*args)[0].sum().backward()
    forget()
    outputs = compiled(two_heads)(*args)
    from pure_backend.jax_bridge import compile as compiling

    (program,) = compiling.programs._programs.values()
    monkeypatch.setitem(vars(program.executables.forward), "order", "another")
    with pytest.raises(pure_backend.PureBackendError, match="tracing its graph again gives another one"):
        outputs[1].sum().backward()


def test_int64_random_and_lapack(folder):
    def f(x, i):
        return torch.linalg.cholesky(x @ x.T + torch.eye(3)), i + 2**40, torch.rand(1000)

    args = torch.eye(3), torch.arange(3)
    first = compiled(f)(*args)
    forget()
    other = compiled(f)(*args)
    assert counts() == (0, 0, 1)
    torch.testing.assert_close(other[:2], first[:2])
    assert other[1].dtype is torch.int64
    assert not torch.equal(other[2], first[2])
    torch.manual_seed(3)
    again = compiled(f)(*args)[2]
    torch.manual_seed(3)
    assert torch.equal(compiled(f)(*args)[2], again)


def test_lapack_is_found_by_another_process(folder):
    code = """
import torch, json, pure_backend
x = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
got = torch.compile(torch.linalg.cholesky, backend="assume_pure")(x)
torch.testing.assert_close(got, torch.linalg.cholesky(x))
print(json.dumps([pure_backend.statistics().disk_hits]))
"""
    assert finish(start(code))[0] == [0]
    assert finish(start(code))[0] == [1]


def test_writes_and_running_statistics(folder):
    for _ in range(2):
        forget()
        torch.manual_seed(0)
        net = nn.BatchNorm1d(4)
        x = torch.randn(8, 4)
        compiled(net)(x).sum().backward()
        want = nn.BatchNorm1d(4)
        want(x)
        torch.testing.assert_close(net.running_mean, want.running_mean)
    assert counts() == (0, 0, 2)


def test_a_model_from_the_disk_dies(folder):
    for _ in range(2):
        forget()
        net, x = net_and_input()
        c = compiled(net)
        c(x).sum().backward()
        ref = weakref.ref(net)
        del net, c, x  # a tensor that lives keeps the graph
    assert counts() == (0, 0, 2)
    torch._dynamo.reset()
    gc.collect()
    assert ref() is None
    from pure_backend.jax_bridge import compile as compiling

    assert len(compiling.programs) == 0


# ------------------------------------------------------------------------------------------------- what is not served


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_default_dtype(torch.float64),
    ],
    ids=["matmul precision", "default dtype"],
)
def test_settings_are_in_the_key(folder, change):
    def f(x):
        return x @ x + torch.tensor(2.0)

    compiled(f)(torch.ones(2, 2))
    forget()
    try:
        change()
        compiled(f)(torch.ones(2, 2, dtype=torch.float32))
        assert counts() == (1, 1, 0)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("part", ["_versions", "_sources"])
def test_another_version_is_not_served(folder, monkeypatch, part):
    from pure_backend.jax_bridge import key_text

    step(*net_and_input())
    forget()
    monkeypatch.setattr(key_text, part, lambda: "another")
    step(*net_and_input())
    assert counts() == (1, 2, 0)


def test_another_processor_is_not_served(folder, monkeypatch):
    from pure_backend.jax_bridge.runtimes import runtime_for

    step(*net_and_input())
    forget()
    monkeypatch.setattr(runtime_for(torch.device("cpu")), "fingerprint", "another")
    step(*net_and_input())
    assert counts() == (1, 2, 0)


def test_a_policy_function_is_not_stored(folder, caplog):
    caplog.set_level("INFO", "pure_backend")
    c = compiled(torch.sin, options={"remat": lambda *_, **__: True})
    c(torch.ones(2, requires_grad=True)).sum().backward()
    assert not folder.exists()
    assert "not stored on disk: the program depends on <function" in caplog.text


CUSTOM = """
import json, sys
import jax, jax.numpy as jnp, torch
import pure_backend
by, slope = map(float, sys.argv[1:])

@jax.custom_vjp
def wave(x):
    return jnp.sin(x) * by

wave.defvjp(lambda x: (wave(x), x), lambda x, g: (g * jnp.cos(x) * slope,))

@pure_backend.jax_op("disk::wave")
def op(x: jax.Array) -> jax.Array:
    return wave(x)

def raised(x):
    return wave(x) + 1

x = torch.ones(3, requires_grad=True)
f = lambda x: pure_backend.call_jax(raised, (op(x),))
y = torch.compile(f, backend="assume_pure")(x)
y.sum().backward()
inner = torch.ones(3).sin() * by
torch.testing.assert_close(y, inner.sin() * by + 1)
torch.testing.assert_close(x.grad, inner.cos() * slope * torch.ones(3).cos() * slope)
s = pure_backend.statistics()
print(json.dumps([s.traces, s.lowerings, s.disk_hits]))
"""


def test_a_changed_operator_is_not_served(folder):
    """The name of a user's operator says nothing of its code, and what it computes nothing of its gradient."""
    assert finish(start(CUSTOM, "2", "2"))[0] == [1, 2, 0]
    assert finish(start(CUSTOM, "2", "2"))[0] == [0, 0, 2]
    assert finish(start(CUSTOM, "3", "2"))[0] == [1, 2, 0]
    assert finish(start(CUSTOM, "3", "3"))[0] == [1, 2, 0]


def test_a_library_of_others_is_not_stored(folder, caplog):
    """An operator that torch takes apart through its Python body."""
    caplog.set_level("INFO", "pure_backend")
    library = torch.library.Library("disk_other", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    assert compiled(lambda x: torch.ops.disk_other.twice(x) + 1)(torch.ones(2)).tolist() == [3, 3]
    assert counts() == (1, 1, 0)
    assert "not stored on disk: the graph calls disk_other.twice" in caplog.text
    assert not folder.exists()


# --------------------------------------------------------------------------------------------------- damaged entries


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    place = len(data) - 100
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def empty(_: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [truncate, flip, empty])
def test_a_damaged_entry_is_made_anew(folder, damage, caplog):
    step(*net_and_input())
    forget()
    for path in folder.iterdir():
        path.write_bytes(damage(path.read_bytes()))
    step(*net_and_input())
    assert counts() == (1, 2, 0)
    assert caplog.text.count("dropped a damaged entry") == 2
    forget()
    step(*net_and_input())
    assert counts() == (0, 0, 2)


def test_an_entry_that_xla_refuses_is_made_anew(folder, caplog):
    step(*net_and_input())
    forget()
    for path in folder.iterdir():
        key, entry = disk_cache._unpacked(path.read_bytes())
        path.write_bytes(disk_cache._packed(key, entry._replace(content=b"no executable")))
    step(*net_and_input())
    assert counts() == (1, 2, 0)
    assert "cannot be loaded here" in caplog.text


# --------------------------------------------------------------------------------------------------------- the store


def test_a_store_gives_back_what_it_was_given(tmp_path):
    store = DiskCache(tmp_path / "a" / "b", 10_000)
    assert store.get("key") is None
    assert store.put("key", {"kept": [1, 2]}, b"\0bytes")
    assert store.get("key") == ({"kept": [1, 2]}, b"\0bytes")
    assert store.folder.stat().st_mode & 0o077 == 0  # executables are loaded from it
    store.drop("key")
    assert store.get("key") is None


def test_keys_are_compared_in_full(tmp_path, monkeypatch):
    store = DiskCache(tmp_path, 10_000)
    monkeypatch.setattr(DiskCache, "_path", lambda self, key: self.folder / "same.entry")
    store.put("one", {}, b"1")
    assert store.get("two") is None
    assert store.get("one").content == b"1"


def test_what_was_used_longest_ago_goes_first(tmp_path):
    store = DiskCache(tmp_path, 3_500)
    for place, name in enumerate("abc"):
        store.put(name, {}, bytes(1_000))
        os.utime(store._path(name), (place, place))
    assert store.get("a") is not None  # used again: b is the oldest now
    store.put("d", {}, bytes(1_000))
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]
    assert not store.put("large", {}, bytes(4_000))
    assert sum(entry.size for entry in store.entries()) <= 3_500


def test_files_of_dead_writers_go(tmp_path):
    store = DiskCache(tmp_path, 10_000)
    (tmp_path / "old.unfinished").touch()
    (tmp_path / "new.unfinished").touch()
    os.utime(tmp_path / "old.unfinished", (0, 0))
    store.put("key", {}, b"")
    assert {path.name for path in tmp_path.iterdir()} >= {"new.unfinished"}
    assert not (tmp_path / "old.unfinished").exists()


def test_the_environment_names_folder_and_size(monkeypatch):
    for off in ("", "0"):
        monkeypatch.setenv("PURE_BACKEND_CACHE_DIR", off)
        assert disk_cache.disk_cache() is None
    monkeypatch.setenv("PURE_BACKEND_CACHE_DIR", "/some/folder")
    assert disk_cache.disk_cache().folder == Path("/some/folder")
    assert disk_cache.disk_cache().limit == 2 * 2**30
    monkeypatch.setenv("PURE_BACKEND_CACHE_SIZE", "500M")
    assert disk_cache.disk_cache().limit == 500 * 2**20
    monkeypatch.setenv("PURE_BACKEND_CACHE_SIZE", "much")
    with pytest.raises(ValueError, match="PURE_BACKEND_CACHE_SIZE must be"):
        disk_cache.disk_cache()
    monkeypatch.delenv("PURE_BACKEND_CACHE_SIZE")
    monkeypatch.delenv("PURE_BACKEND_CACHE_DIR")
    assert disk_cache.disk_cache().folder.name == "pure_backend"


def test_command(folder, capsys, monkeypatch):
    compiled(torch.sin)(torch.ones(3))
    assert command.main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert str(folder) in shown and "1 entry" in shown
    assert command.main(["cache", "--clear"]) == 0
    assert "removed 1 entry" in capsys.readouterr().out
    assert list(folder.iterdir()) == []
    monkeypatch.setenv("PURE_BACKEND_CACHE_DIR", "0")
    assert command.main(["cache"]) == 0
    assert "switched off" in capsys.readouterr().out


def test_no_pickle(folder):
    step(*net_and_input())
    for path in folder.iterdir():
        assert not path.read_bytes().endswith(b".") or b"\x80\x04" not in path.read_bytes()[:200]
    importers = [path for path in (ROOT / "pure_backend").rglob("*.py") if "import pickle" in path.read_text()]
    assert importers == []


def test_callbacks_into_python_work_and_are_not_stored(folder, caplog):
    """An executable that calls a function of this process means nothing to another one."""
    caplog.set_level("INFO", "pure_backend")
    seen = []

    @pure_backend.jax_op("disk::watched")
    def watched(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append(float(value)), x.sum())
        return jax.pure_callback(lambda value: value * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    for _ in range(2):
        assert compiled(lambda x: watched(x) + 1)(torch.ones(2)).tolist() == [3, 3]
    jax.effects_barrier()
    assert seen == [2.0, 2.0]
    assert counts()[2] == 0
    assert "the forward calls functions of this process" in caplog.text
    assert not folder.exists()
