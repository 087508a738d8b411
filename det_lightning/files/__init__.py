"""Local files: written whole, private, or locked; strict JSON."""
