"""What is added to a sample's reward before advantages are taken."""

from __future__ import annotations


def overlong_penalty(completion_tokens: int, *, max_new_tokens: int, buffer_tokens: int) -> float:
    """0 up to `max_new_tokens - buffer_tokens`, then falling linearly to -1 at `max_new_tokens`:
    min(-(L - (L_max - L_c)) / L_c, 0).

    Args:
        completion_tokens: L.
        max_new_tokens: L_max, the limit of a completion.
        buffer_tokens: L_c, how long before the limit the penalty begins; 0 for none.

    Source: DAPO, arXiv 2503.14476, section 3.4.
    """
    if not buffer_tokens:
        return 0.0
    beyond = completion_tokens - (max_new_tokens - buffer_tokens)
    return min(-beyond / buffer_tokens, 0.0)
