"""From a graph of values to executables: torch, JAX and torchax meet here and nowhere else. Never imports `fx_passes` passes.

Order of telling: `trace` (graph -> jaxpr), `vjp` (forward with residuals, backward), `lower` (jaxpr -> HLO), `runtimes` (HLO ->
something to call), `program` (all of it for one signature), `autograd` (a program as one autograd node).
"""
