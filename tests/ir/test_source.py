"""Which profiler scopes a line of source stands in."""

import textwrap

import pytest
from torch import fx

from pure_backend.ir.source import Frame, frames, scopes_at, user_frame

SOURCE = """
def outer(x):
    with record_function("a"), profiler.record_function("b"):
        y = x                                       # 4
        with other("no"), xp.Trace("c"):
            z = y                                   # 6
            def helper(v):
                return v                            # 8
        w = (lambda v:
             v)(z)                                  # 10
    return w                                        # 11

@record_function("d")
@unrelated("no")
def decorated(x):
    return x                                        # 16

def computed(x, name):
    with record_function(name), record_function(f"{name}"), record_function():
        return x                                    # 20
"""

LINES = {
    (4, "outer"): ("a", "b"),
    (6, "outer"): ("a", "b", "c"),
    (8, "helper"): (),
    (8, "outer.<locals>.helper"): (),
    (10, "<lambda>"): (),
    (10, "outer"): ("a", "b"),
    (11, "outer"): (),
    (16, "decorated"): ("d",),
    (20, "computed"): (),
}


@pytest.mark.parametrize(("place", "scopes"), LINES.items())
def test_scopes_are_those_opened_in_the_function_of_the_frame(place, scopes, tmp_path):
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    assert scopes_at(Frame(str(file), *place)) == scopes


@pytest.mark.parametrize("text", ["%timeit record_function('a')\n", ""])
def test_source_that_is_no_python_has_no_scopes(text, tmp_path):
    file = tmp_path / "source.py"
    file.write_text(text)
    assert scopes_at(Frame(str(file), 1, "f")) == ()
    assert scopes_at(Frame(str(tmp_path / "absent.py"), 1, "f")) == ()


def node_from(trace: str) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = textwrap.dedent(trace)
    return node


def test_frames_are_outermost_first():
    node = node_from("""
        File "a.py", line 3, in forward
          return self.layer(x)
                 ^^^^^^^^^^^^^
        File "b c.py", line 40, in Layer.forward
          return x
    """)
    assert frames(node) == (Frame("a.py", 3, "forward"), Frame("b c.py", 40, "Layer.forward"))
    assert user_frame(node) == Frame("b c.py", 40, "Layer.forward")


def test_users_frame_is_outside_of_torch():
    import torch

    node = node_from(f'''
        File "a.py", line 3, in f
        File "{torch.__path__[0]}/functional.py", line 1, in einsum
    ''')
    assert user_frame(node) == Frame("a.py", 3, "f")
    assert user_frame(node_from("")) is None
