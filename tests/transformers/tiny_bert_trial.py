"""A trial on model-hub's base class, as its examples are: sentences of a CSV file, tokenized, and a small BERT."""

import determined.pytorch as det_torch
import model_hub.huggingface as hf
import numpy as np
import transformers
from model_hub import utils


def accuracy(values):
    logits, labels = zip(*values, strict=True)
    return float((utils.expand_like(logits).argmax(-1) == utils.expand_like(labels)).mean())


class TinyBertTrial(hf.BaseTransformerTrial):
    def __init__(self, context: det_torch.PyTorchTrialContext) -> None:
        self.hparams = utils.AttrDict(context.get_hparams())
        self.data_config = utils.AttrDict(context.get_data_config())
        super().__init__(context)
        self.datasets = hf.default_load_dataset(self.data_config).map(self.tokenize)
        for part in self.datasets.values():
            hf.remove_unused_columns(self.model, part)
        self.accuracy = context.wrap_reducer(accuracy, name="accuracy", for_training=False)

    def tokenize(self, record):
        return self.tokenizer(record["sentence"], padding="max_length", max_length=8, truncation=True)

    def make_loader(self, name):
        return det_torch.DataLoader(
            self.datasets[name],
            batch_size=self.context.get_per_slot_batch_size(),
            shuffle=name == "train",
            collate_fn=transformers.default_data_collator,
        )

    def build_training_data_loader(self):
        return self.make_loader("train")

    def build_validation_data_loader(self):
        return self.make_loader("validation")

    def evaluate_batch(self, batch):
        outputs = self.model(**batch)
        self.accuracy.update((utils.numpify(outputs.logits), utils.numpify(batch["labels"])))
        return {"loss": outputs.loss, "largest": float(np.abs(utils.numpify(outputs.logits)).max())}
