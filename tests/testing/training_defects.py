"""Defects of the training itself, and of its metrics, devices and processes."""

from __future__ import annotations

from tests.testing.defects import (
    AGGREGATION,
    BATCH_NORM,
    CONTEXT,
    DETERMINISTIC,
    DEVICE,
    EVALUATED,
    GROUPS,
    HEAD,
    LAYERS,
    METRICS,
    MOVES,
    NEW_BEST,
    PROCESSES,
    REFERENCE,
    RESUMES,
    RETURN,
    Defect,
    before_loss,
)

EVAL_LEFT_ON = (r"model_def.py:\d+: evaluation mode is left on, in which body.1 trains from batch \d", "train\\(\\)")

TRAINING_DEFECTS = [
    Defect(
        "evaluation mode that each batch leaves on",
        CONTEXT,
        EVAL_LEFT_ON,
        {RETURN: f"self.body.eval()\n        {RETURN}"},
    ),
    Defect(
        "evaluation mode that a batch leaves on just before a checkpoint",
        CONTEXT,
        EVAL_LEFT_ON,
        {RETURN: f"if batch_idx == 4:\n            self.body[1].train(False)\n        {RETURN}"},
    ),
    Defect(
        "evaluation mode that a callback leaves on",
        CONTEXT,
        EVAL_LEFT_ON,
        {
            "self.best = Best()\n": "self.best = Best()\n        self.best.body = self.body\n",
            "    def on_validation_end": "    def on_training_epoch_end(self, epoch_idx):\n        self.body.eval()\n\n"
            "    def on_validation_end",
        },
    ),
    Defect(
        "random draw without a seed",
        DETERMINISTIC,
        ("metric loss at batch 0", "apart", "default_rng"),
        before_loss("pass", "self.loss(batch) * (1 + np.random.default_rng().random())"),
    ),
    Defect(
        "order of the data without a seed",
        DETERMINISTIC,
        (r"data batch\[0\].* at batch 0", "not seeded"),
        {
            "        return len(self.inputs)": "        return len(self.inputs)\n\n    chance = random.Random()",
            "return self.inputs[index], ": "return self.inputs[self.chance.randrange(9)], ",
        },
    ),
    Defect(
        "extra random draw",
        REFERENCE,
        ("batch 0|batch 1", "random|metric|parameter|data"),
        before_loss("torch.rand(())"),
    ),
    Defect("loss summed", REFERENCE, ("'?loss'?", "batch 0"), {"** 2).mean()": "** 2).sum()"}),
    Defect(
        "loss summed, for two processes",
        PROCESSES,
        ("metric 'loss' of batch 0", "sum over the batch"),
        {"** 2).mean()": "** 2).sum()"},
    ),
    Defect(
        "scheduler of another mode",
        REFERENCE,
        ("learning rate", "batch 1"),
        {"STEP_EVERY_EPOCH": "STEP_EVERY_BATCH"},
    ),
    Defect(
        "another optimizer",
        REFERENCE,
        ("parameter|metric|weight", "batch [01]"),
        {"torch.optim.Adam": "torch.optim.AdamW"},
    ),
    Defect(".cuda()", DEVICE, (r"model_def.py:\d+: .*\.cuda\(\)", "wrap_model"), {HEAD: HEAD[:-1] + ".cuda())"}),
    Defect(
        "batch moved to a fixed device",
        DEVICE,
        (r"""model_def.py:\d+: inputs\.to\('cuda:0'\)""", "to_device"),
        {"inputs, targets = batch": "inputs, targets = batch\n        inputs = inputs.to('cuda:0')"},
    ),
    Defect(
        "GPUs chosen by the environment",
        DEVICE,
        (r"model_def.py:\d+: .*environ\['CUDA_VISIBLE_DEVICES'\]",),
        {"STEPS = 0": "import os\n\nSTEPS = 0\nos.environ['CUDA_VISIBLE_DEVICES'] = ''"},
    ),
    Defect(
        "process group of its own",
        GROUPS,
        (r"model_def.py:\d+: .*init_process_group", "context.distributed"),
        {HEAD: f"{HEAD}\n        torch.distributed.init_process_group('gloo')"},
    ),
    Defect(
        "sampler of its own for several processes",
        GROUPS,
        (r"model_def.py:\d+: .*DistributedSampler", "gives each process its part"),
        {"shuffle=True)": "sampler=torch.utils.data.distributed.DistributedSampler(Noted(40), 1, 0))"},
    ),
    Defect(
        "training metrics that change names",
        METRICS,
        (r"train_batch\(\)", "batch 3", r"model_def.py:\d+: 'third'"),
        {RETURN: 'return {"loss": loss, "third": 1.0} if batch_idx == 3 else {"loss": loss}'},
    ),
    Defect(
        "validation metrics that change names",
        METRICS,
        ("after 12 batches", "without 'validation_loss'", "'late'"),
        {
            EVALUATED: "late = self.context.current_train_batch() > 8\n"
            '        return {"late" if late else "validation_loss": self.loss(batch)}',
            'float(metrics["validation_loss"])': "0.0",
        },
    ),
    Defect(
        "metric that is not JSON",
        METRICS,
        (r"'extra': object .*\(model_def.py:\d+\)", "float"),
        {NEW_BEST: f'{NEW_BEST}\n        metrics["extra"] = object()'},
    ),
    Defect(
        "validation that fails",
        METRICS,
        ("ZeroDivisionError", r"model_def.py", "validation after 7 batches"),
        {EVALUATED: "return 1 / 0"},
    ),
    Defect(
        "loss that is not a number",
        "trains",
        ("'loss' is nan", "batch 0"),
        {"** 2).mean()": "** 2).mean() * float('nan')"},
    ),
    Defect(
        "backward pass past the context",
        CONTEXT,
        (r"model_def.py:\d+: loss.backward\(\) should be context.backward\(loss\)",),
        {"self.context.backward(loss)": "loss.backward()"},
    ),
    Defect(
        "optimizer stepped past the context",
        CONTEXT,
        (r"model_def.py:\d+: step\(\) of SGD should be context.step_optimizer",),
        {"self.context.step_optimizer(self.sgd)": "self.sgd.step()\n        self.sgd.zero_grad()"},
    ),
    Defect(
        "optimizer stepped on every batch",
        AGGREGATION,
        ("batch 0 completes no update", "head.weight", r"model_def.py:\d+: a step in batch 0", "step_optimizer"),
        {"self.context.step_optimizer(self.sgd)": "self.sgd.step()"},
    ),
    Defect(
        "gradients cleared on every batch",
        AGGREGATION,
        (r"model_def.py:\d+: zero_grad\(\) of Adam", "clears gradients that an update still needs"),
        before_loss("self.adam.zero_grad()"),
    ),
    Defect(
        "layer that the loss does not use",
        MOVES,
        ("never get a gradient: body.2.weight, body.2.bias",),
        {
            "torch.nn.Dropout(0.1)))": "torch.nn.Dropout(0.1), torch.nn.Linear(4, 4)))",
            "self.head(self.body(inputs))": "self.head(self.body[1](self.body[0](inputs)))",
        },
    ),
    Defect(
        "parameters without an optimizer",
        MOVES,
        ("1 of 4 trainable parameters get a gradient, but", "are in no wrapped optimizer: body.0.bias"),
        {"torch.optim.Adam(self.body.parameters()": "torch.optim.Adam([self.body[0].weight]"},
    ),
    Defect(
        "layer whose output is multiplied by 0",
        MOVES,
        ("do not move: body.2.weight, body.2.bias",),
        {
            LAYERS: f"{BATCH_NORM}, torch.nn.Linear(4, 4)",
            "self.head(self.body(inputs))": "self.head(self.body[:2](inputs) + 0 * self.body(inputs))",
        },
    ),
    Defect(
        "optimizer that is never stepped, with a bias before a batch norm",
        MOVES,
        ("do not move: body.0.weight",),
        {LAYERS: BATCH_NORM, "        self.context.step_optimizer(self.adam)\n": ""},
    ),
    Defect(
        "optimizer that is never stepped",
        MOVES,
        ("do not move: head.weight, head.bias", "step_optimizer"),
        {"        self.context.step_optimizer(self.sgd)\n": ""},
    ),
    Defect(
        "loader that cannot be resumed",
        RESUMES,
        ("data batch.* at batch 2", "not a det_lightning.pytorch.DataLoader"),
        {
            "        self.best = Best()\n": "        self.best = Best()\n"
            "        context.experimental.disable_dataset_reproducibility_checks()\n",
            "        return pytorch.DataLoader(Noted(40), "
            "batch_size=self.context.get_per_slot_batch_size(), shuffle=True)": "        "
            "data = torch.utils.data.TensorDataset(*map(torch.stack, zip(*Noted(40))))\n"
            "        batches = torch.utils.data.BatchSampler(range(40), 4, False)\n"
            "        batches = pytorch.samplers.RepeatBatchSampler(batches)\n"
            "        return torch.utils.data.DataLoader(data, batch_sampler=batches)",
        },
    ),
    Defect(
        "dataset with a memory",
        RESUMES,
        ("data batch.* at batch 2", "dataset"),
        {"return self.inputs[index], ": "self.reads += 1\n        return self.inputs[index] + 0.01 * self.reads, "},
    ),
]
