"""LoRA adapters on a causal language model, each text with its own loss."""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import dpsur

DELTA = 1e-4
torch.manual_seed(0)


class Texts(Dataset):
    """Texts that count upwards from a random number, some shorter than others."""

    def __init__(self, count: int) -> None:
        starts = torch.randint(1, 20, (count, 1))
        self.tokens = starts + torch.arange(10)
        self.mask = (torch.arange(10) < torch.randint(4, 11, (count, 1))).long()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, mask = self.tokens[index], self.mask[index]
        # padding has the label -100: it does not count
        return {
            "input_ids": tokens * mask,
            "attention_mask": mask,
            "labels": tokens.masked_fill(mask == 0, -100),
        }


sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
gpt2 = GPT2LMHeadModel(config)
gpt2.loss_type = "ForCausalLM"  # which the library cannot tell from the name of this class
model = get_peft_model(
    gpt2,
    LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
)
model.train()
adapters = [p for p in model.parameters() if p.requires_grad]
print(f"training {sum(p.numel() for p in adapters)} of {model.num_parameters()} weights")

data = Texts(1000)
engine = dpsur.PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.AdamW(adapters, lr=0.02),
    data_loader=DataLoader(data, batch_size=100),
    # the model's own loss is a mean over the tokens of a batch; this one is computed per text
    criterion=dpsur.model_loss(model),
    target_epsilon=8.0,
    target_delta=DELTA,
    max_grad_norm=1.0,
    epochs=3,
)
for epoch in range(3):
    for batch in loader:
        labels = batch.pop("labels")
        optimizer.zero_grad()
        engine.criterion(model(**batch), labels).backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: epsilon {engine.get_epsilon(DELTA):.2f}")

model.eval()
public = Texts(200)  # other texts of the same kind, which are public
with torch.no_grad():
    batch = {name: torch.stack([one[name] for one in public]) for name in public[0]}
    print(f"loss on public texts {model(**batch).loss:.2f}")
