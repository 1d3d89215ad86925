"""From a graph of values to executables: torch graphs in, JAX programs out. Never imports `fx_passes`.

Order of telling: `trace` (graph -> jaxpr), `vjp` (forward with residuals, backward), `lower` (jaxpr -> HLO), `runtimes` (HLO ->
something to call), `program` (all of it for one signature), `autograd` (a program as one autograd node).
"""
