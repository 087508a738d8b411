"""The base trials of Determined's model-hub, at the same paths; see ``docs/transformers.md``."""
