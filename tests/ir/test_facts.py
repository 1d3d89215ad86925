"""The record of a node."""

import ast
import pathlib

import torch
from torch import fx

import pure_backend
from pure_backend.ir.facts import derive, facts, learn, origin

ROOT = pathlib.Path(pure_backend.__file__).parent
TORCHS = {"_checkpoint_context_fn", "example_value", "grapharg", "nn_module_stack", "val"}
"""The keys under which Dynamo and `make_fx` leave something for us to read."""


def is_torchs(use: ast.AST) -> bool:
    """Whether a use of `meta` is `meta["key"]` or `meta.method("key")` with a key of torch's."""
    key = use.slice if isinstance(use, ast.Subscript) else use.args[0] if isinstance(use, ast.Call) and use.args else None
    return isinstance(key, ast.Constant) and key.value in TORCHS


def uses_of_meta(tree: ast.AST):
    """Each expression that is given an attribute `meta`: the subscript or method call around it where there is one."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "meta":
            around = parents[node]
            yield parents[around] if isinstance(around, ast.Attribute) else around


def test_no_other_module_keeps_something_in_meta():
    uses = {path: list(uses_of_meta(ast.parse(path.read_text()))) for path in ROOT.rglob("*.py")}
    own = {str(path.relative_to(ROOT)) for path, found in uses.items() if not all(map(is_torchs, found))}
    assert own == {"ir/facts.py"}


def nodes():
    """A node and a new one in the same graph."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_method("add_", (x, 1)), graph.call_method("clone", (x,))


def test_a_derived_node_stands_where_its_source_stood_and_did_not_do_what_it_did():
    source, new = nodes()
    source.meta["stack_trace"], source.meta["val"] = "File 'a', line 1", 3
    x = torch.ones(2)
    learn(source, value=x, origin="before", scopes=("a", "b"), grad=False, writes=(source.args[0],), donated=True)
    assert derive(new, source) is new
    known = facts(new)
    assert (known.value, known.geometry, known.grad, known.scopes) == (x, facts(source).geometry, False, ("a", "b"))
    assert (known.writes, known.donated, origin(new), new.stack_trace) == ((), False, "before", "File 'a', line 1")
    assert "val" not in new.meta


def test_a_new_value_has_a_new_geometry():
    source, new = nodes()
    learn(source, value=torch.ones(2))
    assert facts(derive(new, source, value=torch.ones(3))).geometry.size == (3,)
    assert facts(derive(new, source, value=None)).geometry is None
    learn(new, scopes=("s",))
    assert (facts(new).value, origin(new)) == (None, new.name)
