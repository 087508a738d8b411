"""Refuses to be imported: the trials of MMDetection are not covered."""

raise ImportError(
    "model_hub.mmdetection is not covered: it is written for MMDetection 2 and for mmcv.runner, which mmcv 2 does not "
    "have. Train with MMDetection 3 and its own Runner, or write a PyTorchTrial around a model of it; "
    "model_hub.huggingface and model_hub.utils are covered.",
    name=__name__,
)
