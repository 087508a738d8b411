"""Code that is right although it looks wrong, and code whose check has nothing to compare."""

from __future__ import annotations

from tests.testing.defects import (
    ADAM,
    AGGREGATION,
    BATCH_NORM,
    CONTEXT,
    DEVICE,
    EVALUATED,
    GROWTH,
    HEAD,
    LAYERS,
    LOSS,
    MOVES,
    NEW_BEST,
    PROCESSES,
    RETURN,
    ROUND_TRIP,
    SAMPLES,
    SMALL_SGD,
    STATE,
    UNCHANGED,
    before_loss,
)

HARMLESS = {
    "an optimizer that lets another one step": (
        CONTEXT,
        {
            "class MyTrial": "class Calling(torch.optim.SGD):\n    def step(self, closure=None):\n"
            "        torch.optim.SGD(self.param_groups[0]['params'], lr=0.1).step()\n\n\nclass MyTrial",
            "torch.optim.SGD(self.head": "Calling(self.head",
        },
    ),
    "counters and averages that are only printed": (
        STATE,
        {
            "        self.best = Best()\n": "        self.best = Best()\n        self.seen = 0; self.mean = 0.0\n",
            RETURN: "self.seen += 1\n        self.mean = 0.9 * self.mean + 0.1 * loss.item()\n"
            f"        if self.seen % 5 == 0:\n            print(self.seen, self.mean)\n        {RETURN}",
        },
    ),
    "a dataset that caches and counts": (
        STATE,
        {
            "return self.inputs[index], ": "self.reads += 1\n        self.known = getattr(self, 'known', {})\n"
            "        return self.known.setdefault(index, self.inputs[index]), "
        },
    ),
    "a metric that is summed over the batches": (
        GROWTH,
        {
            EVALUATED: 'return {"validation_loss": self.loss(batch) * len(batch[0])}\n\n'
            "    def evaluation_reducer(self):\n        return pytorch.Reducer.SUM"
        },
    ),
    "a number of samples": (GROWTH, {EVALUATED: 'return {"validation_loss": self.loss(batch), "n": len(batch[0])}'}),
    "dropout that the trial switches on, and off again, for a validation": (
        UNCHANGED,
        {
            EVALUATED: "self.body[1].train()\n        loss = self.loss(batch)\n        self.body[1].eval()\n"
            '        return {"validation_loss": loss}'
        },
    ),
    "weights that are swapped in for a validation": (
        UNCHANGED,
        {
            EVALUATED: "before = self.head.bias.data.clone()\n        self.head.bias.data += 1\n"
            "        loss = self.loss(batch)\n        self.head.bias.data.copy_(before)\n"
            '        return {"validation_loss": loss}'
        },
    ),
    "gradients that the trial clears itself": (
        CONTEXT,
        {
            "step_optimizer(self.sgd)": "step_optimizer(self.sgd, auto_zero_grads=False)",
            **before_loss("self.sgd.zero_grad()"),
        },
    ),
    "gradients that the trial clears before each of two backward passes": (
        CONTEXT,
        {
            LOSS: "        self.sgd.zero_grad()\n        loss = self.loss(batch)\n        self.context.backward",
            "        self.context.step_optimizer(self.adam)\n        self.context.step_optimizer(self.sgd)\n": (
                "        self.context.step_optimizer(self.sgd, auto_zero_grads=False)\n"
                "        self.adam.zero_grad()\n"
                "        self.context.backward(self.body(batch[0]).pow(2).mean())\n"
                "        self.context.step_optimizer(self.adam, auto_zero_grads=False)\n"
            ),
        },
    ),
    "an optimizer of the inputs": (
        CONTEXT,
        before_loss(
            "noise = torch.zeros_like(batch[0], requires_grad=True)\n"
            "        inner = torch.optim.SGD([noise], lr=0.1)\n"
            "        noise.grad, = torch.autograd.grad(self.loss((batch[0] + noise, batch[1])), [noise])\n"
            "        inner.step()"
        ),
    ),
    "a seed that is set beside the random state of the training": (
        CONTEXT,
        before_loss("with torch.random.fork_rng():\n            torch.manual_seed(0)"),
    ),
    "gradients that are clipped by the context": (
        CONTEXT,
        {
            "step_optimizer(self.sgd)": "step_optimizer(self.sgd, lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0))",
        },
    ),
    "evaluation mode in a batch, and training mode again": (
        CONTEXT,
        {RETURN: f"self.body.eval()\n        self.loss(batch)\n        self.body.train()\n        {RETURN}"},
    ),
    "evaluation mode in a batch, and modes that are put back one by one": (
        CONTEXT,
        {
            LAYERS: BATCH_NORM,
            RETURN: "modes = {m: m.training for m in self.body.modules()}\n        self.body.eval()\n"
            "        self.loss(batch)\n        for m, mode in modes.items():\n            m.training = mode\n"
            f"        {RETURN}",
        },
    ),
    "training mode at the start of each batch, and evaluation mode at its end": (
        CONTEXT,
        {**before_loss("self.body.train()"), RETURN: f"self.body.eval()\n        {RETURN}"},
    ),
    "a batch norm that is frozen in each batch": (CONTEXT, {LAYERS: BATCH_NORM, **before_loss("self.body[1].eval()")}),
    "a batch norm that is frozen later on": (
        CONTEXT,
        {LAYERS: BATCH_NORM, **before_loss("if batch_idx >= 5:\n            self.body[1].eval()")},
    ),
    "a batch norm that is always frozen": (
        CONTEXT,
        {
            LAYERS: "torch.nn.Linear(3, 4), Frozen(4)",
            "class Best(": "class Frozen(torch.nn.BatchNorm1d):\n    def train(self, mode=True):\n"
            "        return super().train(False)\n\n\nclass Best(",
        },
    ),
    "evaluation mode of a model without dropout": (
        CONTEXT,
        {LAYERS: "torch.nn.Linear(3, 4)", RETURN: f"self.body.eval()\n        {RETURN}"},
    ),
    "a layer that is frozen for the end of each batch only": (
        PROCESSES,
        {
            **before_loss("self.head.requires_grad_(True)"),
            RETURN: f"self.head.requires_grad_(False)\n        {RETURN}",
        },
    ),
    "a wrapped teacher that is frozen": (
        SAMPLES,
        {
            HEAD: f"{HEAD}\n        self.teacher = context.wrap_model(torch.nn.Linear(3, 1)).requires_grad_(False)",
            **before_loss(
                "pass", "self.loss(batch) + (self.body(batch[0]).mean() - self.teacher(batch[0])).pow(2).mean()"
            ),
        },
    ),
    "the current GPU, if there is one": (
        DEVICE,
        {HEAD: f"{HEAD}\n        self.device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')"},
    ),
    "what the clock changes": (
        STATE,
        before_loss("import time\n        self.spent = getattr(self, 'spent', 0) + time.perf_counter()"),
    ),
    "what is overwritten before it is read": (STATE, {RETURN: f"self.latest = loss.item()\n        {RETURN}"}),
    "a model that teaches another one": (
        MOVES,
        {
            HEAD: f"{HEAD}\n        self.teacher = context.wrap_model(torch.nn.Linear(3, 1))",
            **before_loss("with torch.no_grad():\n            self.teacher(batch[0])"),
        },
    ),
    "a bias before a batch norm, whose gradient is rounding noise": (MOVES, {LAYERS: BATCH_NORM, ADAM: SMALL_SGD}),
    "weights that the trial clamps after each batch": (
        AGGREGATION,
        {RETURN: f"self.head.weight.data.clamp_(-0.01, 0.01)\n        {RETURN}"},
    ),
    "weights that a callback changes between batches": (
        AGGREGATION,
        {
            "self.best = Best()": "self.best = Best()\n        self.best.head = self.head",
            "    def on_validation_end": "    def on_validation_start(self):\n        self.head.reset_parameters()\n\n"
            "    def on_validation_end",
        },
    ),
    "what a callback adds to a checkpoint": (
        ROUND_TRIP,
        {
            "    def on_validation_end": "    def on_checkpoint_save_start(self, checkpoint):\n"
            "        checkpoint['added'] = 4\n\n    def on_checkpoint_load_start(self, checkpoint):\n"
            "        assert checkpoint['added'] == 4\n\n    def on_validation_end"
        },
    ),
    "a list that is only appended to": (
        STATE,
        {
            "        self.best = Best()\n": "        self.best = Best()\n        self.history = []\n",
            RETURN: f"self.history.append(float(loss))\n        {RETURN}",
        },
    ),
    "lists in a dict of a callback, and in a global variable, that are only appended to": (
        STATE,
        {
            "STEPS = 0": "STEPS = 0\nSEEN: list = []",
            'self.best = float("inf")': 'self.best = float("inf")\n        self.losses = {"validation": []}',
            NEW_BEST: f'{NEW_BEST}\n        self.losses["validation"] += [self.best]\n        SEEN.append(metrics)',
        },
    ),
    "a list of predictions for each validation": (
        STATE,
        {
            "    def on_validation_end": "    def on_validation_start(self):\n        self.seen = []\n\n"
            "    def on_validation_end",
            '        return {"validation_loss"': '        self.best.seen.append(1)\n        return {"validation_loss"',
        },
    ),
}

NOT_COMPARED = {
    "a loss with random numbers": (PROCESSES, "draws random numbers", before_loss("torch.rand(())")),
    "samples with random numbers": (
        SAMPLES,
        "on as many samples as one, 4 in batch 0",
        {"return self.inputs[index], ": "return self.inputs[index] + np.random.rand(1).astype('f'), "},
    ),
    "batches whose first dimension is time": (
        SAMPLES,
        "as many samples as one, 4 in batch 0; as arrays of a batch have other lengths",
        {
            "    def loss(self, batch):\n        inputs, targets = batch": "    def get_batch_length(self, batch):\n"
            "        return batch[0].shape[1]\n\n    def loss(self, batch):\n        inputs, targets = batch\n"
            "        inputs = inputs.mean(0)",
            "shuffle=True)": "shuffle=True, collate_fn=time_first)",
            "Noted(12), batch_size=4)": "Noted(12), batch_size=4, collate_fn=time_first)",
            "class Best(": "def time_first(samples):\n    inputs, targets = map(torch.stack, zip(*samples))\n"
            "    return torch.stack([inputs] * 7), targets\n\n\nclass Best(",
        },
    ),
    "a loss that compares the samples of a batch": (
        PROCESSES,
        "the loss of a batch is not the mean of the losses of its halves",
        {
            "return ((self.head(self.body(inputs)) - targets) ** 2).mean()": (
                "out = self.head(self.body(inputs))\n"
                "        logits = out @ targets.T\n"
                "        return torch.nn.functional.cross_entropy(logits, torch.arange(len(out)))"
            )
        },
    ),
    "batches of a batch_sampler": (
        SAMPLES,
        "the trial makes its batches itself; two processes train on other samples than one",
        {
            "batch_size=self.context.get_per_slot_batch_size(), shuffle=True": (
                "batch_sampler=Buckets(self.context.get_per_slot_batch_size())"
            ),
            "class Best(": "class Buckets:\n    def __init__(self, size):\n        self.size = size\n\n"
            "    def __len__(self):\n        return 40 // self.size\n\n    def __iter__(self):\n"
            "        buckets = np.arange(40).reshape(-1, self.size)\n"
            "        yield from np.random.default_rng(3).permutation(buckets).tolist()\n\n\nclass Best(",
        },
    ),
    "a batch size without a hyperparameter": (
        SAMPLES,
        "no hyperparameter global_batch_size",
        {"self.context.get_per_slot_batch_size()": "4"},
    ),
    "a metric that is 0 at first": (
        GROWTH,
        "hits of the untrained model is 0",
        {EVALUATED: 'return {"validation_loss": self.loss(batch), "hits": 0 * len(batch[0])}'},
    ),
    "parameters that get a gradient later on": (
        MOVES,
        r"head.weight, head.bias got no gradient in 12 batches.*model_def.py:\d+",
        before_loss("self.head.requires_grad_(batch_idx > 99)"),
    ),
}
