"""Real architectures, built small from random configurations, as a test of the whole backend."""
