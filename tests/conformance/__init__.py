"""Torch's operator database as an oracle: each operator, on torch's own samples, against eager.

cases.py     which operators, dtypes, layouts and samples there are
graphs.py    a sample as a graph, and the functions that run it
observe.py   one side: outputs, inputs afterwards, gradients
latitude.py  what of an operator's result is not determined, and is compared by a property
points.py    samples filled with numbers at which formulas break
compare.py   eager against compiled
outcome.py   one case from end to end: compiled, eager, wrong or raised
report.py    docs/conformance.md
__main__.py  all of it, in two processes (`make conformance`)
"""
