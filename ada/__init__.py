"""Reinforce-Ada (arXiv 2510.04996), one file per concern. Start with train.py and ada/sampler.py."""


class UserError(Exception):
    """Something that the user can put right. Commands print it as one line, without a traceback, and exit with 1."""


def one_line(error: Exception) -> str:
    """A library's message, however many lines it has, for use in a UserError."""
    return " ".join(str(error).split()) or type(error).__name__
