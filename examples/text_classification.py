"""A BERT of Hugging Face, trained privately on texts of different lengths."""

import torch
from transformers import BertConfig, BertForSequenceClassification

import dpsur

torch.manual_seed(0)

# Token numbers as a tokenizer returns them, padded to one length. Words above 20 are cheerful, and
# a text is if most of its words are.
count, length = 9000, 8
tokens = torch.randint(2, 40, (count, length))
mask = (torch.arange(length) < torch.randint(3, length + 1, (count, 1))).long()
tokens = tokens * mask
labels = (((tokens > 20) * mask).sum(1) * 2 > mask.sum(1)).long()
columns = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
train = {name: values[:8000] for name, values in columns.items()}
test = {name: values[8000:] for name, values in columns.items()}

# random weights; with BertForSequenceClassification.from_pretrained it is the same
config = BertConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
run = dpsur.fit(
    BertForSequenceClassification(config),
    train,
    test_set=test,
    budget=dpsur.Budget(epsilon=3.0, delta=1e-5),  # and no settings: they are chosen for you
)
print(f"engine: {run.engine.summary}")  # every layer has a fast rule
print(f"epsilon {run.epsilon['proven']:.2f} at delta 1e-5")
print(f"test accuracy {run.scores['accuracy']:.1%}")
