"""The decision log: one line says why something was compiled again."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from oracle import compiled

import pure_backend
from pure_backend.logs import TOPICS


@pytest.fixture
def lines(caplog):
    """The lines of all topics so far: `lines("specialize")`."""
    pure_backend.set_logs("all")
    yield lambda topic: [r.getMessage() for r in caplog.records if r.name == f"pure_backend.{topic}"]
    pure_backend.set_logs()


def product(x, w):
    return (x @ w).sin()


def calls(*sets):
    """One compiled function, called with each set of arguments without new captures by Dynamo."""
    from pure_backend.backend import assume_pure

    gm = torch.fx.symbolic_trace(product)
    call = assume_pure(gm, list(sets[0]))
    for args in sets:
        call(*args)
    return call


def test_the_first_call(lines):
    calls((torch.ones(8, 16), torch.ones(16, 4)))
    assert len(lines("specialize")) == 1
    assert "the first call of a graph" in lines("specialize")[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, w: (torch.ones(9, 16), w), "input 0 (x): f32[8, 16] became f32[9, 16]"),
        (lambda x, w: (x.double(), w.double()), "input 0 (x): f32[8, 16] became f64[8, 16]; input 1 (w): f32[16, 4] became"),
        (lambda x, w: (x, w.clone().requires_grad_()), "requires_grad of input 1 (w): False became True"),
        (lambda x, w: (x, torch.ones(4, 16).t()), "stride of input 1 (w): (4, 1) became (1, 16)"),
    ],
    ids=["shape", "dtype", "requires_grad", "stride"],
)
def test_another_input(lines, change, reason):
    args = torch.ones(8, 16), torch.ones(16, 4)
    calls(args, change(*args))
    assert len(lines("specialize")) == 2
    assert lines("specialize")[1].startswith(f"a new specialization: {reason}")


def test_the_nearest_call_is_the_one_that_counts(lines):
    w, v = torch.ones(16, 4), torch.ones(16, 4, requires_grad=True)
    calls((torch.ones(8, 16), w), (torch.ones(2, 16), v), (torch.ones(3, 16), v))
    assert lines("specialize")[2] == "a new specialization: input 0 (x): f32[2, 16] became f32[3, 16]"


def test_modes(lines):
    args = torch.ones(8, 16), torch.ones(16, 4)
    call = calls(args)
    with torch.no_grad():
        call(*args)
    with torch.autocast("cpu", torch.bfloat16):
        call(*args)
    assert lines("specialize")[1] == "a new specialization: grad mode: True became False"
    assert "autocast: () became (('cpu', torch.bfloat16),)" in lines("specialize")[2]


def test_a_known_call_logs_nothing(lines, caplog):
    args = torch.ones(8, 16), torch.ones(16, 4)
    call = calls(args)
    caplog.clear()
    call(*args)
    call(torch.ones(8, 16), args[1])
    assert caplog.records == []


def test_the_nearest_program_and_each_stage(lines):
    """Dynamo captures another function: what is new is the graph."""
    args = torch.ones(8, 16), torch.ones(16, 4)
    first = compiled(product)
    first(*args)
    compiled(lambda x, w: (x @ w).cos())(*args)
    assert "no program of as many nodes is known" in lines("cache")[0]
    new = [line for line in lines("cache") if line.startswith("a new program")]
    assert "graph: %3 = call_method sin" in new[1] and "became %3 = call_method cos" in new[1]
    compiled(lambda a, b: (a @ b).sin())(*args)
    assert "found a program in memory" in lines("cache")
    assert len(lines("trace")) == len(lines("lower")) == len(lines("compile")) == 2
    assert lines("trace")[0].startswith("a graph of ") and lines("trace")[0].endswith(" s")
    assert lines("lower")[0].startswith("forward for cpu, 2 inputs, 1 outputs: ")


def test_an_option_is_named(lines):
    args = torch.ones(8, 16), torch.ones(16, 4, requires_grad=True)
    first = compiled(product)
    first(*args)
    compiled(product, options={"remat": "full"})(*args)
    assert "remat: auto became full" in [line for line in lines("cache") if line.startswith("a new program")][1]


def test_impure_nodes(lines):
    watch = pure_backend.impure(lambda x: x * 2)
    compiled(lambda x: watch(x.sin().cos() + x.tan()).exp().sin() + 1)(torch.ones(3))
    assert any(line.startswith("around 1 impure node") for line in lines("partition"))


def test_each_stage_is_a_topic():
    assert pure_backend.statistics().seconds.keys() <= set(TOPICS)


def test_topics_are_checked():
    with pytest.raises(ValueError, match="no log topic 'traces': topics are specialize, normalize"):
        pure_backend.set_logs("traces")
    pure_backend.set_logs("trace", "cache")
    on = [topic for topic in TOPICS if logging.getLogger(f"pure_backend.{topic}").isEnabledFor(logging.INFO)]
    pure_backend.set_logs()
    assert on == ["trace", "cache"]


CODE = """
import torch
torch.compile(torch.sin, backend="assume_pure")(torch.ones(3))
"""


def test_the_environment_switches_it_on():
    def run(**env):
        command = [sys.executable, "-W", "ignore", "-c", CODE]
        return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True).stderr

    shown = run(PURE_BACKEND_LOG="trace, cache")
    assert "[pure_backend.trace] a graph of" in shown and "[pure_backend.cache] a new program" in shown
    assert "pure_backend.lower" not in shown
    assert "pure_backend" not in run()
