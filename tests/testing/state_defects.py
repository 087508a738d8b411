"""Defects that lose state over a checkpoint."""

from __future__ import annotations

from tests.testing.defects import (
    CONTEXT,
    HEAD,
    NEW_BEST,
    RESUMES,
    RETURN,
    ROUND_TRIP,
    SAVED,
    SCHEDULER,
    SGD,
    STATE,
    Defect,
    before_loss,
)

STATE_DEFECTS = [
    Defect(
        "a counter that decides later on",
        STATE,
        ("steps", r"model_def.py:\d+"),
        {
            HEAD: f"{HEAD}\n        self.steps = 0",
            RETURN: "self.steps += 1\n        if self.steps % 500 == 0:\n"
            "            self.sgd.param_groups[0]['lr'] /= 10\n"
            f"        {RETURN}",
        },
    ),
    Defect(
        "unwrapped model",
        STATE,
        (r"model trial.head .*\(model_def.py:\d+\)", "weight", "wrap_model"),
        {HEAD: "self.head = torch.nn.Linear(4, 1)"},
    ),
    Defect(
        "unwrapped optimizer",
        STATE,
        (r"optimizer trial.sgd \(SGD\)", "momentum_buffer", "wrap_optimizer"),
        {SGD: SGD[len("context.wrap_optimizer(") : -1], "self.context.step_optimizer(self.sgd)": "self.sgd.step()"},
    ),
    Defect(
        "unwrapped optimizer that is stepped",
        CONTEXT,
        ("steps a SGD that is not wrapped", r"model_def.py:\d+"),
        {SGD: SGD[len("context.wrap_optimizer(") : -1], "self.context.step_optimizer(self.sgd)": "self.sgd.step()"},
    ),
    Defect(
        "unwrapped scheduler",
        STATE,
        (r"scheduler trial.scheduler \(ExponentialLR\)", "last_epoch", "wrap_lr_scheduler"),
        {
            SCHEDULER: "torch.optim.lr_scheduler.ExponentialLR(self.adam, gamma=0.9)",
            RETURN: f"self.scheduler.step()\n        {RETURN}",
        },
    ),
    Defect(
        "scheduler stepped twice",
        CONTEXT,
        (r"step\(\) of ExponentialLR", "STEP_EVERY_EPOCH", "stepped twice", r"model_def.py:\d+"),
        {RETURN: f"self.scheduler.step()\n        {RETURN}"},
    ),
    Defect(
        "scheduler stepped twice, at the end of an epoch",
        CONTEXT,
        (r"step\(\) of ExponentialLR", "stepped twice", r"model_def.py:\d+"),
        {
            "self.best = Best()\n": "self.best = Best()\n        self.best.scheduler = self.scheduler\n",
            "    def on_validation_end": "    def on_training_epoch_end(self, epoch_idx):\n"
            "        self.scheduler.step()\n\n    def on_validation_end",
        },
    ),
    Defect(
        "scheduler wrapped twice",
        CONTEXT,
        (r"model_def.py:\d+: context.wrap_lr_scheduler\(\) is called twice with the same ExponentialLR",),
        {
            "        self.best = Best()\n": "        self.best = Best()\n"
            "        context.wrap_lr_scheduler(self.scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)\n"
        },
    ),
    Defect(
        "iterator that is kept",
        STATE,
        (r"trial \(MyTrial\): weights",),
        {
            HEAD: f"{HEAD}\n        self.weights = (1 + 0.1 * i for i in range(99))",
            **before_loss("pass", "self.loss(batch) * next(self.weights)"),
        },
    ),
    Defect(
        "callback without state",
        STATE,
        (r"callback 'best' \(Best\): best", "state_dict"),
        {
            'def state_dict(self):\n        return {"best": self.best}': "def state_dict(self):\n        return {}",
            'self.best = state_dict["best"]': "pass",
            NEW_BEST: 'self.best = 1 if self.best == float("inf") else self.best + 1\n'
            '        metrics["number"] = self.best',
        },
    ),
    Defect(
        "state on the trial",
        STATE,
        (r"trial \(MyTrial\): seen", "keep it in a callback"),
        {
            "        self.best = Best()\n": "        self.best = Best()\n        self.seen = 0\n",
            **before_loss("self.seen += 1", "self.loss(batch) * (1 + 0.1 * self.seen)"),
        },
    ),
    Defect(
        "state in a list on the trial",
        STATE,
        (r"trial \(MyTrial\): history", "keep it in a callback"),
        {
            "        self.best = Best()\n": "        self.best = Best()\n        self.history = []\n",
            RETURN: 'self.history.append(float(loss))\n        return {"loss": sum(self.history)}',
        },
    ),
    Defect(
        "state in a list on the trial that a callback reads",
        STATE,
        (r"trial \(MyTrial\): history",),
        {
            "        self.best = Best()\n": "        self.best = Best()\n        self.best.trial = self\n"
            "        self.history = []\n",
            RETURN: f"self.history.append(float(loss))\n        {RETURN}",
            NEW_BEST: f'{NEW_BEST}\n        metrics["seen"] = len(self.trial.history)',
        },
    ),
    Defect(
        "state in a list that has another name too",
        STATE,
        (r"trial \(MyTrial\): history",),
        {
            "        self.best = Best()\n": "        self.best = Best()\n        self.history = []\n"
            "        history = self.history\n        self.mean = lambda: sum(history) / len(history)\n",
            RETURN: 'self.history.append(float(loss))\n        return {"loss": self.mean()}',
        },
    ),
    Defect(
        "state in a global variable",
        STATE,
        ("module model_def", "STEPS"),
        before_loss("global STEPS\n        STEPS += 1", "self.loss(batch) * (1 + 0.1 * STEPS)"),
    ),
    Defect(
        "state on a class",
        STATE,
        ("class MyTrial", "factor"),
        before_loss("MyTrial.factor *= 0.9", "self.loss(batch) * MyTrial.factor"),
    ),
    Defect(
        "generator of its own",
        STATE,
        (r"trial \(MyTrial\): noise",),
        {
            HEAD: f"{HEAD}\n        self.noise = torch.Generator().manual_seed(1)",
            **before_loss("pass", "self.loss(batch) * (1 + torch.rand((), generator=self.noise))"),
        },
    ),
    Defect(
        "buffer that is not saved",
        STATE,
        (r"model trial.head", "count", "register_buffer"),
        {
            HEAD: f"{HEAD}\n        self.head.register_buffer('count', torch.zeros(()), persistent=False)",
            **before_loss("self.head.count += 1"),
        },
    ),
    Defect(
        "copy of the weights that is not saved",
        STATE,
        ("model trial.average", "weight"),
        {
            HEAD: f"{HEAD}\n        self.average = torch.optim.swa_utils.AveragedModel(self.head)",
            RETURN: f"self.average.update_parameters(self.head)\n        {RETURN}",
        },
    ),
    Defect(
        "callback that does not restore what it saved",
        ROUND_TRIP,
        ("callbacks.best.best", "saved after 7 batches", r"model_def.py:\d+: def load_state_dict"),
        {'self.best = state_dict["best"]': "pass"},
    ),
    Defect(
        "callback that counts its checkpoints",
        RESUMES,
        ("callback state best.saved", r"model_def.py:\d+: on_checkpoint_write_end\(\)"),
        {
            "    def on_validation_end": "    saved = 0\n\n    def on_checkpoint_write_end(self, checkpoint_dir):\n"
            "        self.saved += 1\n\n    def on_validation_end",
            SAVED: '{"best": self.best, "saved": self.saved}\n\n    def load_state_dict',
            'self.best = state_dict["best"]': 'self.best, self.saved = state_dict["best"], state_dict["saved"]',
        },
    ),
    Defect(
        "objects of the trial's own classes in a checkpoint",
        ROUND_TRIP,
        ("refused when it is loaded", "model_def.Best", "trusted=True", r"model_def.py:\d+: def state_dict"),
        {SAVED: '{"best": self.best, "self": Best()}\n\n    def load_state_dict'},
    ),
    Defect(
        "state that is not there after a resume",
        STATE,
        ("trial .*: hidden",),
        before_loss(
            "if batch_idx == 0:\n            self.hidden = (torch.zeros(1),)\n"
            "        self.hidden = (self.hidden[0] + 1,)",
        ),
    ),
]
