"""A trial whose first run never gets beyond its sixth batch."""

# mypy: ignore-errors

import os
import time

from linear_trial import LinearTrial


class WaitingTrial(LinearTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        while batch_idx == 5 and os.environ["DET_TRIAL_RUN_ID"] == "1":
            time.sleep(1)
        return super().train_batch(batch, epoch_idx, batch_idx)
