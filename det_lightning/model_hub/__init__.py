"""The base trials of Determined's model-hub, at the paths that they have there; see ``docs/transformers.md``."""
