"""Refuses to be imported: the trials of MMDetection are not covered."""

raise ImportError(
    "model_hub.mmdetection is not covered: the trials need MMDetection 2 and mmcv.runner, which mmcv 2 does not have. "
    "Train with MMDetection 3 and its Runner, or write a PyTorchTrial around a model of MMDetection; "
    "model_hub.huggingface and model_hub.utils are covered.",
    name=__name__,
)
