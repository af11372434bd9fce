"""The most that an audit could have shown: where that is below a claim, it could not fail."""

from collections.abc import Mapping
from typing import Any

from dpsur.audits.bounds import largest_bound
from dpsur.audits.one_run import epsilon_of_guesses
from dpsur.audits.training import ONE_RUN, each_confidence


def ceiling(finding: Mapping[str, Any]) -> float | None:
    """The lower bound if every run or guess had spoken for it; None where a law was computed.

    `finding` is a row of `Finding`.
    """
    details, delta, confidence = finding["details"], finding["delta"], finding["confidence"]
    if finding["audit"] == ONE_RUN:
        tried = details["guesses"]
        each = each_confidence(confidence, len(tried))
        return max(
            epsilon_of_guesses(details["canaries"], made, made, delta, each) for made, _ in tried
        )
    if "repetitions" in details:
        return largest_bound(details["repetitions"], delta, confidence)
    return None


def is_idle(finding: Mapping[str, Any]) -> bool:
    """Whether the claim was out of reach, whatever the training does.

    A p-value of the whole claimed curve reaches further than the bound, and is not judged here.
    """
    most = ceiling(finding)
    exact, p_value = finding["exact"], finding["p_value"]
    return exact is None and p_value is None and most is not None and most < finding["claimed"]
