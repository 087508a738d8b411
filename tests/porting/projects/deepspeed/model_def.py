from determined.pytorch import DataLoader
from determined.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext

from data import rows


class TextTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context

    def build_training_data_loader(self):
        return DataLoader(rows(), batch_size=self.context.train_micro_batch_size_per_gpu)
