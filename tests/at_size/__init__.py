"""Right at real sizes: width 512 and 256 rows, where compilers choose other kernels than for the tiny tensors elsewhere."""
