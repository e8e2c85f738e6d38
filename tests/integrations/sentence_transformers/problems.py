"""A tiny sentence transformer, and texts of different lengths."""

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

COLUMNS = 12


class Tokens(nn.Module):
    """Masked self-attention."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def preprocess(self, inputs, **_):
        """Texts are numbers."""
        ids = [torch.tensor([int(word) for word in text.split()]) for text in inputs]
        ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def forward(self, features):
        x = self.embedding(features["input_ids"])
        x = x + self.attention(x, x, x, key_padding_mask=features["attention_mask"] == 0, need_weights=False)[0]
        features["token_embeddings"] = self.dropout(x)
        return features


def tiny(dropout=0.0):
    return SentenceTransformer(modules=[Tokens(dropout), Pooling(8)], device="cpu").double().train()


def texts(seed, rows=11):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, COLUMNS + 1, (rows,), generator=generator)
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 20, mask.shape, generator=generator) * mask, "attention_mask": mask}


def loss_and_gradients(loss, model, columns):
    """The loss, and the gradient of all parameters as one vector: a key's bias has gradient 0."""
    model.zero_grad()
    value = loss([dict(features) for features in columns], None)
    value.backward()
    return [value.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


def trained(loss_of, trainer=None, micro=None, scored=False, **options):
    """The parameters that sentence-transformers' Trainer makes on texts of numbers, ragged batches and all."""
    import datasets
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    model = tiny()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, COLUMNS, (2, 19), generator=generator).tolist()
    rows = [
        [" ".join(map(str, torch.randint(1, 20, (n,), generator=generator).tolist())) for n in column]
        for column in lengths
    ]
    arguments = SentenceTransformerTrainingArguments(
        per_device_train_batch_size=8, num_train_epochs=1, optim="sgd", learning_rate=0.5, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"anchor": rows[0], "positive": rows[1]})
    if scored:
        data = data.add_column("score", [i / len(data) for i in range(len(data))])
    keywords = {"model": model, "args": arguments, "train_dataset": data, "loss": loss_of(model), **(micro or {})}
    (trainer or SentenceTransformerTrainer)(**keywords).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])
