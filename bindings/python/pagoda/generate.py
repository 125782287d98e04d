"""Requests to generators, and their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

from ._native import Numbers, Struct, call, decoded, ffi, initialised, lib, listed
from .cancel import Cancel

Json: TypeAlias = str | Mapping[str, Any] | Sequence[Any]
"""JSON as a text, or as what json.dumps takes."""


class ContextEnd(IntEnum):
    """What happens if prompt and answer do not fit into the model's context."""

    REFUSE = 0
    """The request is rejected."""
    STOP = 1
    """The answer ends where the context does, as if `max_new_tokens` were less."""


class FinishReason(IntEnum):
    """Why an answer ended."""

    NONE = 0
    """It has not ended."""
    STOP = 1
    """An end-of-sequence token, a stop token, or a stop text."""
    LENGTH = 2
    """`max_new_tokens`, or the end of the context."""
    CANCELLED = 3
    """It was cancelled."""
    TIMEOUT = 4
    """Its time limit was exceeded."""


class EarlyStop(IntEnum):
    """When a beam search ends that has as many finished answers as beams."""

    WHEN_UNLIKELY = 0
    """When no beam has a better score at its length than the worst of them."""
    WHEN_FULL = 1
    """At once."""
    NEVER = 2
    """When no beam can get a better score at any length than the worst of them."""


@dataclass(kw_only=True)
class KvPolicy(Struct, struct="pagoda_kv_policy"):
    """A fixed number of slots for the keys and values of each sequence, however long it is."""

    name: str
    """Which tokens stay: "dense" (all of them, and a longer sequence is rejected), "lastrec", "smart-lastrec", "h2o",
    "h2o-orig", "h2o-vlen" and, for quantised pages, "qh2o" and "qh2o-vlen"."""
    cache_length: int = 0
    """The slots of a sequence in each layer. With "dense" 0 is no limit."""
    chunk_size: int = 64
    """The maximum number of tokens of a prompt that one step reads once the slots are full."""
    protect: int | None = None
    """With lastrec and smart-lastrec: the tokens at the beginning that always stay; None: for lastrec an eighth of the
    slots, from 1 to 16; for smart-lastrec half of them."""
    grace_period: int = 0
    """With h2o: the newest tokens, so many of them, stay whatever their weights."""
    keep_initial_fraction: float = 0.05
    """With h2o: the part of the slots that the first eviction leaves alone at the beginning."""
    normalise: bool = False
    """With h2o: the weights that a token got are divided by the time that it has been there."""
    score_share: float = 0.5
    """With qh2o: how much a token's weights count against what quantisation took from it, from 0 to 1."""
    cache_lengths: Numbers | None = None
    """The slots of each layer, instead of `cache_length`; None: all have as many."""
    protect_first_message: bool = False
    """With lastrec and smart-lastrec: the tokens of a chat's first message always stay."""


@dataclass(kw_only=True)
class BeamOptions(Struct, struct="pagoda_beam_options"):
    """A beam search."""

    width: int = 4
    """The number of beams, 1 to 16."""
    length_penalty: float = 1
    """The score of an answer is the sum of its log probabilities over its number of tokens to this power. Above 0 long
    answers get better scores, below 0 short ones."""
    early_stop: EarlyStop = EarlyStop.WHEN_UNLIKELY
    """When the search ends."""


@dataclass
class GenerateRequest(Struct, struct="pagoda_generate_request"):
    """A request for text. It has one of `prompt`, `tokens` and `messages`.

    A number that is None is not given: it is as `generation` in the model's pagoda.json says, or, if that does not say
    either, as the comment of the field says.
    """

    json_fields: ClassVar[frozenset[str]] = frozenset({"messages", "tools", "variables", "grammar"})

    prompt: str | None = None
    """What the text follows, as a text. The special tokens that the model's tokenizer puts before a text are added."""
    # Only the prompt goes without its name.
    _: KW_ONLY
    tokens: Numbers | None = None
    """What the text follows, as tokens."""
    messages: Json | None = None
    """What the text follows, as the messages of a chat: a list of mappings with `role` and `content`, and whatever else
    the model's chat template takes."""
    tools: Json | None = None
    """With `messages`: the tools that the model may call."""
    variables: Json | None = None
    """With `messages`: more variables of the chat template."""
    add_generation_prompt: bool = True
    """With `messages`: the prompt ends before an answer of the model; otherwise after the last message."""
    max_new_tokens: int | None = None
    """The maximum number of tokens of an answer; None: as many as the context has room for."""
    min_new_tokens: int | None = None
    """The number of tokens before which no end-of-sequence token is taken; None: 0."""
    do_sample: bool | None = None
    """Whether tokens are drawn, or the most likely one is taken; None: drawn if `temperature` is given and not 0."""
    temperature: float | None = None
    """What logits are divided by; 0: the most likely token is taken; None: 1."""
    top_k: int | None = None
    """The number of most likely tokens that are drawn from; None or 0: all."""
    top_p: float | None = None
    """The probability that the tokens drawn from have together, 0 to 1; None: 1."""
    min_p: float | None = None
    """The least probability of a token that is drawn, relative to the most likely one, 0 to 1; None: 0."""
    repetition_penalty: float | None = None
    """The penalty of tokens in the prompt and in the answer so far, above 0; None: 1, which is none."""
    presence_penalty: float = 0
    """Subtracted from the logits of tokens that the answer has, -2 to 2."""
    frequency_penalty: float = 0
    """Subtracted from the logits of tokens as often as the answer has them, -2 to 2."""
    no_repeat_ngram_size: int | None = None
    """No sequence of so many tokens occurs twice; None or 0: any may."""
    forced_eos: int | None = None
    """The token that the last of `max_new_tokens` is forced to be; None: none is forced."""
    ignore_eos: bool = False
    """End-of-sequence tokens do not end the answer."""
    stop: Sequence[str] = ()
    """Texts that end the answer. The answer does not have them."""
    stop_tokens: Numbers = ()
    """Tokens that end the answer, beside the model's end-of-sequence tokens."""
    include_stop: bool = False
    """The answer's text has the stop text that ended it."""
    skip_special: bool = True
    """The answer's text leaves special tokens out."""
    logit_bias: Mapping[int, float] | None = None
    """What is added to the logits of tokens; -1e30 bans a token."""
    logprobs: int | None = None
    """The log probabilities of the answer's tokens, and of so many most likely tokens in their places; None: none."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens. The prompt is then computed as a whole."""
    n: int = 1
    """The number of answers."""
    echo: bool = False
    """The text of an answer begins with the prompt."""
    priority: int = 0
    """Requests of higher priority run first."""
    context_end: ContextEnd = ContextEnd.REFUSE
    """What happens if prompt and answer do not fit into the model's context."""
    seed: int | None = None
    """The seed of the draws; None: another one for each request."""
    timeout_us: int = 0
    """The time limit in microseconds; 0: none. The answer then has what was generated until then."""
    session: str | None = None
    """The conversation that the request belongs to. Its keys and values are kept, in the store too. Send the whole
    conversation as the prompt: only what is new is computed."""
    cancel: Cancel | None = None
    """Cancels the request when triggered. The answer then has what was generated until then."""
    kv_policy: KvPolicy | None = None
    """Which tokens stay in the slots of the request's sequences; None: as the generator was opened."""
    grammar: Json | None = None
    """What the answer has to look like: {"json_schema": {...}}, {"regex": "[0-9]+"}, {"choice": ["yes", "no"]} or
    {"lark": "start: ..."}."""
    max_draft: int | None = None
    """The maximum number of tokens that are guessed for one step, 0 to 64. The answer is the same, sooner where much of it
    repeats the prompt. None: as the generator was opened."""
    beams: BeamOptions | None = None
    """A beam search, of which the answers are the `n` best, the best first. There are fewer answers where fewer are found.
    Nothing is drawn, and the request has no session. A stream gets no token before the search has ended: then those of the
    first answer come, then those of the second, and so on."""


@dataclass(frozen=True)
class TokenLogprobs(Struct, struct="pagoda_token_logprobs"):
    """What the model thought of a token, before anything that the request asked for."""

    made_of: ClassVar[Mapping[str, str]] = {"top_tokens": "top", "top_logprobs": "top", "top_count": "top"}

    logprob: float
    """The natural logarithm of the token's probability."""
    rank: int
    """Its place among all tokens, 1 for the most likely; 0: it has no probability, as the first token of a prompt."""
    top: list[tuple[int, float]]
    """The most likely tokens and their log probabilities, the most likely first: as many as were asked for."""

    @classmethod
    def from_c(cls, read: Any) -> TokenLogprobs:
        count = read.top_count
        top = zip(listed(read.top_tokens, count), listed(read.top_logprobs, count), strict=True)
        return cls(read.logprob, read.rank, list(top))


class Token(NamedTuple):
    """A token of an answer, as it is generated."""

    text: str
    """The text that is new. Empty if the token ends inside a character, or if the text may begin a stop text."""
    id: int
    """The token."""
    choice: int
    """Which answer it belongs to."""
    finish_reason: FinishReason
    """Why the answer ends with this token; NONE if it does not."""
    logprobs: TokenLogprobs | None
    """The log probabilities, if they were asked for."""


@dataclass(frozen=True)
class Choice(Struct, struct="pagoda_generate_choice"):
    """One answer."""

    made_of: ClassVar[Mapping[str, str]] = {"text_length": "text", "logprob_count": "logprobs"}

    text: str
    """Its text."""
    tokens: list[int]
    """Its tokens. Those that ended it are the last ones."""
    finish_reason: FinishReason
    """Why it ended."""
    logprobs: list[TokenLogprobs]
    """The log probabilities of its tokens, if they were asked for."""
    queued_ns: int
    """Nanoseconds from the request to its first step."""
    first_token_ns: int
    """Nanoseconds from the request to the first token."""
    generation_ns: int
    """Nanoseconds from the first token to the last."""
    missing: str | None
    """What the request's grammar expects next, if the answer ended before it was valid."""
    score: float | None
    """Of an answer of a beam search: the sum of its log probabilities over its number of tokens to the power of the length
    penalty. Penalties and `logit_bias` are part of it."""


@dataclass(frozen=True)
class GenerateResponse(Struct, struct="pagoda_generate_info"):
    """The answers to a request."""

    made_of: ClassVar[Mapping[str, str]] = {"choice_count": "choices", "prompt_logprob_count": "prompt_logprobs"}

    choices: list[Choice]
    """The answers."""
    prompt_tokens: list[int]
    """The tokens of the prompt."""
    prompt_logprobs: list[TokenLogprobs]
    """The log probabilities of the prompt's tokens, if they were asked for."""
    cached_tokens: int
    """The number of prompt tokens whose keys and values were cached, of the first answer."""
    computed_tokens: int
    """The number of rows that were computed for all answers."""
    version: str
    """The version of the model, as in its pagoda.json."""

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.choices[0].text

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first answer."""
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.choices[0].finish_reason

    @classmethod
    def _taken(cls, handle: Any) -> GenerateResponse:
        """All of a response in C, which is freed."""
        try:
            info = initialised("pagoda_generate_info")
            call(lib.pagoda_generate_response_info, handle, info)
            prompt = lib.pagoda_generate_response_prompt_logprobs
            return cls(
                choices=[_choice(handle, index) for index in range(info.choice_count)],
                prompt_tokens=listed(info.prompt_tokens, info.prompt_token_count),
                prompt_logprobs=[
                    TokenLogprobs.filled(prompt, handle, index) for index in range(info.prompt_logprob_count)
                ],
                cached_tokens=info.cached_tokens,
                computed_tokens=info.computed_tokens,
                version=decoded(info.version),
            )
        finally:
            lib.pagoda_generate_response_free(handle)


def _choice(handle: Any, index: int) -> Choice:
    read = initialised("pagoda_generate_choice")
    call(lib.pagoda_generate_response_choice, handle, index, read)
    logprobs = lib.pagoda_generate_response_logprobs
    return Choice(
        text=_text(read),
        tokens=listed(read.tokens, read.token_count),
        finish_reason=FinishReason(read.finish_reason),
        logprobs=[TokenLogprobs.filled(logprobs, handle, index, token) for token in range(read.logprob_count)],
        queued_ns=read.queued_ns,
        first_token_ns=read.first_token_ns,
        generation_ns=read.generation_ns,
        missing=decoded(read.missing) if read.missing else None,
        score=read.score if read.has_score else None,
    )


def _text(read: Any) -> str:
    """The text of an answer or of a token, which may have NULs in it."""
    return cast(bytes, ffi.unpack(read.text, read.text_length)).decode() if read.text_length else ""
