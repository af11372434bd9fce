"""Sentences that compare Algorithm 1 with DP-SGD and with a coin, by tests over seeds."""

from collections.abc import Iterator

from reproduction.experiments.accuracy import paper_accuracy
from reproduction.experiments.sixteen import coins, compared, counts, grouped
from reproduction.page_figures.records import FOUND, NUMBER, ROWS, Claim, plain_on, shown


def claims() -> Iterator[Claim]:
    """What is significantly ahead, and how near a coin comes to the test."""
    cells = compared(grouped(ROWS), paper_accuracy())
    significant, corrected, behind = counts(cells)
    yield (
        rf"is significantly ahead of Algorithm 1 in {NUMBER} of {NUMBER} cells \(p < (0\.05); "
        rf"{NUMBER} after Bonferroni's correction\), and significantly behind in {NUMBER} \(",
        (str(significant), str(len(cells)), "0.05", str(corrected), str(behind)),
    )
    by_pld, by_renyi = (FOUND["mnist", arm, 1] for arm in ("proven-pld", "proven"))
    yield (
        rf"on MNIST at epsilon 1 it makes {NUMBER} updates instead of {NUMBER} and has {NUMBER}, "
        rf"where it has {NUMBER} by `proven` and DP-SGD {NUMBER}\.",
        (
            *shown(".0f", (by_pld["updates"], by_renyi["updates"])),
            *shown(".2f", (by_pld["mean"], by_renyi["mean"], plain_on("mnist")[0]["mean"])),
        ),
    )
    tossed = [cell for cell in coins(grouped(ROWS)) if cell["data"] != "IMDb"]
    yield (
        rf"the mean of a coin is within {NUMBER} points of the test's, and 95% intervals leave "
        rf"room for at most {NUMBER} \(",
        shown(
            ".2f",
            (
                max(abs(cell["value"]) for cell in tossed),
                max(max(-cell["low"], cell["high"]) for cell in tossed),
            ),
        ),
    )
