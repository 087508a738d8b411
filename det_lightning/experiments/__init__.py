"""Experiments of Determined: their configuration."""
