import json
import logging
import pathlib

import determined as det


def load(path):
    state = json.loads((path / "state.json").read_text())
    return state["guess"], state["steps"]


def main(core_context, hparams, latest_checkpoint):
    guess, first = 0.0, 0
    if latest_checkpoint is not None:
        with core_context.checkpoint.restore_path(latest_checkpoint) as path:
            guess, first = load(path)
    for steps in range(first + 1, hparams["steps"] + 1):
        guess += hparams["rate"] * (1.0 - guess)
        core_context.train.report_training_metrics(steps_completed=steps, metrics={"guess": guess})
        if steps % 2 == 0:
            core_context.train.report_validation_metrics(steps_completed=steps, metrics={"error": abs(1.0 - guess)})
            with core_context.checkpoint.store_path({"steps_completed": steps}) as (path, uuid):
                pathlib.Path(path, "state.json").write_text(json.dumps({"guess": guess, "steps": steps}))
            if core_context.preempt.should_preempt():
                return


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    info = det.get_cluster_info()
    assert info is not None, "run this on a cluster"
    with det.core.init() as core_context:
        main(core_context, info.trial.hparams, info.latest_checkpoint)
