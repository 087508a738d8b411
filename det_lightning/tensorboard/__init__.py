"""TensorBoard, at the paths that it has in Determined."""
