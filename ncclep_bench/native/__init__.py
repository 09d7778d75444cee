"""CUDA sources and what loads and launches them."""
