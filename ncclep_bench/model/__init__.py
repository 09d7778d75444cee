"""Typed frozen records that every layer above shares."""
