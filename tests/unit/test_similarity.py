"""Promise: embeddings have the losses and the measures of sentence-transformers.

Each is written here from its definition, one text after another; a test compares the package where it is installed."""

import math
from importlib import import_module
from itertools import permutations
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.metrics.similarity import LOSSES, correlations, retrieval
from recipes.embeddings import make_batch_loss

WIDTH, SCALE = 16, 20.0


def vectors(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape, WIDTH), dim=-1)


def values_of(ids: list[list[int]]) -> dict[str, Tensor]:
    """Vectors of pairs and negatives, the same for the same text."""
    torch.manual_seed(0)
    text_ids = torch.tensor(ids)
    table = vectors(int(text_ids.max()) + 1)
    found = {"query": table[text_ids[:, 0]], "document": table[text_ids[:, 1]], "text_ids": text_ids}
    if text_ids.shape[1] > 2:
        found["negative"] = table[text_ids[:, 2:]]
    return found | {"scale": torch.full((len(ids),), SCALE)}


# Query, document and two negatives: no text twice; then equal queries, equal documents, a negative that is right for
# another pair with the same query, one that is the query itself, one that stands twice, and a pair that stands twice.
DIFFERENT = [[4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3] for row in range(6)]
EQUAL = [[0, 1, 2, 3], [0, 4, 5, 6], [7, 1, 8, 9], [10, 11, 4, 10], [12, 13, 1, 2], [14, 15, 2, 2], [14, 15, 16, 17]]


def cross_entropy(anchor: Tensor, right: Tensor, others: list[Tensor]) -> float:
    scores = [SCALE * float(F.cosine_similarity(anchor, each, dim=0)) for each in (right, *others)]
    return math.log(sum(map(math.exp, scores))) - scores[0]


def ranking_loss(values: dict[str, Tensor], both: bool) -> list[float]:
    """Of each pair, from its definition: what is equal to a right text is no negative."""
    rows = values["text_ids"].tolist()
    texts = torch.cat([values["query"][:, None], values["document"][:, None], values["negative"]], 1)
    right = {(query, document) for query, document, *_ in rows}
    losses = []
    for at, (query, document, *_) in enumerate(rows):
        places = [(row, column) for column in (1, 2, 3) for row in range(len(rows)) if (row, column) != (at, 1)]
        kept = [place for place in places if (query, rows[place[0]][place[1]]) not in right]
        kept = [(row, column) for row, column in kept if rows[row][column] != query]
        loss = cross_entropy(texts[at, 0], texts[at, 1], [texts[place] for place in kept])
        others = [row for row in range(len(rows)) if row != at and (rows[row][0], document) not in right]
        others = [row for row in others if rows[row][0] != document]
        back = cross_entropy(texts[at, 1], texts[at, 0], [texts[row, 0] for row in others])
        losses.append((loss + back) / 2 if both else loss)
    return losses


@pytest.mark.parametrize("ids", [DIFFERENT, EQUAL])
@pytest.mark.parametrize("kind", ["one_direction", "symmetric"])
def test_contrast_with_hard_negatives(kind: str, ids: list[list[int]]) -> None:
    values = values_of(ids)
    found = make_batch_loss(kind, "", WIDTH, [None])(values)["loss"]
    assert found.tolist() == pytest.approx(ranking_loss(values, kind == "symmetric"), rel=1e-5)


@pytest.mark.parametrize("kind", ["cosine", "cosent"])
def test_losses_of_scored_pairs(kind: str) -> None:
    values = values_of([[2 * row, 2 * row + 1] for row in range(6)])
    score = values["score"] = torch.tensor([0.1, 0.9, 0.5, 0.5, -0.2, 1.0])
    cosines = F.cosine_similarity(values["query"], values["document"])
    expected = sum(float((cosine - own) ** 2) / 6 for cosine, own in zip(cosines, score))
    if kind == "cosent":
        pairs = [(one, other) for one in range(6) for other in range(6) if score[one] > score[other]]
        expected = math.log(1 + sum(math.exp(SCALE * float(cosines[b] - cosines[a])) for a, b in pairs))
    loss = make_batch_loss(kind, "", WIDTH, [1.0])(values)["loss"]
    assert loss.shape == (6,) and float(loss.mean()) == pytest.approx(expected, rel=1e-5)


def test_matryoshka_is_the_sum_over_the_first_elements() -> None:
    values = values_of(EQUAL)
    expected = torch.zeros(len(EQUAL))
    for width in (16, 8, 3):
        names = "query", "document", "negative"
        expected += LOSSES["symmetric"](values | {n: F.normalize(values[n][..., :width], dim=-1) for n in names})
    found = make_batch_loss("symmetric", "16, 8,3", WIDTH, [None])(values)["loss"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numbers", ["8,17", "0", "eight", "8,,4", "-1"])
def test_matryoshka_of_wrong_numbers(numbers: str) -> None:
    with pytest.raises(UsageError, match="expected numbers from 1 to 16, such as 16,8"):
        make_batch_loss("symmetric", numbers, WIDTH, [None])


@pytest.mark.parametrize(
    ("kind", "scores", "line"),
    [
        ("cosent", [None], "--loss cosent does not fit this data: use symmetric or one_direction"),
        ("symmetric", [0.5], "--loss symmetric does not fit this data: use cosine or cosent"),
        ("cosine", [0.5, 5.0], "a score of 5 is not a cosine: divide the scores, or use --loss cosent"),
    ],
)
def test_a_loss_needs_the_data_that_it_is_for(kind: str, scores: list[float | None], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        make_batch_loss(kind, "", WIDTH, scores)


def several_right(num_queries: int = 60, num_negatives: int = 1) -> dict[str, Tensor]:
    """Pairs of a few queries and documents, so that a query has several right documents and the other way round."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randint(0, num_queries, (150, 1), generator=generator)
    rest = torch.randint(num_queries, 3 * num_queries, (150, 1 + num_negatives), generator=generator)
    return values_of(torch.cat([query, rest], 1).tolist())


def expected_measures(values: dict[str, Tensor]) -> dict[str, float]:
    """From the definitions, one query after another, from a sorted list."""
    ids = values["text_ids"]
    queries = {int(one): vector for one, vector in zip(ids[:, 0], values["query"])}
    corpus = {int(one): vector for one, vector in zip(ids[:, 1], values["document"])}
    corpus |= {int(one): vector for one, vector in zip(ids[:, 2:].flatten(), values["negative"].flatten(0, 1))}
    measures: dict[str, list[float]] = {}
    for query, vector in queries.items():
        right = {int(document) for one, document in ids[:, :2] if one == query}
        nearest = sorted(corpus, key=lambda one, vector=vector: -float(vector @ corpus[one]))
        hits = [one in right for one in nearest]
        ideal = sum(1 / math.log2(place + 2) for place in range(min(10, len(right))))
        gains = sum(hit / math.log2(place + 2) for place, hit in enumerate(hits[:10]))
        precisions = [sum(hits[: place + 1]) / (place + 1) for place, hit in enumerate(hits[:100]) if hit]
        for name, value in {
            "recall@1": sum(hits[:1]) / len(right),
            "recall@10": sum(hits[:10]) / len(right),
            "ndcg@10": gains / ideal,
            "mrr@10": 1 / (1 + hits[:10].index(True)) if any(hits[:10]) else 0,
            "map@100": sum(precisions) / min(100, len(right)),
        }.items():
            measures.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in measures.items()}


@pytest.mark.parametrize("num_queries", [60, 4, 1])
def test_retrieval_with_several_right_documents(num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate_recipes.common.tasks.metrics.similarity.QUERIES_AT_ONCE", 17)
    values = several_right(num_queries)
    assert retrieval(values) == pytest.approx(expected_measures(values), abs=1e-6)


def test_more_right_documents_than_a_measure_looks_at() -> None:
    values = values_of([[0, 1 + row, 151 + row] for row in range(150)])
    assert retrieval(values) == pytest.approx(expected_measures(values), abs=1e-6)


def pairs_of(query: Tensor, document: Tensor) -> dict[str, Tensor]:
    """Pairs of different texts."""
    return {"query": query, "document": document, "text_ids": torch.arange(2 * len(query)).view(2, -1).T}


def test_recall_is_the_share_of_hits_in_a_random_order_of_ties() -> None:
    query = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.0], [1.0, 0.2]]), dim=1)
    document = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), dim=1)
    scores = query @ document.T
    found = retrieval(pairs_of(query, document))
    for k in (1, 10):
        hits = [
            at in sorted(order, key=lambda one, at=at: -round(float(scores[at, one]), 5))[:k]
            for order in permutations(range(5))
            for at in range(5)
        ]
        assert found[f"recall@{k}"] == pytest.approx(sum(hits) / len(hits), abs=1e-6)
    worst = [
        1 + sum(float(scores[at, one]) > float(scores[at, at]) - 1e-5 for one in range(5) if one != at)
        for at in range(5)
    ]
    assert found["mrr@10"] == pytest.approx(sum(1 / rank for rank in worst) / 5)


def test_a_model_that_tells_nothing_apart() -> None:
    same = vectors(1).expand(236, -1)
    found = retrieval(pairs_of(same, same))
    assert found["recall@1"] == pytest.approx(1 / 236)
    assert found["ndcg@10"] == found["mrr@10"] == found["map@100"] == 0
    for size in (236, 3):
        broken = torch.full((size, 24), torch.nan)
        assert set(retrieval(pairs_of(broken, broken)).values()) == {0}
    assert set(retrieval(pairs_of(same[:1], same[:1])).values()) == {1}
    ten_times = vectors(30).repeat_interleave(10, 0)
    found = retrieval(pairs_of(ten_times, ten_times))
    assert (found["recall@1"], found["recall@10"]) == pytest.approx((0.1, 1))
    texts = torch.arange(30).repeat_interleave(10)  # the same as texts, too: one document for one query
    found = retrieval(pairs_of(ten_times, ten_times) | {"text_ids": torch.stack([texts, texts + 30], 1)})
    assert found == pytest.approx(dict.fromkeys(found, 1))


def test_correlations() -> None:
    values = values_of([[2 * row, 2 * row + 1] for row in range(40)])
    values["score"] = torch.arange(40).div(4, rounding_mode="floor") / 10
    for at in range(5):  # equal texts: their cosine is 1 but for rounding
        values["document"][at] = values["query"][at]
    cosines = F.cosine_similarity(values["query"], values["document"]).double()
    cosines[:5] = 1
    found = correlations(values)
    assert found["pearson"] == pytest.approx(stats.pearsonr(values["score"], cosines).statistic, abs=1e-6)
    assert found["spearman"] == pytest.approx(stats.spearmanr(values["score"], cosines).statistic, abs=1e-6)
    assert math.isnan(correlations(values | {"score": torch.ones(40)})["spearman"])
    # The metric for the best weights is looked for in an evaluation of one sample.
    assert all(map(math.isnan, correlations({name: value[:1] for name, value in values.items()}).values()))


def test_the_package_says_the_same() -> None:
    package: Any = pytest.importorskip("sentence_transformers")
    evaluation, losses = (import_module(f"sentence_transformers.{part}") for part in ("evaluation", "losses"))

    class Model:  # what the evaluators ask of one
        similarity_fn_name, similarity = "cosine", staticmethod(package.util.cos_sim)
        model_card_data: Any = None

        def __init__(self, table: dict[str, Tensor]):
            self.table = table

        def encode(self, texts: list[str], **options: Any) -> Any:
            found = torch.stack([self.table[text] for text in texts])
            return found.numpy() if options.get("convert_to_numpy") else found

        encode_query = encode_document = encode

    values = several_right()
    ids = values["text_ids"].tolist()
    table = {str(row[0]): vector for row, vector in zip(ids, values["query"])}
    table |= {str(row[1]): vector for row, vector in zip(ids, values["document"])}
    table |= {str(row[2]): vector for row, vector in zip(ids, values["negative"][:, 0])}
    right: dict[str, set[str]] = {}
    for query, document, _ in ids:
        right.setdefault(str(query), set()).add(str(document))
    evaluator = evaluation.InformationRetrievalEvaluator(
        {query: query for query in right}, {one: one for row in ids for one in map(str, row[1:])}, right
    )
    evaluator.store_metrics_in_model_card_data = lambda *_: None
    theirs = evaluator(Model(table))
    for name, value in retrieval(values).items():
        assert value == pytest.approx(theirs[f"cosine_{name}"], abs=1e-6), name

    values = values_of(DIFFERENT)
    columns = [values["query"], values["document"], *values["negative"].unbind(1)]
    one = losses.MultipleNegativesRankingLoss(None, scale=SCALE).compute_loss_from_embeddings(columns, None)
    assert float(make_batch_loss("one_direction", "", WIDTH, [None])(values)["loss"].mean()) == pytest.approx(
        float(one), 1e-5
    )
    values["score"] = torch.tensor([0.1, 0.9, 0.5, 0.5, -0.2, 1.0])
    for kind, loss in (("cosine", losses.CosineSimilarityLoss), ("cosent", losses.CoSENTLoss)):
        theirs = loss(torch.nn.Identity()).compute_loss_from_embeddings(columns[:2], values["score"])
        found = make_batch_loss(kind, "", WIDTH, [1.0])(values)["loss"].mean()
        assert float(found) == pytest.approx(float(theirs), 1e-5)
