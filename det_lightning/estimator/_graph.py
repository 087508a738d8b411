"""``TrainingGraph``: input, model and train operation, built in the same order as by ``tf.estimator``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from det_lightning import errors
from det_lightning.escaping import get_logger
from det_lightning.estimator._optimizer import AGGREGATION
from det_lightning.estimator._tensorflow import tf

logger = get_logger(__name__)

# The collection in which TensorFlow's own hooks look for the tensor that reads the global step.
_STEP_READER = "global_step_read_op_cache"
# The types of the summaries that are read at every batch.
_SCALARS = ("ScalarSummary", "TensorSummary")
_VARIABLES = ("VariableV2", "VarHandleOp")


class TrainingGraph:
    """The graph, with the operations that affect seeds in the same order as in ``Estimator.train``.

    ``warm_start`` has the ``tf.estimator.WarmStartSettings`` that initialize the weights, or None.

    Attributes:
        spec: the ``EstimatorSpec`` of the ``model_fn``.
        initialize_input: operation that starts the dataset, repeated endlessly.
        next_batch: the tensors of the next batch.
        scalars: one string with the scalar summaries of a batch, without summaries changed by the update.
        saver, input_saver: save the model, and the position in the dataset.
        aggregation_saver: saves partially aggregated gradients; None without aggregation.
    """

    def __init__(self, estimator: Any, input_fn: Callable[..., Any], warm_start: Any = None) -> None:
        self.config = estimator.config
        self.graph = tf.Graph()
        with self.graph.as_default(), self.graph.device(self.config.device_fn):
            tf.compat.v1.set_random_seed(self.config.tf_random_seed)
            self.global_step = tf.compat.v1.train.create_global_step()
            _read_step(self.global_step)
            dataset = _call_input_fn(input_fn, estimator)
            iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
            self.next_batch = iterator.get_next()
            features, labels = _split(self.next_batch)
            self.spec = estimator.model_fn(features, labels, tf.estimator.ModeKeys.TRAIN, self.config)
            # From here on, no operation affects a seed.
            self.initialize_input = iterator.make_initializer(dataset.repeat())
            if warm_start is not None:
                tf.compat.v1.train.warm_start(*warm_start)
            self.scalars = _add_summaries(self.spec)
            tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.LOSSES, self.spec.loss)
            self.saver = self._model_saver()
            saveable = tf.data.experimental.make_saveable_from_iterator(iterator)
            self.input_saver = tf.compat.v1.train.Saver([saveable])
            variables = tf.compat.v1.get_collection(AGGREGATION)
            self.aggregation_saver = tf.compat.v1.train.Saver(variables) if variables else None

    def _model_saver(self) -> Any:
        savers = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVERS)
        if self.spec.scaffold.saver is not None:
            return self.spec.scaffold.saver
        if not savers:
            saver = tf.compat.v1.train.Saver(sharded=True, defer_build=True, save_relative_paths=True)
            tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.SAVERS, saver)
            return saver
        return savers[0]

    @functools.cached_property
    def random_tensors(self) -> list[Any]:
        """The tensors to fetch so that all random operations of a batch run; empty without random operations."""
        used = _operations_before([self.spec.train_op, self.spec.loss])
        found = [op for op in used if _is_random(op, self.graph)]
        fetchable = [op.outputs[0] for op in found if self.graph.is_fetchable(op) and op.outputs]
        return fetchable if len(fetchable) == len(found) else [*fetchable, self.spec.loss]


def _read_step(global_step: Any) -> None:
    graph = tf.compat.v1.get_default_graph()
    with graph.name_scope(f"{global_step.op.name}/"):
        value = tf.compat.v1.cond(
            tf.compat.v1.is_variable_initialized(global_step),
            global_step.read_value,
            lambda: global_step.initial_value,
        )
        read = value + 0
    tf.compat.v1.add_to_collection(_STEP_READER, read)


def _call_input_fn(input_fn: Callable[..., Any], estimator: Any) -> Any:
    offered = {"mode": tf.estimator.ModeKeys.TRAIN, "params": estimator.params, "config": estimator.config}
    names = inspect.signature(input_fn).parameters
    with tf.device("/cpu:0"):
        dataset = input_fn(**{name: value for name, value in offered.items() if name in names})
    if not isinstance(dataset, tf.data.Dataset):
        raise errors.InvalidExperimentException(
            f"The input_fn of build_train_spec() must return a tf.data.Dataset; got a {type(dataset).__name__}: tuples "
            "of features and labels are not supported."
        )
    return dataset


def _split(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple):
        return batch, None
    if len(batch) != 2:
        raise errors.InvalidExperimentException(
            f"The elements of the training dataset must be pairs of features and labels; got {len(batch)} parts."
        )
    return batch[0], batch[1]


def _add_summaries(spec: Any) -> Any:
    summaries = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES)
    if not any(summary.op.name == "loss" for summary in summaries):
        tf.compat.v1.summary.scalar("loss", spec.loss)
    summaries = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES)
    scalars = [summary for summary in summaries if summary.op.type in _SCALARS]
    before_update = set(_operations_before([spec.train_op, spec.loss]))
    settled = [summary for summary in scalars if _precedes_update(summary.op, before_update)]
    if left_out := [summary.op.name for summary in scalars if summary not in settled]:
        logger.info(
            "These summaries are not reported, because they read variables while the update changes them: %s.",
            ", ".join(left_out),
        )
    return tf.compat.v1.summary.merge(settled)


def _precedes_update(summary: Any, before_update: set[Any]) -> bool:
    """Return whether a summary always has the value from before the batch's update.

    It does if it reads variables only through operations in ``before_update``, which the update needs.
    """
    waiting = [tensor.op for tensor in summary.inputs]
    seen = set(waiting)
    while waiting:
        op = waiting.pop()
        # An identity of a variable outputs the variable's memory, and the update changes the memory.
        if op.type in _VARIABLES or (op.type == "Identity" and op.inputs[0].op.type in _VARIABLES):
            return False
        if op in before_update:
            continue
        new = [tensor.op for tensor in op.inputs if tensor.op not in seen]
        seen.update(new)
        waiting += new
    return True


def _operations_before(ends: list[Any]) -> list[Any]:
    """Return the operations that run to fetch the tensors or operations in ``ends``."""
    waiting = [getattr(end, "op", end) for end in ends]
    found = dict.fromkeys(waiting)
    while waiting:
        op = waiting.pop()
        for before in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
            if before not in found:
                found[before] = None
                waiting.append(before)
    return list(found)


def _is_random(op: Any, graph: Any) -> bool:
    """Return whether an operation draws random numbers, directly or in a called function."""
    if op.op_def is not None and op.op_def.is_stateful and "seed" in op.node_def.attr:
        return True
    functions = {value.func.name for value in op.node_def.attr.values() if value.func.name}
    if not functions:
        return False
    library = graph.as_graph_def().library.function
    return any("seed" in node.attr for one in library if one.signature.name in functions for node in one.node_def)
