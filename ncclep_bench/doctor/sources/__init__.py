"""Readers of facts: one module per kind of source, functions Machine → Reading."""
