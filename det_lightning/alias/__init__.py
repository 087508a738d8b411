"""On ``PYTHONPATH`` in trial processes, so that ``import determined`` imports det_lightning."""
