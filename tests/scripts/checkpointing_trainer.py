"""A transformers Trainer: a small GPT-2 with gradient checkpointing, accumulation, and an evaluation in between."""

import sys

import torch
from results import print_results
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
config = GPT2Config(
    vocab_size=32,
    n_positions=16,
    n_embd=16,
    n_layer=2,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)
model = GPT2LMHeadModel(config)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (18, 8))]
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    max_steps=4,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=3,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    eval_strategy="steps",
    eval_steps=2,
    logging_steps=1,
    learning_rate=1e-2,
    save_steps=4,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows[:12], eval_dataset=rows[12:])
trainer.train()
history = trainer.state.log_history
print_results(
    [entry[name] for entry in history for name in ("loss", "eval_loss", "grad_norm") if name in entry], model
)
