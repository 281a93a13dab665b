r"""Answers a second: the scorer's worker processes against one process looping over math-verify.

    python bench/reward.py [--workers 2] [--answers 10000]

The answers are 10,000 distinct (gold, answer) pairs drawn from the benchmarks' gold answers (tests/data/golds.jsonl): a
third right as written, a third right in another form, a third wrong. Then the same with 1% of them replaced by answers
that hang a parser or fill its memory. The two ratios are printed last.
"""

import argparse
import json
import logging
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ada.reward import GoldError, Scorer, read_gold  # noqa: E402

HOSTILE = [
    r"10^{10^{10}}", r"\binom{10^9}{5\cdot10^8}", r"\sum_{k=1}^{10^8}k^{-3}", "((10!)!)!", "(" * 500 + "1" + ")" * 500,
    "1" * 100_000, r"\frac{1}{" * 100 + "1" + "}" * 100, "2^{2^{30}}", "9^{9^{9^9}}", r"\int e^{x^2}\sin x\ln x dx",
    r"\lfloor10^{10^{10}}/3\rfloor", r"\gcd(10^{10^8},6)",
]  # fmt: skip


def make_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Distinct (gold, answer) pairs; numbers are added to the real golds so that there are enough."""
    golds = []
    for line in (Path(__file__).parent.parent / "tests/data/golds.jsonl").read_text().splitlines():
        try:
            golds.append(read_gold(json.loads(line)["gold"]))
        except GoldError:
            continue
    rng, pairs = random.Random(seed), {}
    while len(pairs) < count:
        gold, number = rng.choice(golds), rng.randrange(2, 1000)
        single = not any(sign in gold for sign in ",=%<>") and not gold.isalpha()
        changed = rf"\frac{{{number}({gold})}}{{{number}}}" if single else gold.replace(",", ", ")
        new = rng.choice([f"{number}", rf"\frac{{{number}}}{{{number + 1}}}", f"{number}.5", rf"{number}\sqrt{{2}}"])
        for pair in [(gold, gold), (gold, changed), (gold, rng.choice(golds)), (new, new), (new, rng.choice(golds))]:
            pairs[pair] = None
    return rng.sample(list(pairs)[:count], count)


def one_process(pairs) -> float:
    """Seconds that a plain loop over math-verify's parse and verify takes, with its own time limits."""
    from math_verify import parse, verify

    logging.disable(logging.WARNING)
    verify(parse("$1$"), parse("$x$"))
    start = time.perf_counter()
    for gold, answer in pairs:
        verify(parse(f"${gold}$"), parse(rf"$\boxed{{{answer}}}$"))
    return time.perf_counter() - start


def scorer(pairs, workers: int) -> tuple[float, float, dict]:
    """Seconds for all, microseconds per submit (the answers arrive as fast as they are taken), failures by cause."""
    responses = [("Some reasoning. " * 100 + rf"\boxed{{{answer}}}", gold) for gold, answer in pairs]
    with Scorer(workers=workers) as graders:
        for key in range(workers):
            graders.submit(key, r"\boxed{1}", f"warm {key}")
        for _ in range(workers):
            while not graders.poll(60):
                pass
        start, submitting, done = time.perf_counter(), 0.0, 0
        for key, (response, gold) in enumerate(responses):
            before = time.perf_counter()
            graders.submit(key, response, gold)
            submitting += time.perf_counter() - before
        while done < len(responses):
            done += len(graders.poll(None))
        return time.perf_counter() - start, 1e6 * submitting / len(responses), dict(graders.failures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--answers", type=int, default=10_000)
    options = parser.parse_args()
    pairs = make_pairs(options.answers)
    rng = random.Random(1)
    hostile = [(gold, rng.choice(HOSTILE) if row % 100 == 50 else answer) for row, (gold, answer) in enumerate(pairs)]

    clean_sec, submit_us, _ = scorer(pairs, options.workers)
    print(f"scorer, {options.workers} workers: {len(pairs) / clean_sec:.0f} answers/s; submit {submit_us:.1f} us")
    hostile_sec, submit_us, failures = scorer(hostile, options.workers)
    print(f"with 1% hostile: {len(pairs) / hostile_sec:.0f} answers/s; submit {submit_us:.1f} us; {failures}")
    loop_sec = one_process(pairs)
    print(f"one process, math-verify: {len(pairs) / loop_sec:.0f} answers/s")
    print(f"scorer with 1% hostile / clean: {clean_sec / hostile_sec:.2f}")
    print(f"scorer / one process: {loop_sec / clean_sec:.2f}")


if __name__ == "__main__":
    main()
