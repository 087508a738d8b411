"""Defects that show in other processes, other batches or a second epoch, of training, validation and gradients."""

from __future__ import annotations

from tests.testing.defects import (
    ANOTHER_PROCESS,
    BATCH_NORM,
    CONTEXT,
    DEVICE,
    EQUAL_WEIGHTS,
    EVALUATED,
    GROWTH,
    HEAD,
    LAYERS,
    PROCESSES,
    PROCESSES_VALIDATE,
    RETURN,
    SAMPLES,
    STATE,
    UNCHANGED,
    Defect,
    before_loss,
)

PER_SLOT = "get_per_slot_batch_size()"
RANK = "self.context.distributed.rank"
TRAINING_DATA = "Noted(40)"
REDUCER = """class Mean(pytorch.MetricReducer):
    def __init__(self):
        self.reset()

    def reset(self):
        self.losses = []

    def update(self, loss):
        self.losses.append(loss)

    def per_slot_reduce(self):
        return sum(self.losses), len(self.losses)

    def cross_slot_reduce(self, parts):
        return sum(total for total, _ in parts) / parts[0][1]


class Best("""

PROCESS_DEFECTS = [
    Defect(
        "a parameter that is frozen after its model was wrapped",
        SAMPLES,
        (r"model_def.py:\d+: freezes parameters", r"requires_grad_\(False\) before context.wrap_model"),
        {HEAD: f"self.body[0].bias.requires_grad = False\n        {HEAD}"},
    ),
    Defect(
        "a learning rate that grows with the processes",
        PROCESSES,
        ("metric 'loss' of batch 1", r"model_def.py:\d+: 0.05 \* context.distributed.size"),
        {"lr=0.05": "lr=0.05 * context.distributed.size"},
    ),
    Defect(
        "the global batch for each process",
        SAMPLES,
        ("train on 8 samples in batch 0, where one trains on 4", r"model_def.py:\d+: .*get_global_batch_size"),
        {PER_SLOT: "get_global_batch_size()"},
    ),
    Defect(
        "the global batch for each process, with random numbers",
        SAMPLES,
        ("train on 8 samples in batch 0, where one trains on 4",),
        {PER_SLOT: "get_global_batch_size()", **before_loss("torch.rand(())")},
    ),
    Defect(
        "data that are sharded twice",
        SAMPLES,
        ("20 samples in each of two processes, and 40 in one", r"model_def.py:\d+: .*distributed.rank"),
        {TRAINING_DATA: f"torch.utils.data.Subset(Noted(40), range({RANK}, 40, self.context.distributed.size))"},
    ),
    Defect(
        "an order of the data for each process",
        SAMPLES,
        ("other samples than one, first in batch [01]",),
        {"shuffle=True": f"shuffle=True, generator=torch.Generator().manual_seed({RANK})"},
    ),
    Defect(
        "the sum of a loss without that name",
        PROCESSES,
        ("gradient of parameter .* is 0.5 times",),
        {"** 2).mean()": "** 2).sum()", RETURN: 'return {"error": loss}'},
    ),
    Defect(
        "the sum of a loss, with random numbers",
        PROCESSES,
        ("metric 'loss' of batch 0 is 0.[45]", r"model_def.py:\d+: .*\.sum\(\)"),
        {"** 2).mean()": "** 2).sum() * (1 + 0.01 * torch.rand(()))"},
    ),
    Defect(
        "a factor that depends on the rank",
        PROCESSES,
        ("trial.factor_here is 1.0 in one process and 2.0 in the other",),
        {
            HEAD: f"{HEAD}\n        self.factor_here = 1.0 + context.distributed.rank",
            **before_loss("pass", "self.factor_here * self.loss(batch)"),
        },
    ),
    Defect(
        "a parameter beside the models that depends on the rank",
        EQUAL_WEIGHTS,
        ("which no wrapped model has: trial.scale", r"model_def.py:\d+: context.distributed.rank"),
        {
            HEAD: f"{HEAD}\n        self.scale = torch.nn.Parameter(torch.tensor(1.0 + context.distributed.rank))",
            **before_loss("pass", "self.scale * self.loss(batch)"),
        },
    ),
    Defect(
        "a reducer that counts the samples of one process",
        PROCESSES_VALIDATE,
        ("'mean' is .* with two processes and .* with one",),
        {
            "class Best(": REDUCER,
            HEAD: f"{HEAD}\n        self.mean = context.wrap_reducer(Mean(), 'mean', for_training=False)",
            EVALUATED: f"self.mean.update(self.loss(batch).item())\n        {EVALUATED}",
        },
    ),
    Defect(
        "the number of the process",
        ANOTHER_PROCESS,
        ("Another process does not train the same", "metric loss at batch 0"),
        {"STEPS = 0": "import os\n\nSTEPS = 0", **before_loss("pass", "self.loss(batch) * (1 + os.getpid() % 9999)")},
    ),
    Defect(
        "training mode in a validation",
        UNCHANGED,
        (
            r"model_def.py:\d+: dropout works as in training in evaluate_batch",
            r"model_def.py:\d+: evaluate_batch\(\) leaves body and 2 more in training mode",
        ),
        {EVALUATED: f"self.body.train()\n        {EVALUATED}"},
    ),
    Defect(
        "statistics that a validation moves",
        UNCHANGED,
        (r"changes body.1.running_mean", "batch norm works as in training"),
        {LAYERS: BATCH_NORM, EVALUATED: f"self.body[1].train()\n        {EVALUATED}"},
    ),
    Defect(
        "weights that a validation changes",
        UNCHANGED,
        (r"model_def.py:\d+: evaluate_batch\(\) changes head.bias",),
        {EVALUATED: f"self.head.bias.data += 0.01\n        {EVALUATED}"},
    ),
    Defect(
        "a validation metric that is a sum",
        GROWTH,
        ("'validation_loss' is a sum over the batch: .* with batches of 4, and .* of 2",),
        {EVALUATED: 'return {"validation_loss": self.loss(batch) * len(batch[0])}'},
    ),
    Defect(
        "a sum over the data, divided by the number of batches",
        GROWTH,
        ("'validation_loss' is a sum over the batch",),
        {
            f"evaluate_batch(self, batch):\n        {EVALUATED}": "evaluate_full_dataset(self, data_loader):\n"
            "        total = sum(self.loss(batch).item() * len(batch[0]) for batch in data_loader)\n"
            '        return {"validation_loss": total / len(data_loader)}',
        },
    ),
    Defect(
        "dropout of torch in a validation",
        UNCHANGED,
        (r"model_def.py:\d+: dropout works as in training in evaluate_batch",),
        {EVALUATED: f"batch = (torch.dropout(batch[0], 0.5, True), batch[1])\n        {EVALUATED}"},
    ),
    Defect(
        "gradients that are clipped after the step",
        CONTEXT,
        (r"model_def.py:\d+: clip_grad_norm_\(\) clips .* after the step",),
        {RETURN: f"torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1)\n        {RETURN}"},
    ),
    Defect(
        "a seed that is set in each batch",
        CONTEXT,
        ("same seed", r"model_def.py:\d+: torch.manual_seed\(7\)"),
        before_loss("torch.manual_seed(7)"),
    ),
    Defect(
        "a seed that is set in each validation",
        CONTEXT,
        ("same seed", r"model_def.py:\d+: random.seed\(7\)"),
        {EVALUATED: f"random.seed(7)\n        {EVALUATED}"},
    ),
    Defect(
        "gradients that are clipped before the backward pass",
        CONTEXT,
        (r"model_def.py:\d+: clip_grad_norm_\(\) clips before the backward pass",),
        {
            "        self.context.backward(loss)": "        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1)\n"
            "        self.context.backward(loss)"
        },
    ),
    Defect(
        "gradients that are never cleared",
        CONTEXT,
        (r"model_def.py:\d+: adds gradients to those of an earlier batch",),
        {"step_optimizer(self.sgd)": "step_optimizer(self.sgd, auto_zero_grads=False)"},
    ),
    Defect(
        "the first GPU, if there is one",
        DEVICE,
        (r"model_def.py:\d+: .*'cuda:0' if torch.cuda.is_available\(\) else 'cpu'",),
        {HEAD: f"{HEAD}\n        self.device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')"},
    ),
    Defect(
        "a dataset that is changed in place",
        STATE,
        (r"the training dataset \(Noted\): inputs \(model_def.py:\d+\)", "data that change while they are read"),
        {"return self.inputs[index], ": "self.inputs[index] *= 0.9\n        return self.inputs[index].clone(), "},
    ),
]
