r"""Is this answer that answer? A library of its own: it knows mathematics, LaTeX and sloppy writing, and nothing of RL.

    read_gold(cell)           a data set's gold answer as one LaTeX string; GoldError if it cannot be read
    last_boxed(response)      the content of a response's last \boxed{}
    is_right(answer, gold)    do they say the same? compare.py has the rules

Nothing here is bounded in time or memory: ada/reward.py runs it in processes that can be killed.
"""

from answers.compare import GoldError, is_right, read_gold
from answers.latex import last_boxed, too_long

__all__ = ["GoldError", "is_right", "last_boxed", "read_gold", "too_long"]
