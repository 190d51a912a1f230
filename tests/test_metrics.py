import random

from farside.metrics import Latencies, quantile_ns


def test_quantiles_are_within_an_eighth() -> None:
    rng = random.Random(1)
    samples = [int(rng.lognormvariate(10, 3)) for _ in range(20_000)]
    parts = [Latencies() for _ in range(3)]
    for i, s in enumerate(samples):
        parts[i % 3].add(s)
    samples.sort()
    for q in (0.01, 0.5, 0.99):
        true = samples[int(q * len(samples)) - 1]
        got = quantile_ns(parts, q)
        assert got is not None
        assert true * 0.98 - 1 <= got <= true * 1.26 + 1, q
    assert sum(p.count for p in parts) == len(samples)
    assert sum(p.total_ns for p in parts) == sum(samples)


def test_small_huge_and_negative_values_stay_in_range() -> None:
    h = Latencies()
    for ns in (-5, 0, 1, 7, 8, 9, 15, 16, 17, 2**70):
        h.add(ns)
    assert h.count == 10
    assert quantile_ns([h], 0.0) is not None
    assert quantile_ns([], 0.5) is None


def test_each_value_lies_at_or_below_the_edge_of_its_bucket() -> None:
    for ns in range(0, 5000):
        h = Latencies()
        h.add(ns)
        edge = quantile_ns([h], 1.0)
        assert edge is not None
        assert ns <= edge <= ns * 1.25 + 1
