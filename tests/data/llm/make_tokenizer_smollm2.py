"""Makes tokenizer-smollm2.json: 1,000 strings with the ids that reference tokenizers give for SmolLM2's GGUF file.

    python make_tokenizer_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf llama.cpp       writes the file
    python make_tokenizer_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf transformers    compares, and adds its name

llama.cpp is the one in the package xllamacpp, asked through its server; transformers reads the same GGUF file itself
(it needs torch). Its reader does not look at tokenizer.ggml.pre and leaves out the step that splits digits, which 16
of the strings show: that step, which SmolLM2's own tokenizer.json has, is put back here. Special tokens in a string
are parsed, none is added. The strings are the same on every machine with Python 3.11: they come from its Unicode
tables and a seed.
"""

import json
import random
import sys
import unicodedata
import urllib.request
from importlib.metadata import version
from pathlib import Path

OUT = Path(__file__).with_name("tokenizer-smollm2.json")
COUNT = 1000

WRITTEN = [
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\t\t", " \n ", "\n \n", "a\n", "\na", " a", "a ",
    "  a  ", "\u00a0", "\u3000", "\u2003\u2009", "\u200b", "\ufeff", "a\u00a0b", "\u1680\u2028\u2029\u0085",
    "\x0b\x0c\x1c\x1f", "\x00", "a\x00b", "\x7f\x80\x9f", "\u200e\u200f\u202a\u202e\u2066", "\ufffd", "\ufffe\uffff",
    "\U0010ffff", "\ue000", "it's I'm you're we've he'll she'd don't", "IT'S I'M YOU'RE WE'VE HE'LL SHE'D DON'T",
    "'s 't 're 've 'm 'll 'd", "\u2019s \u02bcm '\u017f", "''''", "a'b'c'", "'S'T'RE'VE'M'LL'D", "rock 'n' roll",
    "0123456789", "1 22 333 4444 55555 666666", "3.14159", "1,000,000", "1e-10", "0x1F", "12:34:56", "2026-11-17",
    "\u00b2\u00b3\u00b9\u2070\u2081", "\u00bd\u00be\u2153", "\u2160\u2163\u216b", "\u2460\u2473",
    "\u0660\u0661\u0662", "\u0966\u0967\u0968", "\u4e00\u4e8c\u4e09", "\uff11\uff12\uff13", "\U0001d7d8\U0001d7e2",
    "a1b2c3", "\u0e51\u0e52", "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|><|im_end|>", "<|endoftext|>",
    " <|endoftext|> ", "<|im_start|", "|im_end|>", "<|IM_START|>", "<<|im_end|>>", "<repo_name>x<file_sep>y",
    "<jupyter_code> 1", "<|im_end|><|im_end|>x", "<empty_output>", "<issue_start>\n<issue_closed>",
    "<|im_start|>\u200b<|im_end|>", "<s></s><unk><pad>", "<0x0A>", "def f(x):\n\treturn x**2  # square\n",
    "if (a && b || !c) { return a->b[0]; }", "<div class=\"x\">&nbsp;</div>", "SELECT * FROM t WHERE a <> 'b';",
    "https://example.org/a/b?c=d&e=%20#f", "a@b.example", "C:\\dir\\file.txt", "$x^2 + \\frac{1}{2}$",
    "```python\nprint()\n```", "---\n***\n===\n", "....!!!!????", "\u2026\u2014\u2013\u00ab\u00bb",
    "\u00e9 e\u0301 \u00c5 A\u030a \u212b", "\ufb01\ufb02 \u0133 \u01c4", "\u00df \u1e9e \u0130\u0131",
    "Z\u0335\u0321\u0352", "\u1100\u1161\u11a8 \uac01", "\u0e01\u0e33 \u0e01\u0e4d\u0e32",
    "\u0915\u094d\u0937 \u0915\u094d\u200d\u0937", "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f1fa\U0001f1f3\U0001f1ea",
    "\U0001f44d\U0001f3fd", "1\ufe0f\u20e3 #\ufe0f\u20e3", "\u2764\ufe0f\u200d\U0001f525",
    "\U0001f3f4\U000e0067\U000e007f", "\U0001f980\U0001f980\U0001f980", "a\U0001f600b", " \U0001f600 ",
    "\u2603\ufe0e\u2603\ufe0f", "\U0001faf1\U0001f3fb", "camelCaseAndPascalCase_snake_case-kebab-case", "ALLCAPS",
    "\u0394\u03a3 \u03c3\u03c2", "\u041f\u0440\u0438\u0432\u0435\u0442", "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\u3053\u3093\u306b\u3061\u306f", "\uc548\ub155\ud558\uc138\uc694",
    "\u0627\u0644\u0633\u0644\u0627\u0645 \u0639\u0644\u064a\u0643\u0645",
    "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd",
    "mixed \u05e9\u05dc\u05d5\u05dd and \u0645\u0631\u062d\u0628\u0627 text", "x" * 200, " " * 100, "\n" * 50,
    "\t " * 40, "ab" * 60, "\u00e9" * 60, "-" * 99, "\u200d" * 9, "hello" + " " * 7 + "world",
    "tab\tbetween\twords\n\n\n  indented",
]  # fmt: skip


def strings():
    """The written ones, then every script on its own, then mixtures."""
    made, choose = list(dict.fromkeys(WRITTEN)), random.Random(27)
    characters = [
        chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")
    ]
    scripts = {}
    for character in characters:
        # The first word of a name is its script, or the kind of symbol.
        scripts.setdefault(unicodedata.name(character, "CONTROL").split(" ")[0].split("-")[0], []).append(character)
    large = sorted(name for name, letters in scripts.items() if len(letters) >= 12)
    for name in large:
        letters = scripts[name]
        words = ["".join(choose.choices(letters, k=choose.randint(1, 7))) for _ in range(3)]
        made.append(choose.choice([" ", "", "\n", ", ", "  "]).join(words))
    spaces = [c for c in characters if c.isspace()]
    controls = [c for c in characters if unicodedata.category(c) in ("Cc", "Cf")]
    emoji = [c for c in characters if "\U0001f300" <= c <= "\U0001faff"] + ["\u200d", "\ufe0f"]
    marks = [c for c in characters if unicodedata.category(c) in ("Mn", "Mc", "Me")]
    digits = [c for c in characters if unicodedata.category(c) in ("Nd", "Nl", "No")]
    ascii_ = [chr(code) for code in range(0x20, 0x7F)]
    latin = [c for c in characters if "\u00c0" <= c <= "\u024f"]
    kinds = [spaces, controls, emoji, marks, digits, ascii_, ascii_, latin, characters]
    while len(made) < COUNT:
        parts = []
        for _ in range(choose.randint(2, 5)):
            parts += choose.choices(choose.choice(kinds), k=choose.randint(1, 5))
        if choose.random() < 0.3:
            choose.shuffle(parts)
        made.append("".join(parts))
        made = list(dict.fromkeys(made))
    return made[:COUNT]


def llama_cpp(model):
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.warmup = str(model), 512, False
    server = xllamacpp.Server(parameters)

    def encode(text):
        asked = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", asked)
        return json.load(urllib.request.urlopen(request))["tokens"]

    return encode, f"llama.cpp (xllamacpp {version('xllamacpp')})"


def transformers(model):
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    return lambda text: tokenizer.encode(text, add_special_tokens=False), f"transformers {version('transformers')}"


def main(model, reference):
    encode, name = {"llama.cpp": llama_cpp, "transformers": transformers}[reference](Path(model))
    texts = strings()
    ids = [encode(text) for text in texts]
    made = {"model": "SmolLM2-135M-Instruct.Q4_1.gguf", "references": [name], "strings": texts, "ids": ids}
    if reference != "llama.cpp":
        written = json.loads(OUT.read_text())
        if written["strings"] != texts:
            sys.exit("the strings are others than those of the file: make it again with llama.cpp first")
        differ = [(text, a, b) for text, a, b in zip(texts, written["ids"], ids) if a != b]
        for text, a, b in differ:
            print(f"{text!r}\n  {written['references']} {a}\n  {name} {b}")
        if differ:
            sys.exit(f"{len(differ)} of {len(texts)} strings differ")
        made["references"] = [*dict.fromkeys([*written["references"], name])]
    OUT.write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{len(texts)} strings, {sum(map(len, ids))} ids, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
