"""A trial for experiments, written as for Determined."""

import tensorflow as tf
from determined.estimator import EstimatorTrial, EstimatorTrialContext


def numbers(seed):
    inputs = tf.random.stateless_uniform([64, 2], [seed, 0])
    return tf.data.Dataset.from_tensor_slices(({"x": inputs}, tf.reduce_sum(inputs, axis=1)))


class NumbersTrial(EstimatorTrial):
    def __init__(self, context: EstimatorTrialContext):
        self.context = context

    def build_estimator(self):
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(self.context.get_hparam("lr"))
        return tf.compat.v1.estimator.LinearRegressor(
            [tf.feature_column.numeric_column("x", shape=(2,))],
            optimizer=self.context.wrap_optimizer(optimizer),
            config=tf.estimator.RunConfig(tf_random_seed=self.context.get_trial_seed()),
        )

    def _batches(self, seed):
        dataset = self.context.wrap_dataset(numbers(seed))
        return dataset.batch(self.context.get_per_slot_batch_size())

    def build_train_spec(self):
        return tf.estimator.TrainSpec(lambda: self._batches(0))

    def build_validation_spec(self):
        return tf.estimator.EvalSpec(lambda: self._batches(1), steps=None)
