"""Losses of the cosines of vectors, and measures of them, as in sentence-transformers."""

import math
from collections.abc import Callable

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from ...data import Examples, Metrics

ROUNDING = 1e-6  # of a similarity in float32
QUERIES_AT_ONCE = 1024
DEEPEST = 100  # rank that a measure looks at

# Values of the global batch: "query" and "document", vectors of length 1, shape (batch, hidden); perhaps "negative",
# (batch, negatives, hidden), or "score", (batch,); "text_ids", (batch, 2 + negatives); and "scale", (batch,).
Values = dict[str, Tensor]


def candidates(values: Values) -> tuple[Tensor, Tensor]:
    """All documents, and then all negatives: (vectors, shape (candidates, hidden); ids of their texts)."""
    negatives = values["negative"].unbind(1) if "negative" in values else ()
    return torch.cat([values["document"], *negatives]), values["text_ids"][:, 1:].T.flatten()


def _scores(values: Values) -> Tensor:
    """Cosines of each query and candidate, times `scale`, shape (batch, candidates). Minus infinity marks what is not a
    negative of the query: another document of an equal query, a text equal to one of those, or to the query."""
    vectors, texts = candidates(values)
    query, document = values["text_ids"][:, 0], values["text_ids"][:, 1]
    right = (query[:, None] == query).float() @ (document[:, None] == texts).float() > 0
    no_negative = (right | (query[:, None] == texts)).fill_diagonal_(False)
    return (values["scale"][:, None] * (values["query"] @ vectors.T)).masked_fill(no_negative, -math.inf)


def _find(scores: Tensor) -> Tensor:
    """The cross-entropy of finding partner i of row i."""
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device), reduction="none")


def _cosines(values: Values) -> Tensor:
    return (values["query"] * values["document"]).sum(-1)


def _order(cosines: Tensor, score: Tensor) -> Tensor:
    """A loss that is low if pairs with higher scores have higher cosines. One number for all, shape (batch,)."""
    over = (cosines[:, None] - cosines).masked_fill(score[:, None] >= score, -math.inf)
    return torch.cat([over.new_zeros(1), over.flatten()]).logsumexp(0).expand(len(cosines))


LOSSES: dict[str, Callable[[Values], Tensor]] = {  # of each pair, shape (batch,); sentence-transformers calls them
    # MultipleNegativesSymmetricRankingLoss, which is InfoNCE in both directions
    "symmetric": lambda values: (_find(scores := _scores(values)) + _find(scores[:, : len(scores)].T)) / 2,
    "one_direction": lambda values: _find(_scores(values)),  # MultipleNegativesRankingLoss
    "cosine": lambda values: (_cosines(values) - values["score"]).square(),  # CosineSimilarityLoss
    "cosent": lambda values: _order(values["scale"] * _cosines(values), values["score"]),  # CoSENTLoss
}


def retrieval(examples: Examples) -> Metrics:
    """The metrics of InformationRetrievalEvaluator, over all distinct queries, and distinct documents and negatives.
    The documents of all pairs of a query are right. Where documents are equally near, recall uses the average over
    random orders, and for the other metrics the wrong ones come first. NaN is never near."""
    vectors, texts = candidates(examples)
    # Where each id first occurs, and for each place the number of its id.
    found = [numpy.unique(ids, return_index=True, return_inverse=True) for ids in (examples["text_ids"][:, 0], texts)]
    (queries, query_of), (documents, document_of) = (map(torch.from_numpy, each[1:]) for each in found)
    is_right = torch.stack([query_of, document_of[: len(query_of)]]).unique(dim=1)
    parts = []
    for rows in torch.arange(len(queries)).split(QUERIES_AT_ONCE):
        scores = examples["query"][queries[rows]] @ vectors[documents].T
        right = torch.zeros_like(scores, dtype=torch.bool)
        query, document = is_right[:, (is_right[0] >= rows[0]) & (is_right[0] <= rows[-1])]
        right[query - rows[0], document] = True
        parts.append(_measures(scores, right))
    return {name: float(torch.cat([part[name] for part in parts]).mean()) for name in parts[0]}


def _measures(scores: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Measures of each query, from (queries, documents): the scores, and which documents are right."""
    total = right.sum(1)
    best = scores.masked_fill(~right, -math.inf).topk(min(DEEPEST, int(total.max())), dim=1).values
    ranks = torch.full_like(best, math.inf, dtype=torch.float64)
    found = {f"recall@{k}": torch.zeros(len(best), dtype=torch.float64) for k in (1, 10)}
    for number, own in enumerate(best.unbind(1)):  # the scores of the right documents, from the highest
        over = scores - own[:, None]
        nearer, ties = (~(over <= ROUNDING)).sum(1), (over.abs() <= ROUNDING).sum(1)
        for k in (1, 10):
            found[f"recall@{k}"] += ((k - nearer) / ties.clamp(min=1)).clamp(0, 1) * (ties > 0) / total
        wrong = (~(over < -ROUNDING) & ~right).sum(1)
        ranks[:, number] = torch.where(own.isfinite(), wrong + number + 1.0, math.inf)
    gains = 1 / torch.arange(2, 12).double().log2()
    hits = torch.arange(1, ranks.shape[1] + 1)
    found["ndcg@10"] = ((ranks <= 10) / (ranks + 1).log2()).sum(1) / gains.cumsum(0)[total.clamp(max=10) - 1]
    found["mrr@10"] = (ranks[:, 0] <= 10) / ranks[:, 0]
    found["map@100"] = ((ranks <= DEEPEST) * hits / ranks).sum(1) / total.clamp(max=DEEPEST)
    return found


def correlations(examples: Examples) -> Metrics:
    """The metrics of EmbeddingSimilarityEvaluator, from cosines and scores."""
    return correlations_of(_cosines(examples), examples["score"])


def correlations_of(predicted: Tensor, target: Tensor) -> Metrics:
    """Pearson's and Spearman's correlation of numbers of about 1. Predictions that differ by rounding share a rank."""
    from scipy.stats import rankdata  # a dependency of scikit-learn

    values = predicted.double(), target.double()
    ranks = [torch.from_numpy(rankdata(each)) for each in ((values[0] / ROUNDING).round(), values[1])]
    measured = {"pearson": values, "spearman": ranks}
    return {name: float(torch.stack([*both]).corrcoef()[0, 1]) for name, both in measured.items()}
