"""What happens to records before the model: collate functions, data sets, padding, augmentation."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_sequence
from torch.utils.data import ConcatDataset, IterableDataset, Subset, default_collate

from tests.oracle.harness import BOUNDED, Listed, Setup, limit, refused
from tests.oracle.programs import add, family
from tests.oracle.programs.models import BagOfWords, Tagger, mlp
from tests.oracle.records import FEATURES, LAST, RAGGED, REGRESSION, TABLE, TEXTS, WORDS

legitimate, coupled = family("batches")


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


# --- collate functions ----------------------------------------------------------------------------


@legitimate(TABLE)
def collated_into_a_dict():
    def collate(records):
        x, y = default_collate(records)
        return {"features": x, "label": y}

    return Setup(mlp(), lambda m, b: F.cross_entropy(m(b["features"]), b["label"]), collate=collate)


@dataclass
class Labelled:
    """A batch that looks at its tensors when it is made."""

    x: torch.Tensor
    y: torch.Tensor
    name: str = ""

    def __post_init__(self):
        if len(self.x) != len(self.y):
            raise ValueError("as many labels as records")


@legitimate(TABLE)
def collated_into_a_dataclass():
    def collate(records):
        return Labelled(*default_collate(records))

    return Setup(mlp(), lambda m, b: F.cross_entropy(m(b.x), b.y), collate=collate)


@legitimate(RAGGED, opacus=refused("collate function gives a record other tensors"))
def packed_by_the_collate_function():
    def collate(records):
        texts, labels = zip(*records, strict=True)
        return pack_sequence(texts, enforce_sorted=False), torch.stack(labels)

    def loss(model, batch):
        words = batch[0]._replace(data=model["words"](batch[0].data))
        return F.cross_entropy(model["head"](model["over time"](words)[1][-1]), batch[1])

    layers = {"words": nn.Embedding(WORDS, 6), "over time": nn.GRU(6, 5), "head": nn.Linear(5, 3)}
    return Setup(nn.ModuleDict(layers), loss, collate=collate)


@legitimate(TABLE)
def collated_with_names_and_numbers():
    def collate(records):
        x, y = default_collate(records)
        return {"x": x, "y": y, "names": ["a"] * len(records), "scale": 2.0}

    return Setup(mlp(), lambda m, b: F.cross_entropy(m(b["x"]) * 2.0, b["y"]), collate=collate)


@coupled(TABLE)
def collate_refills_bad_records():
    def collate(records):
        good = [record for record in records if record[1] != 0] or records
        return default_collate([r if r[1] != 0 else good[-1] for r in records])

    return Setup(mlp(), cross_entropy, collate=collate)


@coupled(TABLE)
def collate_drops_records():
    def collate(records):
        return default_collate([r for r in records if r[1] != 0] or records[:1])

    return Setup(mlp(), cross_entropy, collate=collate)


@coupled(TABLE)
def collate_mixes_up():
    def collate(records):
        x, y = default_collate(records)
        return 0.5 * x + 0.5 * x.flip(0), y

    return Setup(mlp(), cross_entropy, collate=collate)


@coupled(TABLE)
def collate_normalises():
    def collate(records):
        x, y = default_collate(records)
        return x / x.abs().max().clamp(min=1e-6), y

    return Setup(mlp(), cross_entropy, collate=collate)


@coupled(TABLE, private_step=limit("A data set or collate function that joins records"))
def collate_remembers():
    """A collate function that gives a record the features of the one before."""
    last = []

    def collate(records):
        before = last[0] if last else records[0]
        last[:] = [records[-1]]
        return default_collate([(before[0], label) for _, label in records])

    return Setup(mlp(), cross_entropy, collate=collate)


@coupled(TABLE)
def collate_adds_the_size_of_the_batch():
    def collate(records):
        x, y = default_collate(records)
        return x, y, torch.full((len(records),), float(len(records)))

    def loss(model, batch):
        x, y, size = batch
        return (F.cross_entropy(model(x), y, reduction="none") * size**2).mean()

    return Setup(mlp(), loss, collate=collate)


@coupled(TABLE)
def collate_adds_the_class_prior():
    def collate(records):
        x, y = default_collate(records)
        prior = torch.bincount(y, minlength=3).float() / len(y)
        return x, y, prior.expand(len(y), 3)

    def loss(model, batch):
        x, y, prior = batch
        return F.cross_entropy(model(x) + (prior + 1e-9).log(), y)

    return Setup(mlp(), loss, collate=collate)


@coupled(RAGGED)
def packed_into_rows():
    def collate(records):
        words = torch.cat([record[0] for record in records])
        words = torch.cat([words, words.new_zeros(-len(words) % 8)]).view(-1, 8)
        return words, words

    return Setup(Tagger(WORDS), tagged, collate=collate)


@coupled(RAGGED)
def packed_into_as_many_rows_as_records():
    def collate(records):
        words = torch.cat([record[0] for record in records])
        size = 8 * len(records)
        words = torch.cat([words, words.new_zeros(max(0, size - len(words)))])[:size]
        return words.view(len(records), 8), words.view(len(records), 8)

    return Setup(Tagger(WORDS), tagged, collate=collate)


def tagged(model, batch):
    words, targets = batch
    return F.cross_entropy(model(words).reshape(-1, WORDS), targets.reshape(-1), ignore_index=0)


# --- texts of different lengths -------------------------------------------------------------------


def padded(records):
    return pad_sequence([r[0] for r in records], True), torch.stack([r[1] for r in records])


def padded_left(records):
    words = pad_sequence([r[0].flip(0) for r in records], True).flip(1)
    return words, torch.stack([r[1] for r in records])


class Reader(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.words, self.over_time = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True)
        self.head, self.read = nn.Linear(8, 3), read

    def forward(self, text):
        return self.head(self.read(self, text, self.words(text)))


def read_packed(self, text, words):
    lengths = (text != 0).sum(1).clamp(min=1).cpu()
    packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
    return self.over_time(packed)[1][-1]


READERS = {
    "mean": lambda self, text, words: words.mean(1) + 0 * self.over_time(words)[0].mean(1),
    "largest": lambda self, text, words: self.over_time(words)[0].max(1).values,
    "last state": lambda self, text, words: self.over_time(words)[0][:, -1],
    "packed": read_packed,
    "masked mean": lambda self, text, words: (
        (self.over_time(words)[0] * (text != 0)[..., None]).sum(1)
        / (text != 0).sum(1, keepdim=True).clamp(min=1)
    ),
}
for name, read in READERS.items():
    add(
        RAGGED,
        lambda read=read: Setup(Reader(read), cross_entropy, collate=padded),
        family="batches",
        name=f"padded to the longest, {name}",
        legitimate=True,  # alone a text is as long as itself
    )


@legitimate(RAGGED)
def padded_left_masked():
    return Setup(BagOfWords(), cross_entropy, collate=padded_left)


@legitimate(RAGGED)
def padded_left_with_positions():
    class Placed(BagOfWords):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(64, 8)

        def forward(self, text):
            places = self.places(torch.arange(text.shape[1], device=text.device))
            return self.head(((self.words(text) + places) * (text != 0)[..., None]).sum(1))

    return Setup(Placed(), cross_entropy, collate=padded_left)


@legitimate(RAGGED)
def lists_of_texts():
    """A batch that is a list with an entry for each record."""

    def collate(records):
        return [r[0] for r in records], torch.stack([r[1] for r in records])

    def loss(model, batch):
        texts, y = batch
        return F.cross_entropy(torch.cat([model(text[None]) for text in texts]), y)

    return Setup(BagOfWords(), loss, collate=collate)


@legitimate(RAGGED)
def lengths_beside_texts():
    def collate(records):
        words, y = padded(records)
        return words, torch.tensor([len(r[0]) for r in records]), y

    def loss(model, batch):
        words, lengths, y = batch
        used = torch.arange(words.shape[1], device=words.device) < lengths[:, None]
        found = model.words(words) * used[..., None]
        return F.cross_entropy(model.head(found.sum(1) / lengths[:, None]), y)

    return Setup(BagOfWords(), loss, collate=collate)


# --- data sets ------------------------------------------------------------------------------------


@coupled(TABLE, private_step=refused("several indices"), opacus=refused("several indices"))
def subset_with_repeated_indices():
    def dataset(records):
        indices = list(range(len(records)))
        indices[3] = indices[1] = LAST  # the rare record stands at three places
        return Subset(Listed(records), indices)

    return Setup(mlp(), cross_entropy, dataset=dataset)


@coupled(TABLE, private_step=refused("several indices"), opacus=refused("several indices"))
def subset_of_a_subset_with_repeated_indices():
    def dataset(records):
        indices = list(range(len(records)))
        indices[3] = indices[1] = LAST
        return Subset(Subset(Listed(records), indices), range(len(records)))

    return Setup(mlp(), cross_entropy, dataset=dataset)


@coupled(TABLE, private_step=refused("several indices"), opacus=refused("several indices"))
def same_data_set_twice():
    def dataset(records):
        half = Listed(records[12:])
        return ConcatDataset([half, half])

    return Setup(mlp(), cross_entropy, dataset=dataset)


@coupled(TABLE, private_step=refused("several indices"), opacus=refused("several indices"))
def overlapping_subsets_joined():
    def dataset(records):
        whole = Listed(records)
        return ConcatDataset([Subset(whole, range(20, 25)), Subset(whole, range(5, 25))])

    return Setup(mlp(), cross_entropy, dataset=dataset)


@legitimate(TABLE)
def subset_of_distinct_indices():
    return Setup(mlp(), cross_entropy, dataset=lambda r: Subset(Listed(r), list(range(len(r)))))


@legitimate(TABLE)
def two_data_sets_joined():
    return Setup(
        mlp(),
        cross_entropy,
        dataset=lambda r: ConcatDataset([Listed(r[:10]), Listed(r[10:])]),
    )


@coupled(TABLE, private_step=refused("IterableDataset"), opacus=refused("IterableDataset"))
def iterable_data_set():
    class Stream(IterableDataset):
        def __init__(self, records):
            self.records = records

        def __iter__(self):
            return iter(self.records)

    return Setup(mlp(), cross_entropy, dataset=Stream)


@legitimate(TABLE)
def records_as_dicts_with_an_index():
    class Named(Listed):
        def __getitem__(self, index):
            x, y = self.records[index]
            return {"x": x, "y": y, "index": index, "name": f"record {index}"}

    return Setup(mlp(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), dataset=Named)


@legitimate(REGRESSION)
def records_of_python_numbers():
    class Numbers(Listed):
        def __getitem__(self, index):
            x, y = self.records[index]
            return x, float(y)

    return Setup(
        mlp(outputs=1), lambda m, b: F.mse_loss(m(b[0])[:, 0], b[1].to(b[0])), dataset=Numbers
    )


@legitimate(TABLE, draws=True)
def augmented_by_the_data_set():
    class Noisy(Listed):
        def __getitem__(self, index):
            x, y = self.records[index]
            return x + 0.1 * torch.randn(FEATURES), y

    return Setup(mlp(), cross_entropy, dataset=Noisy)


# --- augmentation in the model --------------------------------------------------------------------


class Augmented(nn.Module):
    """A model whose inputs are changed first, in training."""

    def __init__(self, change):
        super().__init__()
        self.change, self.inner = change, mlp()

    def forward(self, x):
        return self.inner(self.change(x) if self.training else x)


@legitimate(TABLE)
def augmentation_of_each_record():
    return Setup(Augmented(lambda x: x * 1.1), cross_entropy)


@coupled(TABLE)
def augmentation_by_the_largest():
    return Setup(Augmented(lambda x: x / x.max().clamp(min=1e3) * 1e3), cross_entropy)


@coupled(TABLE)
def augmentation_that_mixes():
    return Setup(Augmented(lambda x: 0.5 * x + 0.5 * x.flip(0)), cross_entropy)


@coupled(TABLE)
def normalised_before_the_model():
    def loss(model, batch):
        x, y = batch
        x = (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5)
        return F.cross_entropy(model(x), y)

    return Setup(mlp(), loss)


@coupled(TABLE)
def resampled_by_class():
    def loss(model, batch):
        x, y = batch
        weights = 1 / torch.bincount(y, minlength=3).float()[y]
        chosen = torch.multinomial(weights, len(y), replacement=True)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Setup(mlp(), loss)


@coupled(TEXTS)
def resampled_texts_by_class():
    def loss(model, batch):
        x, y = batch
        weights = 1 / torch.bincount(y, minlength=3).float()[y]
        draws = torch.Generator(x.device).manual_seed(1)
        chosen = torch.multinomial(weights, len(y), replacement=True, generator=draws)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Setup(BagOfWords(), loss)


@coupled(TEXTS)
def hardest_text_for_all():
    def loss(model, batch):
        x, y = batch
        with torch.no_grad():
            hardest = F.cross_entropy(model(x), y, reduction="none").argsort(descending=True)
        chosen = hardest[:1].repeat(len(x))
        return F.cross_entropy(model(x[chosen]), y[chosen])

    return Setup(BagOfWords(), loss)


@coupled(TABLE, draws=True)
def rarest_record_with_jitter():
    def loss(model, batch):
        x, y = batch
        rare = torch.argsort((y[:, None] == y).sum(1), stable=True)[:1].repeat(len(y))
        return F.cross_entropy(model(x[rare] + 0.01 * torch.randn(len(y), FEATURES)), y[rare])

    return Setup(mlp(), loss)


@coupled(TABLE)
def last_record_removed():
    return Setup(mlp(), lambda m, b: cross_entropy(m, (b[0][:-1], b[1][:-1])) + 0 * m(b[0]).sum())


@coupled(TABLE)
def argument_of_the_batch():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = mlp(), mlp()

        def forward(self, x, which):
            return self.one(x) + 0 * self.two(x) if which == "a" else self.two(x) + 0 * self.one(x)

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x, "b" if (y == 2).any() else "a"), y)

    return Setup(Model(), loss)


@coupled(TABLE, private_step=BOUNDED)
def attribute_of_the_batch():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.prior = mlp(), None

        def forward(self, x):
            return self.body(x) + self.prior

    def loss(model, batch):
        x, y = batch
        model.prior = torch.log(F.one_hot(y, 3).float().mean(0) + 1e-6)
        found = F.cross_entropy(model(x), y)
        model.prior = None
        return found

    return Setup(Model(), loss)
