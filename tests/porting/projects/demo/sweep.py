"""Submit the demo with several batch sizes."""

import os
import subprocess

CONFIG = "determined_files/const.yaml"


def submit(size):
    subprocess.run(
        ["det", "experiment", "create", CONFIG, "determined_files", "--config", f"hyperparameters.global_batch_size={size}"],
        check=True,
    )


if __name__ == "__main__":
    for size in (2, 4):
        submit(size)
    os.system(f"det e create {CONFIG} determined_files")
