"""Write a policy of a run for use elsewhere: a peft adapter, or with --merge a whole model.

The folder also gets the tokenizer, a README.md that says how to load it and, for the model "tiny", the base
model. peft, transformers and vLLM load it as it is. After full fine-tuning there is no adapter, and the whole
model is written with and without --merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from lightning_mtrl.class_lookup import class_named
from lightning_mtrl.command_paths import add_run_options, expect_writable, open_run
from lightning_mtrl.counting import counted
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import command_parser, parse
from lightning_mtrl.runs.atomic import replacing_folder

if TYPE_CHECKING:
    from lightning_mtrl.assembly import Learner
    from lightning_mtrl.recorder import Run
    from lightning_mtrl.runs.folder import RunFolder

LOST = 0.05  # error of merged weights over the adapter's change of them, above which it is said


def main(arguments: Sequence[str]) -> None:
    """Run the command; `arguments` are those after its name."""
    options = parse(_parser(), arguments)
    folder, output = open_run(options), Path(options.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"--output is {options.output!r}, which is there and not an empty folder. Name a new one."
        )
    if output.resolve() == Path.cwd():  # it would be replaced under the feet of whoever stands in it
        raise UserError(f"--output is {options.output!r}, the folder you are in. Name a new one.")
    expect_writable("--output", output)
    from lightning_mtrl.models.saving import save_merged, save_role
    from lightning_mtrl.recorder import load_learner

    run = load_learner(folder, options.iteration)
    lost = 0.0
    with replacing_folder(output) as unfinished:
        if options.merge:
            lost = save_merged(run.parts.backbone, "policy", unfinished)
        else:
            save_role(run.parts.backbone, "policy", unfinished)
        run.parts.context.chat.tokenizer.save_pretrained(unfinished)
        _explain(run, unfinished, output, folder)
    print(f"Policy of iteration {run.iteration} in {output}")
    if lost > LOST:
        print(
            f"Rounding to {run.config.model.dtype} put an error of {lost:.0%} of the adapter's size into the "
            f"merged weights, so the model differs from the policy that was trained. Export without --merge."
        )


def _explain(run: Run[Learner], unfinished: Path, output: Path, folder: RunFolder) -> None:
    from lightning_mtrl.models.model_card import name_base, write_card
    from lightning_mtrl.models.tiny import TINY_MODELS, tiny_model_of

    config = run.config
    if (unfinished / "adapter_config.json").is_file():
        environment = class_named("environment", config.environment.class_path)
        embedded = TINY_MODELS[tiny_model_of(environment)].folder
        name_base(unfinished, output, embedded if config.model.name == "tiny" else None)
    model = config.model
    facts = {
        "base model" if model.fine_tuning == "lora" else "started from": model.name,
        "type of its weights": model.dtype if model.quantization == "none" else model.quantization,
        "run": str(folder.path),
        "iteration": str(run.iteration),
        "algorithm": config.algorithm.class_path,
        "environment": config.environment.class_path,
        "made with": f"lightning_mtrl {version('lightning_mtrl')}",
    }
    for row in run.summary.iterations:
        if row["iteration"] == run.iteration and row["success_rate"] is not None:
            facts["success rate"] = (
                f"{row['success_rate']:.3f} in {counted(row['conversations'], 'conversation')}"
            )
    write_card(unfinished, f"Policy {run.iteration} of {folder.path.resolve().name}", facts)


def _parser() -> ArgumentParser:
    parser = command_parser("export", __doc__ or "")
    add_run_options(parser)
    parser.add_argument("--output", type=str, required=True, help="new folder")
    parser.add_argument("--merge", action="store_true", help="a whole model instead of an adapter")
    return parser
