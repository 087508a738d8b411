"""What is wrong with a trial, by the check that catches it."""

from __future__ import annotations

from tests.testing.changed_trials import case

BATCH_NORM = "torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)"
SCALER = "self.scaler = context.wrap_scaler(torch.amp.GradScaler('cpu', init_scale=4.0))"
SCALED = "self.context.backward(self.scaler.scale(loss))"
CLIP = "torch.nn.utils.clip_grad_norm_(self.body.parameters(), 1)"
STEP_SCALED = "self.context.step_optimizer(self.sgd, scaler=self.scaler)\n        self.scaler.update()"
BACKWARD_TWICE = """self.context.step_optimizer(self.sgd, auto_zero_grads=False)
        self.adam.zero_grad()
        self.context.backward(self.body(batch[0]).pow(2).mean())
        self.context.step_optimizer(self.adam, auto_zero_grads=False)"""

COUNTING = """class Counting(torch.utils.data.Dataset):
    reads = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.reads += 1
        return torch.full((3,), 0.01 * self.reads), torch.ones(1)

    def state_dict(self):
        return {{"reads": self.reads}}

    def load_state_dict(self, state_dict):
        {loads}
"""

DEFECTS = {
    "trains": [case("nan for a loss", "'loss' is nan", "batch 0")(reduced="mean() * float('nan')")],
    "is deterministic under a seed": [
        case(
            "file of the first run",
            r"The very first run, which wrote .*scale.txt, is not like .*metric loss at batch 0",
        )(
            above="from pathlib import Path",
            init="file = Path(__file__).with_name('scale.txt')\nself.scale = 1.0 if file.exists() else 2.0\n"
            "file.write_text('1.0')",
            loss="self.loss(batch) * self.scale",
        ),
        case("order of the data without a seed", r"data batch\[0\].* at batch 0", "not seeded")(
            above="CHANCE = random.Random()", sample="self.inputs[CHANCE.randrange(9)]"
        ),
        case(
            "time, not the clock of a message or a seeded generator", r"equal to the bit.*\n  - LINE: time.time_ns\(\)"
        )(
            above="import time",
            init="self.noise = torch.Generator().manual_seed(3)\nself.since = time.time()",
            first="print(time.time() - self.since)",
            loss="self.loss(batch) * (1 + time.time_ns() % 997)",
        ),
    ],
    "is deterministic in another process": [
        case("number of the process", "Another process does not train the same", "metric loss at batch 0")(
            loss="self.loss(batch) * (1 + os.getpid() % 9999)"
        ),
    ],
    "moves every trainable parameter": [
        case("layer that the loss does not use", "never get a gradient: body.2.weight, body.2.bias")(
            layers="torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 4)",
            outputs="self.head(self.body[1](self.body[0](inputs)))",
        ),
        case(
            "parameters without an optimizer",
            "1 of 4 trainable parameters get a gradient, but",
            "are in no wrapped optimizer: body.0.bias",
        )(adam="torch.optim.Adam([self.body[0].weight])"),
        case("optimizer that is never stepped", "do not move: head.weight, head.bias", "step_optimizer")(step="pass"),
    ],
    "validates with JSON-serializable metrics of stable names": [
        case("training metrics that change names", r"train_batch\(\)", "batch 3", "LINE: 'third'")(
            returned='{"loss": loss, "third": 1.0} if batch_idx == 3 else {"loss": loss}'
        ),
        case("validation metrics that change names", "after 12 batches", "without 'validation_loss'", "'late'")(
            best="0.0",
            validation="late = self.context.current_train_batch() > 8",
            evaluated='{"late" if late else "validation_loss": self.loss(batch)}',
        ),
        case("metric that is no JSON", r"metric 'extra' is a object.*\(LINE\)", "float")(
            validated='metrics["extra"] = object()'
        ),
        case("validation that fails", "ZeroDivisionError", "model_def.py", "validation after 7 batches")(
            evaluated="1 / 0"
        ),
    ],
    "is not changed by a validation": [
        case(
            "training mode",
            "LINE: dropout works as in training in evaluate_batch",
            r"LINE: evaluate_batch\(\) leaves body and 2 more in training mode",
        )(validation="self.body.train()"),
        case("moving statistics", "changes body.1.running_mean", "batch norm works as in training")(
            layers=BATCH_NORM, validation="self.body[1].train()"
        ),
        case("changed bias", r"LINE: evaluate_batch\(\) changes head.bias")(validation="self.head.bias.data += 0.01"),
        case("dropout of torch", "LINE: dropout works as in training in evaluate_batch")(
            validation="batch = (torch.dropout(batch[0], 0.5, True), batch[1])"
        ),
        case("pruning at its end", r"LINE: on_validation_end\(\) changes head.weight_orig, head.weight_mask")(
            above="import torch.nn.utils.prune",
            validated="torch.nn.utils.prune.l1_unstructured(self.head, 'weight', 0.5)",
            init="self.best.head = self.head",
        ),
    ],
    "metrics do not grow with the batch": [
        case("sum over the data by the number of batches", "'validation_loss' is a sum over the batch")(
            evaluation="evaluate_full_dataset(self, data_loader)",
            validation="total = sum(self.loss(batch).item() * len(batch[0]) for batch in data_loader)",
            evaluated='{"validation_loss": total / len(data_loader)}',
        ),
        case("sum of means", "'validation_loss' grows with the number of batches", "LINE: pytorch.Reducer.SUM")(
            methods="def evaluation_reducer(self):\n    return pytorch.Reducer.SUM\n"
        ),
        case("sum in training", "Training metric 'hits' is a sum over the batch: .* in a batch, and .* in its halves")(
            returned='{"loss": loss, "hits": loss.item() * len(batch[0])}'
        ),
    ],
    "trains through its context": [
        case("unwrapped optimizer that is stepped", "steps a SGD that is not wrapped", "LINE")(
            sgd="torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)", step="self.sgd.step()"
        ),
        case("scheduler stepped twice", r"LINE: step\(\) of ExponentialLR", "STEP_EVERY_EPOCH", "stepped twice")(
            last="self.scheduler.step()"
        ),
        case(
            "scheduler wrapped twice",
            r"LINE: context.wrap_lr_scheduler\(\) is called twice with the same ExponentialLR",
        )(init="context.wrap_lr_scheduler(self.scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)"),
        case(
            "evaluation mode left on by each batch",
            r"LINE: evaluation mode is left on, in which body.1 trains from batch \d",
            r"train\(\)",
        )(last="self.body.eval()"),
        case("backward pass past the context", r"LINE: loss.backward\(\) should be context.backward\(loss\)")(
            backward="loss.backward()"
        ),
        case("step past the context", r"LINE: step\(\) of SGD should be context.step_optimizer")(
            step="self.sgd.step()\n        self.sgd.zero_grad()"
        ),
        case("clipping after the step", r"LINE: clip_grad_norm_\(\) clips .* after the step")(
            last="torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1)"
        ),
        case("clipping before the backward pass", r"LINE: clip_grad_norm_\(\) clips before the backward pass")(
            backward="torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1)\n        self.context.backward(loss)"
        ),
        case("gradients that are never cleared", "LINE: adds gradients to those of an earlier batch")(
            step="self.context.step_optimizer(self.sgd, auto_zero_grads=False)"
        ),
        case("seed in each validation", "same seed", r"LINE: random.seed\(7\)")(validation="random.seed(7)"),
        case("seed for each sample", r"same seed.*\n  - LINE: torch.manual_seed\(\d+\)\nUsual")(
            reads="torch.manual_seed(index)"
        ),
        case("seed in each epoch", "same seed", r"LINE: numpy.random.seed\(5\)")(
            hook="def on_training_epoch_start(self, epoch_idx):\n    np.random.seed(5)"
        ),
        case("scaled loss without its scaler", r"LINE: Adam steps with gradients of a scaled loss.*scaler=scaler")(
            begins=SCALER, backward=SCALED, step=STEP_SCALED
        ),
        case("clipping of scaled gradients", r"LINE: clip_grad_norm_\(\) clips gradients of a scaled loss: .*unscale_")(
            begins=SCALER,
            backward=SCALED,
            adam_step=f"{CLIP}\n        self.context.step_optimizer(self.adam, scaler=self.scaler)",
            step=STEP_SCALED,
        ),
        case("shrinking after the step", r"LINE: _foreach_mul_\(\) changes gradients after the step")(
            methods="def shrink(self):\n    torch._foreach_mul_([p.grad for p in self.head.parameters()], 0.5)\n",
            first="self.sgd.zero_grad()",
            step="self.context.step_optimizer(self.sgd, auto_zero_grads=False)\n        self.shrink()",
        ),
    ],
    "uses no hard-coded device": [
        case(".cuda()", r"LINE: .*\.cuda\(\)", "wrap_model")(head="context.wrap_model(torch.nn.Linear(4, 1).cuda())"),
        case("GPUs chosen by the environment", r"LINE: .*environ\['CUDA_VISIBLE_DEVICES'\]")(
            above="os.environ['CUDA_VISIBLE_DEVICES'] = ''"
        ),
    ],
    "has no process-group code of its own": [
        case("process group of its own", "LINE: .*init_process_group", "context.distributed")(
            init="torch.distributed.init_process_group('gloo')"
        ),
        case("sampler of its own", "LINE: .*DistributedSampler", "gives each process its part")(
            batches="batch_size=4, sampler=torch.utils.data.distributed.DistributedSampler(Noted(40), 1, 0)"
        ),
    ],
    "checkpoint contains all the state that training changes": [
        case("global counter that decides later on", r"module model_def .*: STEPS", "LINE")(
            first="global STEPS\nSTEPS += 1\nif STEPS % 500 == 0:\n    self.sgd.param_groups[0]['lr'] /= 10"
        ),
        case(
            "state in other places",
            "the context .*: steps",
            "trial.plain .*: n",
            "trial.slots .*: batches",
            r"trial.due .*: calls \(LINE\)",
            "class MyTrial .*factor",
        )(
            above="import types\n\nclass Slots:\n    __slots__ = 'batches'\n",
            init="calls = []\ncontext.steps, self.plain, self.slots = 0, types.SimpleNamespace(n=0), Slots()\n"
            "self.slots.batches = 0\nself.due = lambda: calls.append(1)",
            first="self.due()\nself.context.steps += 1\nself.plain.n += 1\nself.slots.batches += 1",
            last="type(self).factor *= 0.9",
            loss="self.loss(batch) * self.factor",
        ),
        case("unwrapped model", r"model trial.head .*\(LINE\)", "weight", "wrap_model")(head="torch.nn.Linear(4, 1)"),
        case("unwrapped optimizer", r"optimizer trial.sgd \(SGD\)", "momentum_buffer", "wrap_optimizer")(
            sgd="torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)", step="self.sgd.step()"
        ),
        case("unwrapped scheduler", r"scheduler trial.scheduler \(ExponentialLR\)", "last_epoch", "wrap_lr_scheduler")(
            scheduler="decay", last="self.scheduler.step()"
        ),
        case("iterator that is kept", r"trial \(MyTrial\): weights")(
            init="self.weights = (1 + 0.1 * i for i in range(99))", loss="self.loss(batch) * next(self.weights)"
        ),
        case("callback without state", r"callback 'best' \(Best\): best", "state_dict")(
            validated='metrics["number"] = self.best',
            best='1 if self.best == float("inf") else self.best + 1',
            saved="{}",
            loads="pass",
        ),
        case("state on the trial", r"trial \(MyTrial\): seen", "keep it in a callback")(
            init="self.seen = 0", first="self.seen += 1", loss="self.loss(batch) * (1 + 0.1 * self.seen)"
        ),
        case("list on the trial that a callback reads", r"trial \(MyTrial\): history")(
            validated='metrics["seen"] = len(self.trial.history)',
            init="self.best.trial = self\nself.history = []",
            last="self.history.append(float(loss))",
        ),
        case("attribute of a class", "class MyTrial", "factor")(
            first="MyTrial.factor *= 0.9", loss="self.loss(batch) * MyTrial.factor"
        ),
        case("generator of its own", r"trial \(MyTrial\): noise")(
            init="self.noise = torch.Generator().manual_seed(1)",
            loss="self.loss(batch) * (1 + torch.rand((), generator=self.noise))",
        ),
        case("buffer that is not saved", "model trial.head", "count", "register_buffer")(
            init="self.head.register_buffer('count', torch.zeros(()), persistent=False)", first="self.head.count += 1"
        ),
        case("state that is not there after a resume", "trial .*: hidden")(
            first="if batch_idx == 0:\n    self.hidden = (torch.zeros(1),)\nself.hidden = (self.hidden[0] + 1,)"
        ),
        case(
            "dataset that is changed in place",
            r"the training dataset \(Noted\): inputs \(LINE\)",
            "data that change while they are read",
        )(reads="self.inputs[index] *= 0.9", sample="self.inputs[index].clone()"),
        case("hyperparameter that is changed", r"the hyperparameters \(dict\): \['lr'\] \(LINE\)")(
            first="self.context.get_hparams()['lr'] *= 0.9", loss="self.loss(batch) * self.context.get_hparam('lr')"
        ),
        case("environment variable", r"the environment \(dict\): \['STEPS'\] \(LINE\)")(
            first="os.environ['STEPS'] = os.environ.get('STEPS', '') + '.'",
            loss="self.loss(batch) * len(os.environ['STEPS'])",
        ),
        case("metric that decides", r"metric trial.seen \(MeanMetric\): mean_value, weight \(LINE\)")(
            above="import torchmetrics",
            init="self.seen = torchmetrics.MeanMetric()",
            last="self.seen.update(loss.detach())\nself.sgd.param_groups[0]['lr'] = 0.1 * float(self.seen.compute())",
        ),
        case("reducer that is not reset", r"reducer trial.mean \(Kept\): losses", "whose reset")(
            above="class Kept(pytorch.MetricReducer):\n    losses = 0.0\n\n    def reset(self):\n        pass\n\n"
            "    def per_slot_reduce(self):\n        return self.losses\n\n"
            "    def cross_slot_reduce(self, parts):\n        return sum(parts)\n",
            init="self.mean = context.wrap_reducer(Kept(), 'mean', for_training=False)",
            validation="self.mean.losses += 1",
        ),
        case("state that cannot be seen", r"A resumed run differs, and no state was found .*metric loss at batch \d")(
            above="import itertools",
            init="self.weights = itertools.cycle([1.0, 1.1, 1.2, 1.3, 1.4])",
            loss="self.loss(batch) * next(self.weights)",
        ),
    ],
    "checkpoint round-trips": [
        case("state that is not loaded", "callbacks.best.best", "saved after 7 batches", "LINE: def load_state_dict")(
            loads="pass"
        ),
        case("own classes", "refused when it is loaded", "model_def.Best", "trusted=True", "LINE: def state_dict")(
            saved='{"best": self.best, "self": Best()}'
        ),
    ],
    "resumes bit-equal in the middle of an epoch": [
        case(
            "dataset that restores nothing",
            "resumed after 2 batches continues differently",
            r"data batch\[0\].* at batch 2",
            "LINE: def load_state_dict",
        )(above=COUNTING.format(loads="pass"), data="Counting()"),
        case("dataset whose state does not fit", "resumed after 2 batches fails .*KeyError", "in load_state_dict")(
            above=COUNTING.format(loads="self.reads = state_dict['read']"), data="Counting()"
        ),
        case("callback that counts its checkpoints", "callback state best.saved", r"LINE: on_checkpoint_write_end\(\)")(
            hook="saved = 0\n\ndef on_checkpoint_write_end(self, checkpoint_dir):\n    self.saved += 1",
            saved='{"best": self.best, "saved": self.saved}',
            loads='self.best, self.saved = state_dict["best"], state_dict["saved"]',
        ),
        case("loader of torch", "data batch.* at batch 2", "not a det_lightning.pytorch.DataLoader")(
            init="context.experimental.disable_dataset_reproducibility_checks()\n"
            "batches = torch.utils.data.BatchSampler(range(40), 4, False)\n"
            "self.batches = pytorch.samplers.RepeatBatchSampler(batches)",
            loader="torch.utils.data.DataLoader(Noted(40), batch_sampler=self.batches)",
        ),
    ],
    "trains under aggregation": [
        case("early step", "batch 0 completes no update", "head.weight", "LINE: a step in batch 0", "step_optimizer")(
            step="self.sgd.step()"
        ),
        case(
            "gradients cleared on every batch",
            r"LINE: zero_grad\(\) of Adam",
            "clears gradients that an update still needs",
        )(first="self.adam.zero_grad()"),
    ],
    "two processes train on the samples of one": [
        case("parameter frozen late", "LINE: .*freezes", r"requires_grad_\(False\) before context.wrap_model")(
            init="self.body[0].bias.requires_grad = False"
        ),
        case("global batch for each", "8 samples in batch 0, where one trains on 4", "LINE: .*get_global_batch_size")(
            size="context.get_global_batch_size()"
        ),
        case("data sharded twice", "20 samples in each of two processes, and 40 in one", "LINE: .*distributed.rank")(
            data="torch.utils.data.Subset(Noted(40), "
            "range(self.context.distributed.rank, 40, self.context.distributed.size))"
        ),
        case("data sharded by the variables of torchrun", "20 samples in each of two processes", "LINE: 'RANK'")(
            data="torch.utils.data.Subset(Noted(40), range(int(os.environ.get('RANK', 0)), 40, "
            "int(os.environ.get('WORLD_SIZE', 1))))"
        ),
        case("sampler of each process", "Two processes train on other samples than one, first in batch 1")(
            batches="batch_size=self.batch_size, sampler=Drawing(np.random.default_rng(os.getpid()))"
        ),
    ],
    "two processes keep their weights equal": [
        case(
            "parameter that depends on the rank",
            "which no wrapped model has: trial.scale",
            "LINE: context.distributed.rank",
        )(
            init="self.scale = torch.nn.Parameter(torch.tensor(1.0 + context.distributed.rank))",
            loss="self.scale * self.loss(batch)",
        )
    ],
    "two processes agree with one": [
        case("sum for a loss", "metric 'loss' of batch 0", "sum over the batch")(reduced="sum()"),
        case("sum without that name", "gradient of parameter .* is 0.5 times")(
            reduced="sum()", returned='{"error": loss}'
        ),
        case("sum with random numbers", "metric 'loss' of batch 0 is 0.[45]", r"LINE: .*\.sum\(\)")(
            reduced="sum() * (1 + 0.01 * torch.rand(()))"
        ),
        case("rate that grows", "metric 'loss' of batch 1", r"LINE: 0.05 \* context.distributed.size")(
            sgd="context.wrap_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.05 * context.distributed.size))"
        ),
        case("factor of the rank", "trial.factor_here is 1.0 in one process and 2.0 in the other")(
            init="self.factor_here = 1.0 + context.distributed.rank", loss="self.factor_here * self.loss(batch)"
        ),
    ],
    "two processes validate like one": [
        case("reducer of one process", "'mean' is .* with two processes and .* with one")(
            init="self.mean = context.wrap_reducer(Mean(), 'mean', for_training=False)",
            validation="self.mean.update(self.loss(batch).item())",
        )
    ],
    "matches the real determined": [
        case("extra random draw", "batch 0|batch 1", "random|metric|parameter|data")(first="torch.rand(())"),
        case("scheduler of another mode", "learning rate", "batch 1")(
            scheduler="context.wrap_lr_scheduler(decay, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)"
        ),
    ],
}

#: Code that is right although it looks wrong.
HARMLESS = {
    "trains": [
        case("a hyperparameter that is taken out")(init="context.get_hparams().pop('lr')"),
        case("a method for all loaders")(
            takes="self, samples=40, shuffle=True",
            loader="pytorch.DataLoader(Noted(samples), batch_size=4, shuffle=shuffle)",
            validation_loader="self.build_training_data_loader(samples=12, shuffle=False)",
        ),
    ],
    "resumes bit-equal in the middle of an epoch": [
        case("a dataset that knows its position")(
            above=COUNTING.format(loads='self.reads = state_dict["reads"]'), data="Counting()"
        )
    ],
    "is deterministic under a seed": [
        case("a trial that can be built once in a process")(
            begins="import multiprocessing\nmultiprocessing.set_start_method('fork')"
        )
    ],
    "moves every trainable parameter": [
        case("a model that teaches another one")(
            init="self.teacher = context.wrap_model(torch.nn.Linear(3, 1))",
            first="with torch.no_grad():\n    self.teacher(batch[0])",
        ),
        case("an optimizer without a learning rate")(
            above="class Plain(torch.optim.Optimizer):\n    def step(self, closure=None):\n"
            "        for p in self.param_groups[0]['params']:\n            p.data.sub_(p.grad, alpha=0.1)\n",
            sgd="context.wrap_optimizer(Plain(self.head.parameters(), {}))",
        ),
        case("a bias before a batch norm, whose gradient is rounding noise")(
            layers=BATCH_NORM, adam="torch.optim.SGD(self.body.parameters(), lr=0.001)"
        ),
        case("a bias before a batch norm, with another gradient while the learning rate is 0")(
            layers=BATCH_NORM,
            adam="torch.optim.SGD(self.body.parameters(), lr=0.01)",
            first="self.body.train(epoch_idx > 0)\nself.adam.param_groups[0]['lr'] = 0.01 if epoch_idx else 0.0",
        ),
        case("a bias whose gradients of two backward passes cancel")(
            backward="self.context.backward(self.head(self.body(batch[0])).mean())\n"
            "        self.context.backward(-self.head(self.body(batch[0] + 1)).mean())",
        ),
    ],
    "is not changed by a validation": [
        case("dropout that is switched on, and off again")(
            validation="self.body[1].train()\nloss = self.loss(batch)\nself.body[1].eval()",
            evaluated='{"validation_loss": loss}',
        ),
        case("weights that are swapped in")(
            validation="before = self.head.bias.data.clone()\nself.head.bias.data += 1\n"
            "loss = self.loss(batch)\nself.head.bias.data.copy_(before)",
            evaluated='{"validation_loss": loss}',
        ),
    ],
    "metrics do not grow with the batch": [
        case("a metric that is summed over the batches")(
            methods="def evaluation_reducer(self):\n    return pytorch.Reducer.SUM",
            evaluated='{"validation_loss": self.loss(batch) * len(batch[0])}',
        ),
        case("a learning rate that is scaled by the global batch size")(
            init="self.rate = 0.1 * context.get_global_batch_size() / 256",
            returned='{"loss": loss, "rate": self.rate}',
            evaluated='{"validation_loss": self.loss(batch), "rate": self.rate}',
        ),
        case("a number of samples and a learning rate in training")(
            returned='{"loss": loss, "n": len(batch[0]), "rate": self.scheduler.get_last_lr()[0]}'
        ),
    ],
    "trains through its context": [
        case("gradients that the trial clears before each of two backward passes")(
            first="self.sgd.zero_grad()", adam_step="pass", step=BACKWARD_TWICE
        ),
        case("other optimizers, seeds and modes for a moment, and gradients that the context clips")(
            sgd="context.wrap_optimizer(Calling(self.head.parameters(), lr=0.05, momentum=0.9))",
            first="with torch.random.fork_rng():\n    torch.manual_seed(0)\n"
            "noise = torch.zeros_like(batch[0], requires_grad=True)\ninner = torch.optim.SGD([noise], lr=0.1)\n"
            "noise.grad, = torch.autograd.grad(self.loss((batch[0] + noise, batch[1])), [noise])\ninner.step()",
            step="self.context.step_optimizer(self.sgd, lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0))",
            last="self.body.eval()\nself.loss(batch)\nself.body.train()",
        ),
        case("training mode at the start of each batch, and evaluation mode at its end")(
            first="self.body.train()", last="self.body.eval()"
        ),
        case("a batch norm that is frozen in each batch")(layers=BATCH_NORM, first="self.body[1].eval()"),
        case("a scaled loss whose gradients are divided before they are clipped")(
            begins=SCALER,
            backward=SCALED,
            adam_step=f"self.scaler.unscale_(self.adam)\n        {CLIP}\n"
            "        self.context.step_optimizer(self.adam, scaler=self.scaler)",
            step=STEP_SCALED,
        ),
        case("a seed for each sample, after which the state is restored")(
            reads="state = torch.get_rng_state()\ntorch.manual_seed(index)\ntorch.set_rng_state(state)"
        ),
        case("clipping and scaling with keywords")(
            begins=SCALER,
            backward=SCALED.replace("(loss)", "(outputs=loss)", 1),
            adam_step="self.context.step_optimizer(self.adam, scaler=self.scaler, "
            "clip_grads=lambda ps: torch.nn.utils.clip_grad_norm_(parameters=ps, max_norm=1))",
            step=STEP_SCALED,
        ),
        case("a batch norm that is always frozen")(layers="torch.nn.Linear(3, 4), Frozen(4)"),
    ],
    "uses no hard-coded device": [
        case("a tensor that is moved")(
            init="self.means = torch.zeros(3)", prepares="inputs = inputs - self.context.to_device(self.means)"
        ),
        case("the current GPU, if there is one")(
            init="self.device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')"
        ),
    ],
    "checkpoint contains all the state that training changes": [
        case("a dataset that caches and counts")(
            reads="self.reads += 1\nself.known = getattr(self, 'known', {})\n"
            "if index not in self.known:\n    self.known[index] = self.inputs[index]",
            sample="self.known[index]",
        ),
        case("values that are printed, overwritten, of the clock, or only appended to")(
            above="import time\nSEEN: list = []",
            remembers='self.losses = {"validation": []}',
            validated='self.losses["validation"] += [self.best]\nSEEN.append(metrics)',
            init="self.seen = self.mean = self.since = 0\nself.history = []",
            first="self.spent = getattr(self, 'spent', 0) + time.perf_counter()",
            last="self.seen += 1\nself.mean = 0.9 * self.mean + 0.1 * loss.item()\nself.latest = loss.item()\n"
            "if self.seen % 5 == 0:\n    print(self.seen, self.mean, self.since)\n"
            "    self.since = time.time()\nself.history.append(float(loss))",
        ),
        case("a reducer and a metric that are reset")(
            above="import torchmetrics",
            init="self.mean = context.wrap_reducer(Mean(), 'mean', for_validation=False)\n"
            "self.seen = context.wrap_reducer(torchmetrics.MeanMetric(), 'seen', for_validation=False)",
            last="self.mean.update(loss.item())\nself.seen.update(loss.item())",
        ),
    ],
    "checkpoint round-trips": [
        case("what a callback adds to a checkpoint")(
            hook="def on_checkpoint_save_start(self, checkpoint):\n    checkpoint['added'] = 4\n\n"
            "def on_checkpoint_load_start(self, checkpoint):\n    assert checkpoint['added'] == 4"
        )
    ],
    "trains under aggregation": [
        case("weights that are clamped after each batch")(last="self.head.weight.data.clamp_(-0.01, 0.01)"),
    ],
    "two processes train on the samples of one": [
        case("a wrapped teacher that is frozen")(
            init="self.teacher = context.wrap_model(torch.nn.Linear(3, 1)).requires_grad_(False)",
            loss="self.loss(batch) + (self.body(batch[0]).mean() - self.teacher(batch[0])).pow(2).mean()",
        )
    ],
    "two processes agree with one": [
        case("a layer that is frozen for the end of each batch only")(
            first="self.head.requires_grad_(True)", last="self.head.requires_grad_(False)"
        ),
    ],
}

#: Trials for which a check has nothing to compare.
NOT_COMPARED = {
    "checkpoint contains all the state that training changes": [
        case("random numbers without a seed", "two uninterrupted runs differ already")(
            loss="self.loss(batch) * (1 + np.random.default_rng().random())"
        )
    ],
    "moves every trainable parameter": [
        case("a gradient later on", "head.weight, head.bias got no gradient in 12 batches.*LINE")(
            first="self.head.requires_grad_(batch_idx > 99)"
        )
    ],
    "metrics do not grow with the batch": [
        case("a metric that is 0 at first", "hits of the untrained model is 0")(
            evaluated='{"validation_loss": self.loss(batch), "hits": 0 * len(batch[0])}'
        )
    ],
    "two processes train on the samples of one": [
        case("samples with random numbers", "on as many samples as one, 4 in batch 0")(
            sample="self.inputs[index] + np.random.rand(1).astype('f')"
        ),
        case("time as the first dimension", "4 in batch 0; as arrays of a batch have other lengths")(
            batches="batch_size=self.batch_size, shuffle=True, collate_fn=time_first",
            validates="batch_size=4, collate_fn=time_first",
            methods="def get_batch_length(self, batch):\n    return batch[0].shape[1]\n",
            prepares="inputs = inputs.mean(0)",
        ),
        case("a batch_sampler", "the trial makes its batches itself; two processes train on other samples than one")(
            batches="batch_sampler=Buckets(self.batch_size)"
        ),
        case("a batch size without a hyperparameter", "no hyperparameter global_batch_size")(size="4"),
    ],
    "two processes agree with one": [
        case("a loss with random numbers", "draws random numbers")(first="torch.rand(())"),
        case(
            "a loss that compares the samples of a batch",
            "the loss of a batch is not the mean of the losses of its halves",
        )(
            prepares="logits = self.head(self.body(inputs)) @ targets.T",
            error="torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))",
        ),
        case("a sampler without a seed", "differ already, first in the data.* deterministic under a seed")(
            batches="batch_size=self.batch_size, sampler=Drawing(np.random.default_rng())"
        ),
        case("a sampler of each process", "two processes train on other samples than one in batch 1")(
            batches="batch_size=self.batch_size, sampler=Drawing(np.random.default_rng(os.getpid()))"
        ),
    ],
}
