"""Talks with a language model: chat.py FOLDER [SEED]. Each line of the input is a message; the answer is printed as it is
generated. The same seed gives the same answers.

The generator keeps the keys and values of the session, so a turn costs what is new, however long the talk is.
"""

import sys
from typing import Any

import pagoda


def chat(folder: str, seed: int) -> None:
    messages: list[dict[str, Any]] = []
    with pagoda.Generator(folder) as generator:
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.removesuffix("\n")})
            stream = generator.stream(
                messages=messages,
                max_new_tokens=200,
                temperature=0.2,
                top_p=0.9,
                repetition_penalty=1.1,
                seed=seed,
                session="chat",
                context_end=pagoda.ContextEnd.STOP,
            )
            for token in stream:
                print(token.text, end="", flush=True)
            answer = stream.response()
            prompt, reason = len(answer.prompt_tokens), answer.finish_reason.name.lower()
            print(f"\n[{len(answer.tokens)} tokens; {answer.cached_tokens} of the prompt's {prompt} were cached; {reason}]")
            messages.append({"role": "assistant", "content": answer.text})


if __name__ == "__main__":
    folder, seed = (sys.argv[1:] + ["0"])[:2] if 2 <= len(sys.argv) <= 3 else ("", "")
    if not seed.isdecimal():
        print(f"usage: {sys.argv[0]} FOLDER [SEED]", file=sys.stderr)
        sys.exit(2)
    try:
        chat(folder, int(seed))
    except pagoda.PagodaError as error:
        print("chat:", error, file=sys.stderr)
        sys.exit(1)
