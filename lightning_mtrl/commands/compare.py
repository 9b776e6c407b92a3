"""Compare two logs (A/B test): difference of the outcome rates, interval, p-value; and how many are needed.

Outcomes of 0 and 1 are compared as rates, others as means; a conversation without an outcome is counted, and
no zero. Those drawn to be explored or under a persona, as `collect` writes them where data.explore_share
and data.persona_share are above 0, are not the policy's own: --coverage leaves them out or counts them, and
the result says how many there are. Conversations of a customer or a group, or with the same value of
--cluster, are not taken for independent. With --detect it also says how many conversations show such a
difference; for that the baseline alone is enough. Where the comparison is looked at before all has come in,
--looks and --look correct for it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

from lightning_mtrl.command_line import option_places
from lightning_mtrl.command_paths import Seed, expect_writable
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import command_parser, parse

if TYPE_CHECKING:
    from lightning_mtrl.evaluation.arms import Arm
    from lightning_mtrl.evaluation.looks import Looks

RESULT = "comparison.json"
MOST_LOOKS = 50


def main(arguments: Sequence[str]) -> None:
    """Run the command; `arguments` are those after its name."""
    _refuse_loose_fractions(arguments)
    options = parse(_parser(), arguments)
    outputs = _outputs(options)
    _check(options)
    from lightning_mtrl.evaluation.compare import compare
    from lightning_mtrl.evaluation.comparison_report import as_json, show
    from lightning_mtrl.evaluation.sample_size import plan_sample_size
    from lightning_mtrl.rollouts.log_files import expect_logs
    from lightning_mtrl.runs.atomic import write_text

    for file in filter(None, (options.baseline, options.candidate)):
        expect_logs(file)
    looks, alpha = _looks(options), round(1 - options.confidence, 12)
    baseline = _read("baseline", options.baseline, options)
    comparison = plan = None
    if options.candidate is not None:
        candidate = _read("candidate", options.candidate, options)
        comparison = compare(
            baseline, candidate, alpha=alpha, looks=looks, cluster=options.cluster, segment=options.segment
        )
    if options.detect is not None:
        plan = plan_sample_size(baseline, options.detect, options.power, alpha, looks, options.cluster)
    show(comparison, plan)
    for output in outputs:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, json.dumps(as_json(comparison, plan), indent=2, allow_nan=False) + "\n")


def _read(role: str, file: str, options: Namespace) -> Arm:
    from lightning_mtrl.evaluation.arms import Arm, outcome_only
    from lightning_mtrl.rollouts.behaviour import Coverage, coverage_of
    from lightning_mtrl.rollouts.logs import LoadedLogs, stream_conversations

    loaded, keys, counts = LoadedLogs(), (options.cluster, options.segment), options.coverage == "count"
    kept, coverage = [], Counter[Coverage]()
    for conversation in stream_conversations(file, loaded, options.strict):
        kind = coverage_of(conversation)
        if kind is not None:
            coverage[kind] += 1
        if kind is None or counts:
            kept.append(outcome_only(conversation, keys))
    return Arm(role, file, kept, dict(loaded.dropped), coverage, counts)


def _looks(options: Namespace) -> Looks:
    from lightning_mtrl.evaluation.looks import Looks

    number = options.looks
    fractions = options.fractions or [place / number for place in range(1, number + 1)]
    return Looks(options.look or number, tuple(fractions), options.boundary)


def _check(options: Namespace) -> None:
    """Refuse what cannot be, before a file is read."""
    if options.candidate is None and options.detect is None:
        raise UserError(
            "--candidate must be given, or --detect to plan a comparison with the baseline alone; --help "
            "describes the options."
        )
    for key in ("confidence", "power"):
        value = getattr(options, key)
        _expect(0 < value < 1, key, value, "a number between 0 and 1", 0.9)
    above = f"more than 1 - confidence, {1 - options.confidence:g},"
    _expect(options.power > 1 - options.confidence, "power", options.power, above, 0.8)
    detect, look, looks = options.detect, options.look, options.looks
    holds = detect is None or (math.isfinite(detect) and detect != 0)
    _expect(holds, "detect", detect, "a difference other than 0", 0.03)
    _expect(1 <= looks <= MOST_LOOKS, "looks", looks, f"a whole number from 1 to {MOST_LOOKS}", 3)
    _expect(look is None or look <= looks, "look", look, f"at most the number of --looks, {looks},", looks)
    if options.candidate is not None and looks > 1 and look is None:
        raise UserError(
            f"--looks is {looks}, but which of them this is, is not said. Pass --look 1 to {looks}."
        )
    if options.candidate is None and options.segment is not None:
        raise UserError("--segment is given, but there is no --candidate to compare by it. Leave it out.")
    _check_fractions(options)


def _expect(holds: bool, option: str, value: object, expected: str, example: object) -> None:
    if not holds:
        raise UserError(f"--{option} is {value}, but {expected} was expected, such as --{option} {example}.")


def _check_fractions(options: Namespace) -> None:
    given = options.fractions
    if given is None:
        return
    steps = [later - earlier for earlier, later in zip([0.0, *given], given, strict=False)]
    # Closer looks would see the same conversations, and the integration does not resolve them.
    rising = all(math.isfinite(step) and step >= 0.01 - 1e-9 for step in steps)
    expected = f"{options.looks} rising numbers (as many as --looks), at least 0.01 apart, the last one 1"
    holds = len(given) == options.looks and rising and math.isclose(given[-1], 1.0)
    _expect(holds, "fractions", given, expected, "[0.4,1.0]")


def _refuse_loose_fractions(arguments: Sequence[str]) -> None:
    """Refuse numbers one after the other, of which the parser would take the first alone."""
    for _, end, value in option_places(arguments, "--fractions"):
        more = list(takewhile(_is_number, arguments[end:]))
        if _is_number(value) and more:
            listed = ",".join(f"{float(number):g}" for number in (value, *more))
            raise UserError(
                f"--fractions is {' '.join([value, *more])}, but one list was expected. Write it as "
                f"--fractions [{listed}]."
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _outputs(options: Namespace) -> list[Path]:
    """Files to write the result to."""
    paths = []
    if options.output is not None:
        path = Path(options.output)
        if path.suffix != ".json" or path.is_dir():
            raise UserError(f"--output is {options.output!r}, but a file that ends with .json was expected.")
        expect_writable("--output", path)
        paths.append(path)
    if options.run_dir is not None:
        path = Path(options.run_dir) / RESULT
        expect_writable("--run_dir", path)
        paths.append(path)
    return paths


def _parser() -> ArgumentParser:
    parser = command_parser("compare", __doc__ or "")
    add = parser.add_argument
    add("--baseline", type=str, required=True, help="log of the policy that is there")
    add("--candidate", type=str | None, help="log of the policy that may replace it")
    add(
        "--segment",
        type=str | None,
        help="key of the metadata (or a path, such as facts.urgency) to split by",
    )
    add(
        "--cluster",
        type=str | None,
        help="key of the metadata of what belongs together; null: customer, group",
    )
    add(
        "--coverage",
        type=Literal["leave_out", "count"],
        default="leave_out",
        help="what to do with conversations that are not the policy's own: drawn to be explored, or under "
        "a persona",
    )
    add(
        "--confidence",
        type=float,
        default=0.95,
        help="of the intervals; a p-value below the rest is a finding",
    )
    add("--detect", type=float | None, help="difference for which to plan the number of conversations")
    add("--power", type=float, default=0.8, help="chance to see that difference")
    add("--looks", type=int, default=1, help="how often the comparison is looked at in all")
    add("--look", type=PositiveInt | None, help="which look this is, from 1; earlier ones did not end it")
    add(
        "--fractions",
        type=list[float] | None,
        help="shares of the conversations at the looks; null: equal steps",
    )
    add(
        "--boundary",
        type=Literal["obrien_fleming", "pocock", "spending"],
        default="obrien_fleming",
        help="strict at first and as one test at the end; equal at all looks; or Lan-DeMets spending, where "
        "coming looks may still be moved",
    )
    add("--output", type=str | None, help="a .json file for the numbers; replaced if there")
    add("--run_dir", type=str | None, help=f"folder for the same numbers, as {RESULT}")
    add("--strict", action="store_true", help="refuse a log with a record that cannot be read")
    add(
        "--seed", type=Seed | None, help="as for other commands; nothing is drawn here, so it changes nothing"
    )
    return parser
