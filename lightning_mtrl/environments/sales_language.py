"""The words of the Suggested Response shop: phrases for every act, and rules that read free text.

A tiny model learns these phrases; a real chat model writes its own, and `classify` reads both.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

NEEDS = ("laptop", "phone", "camera", "printer")
TIERS = ("basic", "premium")  # the tier that suits a small and a large budget
MAX_WORDS = 80  # a longer message is not read to its end


@dataclass(frozen=True)
class Act:
    """What a message of the shop does.

    Attributes:
        kind: "ask_need", "ask_budget", "offer", "chat" or "nonsense".
        need: the product offered; None unless `kind` is "offer".
        tier: the version offered, "basic" or "premium"; None when the offer names none.
    """

    kind: str
    need: str | None = None
    tier: str | None = None


ACT_PHRASES: dict[str, tuple[str, ...]] = {
    "ask_need": ("What are you looking for?", "What do you need?", "Which product do you want?"),
    "ask_budget": ("What is your budget?", "How much can you spend?", "What price do you have in mind?"),
    "offer": (
        "I recommend our {tier} {need}.",
        "Our {tier} {need} would suit you.",
        "Take a look at the {tier} {need}.",
    ),
    "chat": ("Thanks for your message.", "We are happy to help.", "It is a lovely day."),
}

STYLE_ENDINGS = {"formal": " Kind regards.", "casual": " Cheers!"}

REPLIES: dict[str, tuple[str, ...]] = {
    "bought": ("Great, I will take it!", "Yes, I will buy it."),
    "stated_need": ("I need a {need}.", "I am looking for a {need}.", "A {need}, please."),
    "stated_budget_small": ("My budget is small.", "I cannot spend much.", "Something cheap, please."),
    "stated_budget_large": ("My budget is large.", "Money is no problem.", "I want the best."),
    "restated_need": ("As I said, I need a {need}.",),
    "restated_budget_small": ("As I said, my budget is small.",),
    "restated_budget_large": ("As I said, my budget is large.",),
    "evaded": ("I am not sure yet.", "Hard to say."),
    "wrong_need": ("No, that is not what I need.", "That is the wrong product."),
    "wrong_tier_small": ("That is too expensive.",),
    "wrong_tier_large": ("That is too simple for me.",),
    "hesitated": ("Let me think about it.",),
    "chatted": ("Okay.", "I see."),
    "puzzled": ("I do not understand.",),
}

GREETINGS = {
    "calm": ("Hello.", "Hi, I have a question."),
    "urgent": ("Hello, I am in a hurry.", "Quick, please."),
}

INSTRUCTIONS = (
    "You sell laptops, phones, cameras and printers, each as a basic version for small budgets and a "
    "premium version for large budgets. Ask the customer what they need and what their budget is, then "
    "recommend one product, in one short sentence."
)

_NEED_WORDS = {
    "laptop": r"laptops?|notebooks?",
    "phone": r"(?:smart)?phones?",
    "camera": r"cameras?",
    "printer": r"printers?",
}
_TIER_WORDS = {
    "basic": r"basic|cheap(?:est|er)?|affordable|budget-friendly|low-cost|entry-level|inexpensive",
    "premium": r"premium|high-end|top-of-the-line|deluxe|best|luxury",
}
_BUDGET = re.compile(r"\b(budget|spend|price|afford|how much|cost)\b")
_WISH = re.compile(
    r"\b(looking for|need|want|which|interested in|help you|assist you|"
    r"what kind|what type|what product|prefer)\b"
)
_COMMON = re.compile(
    r"\b(thanks?|hello|hi|hey|happy|welcome|help|day|you|your|we|our|us|i|please|sorry|great|sure|the|is|are|a)\b"
)


def classify(text: str) -> Act:
    """Read what a message of the shop does, by rules.

    A question about money asks for the budget; one product with a version or without a question is an
    offer; any other question about wishes (also one that lists several products) asks for the need. Other
    sentences with ordinary words are chat. The rest, and anything over `MAX_WORDS` words, is nonsense.
    """
    low = text.lower()
    if len(low.split()) > MAX_WORDS:
        return Act("nonsense")
    needs = [need for need, words in _NEED_WORDS.items() if re.search(rf"\b(?:{words})\b", low)]
    tiers = [tier for tier, words in _TIER_WORDS.items() if re.search(rf"\b(?:{words})\b", low)]
    question = "?" in low
    if question and _BUDGET.search(low) and not (needs and tiers):
        return Act("ask_budget")
    if len(needs) == 1 and (len(tiers) == 1 or not question):
        return Act("offer", needs[0], tiers[0] if len(tiers) == 1 else None)
    if question and (needs or _WISH.search(low)):
        return Act("ask_need")
    return Act("chat") if _COMMON.search(low) else Act("nonsense")


def phrase(act: Act, rng: random.Random) -> str:
    """One of the phrases for an act."""
    return rng.choice(ACT_PHRASES[act.kind]).format(need=act.need, tier=act.tier)


def reply_text(kind: str, need: str, budget: str, rng: random.Random) -> str:
    """One of the customer's phrases for a reaction; `kind` may leave the budget's size to be filled in."""
    options = REPLIES.get(kind) or REPLIES[f"{kind}_{budget}"]
    return rng.choice(options).format(need=need)


def read_reply(observation: str) -> tuple[str, str | None]:
    """The reaction that a customer's message shows, and the fact in it (a need, or "small" / "large").

    The inverse of `reply_text` on the text that the agent sees; ("other", None) for anything else.
    """
    text = observation.split(" (Sent instead: ")[0]
    for kind, options in REPLIES.items():
        for option in options:
            pattern = re.escape(option).replace(r"\{need\}", "(?P<need>" + "|".join(NEEDS) + ")")
            match = re.fullmatch(pattern, text)
            if match:
                return _named(kind, match.groupdict().get("need"))
    return "other", None


def _named(kind: str, need: str | None) -> tuple[str, str | None]:
    for size in ("small", "large"):
        if kind.endswith("_" + size):
            return kind.removesuffix("_" + size), size
    return kind, need
