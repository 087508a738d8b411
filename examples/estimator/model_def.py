"""Reads handwritten digits (8 by 8 pixels) with a premade Estimator; written as for Determined."""

import numpy as np
import tensorflow as tf
from determined.estimator import EstimatorTrial, EstimatorTrialContext
from sklearn.datasets import load_digits

PIXELS, CLASSES = 64, 10
TRAINING = 1500  # of 1797 digits


def read_digits(start, end):
    digits = load_digits()
    images = (digits.data[start:end] / 16).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((images, digits.target[start:end].astype(np.int64)))


def name_features(images, labels):
    return {"image": images}, labels


class DigitsTrial(EstimatorTrial):
    def __init__(self, context: EstimatorTrialContext):
        self.context = context

    def build_estimator(self):
        optimizer = tf.compat.v1.train.AdamOptimizer(learning_rate=self.context.get_hparam("learning_rate"))
        return tf.compat.v1.estimator.DNNClassifier(
            feature_columns=[tf.feature_column.numeric_column("image", shape=(PIXELS,))],
            n_classes=CLASSES,
            hidden_units=[self.context.get_hparam("hidden_layer_1"), self.context.get_hparam("hidden_layer_2")],
            optimizer=self.context.wrap_optimizer(optimizer),
            dropout=self.context.get_hparam("dropout"),
            config=tf.estimator.RunConfig(tf_random_seed=self.context.get_trial_seed()),
        )

    def build_train_spec(self):
        def input_fn():
            @self.context.experimental.cache_train_dataset("digits", "v1", shuffle=True)
            def make_dataset():
                return read_digits(0, TRAINING)

            return make_dataset().batch(self.context.get_per_slot_batch_size()).map(name_features)

        return tf.estimator.TrainSpec(input_fn)

    def build_validation_spec(self):
        def input_fn():
            @self.context.experimental.cache_validation_dataset("digits", "v1")
            def make_dataset():
                return read_digits(TRAINING, None)

            return make_dataset().batch(self.context.get_per_slot_batch_size()).map(name_features)

        return tf.estimator.EvalSpec(input_fn, steps=None)

    def build_serving_input_receiver_fns(self):
        pixels = tf.compat.v1.placeholder(tf.float32, [None, PIXELS])
        return {"digits": tf.estimator.export.build_raw_serving_input_receiver_fn({"image": pixels})}
