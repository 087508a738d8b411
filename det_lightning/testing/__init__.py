"""Proof that a ported trial trains as it did: a pytest plugin, functions for your own tests, and a recorder."""
