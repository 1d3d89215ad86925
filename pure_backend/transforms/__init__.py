"""Functions that are captured whole and run as one program: `assume_pure`, loops, scanned layers, calls of JAX functions."""
