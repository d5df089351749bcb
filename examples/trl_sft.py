"""TRL: supervised fine-tuning of a tiny model, to be measured as it is.

python examples/tiny_model.py work
fast-axolotl measure -- python examples/trl_sft.py work
"""

import sys

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

work = sys.argv[1]
SFTTrainer(
    model=f"{work}/model",
    train_dataset=load_dataset("json", data_files=f"{work}/conversations.jsonl", split="train"),
    args=SFTConfig(
        output_dir=f"{work}/output",
        max_length=128,
        max_steps=20,
        per_device_train_batch_size=2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    ),
).train()
