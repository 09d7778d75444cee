"""NVIDIA's own collectives: the traditional partners, and parameters and gradients where NCCL has an operation."""
