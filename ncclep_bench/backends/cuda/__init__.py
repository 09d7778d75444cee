"""Our CUDA kernels over peer memory, one rank per GPU; between hosts rows are staged."""
