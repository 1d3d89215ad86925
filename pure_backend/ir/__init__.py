"""The vocabulary that the graph passes and the bridge share: facts about nodes, geometry of tensors, words for errors.

Plain data over torch; imports neither JAX nor the passes.
"""
