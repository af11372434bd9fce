"""Models that several families use."""

from torch import Tensor, nn

from tests.oracle.records import CLASSES, FEATURES, WORDS


def mlp(inputs: int = FEATURES, outputs: int = CLASSES, hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class TwoLayers(nn.Module):
    """Two layers whose forward pass programs replace."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class BagOfWords(nn.Module):
    """The mean of the words of a text that are no padding."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8, padding_idx=0), nn.Linear(8, outputs)

    def forward(self, text: Tensor) -> Tensor:
        used = (text != 0).to(self.head.weight.dtype)[..., None]
        return self.head((self.words(text) * used).sum(1) / used.sum(1).clamp(min=1))


class Tagger(nn.Module):
    """An output for each word."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.words, self.over_time = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.over_time(self.words(text))[0])
