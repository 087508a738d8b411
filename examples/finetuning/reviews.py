"""Made reviews of restaurants: all that is known about their words is which of them occur together."""

import torch

NOUNS = ["soup", "bread", "fish", "rice", "salad", "cake", "coffee", "wine", "waiter", "table", "music", "bill"]
PRAISE = ["good", "great", "fresh", "lovely", "fine", "superb", "warm", "tasty", "perfect", "bright", "crisp", "rich"]
BLAME = ["bad", "awful", "stale", "nasty", "poor", "cold", "bland", "rude", "slow", "dull", "burnt", "sour"]
MASK = "?"
WORDS = [MASK, "the", "was", "and", *NOUNS, *PRAISE, *BLAME]
NUMBERS = {word: number for number, word in enumerate(WORDS)}

CLAUSES = 3
LENGTH = 5 * CLAUSES - 1  # "the soup was good and the bill was fine and the table was great"
#: Number of adjectives in labelled reviews for training; the others occur only in reviews without labels.
LABELLED = 4


def make_reviews(count: int, seed: int, adjectives: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers of words ``(count, LENGTH)`` and labels ``(count,)``, 1 for praise and 0 for blame.

    Args:
        count: number of reviews.
        seed: of the choice of words.
        adjectives: which of those of each kind to use.
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(words: list[str]) -> str:
        return words[int(torch.randint(len(words), (), generator=generator))]

    labels = torch.randint(2, (count,), generator=generator)
    rows = []
    for praises in labels.tolist():
        kind = (PRAISE if praises else BLAME)[adjectives]
        review = " and ".join(f"the {choose(NOUNS)} was {choose(kind)}" for _ in range(CLAUSES))
        rows.append([NUMBERS[word] for word in review.split()])
    return torch.tensor(rows), labels
