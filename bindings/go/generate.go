package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"maps"
	"runtime"
	"runtime/cgo"
	"slices"
	"time"
	"unsafe"
)

// ContextEnd is what happens if prompt and answer do not fit into the model's context.
type ContextEnd int32

// What happens at the end of the context.
const (
	ContextEndRefuse ContextEnd = C.PAGODA_CONTEXT_END_REFUSE // The request is rejected.
	ContextEndStop   ContextEnd = C.PAGODA_CONTEXT_END_STOP   // The answer ends there, as if MaxNewTokens were less.
)

// EarlyStop is when a beam search ends that has as many finished answers as beams.
type EarlyStop int32

// When a beam search ends.
const (
	EarlyStopWhenUnlikely EarlyStop = C.PAGODA_EARLY_STOP_WHEN_UNLIKELY // When no beam has a better score at its length than the worst.
	EarlyStopWhenFull     EarlyStop = C.PAGODA_EARLY_STOP_WHEN_FULL     // At once.
	EarlyStopNever        EarlyStop = C.PAGODA_EARLY_STOP_NEVER         // When no beam can get a better score at any length.
)

// BeamOptions is a beam search.
type BeamOptions struct {
	// Width is the number of beams, 1 to 16; 0: 4.
	Width int32
	// LengthPenalty: the score of an answer is the sum of its log probabilities over its number of tokens to this power.
	// Above 0 long answers get better scores, below 0 short ones. nil: 1.
	LengthPenalty *float64
	// EarlyStop is when the search ends.
	EarlyStop EarlyStop
}

func (b *BeamOptions) toC(f *fields) *C.pagoda_beam_options {
	c := C.pagoda_beam_options_init()
	orDefault(&c.width, b.Width)
	if b.LengthPenalty != nil {
		c.length_penalty = C.float(*b.LengthPenalty)
	}
	c.early_stop = C.pagoda_early_stop(b.EarlyStop)
	f.lent.Pin(&c)
	return &c
}

// FinishReason is why an answer ended.
type FinishReason int32

// Why an answer ended.
const (
	FinishReasonNone      FinishReason = C.PAGODA_FINISH_REASON_NONE      // It has not ended.
	FinishReasonStop      FinishReason = C.PAGODA_FINISH_REASON_STOP      // An end-of-sequence or stop token, or a stop text.
	FinishReasonLength    FinishReason = C.PAGODA_FINISH_REASON_LENGTH    // MaxNewTokens, or the end of the context.
	FinishReasonCancelled FinishReason = C.PAGODA_FINISH_REASON_CANCELLED // It was cancelled.
	FinishReasonTimeout   FinishReason = C.PAGODA_FINISH_REASON_TIMEOUT   // Its time limit was exceeded.
)

// String is the word for it, such as "stop"; "" for [FinishReasonNone].
func (r FinishReason) String() string {
	if names := [...]string{"", "stop", "length", "cancelled", "timeout"}; r >= 0 && int(r) < len(names) {
		return names[r]
	}
	return "unknown"
}

// Message is a message of a chat.
type Message struct {
	// Role is who speaks: "system", "user", "assistant", or what else the model's chat template knows.
	Role string `json:"role"`
	// Content is the text.
	Content string `json:"content"`
}

// Ptr is a pointer to a value, for the optional fields of a request: Temperature: pagoda.Ptr(0.7).
func Ptr[T any](value T) *T { return &value }

// GenerateRequest is a request for text. It has one of Prompt, Tokens and Messages.
//
// A field that is nil is not given: it is as `generation` in the model's pagoda.json says, or, if that does not say either,
// as the comment of the field says. [Ptr] makes the others.
//
// Messages, Tools, Variables and Grammar are JSON: a string, a []byte or a json.RawMessage is JSON already, and
// encoding/json makes it of anything else.
type GenerateRequest struct {
	// Prompt is what the text follows, as a text; "": Tokens or Messages. The special tokens that the model's tokenizer
	// puts before a text are added.
	Prompt string
	// Tokens is what the text follows, as tokens; nil: Prompt or Messages. They are not copied.
	Tokens []uint32
	// Messages is what the text follows, as the messages of a chat; nil: Prompt or Tokens. It is a []Message, or whatever
	// else is a list of objects with role and content, and what the model's chat template takes beside them.
	Messages any
	// Tools is, with Messages, the tools that the model may call; nil: none.
	Tools any
	// Variables is, with Messages, more variables of the chat template, an object; nil: none.
	Variables any
	// AddGenerationPrompt is, with Messages, whether the prompt ends before an answer of the model, rather than after the
	// last message; nil: it does.
	AddGenerationPrompt *bool
	// MaxNewTokens is the maximum number of tokens of an answer; nil: as many as the context has room for.
	MaxNewTokens *int
	// MinNewTokens is the number of tokens before which no end-of-sequence token is taken; nil: 0.
	MinNewTokens *int
	// DoSample is whether tokens are drawn; else the most likely one is taken. nil: drawn if Temperature is given and not 0.
	DoSample *bool
	// Temperature is what logits are divided by; 0: the most likely token is taken. nil: 1.
	Temperature *float64
	// TopK is the number of most likely tokens that are drawn from; 0: all. nil: all.
	TopK *int
	// TopP is the probability that the tokens drawn from have together, 0 to 1; nil: 1.
	TopP *float64
	// MinP is the least probability of a token that is drawn, relative to the most likely one, 0 to 1; nil: 0.
	MinP *float64
	// RepetitionPenalty is the penalty of tokens in the prompt and in the answer so far, above 0; nil: 1, which is none.
	RepetitionPenalty *float64
	// PresencePenalty is subtracted from the logits of tokens that the answer has, -2 to 2.
	PresencePenalty float64
	// FrequencyPenalty is subtracted from the logits of tokens as often as the answer has them, -2 to 2.
	FrequencyPenalty float64
	// NoRepeatNgramSize: no sequence of so many tokens occurs twice; 0: any may. nil: 0.
	NoRepeatNgramSize *int
	// LogitBias is what is added to the logits of tokens; -1e30 bans one.
	LogitBias map[uint32]float32
	// Seed is the seed of the draws: the same request with the same seed gets the same tokens. nil: another one for each
	// request.
	Seed *uint64
	// ForcedEOS is the token that the last of MaxNewTokens is forced to be; nil: none is forced.
	ForcedEOS *int
	// IgnoreEOS is whether end-of-sequence tokens do not end the answer.
	IgnoreEOS bool
	// Stop is texts that end the answer. The answer does not have them, unless IncludeStop is set.
	Stop []string
	// StopTokens is tokens that end the answer, beside the model's end-of-sequence tokens.
	StopTokens []uint32
	// IncludeStop is whether the answer's text has the stop text that ended it.
	IncludeStop bool
	// SkipSpecial is whether the answer's text leaves special tokens out; nil: it does.
	SkipSpecial *bool
	// Logprobs asks for the log probabilities of the answer's tokens, and of so many most likely tokens in their places;
	// nil: for none.
	Logprobs *int
	// PromptLogprobs asks for the same of the prompt's tokens; nil: for none. The prompt is then computed as a whole.
	PromptLogprobs *int
	// N is the number of answers; 0: 1.
	N int
	// Echo is whether the text of an answer begins with the prompt.
	Echo bool
	// Priority: requests of higher priority run first. Requests of one priority run in order of arrival.
	Priority int32
	// ContextEnd is what happens if prompt and answer do not fit into the model's context.
	ContextEnd ContextEnd
	// Timeout is the time limit, rounded up to whole microseconds; 0: none. The answer then has what was generated until
	// then, and ends with [FinishReasonTimeout], which is no error.
	Timeout time.Duration
	// Session is the conversation that the request belongs to; "": none. Its keys and values are kept, in the store too.
	// Send the whole conversation as the prompt: only what is new is computed. Requests of one session run one at a time.
	Session string
	// KVPolicy is which tokens stay in the slots of the request's sequences; nil: as the generator was opened. That must
	// have been with a policy that needs as much of the model. CacheLength stays the generator's: leave it 0.
	KVPolicy *KVPolicy
	// Grammar is what the answer has to look like; nil: any text. {"json_schema": {...}}: JSON that is valid by this JSON
	// Schema; {"regex": "[0-9]+"}: a text that matches as a whole; {"choice": ["yes", "no"]}: one of these texts;
	// {"lark": "start: ..."}: a text of this grammar.
	Grammar any
	// MaxDraft is the maximum number of tokens that are guessed for one step, 0 to 64. The answer is the same, sooner where
	// much of it repeats the prompt. nil: as the generator was opened.
	MaxDraft *int
	// Beams is a beam search, of which the answers are the N best, the best first; nil: none. There are fewer answers where
	// fewer are found. Nothing is drawn, and the request has no session. A stream gets no token before the search has ended:
	// then those of the first answer come, then those of the second, and so on.
	Beams *BeamOptions
}

// toC is the request in C's form, all but its cancel. A new field of pagoda.h is a field above and a line here.
func (r *GenerateRequest) toC(l *lent) (*C.pagoda_generate_request, error) {
	if r == nil {
		return nil, fail(ErrInvalidArgument, "request", "nil, where a request is needed")
	}
	c, f := C.pagoda_generate_request_init(), &fields{lent: l}
	f.text(&c.prompt, r.Prompt, "request.prompt")
	if r.Tokens != nil {
		c.tokens, c.token_count = (*C.uint32_t)(list(f, r.Tokens)), C.size_t(len(r.Tokens))
	}
	f.json(&c.messages, r.Messages, "request.messages")
	f.json(&c.tools, r.Tools, "request.tools")
	f.json(&c.variables, r.Variables, "request.variables")
	f.flag(&c.add_generation_prompt, r.AddGenerationPrompt)
	f.count(&c.max_new_tokens, r.MaxNewTokens, "request.max_new_tokens")
	f.count(&c.min_new_tokens, r.MinNewTokens, "request.min_new_tokens")
	f.flag(&c.do_sample, r.DoSample)
	f.number(&c.temperature, r.Temperature, "request.temperature")
	f.count(&c.top_k, r.TopK, "request.top_k")
	f.number(&c.top_p, r.TopP, "request.top_p")
	f.number(&c.min_p, r.MinP, "request.min_p")
	f.number(&c.repetition_penalty, r.RepetitionPenalty, "request.repetition_penalty")
	c.presence_penalty, c.frequency_penalty = C.float(r.PresencePenalty), C.float(r.FrequencyPenalty)
	f.count(&c.no_repeat_ngram_size, r.NoRepeatNgramSize, "request.no_repeat_ngram_size")
	if len(r.LogitBias) > 0 {
		biases := make([]C.pagoda_logit_bias, 0, len(r.LogitBias))
		for _, token := range slices.Sorted(maps.Keys(r.LogitBias)) {
			bias := C.pagoda_logit_bias_init()
			bias.token, bias.bias = C.uint32_t(token), C.float(r.LogitBias[token])
			biases = append(biases, bias)
		}
		c.logit_bias, c.logit_bias_count = list(f, biases), C.size_t(len(biases))
	}
	if r.Seed != nil {
		c.has_seed, c.seed = 1, C.uint64_t(*r.Seed)
	}
	f.count(&c.forced_eos, r.ForcedEOS, "request.forced_eos")
	c.ignore_eos, c.include_stop, c.echo = flag(r.IgnoreEOS), flag(r.IncludeStop), flag(r.Echo)
	c.stop, c.stop_count = f.texts(r.Stop, "request.stop")
	if len(r.StopTokens) > 0 {
		c.stop_tokens, c.stop_token_count = (*C.uint32_t)(list(f, r.StopTokens)), C.size_t(len(r.StopTokens))
	}
	f.flag(&c.skip_special, r.SkipSpecial)
	f.count(&c.logprobs, r.Logprobs, "request.logprobs")
	f.count(&c.prompt_logprobs, r.PromptLogprobs, "request.prompt_logprobs")
	if r.N != 0 {
		c.n = number(r.N)
	}
	c.priority, c.context_end = C.int32_t(r.Priority), C.pagoda_context_end(r.ContextEnd)
	f.duration(&c.timeout_us, r.Timeout, "request.timeout_us")
	f.text(&c.session, r.Session, "request.session")
	if r.KVPolicy != nil {
		c.kv_policy = r.KVPolicy.toC(f, "request.kv_policy")
	}
	f.json(&c.grammar, r.Grammar, "request.grammar")
	f.count(&c.max_draft, r.MaxDraft, "request.max_draft")
	if r.Beams != nil {
		c.beams = r.Beams.toC(f)
	}
	return &c, f.err
}

// GenerateResponse is the answers to a request.
type GenerateResponse struct {
	// Choices is the answers, as many as N; of a beam search there can be fewer.
	Choices []Choice
	// PromptTokens is the tokens of the prompt.
	PromptTokens []uint32
	// PromptLogprobs is the log probabilities of the prompt's tokens, if they were asked for. The first token has none: its
	// Rank is 0.
	PromptLogprobs []TokenLogprobs
	// CachedTokens is the number of prompt tokens whose keys and values were cached, of the first answer.
	CachedTokens int
	// ComputedTokens is the number of rows that were computed for all answers.
	ComputedTokens uint64
	// Version is the version of the model, as in its pagoda.json.
	Version string
}

// Choice is one answer.
type Choice struct {
	// Text is its text.
	Text string
	// Tokens is its tokens. Those that ended it are the last ones.
	Tokens []uint32
	// Logprobs is the log probabilities of its tokens, if they were asked for.
	Logprobs []TokenLogprobs
	// FinishReason is why it ended.
	FinishReason FinishReason
	// Missing is what the request's grammar expects next, if the answer ended before it was valid; else "".
	Missing string
	// Queued is the time from the request to its first step, FirstToken that to the first token, and Generation that from
	// the first token to the last.
	Queued, FirstToken, Generation time.Duration
	// Score is the score of an answer of a beam search: the sum of its log probabilities over its number of tokens to the
	// power of the length penalty. Penalties and LogitBias are part of it. nil: it is of no search.
	Score *float32
}

// TokenLogprobs is what the model thought of a token, before anything that the request asked for.
type TokenLogprobs struct {
	// Logprob is the natural logarithm of the token's probability.
	Logprob float32
	// Rank is its place among all tokens, 1 for the most likely; 0: it has no probability, as the first token of a prompt.
	Rank int
	// Top is the most likely tokens, as many as were asked for, the most likely first.
	Top []TopLogprob
}

// TopLogprob is one of the most likely tokens in a place.
type TopLogprob struct {
	// Token is the token.
	Token uint32
	// Logprob is the natural logarithm of its probability.
	Logprob float32
}

// Generate answers a request, and waits for the end of all its answers. Any number of goroutines may call it at the same
// time; their requests run together.
//
// When ctx is done, the answers end with what they have. The error is then [ErrCancelled] and the context's, and the
// response is there even so.
func (g *Generator) Generate(ctx context.Context, request *GenerateRequest) (*GenerateResponse, error) {
	var l lent
	defer l.Unpin()
	handle, c, stopper, err := g.prepare(ctx, request, &l)
	if err != nil {
		return nil, err
	}
	defer stopper.end()
	defer runtime.KeepAlive(g)
	defer runtime.KeepAlive(request)
	var response *C.pagoda_generate_response
	var failure *C.pagoda_error
	if err := check(C.pagoda_generator_generate(handle, c, &response, &failure), &failure); err != nil {
		return nil, blame(ctx, err)
	}
	return ended(ctx, response)
}

// GenerateResult is how an asynchronous request ended.
type GenerateResult struct {
	// Response is the answers. It is there too if the context was done.
	Response *GenerateResponse
	// Err says what went wrong.
	Err error
}

// GenerateAsync starts to answer a request on a thread of Pagoda, and returns at once; the result comes through the channel.
// It is [Generator.Generate] otherwise. An error in the request itself is returned at once. When this returns, the arguments
// may be reused. The channel need not be read. [Generator.Stream] has the tokens as they come.
func (g *Generator) GenerateAsync(ctx context.Context, request *GenerateRequest) (<-chan GenerateResult, error) {
	// Room for the result, so that the thread of Pagoda does not wait for a reader.
	result := make(chan GenerateResult, 1)
	err := g.start(ctx, request, &asyncGenerate{end: func(response *GenerateResponse, err error) {
		result <- GenerateResult{response, err}
		close(result)
	}})
	if err != nil {
		return nil, err
	}
	return result, nil
}

// asyncGenerate is what is kept until a request has ended.
type asyncGenerate struct {
	ctx     context.Context
	stopper stopper
	token   func(Token) // nil: tokens are not asked for
	end     func(*GenerateResponse, error)
}

// start starts a request.
func (g *Generator) start(ctx context.Context, request *GenerateRequest, to *asyncGenerate) error {
	var l lent
	defer l.Unpin()
	handle, c, stopper, err := g.prepare(ctx, request, &l)
	if err != nil {
		return err
	}
	defer runtime.KeepAlive(g)
	defer runtime.KeepAlive(request)
	to.ctx, to.stopper = ctx, stopper
	held := cgo.NewHandle(to)
	var failure *C.pagoda_error
	status := C.pagoda_go_generator_generate_async(handle, c, flag(to.token != nil), C.uintptr_t(held), &failure)
	if err := check(status, &failure); err != nil {
		held.Delete()
		stopper.end()
		return blame(ctx, err)
	}
	return nil
}

//export pagodaGoToken
func pagodaGoToken(held C.uintptr_t, token *C.pagoda_generate_token) {
	it := Token{
		Choice:       int(token.choice),
		ID:           uint32(token.id),
		Text:         C.GoStringN(token.text, C.int(token.text_length)),
		FinishReason: FinishReason(token.finish_reason),
	}
	if token.logprobs != nil {
		it.Logprobs = Ptr(newTokenLogprobs(token.logprobs))
	}
	cgo.Handle(held).Value().(*asyncGenerate).token(it)
}

//export pagodaGoGenerated
func pagodaGoGenerated(held C.uintptr_t, status C.pagoda_status, response *C.pagoda_generate_response,
	failure *C.pagoda_error) {
	it := cgo.Handle(held).Value().(*asyncGenerate)
	cgo.Handle(held).Delete()
	it.stopper.end()
	if status != C.PAGODA_STATUS_OK {
		it.end(nil, blame(it.ctx, toError(status, failure)))
	} else {
		it.end(ended(it.ctx, response))
	}
}

// prepare is what all ways of generating begin with. What it makes must be unpinned and ended, unless there is an error.
func (g *Generator) prepare(ctx context.Context, request *GenerateRequest, l *lent) (*C.pagoda_generator,
	*C.pagoda_generate_request, stopper, error) {
	handle, err := g.handle()
	if err != nil {
		return nil, nil, stopper{}, err
	}
	c, err := request.toC(l)
	if err != nil {
		return nil, nil, stopper{}, err
	}
	stopper, err := newStopper(ctx)
	c.cancel = stopper.handle
	return handle, c, stopper, err
}

// ended reads a response and frees it. Answers that were cancelled are an error: to a context, and to a loop over tokens,
// they would look like whole ones.
func ended(ctx context.Context, handle *C.pagoda_generate_response) (*GenerateResponse, error) {
	defer C.pagoda_generate_response_free(handle)
	response, err := newGenerateResponse(handle)
	if err != nil {
		return nil, err
	}
	for _, choice := range response.Choices {
		if choice.FinishReason == FinishReasonCancelled {
			if err := done(ctx); err != nil {
				return response, err
			}
			return response, &Error{Status: ErrCancelled, Message: "the generator was closed before the answer ended"}
		}
	}
	return response, nil
}

func newGenerateResponse(handle *C.pagoda_generate_response) (*GenerateResponse, error) {
	info := C.pagoda_generate_info_init()
	var failure *C.pagoda_error
	if err := check(C.pagoda_generate_response_info(handle, &info, &failure), &failure); err != nil {
		return nil, err
	}
	response := &GenerateResponse{
		Choices:        make([]Choice, info.choice_count),
		PromptTokens:   tokens(info.prompt_tokens, info.prompt_token_count),
		CachedTokens:   int(info.cached_tokens),
		ComputedTokens: uint64(info.computed_tokens),
		Version:        C.GoString(info.version),
	}
	var err error
	response.PromptLogprobs, err = logprobs(info.prompt_logprob_count, func(index C.size_t,
		to *C.pagoda_token_logprobs, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_generate_response_prompt_logprobs(handle, index, to, failure)
	})
	for i := range response.Choices {
		if err != nil {
			return nil, err
		}
		choice := C.pagoda_generate_choice_init()
		err = check(C.pagoda_generate_response_choice(handle, C.size_t(i), &choice, &failure), &failure)
		if err != nil {
			return nil, err
		}
		to := &response.Choices[i]
		*to = Choice{
			Text:         C.GoStringN(choice.text, C.int(choice.text_length)),
			Tokens:       tokens(choice.tokens, choice.token_count),
			FinishReason: FinishReason(choice.finish_reason),
			Queued:       time.Duration(choice.queued_ns),
			FirstToken:   time.Duration(choice.first_token_ns),
			Generation:   time.Duration(choice.generation_ns),
		}
		if choice.missing != nil {
			to.Missing = C.GoString(choice.missing)
		}
		if choice.has_score == 1 {
			to.Score = Ptr(float32(choice.score))
		}
		to.Logprobs, err = logprobs(choice.logprob_count, func(index C.size_t, into *C.pagoda_token_logprobs,
			failure **C.pagoda_error) C.pagoda_status {
			return C.pagoda_generate_response_logprobs(handle, C.size_t(i), index, into, failure)
		})
	}
	return response, err
}

// tokens is a copy of tokens that go with a response.
func tokens(from *C.uint32_t, count C.size_t) []uint32 {
	return slices.Clone(unsafe.Slice((*uint32)(from), count))
}

// logprobs is those of all tokens of a list; nil if they were not asked for.
func logprobs(count C.size_t, get func(C.size_t, *C.pagoda_token_logprobs, **C.pagoda_error) C.pagoda_status) (
	[]TokenLogprobs, error) {
	if count == 0 {
		return nil, nil
	}
	all := make([]TokenLogprobs, count)
	one := C.pagoda_token_logprobs_init()
	var failure *C.pagoda_error
	for i := range all {
		if err := check(get(C.size_t(i), &one, &failure), &failure); err != nil {
			return nil, err
		}
		all[i] = newTokenLogprobs(&one)
	}
	return all, nil
}

func newTokenLogprobs(from *C.pagoda_token_logprobs) TokenLogprobs {
	top := make([]TopLogprob, from.top_count)
	ids, logs := unsafe.Slice(from.top_tokens, from.top_count), unsafe.Slice(from.top_logprobs, from.top_count)
	for i := range top {
		top[i] = TopLogprob{uint32(ids[i]), float32(logs[i])}
	}
	return TokenLogprobs{float32(from.logprob), int(from.rank), top}
}
