"""The public API: communicators and handles, and the C names over them."""
