"""A script around Hugging Face's Trainer."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.randint(0, 32, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=6, n_embd=16, n_layer=2, n_head=2))
arguments = TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    eval_strategy="epoch",
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    logging_steps=1,
)
trainer = Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens())
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print("loss", entry["step"] - 1, entry["loss"])
