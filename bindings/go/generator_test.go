package pagoda_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pagoda"
)

const llama = root + "/tests/data/generate/llama"

func openGenerator(t testing.TB, options *pagoda.GeneratorOptions) *pagoda.Generator {
	t.Helper()
	options.Model = cpu()
	if options.KVSize == (pagoda.KVSize{}) {
		options.KVSize = pagoda.KVPages(64)
	}
	if options.MaxBatch == 0 {
		options.MaxBatch = 4
	}
	it := must[*pagoda.Generator](t)(pagoda.OpenGenerator(ctx, llama, options))
	t.Cleanup(func() { ok(t, it.Close()) })
	return it
}

// reference is the prompts of tests/data/llm/llama, and the logits that transformers gives for them.
func reference(t testing.TB, index string) (prompt []uint32, logits [][]float32) {
	t.Helper()
	file := must[[]byte](t)(os.ReadFile(root + "/tests/data/llm/llama/expected.safetensors"))
	size := binary.LittleEndian.Uint64(file)
	var header map[string]struct {
		Dtype   string
		Shape   []int
		Offsets [2]int `json:"data_offsets"`
	}
	ok(t, json.Unmarshal(file[8:8+size], &header))
	bytes := func(name, dtype string) []byte {
		tensor := header[name]
		equal(t, name, tensor.Dtype, dtype)
		return file[8+size:][tensor.Offsets[0]:tensor.Offsets[1]]
	}
	ids := bytes("input_ids."+index, "I32")
	for i := 0; i < len(ids); i += 4 {
		prompt = append(prompt, binary.LittleEndian.Uint32(ids[i:]))
	}
	numbers := bytes("logits."+index, "F32")
	row := make([]float32, len(numbers)/4/len(prompt))
	for range prompt {
		must[int](t)(binary.Decode(numbers, binary.LittleEndian, row))
		logits, numbers = append(logits, slices.Clone(row)), numbers[4*len(row):]
	}
	return prompt, logits
}

var first = []uint32{5, 6, 7, 8, 9, 10, 11, 12}

// likely is a request for the most likely tokens, which no token ends.
func likely(tokens []uint32, count int) *pagoda.GenerateRequest {
	return &pagoda.GenerateRequest{
		Tokens: tokens, DoSample: pagoda.Ptr(false), IgnoreEOS: true, MaxNewTokens: pagoda.Ptr(count),
	}
}

// drawn is a request for tokens that are drawn.
func drawn(seed uint64) *pagoda.GenerateRequest {
	request := likely(first, 12)
	request.DoSample, request.Temperature, request.Seed = pagoda.Ptr(true), pagoda.Ptr(1.5), &seed
	request.TopK, request.TopP = pagoda.Ptr(0), pagoda.Ptr(1.0)
	return request
}

func answer(t testing.TB, g *pagoda.Generator, request *pagoda.GenerateRequest) *pagoda.GenerateResponse {
	t.Helper()
	return must[*pagoda.GenerateResponse](t)(g.Generate(ctx, request))
}

// with is a request that was changed.
func with(request *pagoda.GenerateRequest, change func(*pagoda.GenerateRequest)) *pagoda.GenerateRequest {
	change(request)
	return request
}

func same(t testing.TB, what string, got, want []uint32) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %v, not %v", what, got, want)
	}
}

func TestProbabilitiesAndTheFirstTokenAreThoseOfTransformers(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{})
	for _, index := range []string{"0", "1"} {
		prompt, logits := reference(t, index)
		r := answer(t, g, with(likely(prompt, 4), func(r *pagoda.GenerateRequest) {
			r.Logprobs, r.PromptLogprobs = pagoda.Ptr(5), pagoda.Ptr(3)
		}))
		same(t, "prompt", r.PromptTokens, prompt)
		equal(t, "log probabilities of the prompt", len(r.PromptLogprobs), len(prompt))
		equal(t, "rank of the first token", r.PromptLogprobs[0].Rank, 0)
		for i, row := range logits {
			sum := 0.0
			for _, logit := range row {
				sum += math.Exp(float64(logit))
			}
			log := func(token uint32) float64 { return float64(row[token]) - math.Log(sum) }
			if i == len(logits)-1 {
				best := slices.Index(row, slices.Max(row))
				equal(t, "first token", r.Choices[0].Tokens[0], uint32(best))
				continue
			}
			found := r.PromptLogprobs[i+1]
			if math.Abs(float64(found.Logprob)-log(prompt[i+1])) > 1e-3 || found.Rank < 1 || len(found.Top) != 3 ||
				math.Abs(float64(found.Top[0].Logprob)-log(found.Top[0].Token)) > 1e-3 {
				t.Fatalf("token %d: %+v, not %v", i+1, found, log(prompt[i+1]))
			}
		}
		for i, found := range r.Choices[0].Logprobs {
			if found.Rank != 1 || len(found.Top) != 5 || found.Top[0].Token != r.Choices[0].Tokens[i] ||
				found.Top[0].Logprob != found.Logprob {
				t.Errorf("token %d: %+v", i, found)
			}
		}
		equal(t, "log probabilities", len(r.Choices[0].Logprobs), 4)
	}
}

// readStream is what a stream brings: the tokens and the text of each answer.
func readStream(t testing.TB, s *pagoda.TokenStream, answers int) (tokens [][]uint32, texts []string, last []pagoda.FinishReason) {
	t.Helper()
	tokens, texts, last = make([][]uint32, answers), make([]string, answers), make([]pagoda.FinishReason, answers)
	for token, err := range s.Tokens() {
		ok(t, err)
		tokens[token.Choice] = append(tokens[token.Choice], token.ID)
		texts[token.Choice] += token.Text
		last[token.Choice] = token.FinishReason
	}
	return tokens, texts, last
}

func TestOneCallStreamsAndStepsGiveTheSameAnswer(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{})
	stepped := openGenerator(t, &pagoda.GeneratorOptions{Driver: pagoda.DriverCaller})
	request := with(likely(first, 12), func(r *pagoda.GenerateRequest) { r.Logprobs = pagoda.Ptr(2) })
	whole := answer(t, g, request).Choices[0]
	equal(t, "tokens", len(whole.Tokens), 12)
	equal(t, "end", whole.FinishReason, pagoda.FinishReasonLength)
	if whole.Queued <= 0 || whole.FirstToken <= whole.Queued || whole.Generation <= 0 {
		t.Errorf("%+v", whole)
	}
	for _, c := range []context.Context{ctx, t.Context()} {
		s := must[*pagoda.TokenStream](t)(g.Stream(c, request))
		var tokens []uint32
		var text strings.Builder
		for token, err := range s.Tokens() {
			ok(t, err)
			if want := whole.Logprobs[len(tokens)]; token.Logprobs.Logprob != want.Logprob ||
				!slices.Equal(token.Logprobs.Top, want.Top) {
				t.Errorf("%+v, not %+v", token.Logprobs, want)
			}
			tokens = append(tokens, token.ID)
			text.WriteString(token.Text)
			equal(t, "ends", token.FinishReason == pagoda.FinishReasonLength, len(tokens) == 12)
		}
		same(t, "streamed", tokens, whole.Tokens)
		equal(t, "text", text.String(), whole.Text)
		response := must[*pagoda.GenerateResponse](t)(s.Response())
		same(t, "response of the stream", response.Choices[0].Tokens, whole.Tokens)
		for range s.Tokens() {
			t.Error("a token was there twice")
		}
		later := <-must[<-chan pagoda.GenerateResult](t)(g.GenerateAsync(c, request))
		ok(t, later.Err)
		same(t, "asynchronous", later.Response.Choices[0].Tokens, whole.Tokens)
		equal(t, "version", later.Response.Version, response.Version)
		same(t, "by a call that steps", answer(t, stepped, request).Choices[0].Tokens, whole.Tokens)
	}
	s := must[*pagoda.TokenStream](t)(stepped.Stream(ctx, request))
	for steps := 1; must[bool](t)(stepped.Step()); steps++ {
		if steps > 12 {
			t.Fatal("there are more steps than tokens")
		}
	}
	tokens, _, _ := readStream(t, s, 1)
	same(t, "by steps", tokens[0], whole.Tokens)
	equal(t, "more steps", must[bool](t)(stepped.Step()), false)
	_, err := g.Step()
	if !errors.Is(err, pagoda.ErrUnsupported) {
		t.Errorf("a step of a generator that has a thread: %v", err)
	}
}

func TestManyAnswersAreThoseOfTheirSeed(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{})
	four := func(seed uint64) *pagoda.GenerateRequest {
		return with(drawn(seed), func(r *pagoda.GenerateRequest) { r.N = 4 })
	}
	one, again, other := answer(t, g, four(7)), answer(t, g, four(7)), answer(t, g, four(1007))
	streamed, texts, ends := readStream(t, must[*pagoda.TokenStream](t)(g.Stream(ctx, four(7))), 4)
	for i := range 4 {
		same(t, "the same seed", again.Choices[i].Tokens, one.Choices[i].Tokens)
		same(t, "streamed", streamed[i], one.Choices[i].Tokens)
		equal(t, "text", texts[i], one.Choices[i].Text)
		equal(t, "end", ends[i], pagoda.FinishReasonLength)
		if slices.Equal(other.Choices[i].Tokens, one.Choices[i].Tokens) {
			t.Errorf("answer %d is the same with another seed", i)
		}
	}
	// Without a seed every request has another one; what is not given is as the model says.
	different := map[string]bool{}
	for range 5 {
		r := &pagoda.GenerateRequest{Tokens: first, IgnoreEOS: true, MaxNewTokens: pagoda.Ptr(12)}
		different[answer(t, g, r).Choices[0].Text] = true
	}
	if len(different) < 2 {
		t.Error("five requests without a seed got one answer")
	}
	greedy := answer(t, g, likely(first, 12)).Choices[0].Tokens
	zero := &pagoda.GenerateRequest{Tokens: first, IgnoreEOS: true, MaxNewTokens: pagoda.Ptr(12), Temperature: pagoda.Ptr(0.0)}
	same(t, "temperature 0", answer(t, g, zero).Choices[0].Tokens, greedy)
}

func TestEveryFieldOfARequestReachesTheLibrary(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{})
	plain := answer(t, g, likely(first, 12)).Choices[0]
	change := func(change func(*pagoda.GenerateRequest)) pagoda.Choice {
		t.Helper()
		return answer(t, g, with(likely(first, 12), change)).Choices[0]
	}
	type r = pagoda.GenerateRequest
	if slices.Contains(change(func(r *r) { r.LogitBias = map[uint32]float32{plain.Tokens[0]: -1e30} }).Tokens, plain.Tokens[0]) {
		t.Error("a token that was banned is there")
	}
	all77 := change(func(r *r) { r.LogitBias = map[uint32]float32{77: 1e6, 3: 1} })
	same(t, "biased", all77.Tokens, slices.Repeat([]uint32{77}, 12))
	norepeat := change(func(r *r) { r.LogitBias, r.NoRepeatNgramSize = map[uint32]float32{77: 1e3}, pagoda.Ptr(1) })
	slices.Sort(norepeat.Tokens)
	equal(t, "tokens that are not repeated", len(slices.Compact(norepeat.Tokens)), 12)
	forced := change(func(r *r) { r.ForcedEOS = pagoda.Ptr(2) })
	same(t, "forced", forced.Tokens, append(slices.Clone(plain.Tokens[:11]), 2))
	stop := plain.Tokens[5]
	stopped := change(func(r *r) { r.StopTokens = []uint32{stop} })
	same(t, "stopped", stopped.Tokens, plain.Tokens[:slices.Index(plain.Tokens, stop)+1])
	equal(t, "end", stopped.FinishReason, pagoda.FinishReasonStop)
	eos := change(func(r *r) { r.LogitBias, r.IgnoreEOS = map[uint32]float32{2: 1e6}, false })
	same(t, "end of sequence", eos.Tokens, []uint32{2})
	least := change(func(r *r) {
		r.LogitBias, r.IgnoreEOS, r.MinNewTokens = map[uint32]float32{2: 1e6, 4: -1e30}, false, pagoda.Ptr(3)
	})
	equal(t, "at least", len(least.Tokens), 4)
	special := change(func(r *r) { r.LogitBias, r.SkipSpecial = map[uint32]float32{2: 1e6}, pagoda.Ptr(false) })
	equal(t, "special tokens", special.Text, strings.Repeat("</s>", 12))
	equal(t, "special tokens left out", change(func(r *r) { r.LogitBias = map[uint32]float32{2: 1e6} }).Text, "")
	top := change(func(r *r) { r.DoSample, r.TopK, r.Seed = pagoda.Ptr(true), pagoda.Ptr(1), pagoda.Ptr[uint64](1) })
	same(t, "the one most likely", top.Tokens, plain.Tokens)
	tight := change(func(r *r) { r.DoSample, r.TopK, r.TopP = pagoda.Ptr(true), pagoda.Ptr(0), pagoda.Ptr(0.0) })
	same(t, "top_p of 0", tight.Tokens, plain.Tokens)
	minP := change(func(r *r) {
		r.DoSample, r.TopK, r.TopP, r.MinP = pagoda.Ptr(true), pagoda.Ptr(0), pagoda.Ptr(1.0), pagoda.Ptr(1.0)
	})
	same(t, "min_p of 1", minP.Tokens, plain.Tokens)
	// Some tokens that are far ahead of the others, and close together.
	some := map[uint32]float32{}
	for token := range uint32(30) {
		some[70+token] = 30
	}
	for name, change := range map[string]func(*r){
		"repetition_penalty": func(r *r) { r.RepetitionPenalty = pagoda.Ptr(30.0) },
		"presence_penalty":   func(r *r) { r.PresencePenalty = 2 },
		"frequency_penalty":  func(r *r) { r.FrequencyPenalty = 2 },
	} {
		biased := with(likely(first, 12), func(r *r) { r.LogitBias = some })
		without := answer(t, g, biased).Choices[0].Tokens
		if slices.Equal(answer(t, g, with(biased, change)).Choices[0].Tokens, without) {
			t.Errorf("%s changes nothing: %v", name, without)
		}
	}
	long := answer(t, g, likely(first, 40)).Choices[0]
	middle := string([]rune(long.Text)[10:12])
	before, _, _ := strings.Cut(long.Text, middle)
	for include, want := range map[bool]string{false: before, true: before + middle} {
		s := must[*pagoda.TokenStream](t)(g.Stream(ctx, with(likely(first, 40), func(r *r) {
			r.Stop, r.IncludeStop = []string{"never there", middle}, include
		})))
		_, texts, ends := readStream(t, s, 1)
		equal(t, "text before the stop", texts[0], want)
		equal(t, "end", ends[0], pagoda.FinishReasonStop)
	}
	// Prompts of other kinds.
	words := "the quick brown 狐 fox"
	byText := with(likely(nil, 12), func(r *r) { r.Prompt, r.Echo = words, true })
	tokens := must[[]uint32](t)(g.Tokenize(byText))
	equal(t, "beginning of a sequence", tokens[0], 1)
	equal(t, "text", must[string](t)(g.Detokenize(tokens, true)), words)
	equal(t, "text", must[string](t)(g.Detokenize(tokens, false)), "<s>"+words)
	equal(t, "no text", must[string](t)(g.Detokenize(nil, false)), "")
	echoed := answer(t, g, byText)
	same(t, "prompt", echoed.PromptTokens, tokens)
	byTokens := answer(t, g, likely(tokens, 12)).Choices[0]
	same(t, "of a text", echoed.Choices[0].Tokens, byTokens.Tokens)
	equal(t, "echo", echoed.Choices[0].Text, words+byTokens.Text)
	chat := []pagoda.Message{{Role: "system", Content: "be \"brief\""}, {Role: "user", Content: "hello 狐"}}
	written := "<|im_start|>system\nbe \"brief\"<|im_end|>\n<|im_start|>user\nhello 狐<|im_end|>\n"
	for _, messages := range []any{
		chat, must[[]byte](t)(json.Marshal(chat)), string(must[[]byte](t)(json.Marshal(chat))),
		json.RawMessage(must[[]byte](t)(json.Marshal(chat))),
	} {
		whole := must[[]uint32](t)(g.Tokenize(&r{Messages: messages}))
		equal(t, "chat", must[string](t)(g.Detokenize(whole, false)), written+"<|im_start|>assistant\n")
		without := must[[]uint32](t)(g.Tokenize(&r{Messages: messages, AddGenerationPrompt: pagoda.Ptr(false)}))
		equal(t, "chat", must[string](t)(g.Detokenize(without, false)), written)
		with := must[[]uint32](t)(g.Tokenize(&r{Messages: messages, Tools: []any{}, Variables: map[string]any{"x": 1}}))
		same(t, "with tools and variables", with, whole)
	}
	// The end of the context.
	room := with(likely(slices.Repeat([]uint32{5}, 505), 12), func(r *r) { r.ContextEnd = pagoda.ContextEndStop })
	equal(t, "tokens up to the end", len(answer(t, g, room).Choices[0].Tokens), 7)
	room.ContextEnd = pagoda.ContextEndRefuse
	_, err := g.Generate(ctx, room)
	fails(t, err, pagoda.ErrInvalidArgument, "request.max_new_tokens")
	// A time limit ends an answer, and is no error.
	stepped := openGenerator(t, &pagoda.GeneratorOptions{Driver: pagoda.DriverCaller})
	late := answer(t, stepped, with(likely(first, 12), func(r *r) { r.Timeout = time.Microsecond }))
	equal(t, "late", late.Choices[0].FinishReason, pagoda.FinishReasonTimeout)
	equal(t, "word", late.Choices[0].FinishReason.String(), "timeout")
}

func TestAnswersKeepToAGrammar(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{})
	grammar := func(grammar any, count int) pagoda.Choice {
		t.Helper()
		return answer(t, g, with(drawn(1), func(r *pagoda.GenerateRequest) {
			r.Grammar, r.MaxNewTokens = grammar, pagoda.Ptr(count)
		})).Choices[0]
	}
	for _, regex := range []any{map[string]any{"regex": "[0-9]{5}x"}, `{"regex": "[0-9]{5}x"}`} {
		if text := grammar(regex, 100).Text; !regexp.MustCompile("^[0-9]{5}x$").MatchString(text) {
			t.Errorf("%q", text)
		}
	}
	cut := grammar(map[string]any{"choice": []string{"abcdefgh"}}, 2)
	if cut.FinishReason != pagoda.FinishReasonLength || !strings.HasPrefix(cut.Missing, "next is ") {
		t.Errorf("%+v", cut)
	}
	equal(t, "nothing is missing", grammar(map[string]any{"choice": []string{"yes"}}, 9).Missing, "")
}

func TestRequestsOfHigherPriorityRunFirst(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{Driver: pagoda.DriverCaller, MaxBatch: 1})
	low := must[*pagoda.TokenStream](t)(g.Stream(ctx, likely(first, 3)))
	high := must[*pagoda.TokenStream](t)(g.Stream(ctx, with(likely(first, 3), func(r *pagoda.GenerateRequest) { r.Priority = 1 })))
	for must[bool](t)(g.Step()) {
	}
	before, after := must[*pagoda.GenerateResponse](t)(high.Response()), must[*pagoda.GenerateResponse](t)(low.Response())
	if before.Choices[0].FirstToken >= after.Choices[0].FirstToken {
		t.Errorf("%v, then %v", before.Choices[0].FirstToken, after.Choices[0].FirstToken)
	}
}

func cancelled(t testing.TB, response *pagoda.GenerateResponse, err error, cause error) {
	t.Helper()
	if !errors.Is(err, pagoda.ErrCancelled) || cause != nil && !errors.Is(err, cause) {
		t.Errorf("%v, where a cancel is due", err)
	}
	if response == nil || response.Choices[0].FinishReason != pagoda.FinishReasonCancelled ||
		len(response.Choices[0].Tokens) >= 480 {
		t.Errorf("%+v is not what was there until the cancel", response)
	}
}

func TestWhatEndsARequestReachesIt(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{})
	long := likely(first, 480)
	// A context, of a stream.
	c, cancel := context.WithCancel(ctx)
	s := must[*pagoda.TokenStream](t)(g.Stream(c, long))
	read, failure := 0, error(nil)
	for _, err := range s.Tokens() {
		if read++; read == 3 {
			cancel()
		}
		failure = err
	}
	response, err := s.Response()
	cancelled(t, response, err, context.Canceled)
	if failure != err {
		t.Errorf("the loop ended with %v, the response with %v", failure, err)
	}
	// The end of a loop.
	s = must[*pagoda.TokenStream](t)(g.Stream(ctx, long))
	for range s.Tokens() {
		break
	}
	response, err = s.Response()
	cancelled(t, response, err, nil)
	left := 1
	for token, err := range s.Tokens() {
		if err == nil {
			equal(t, "what was not read", token.ID, response.Choices[0].Tokens[left])
			left++
		}
	}
	equal(t, "all tokens", left, len(response.Choices[0].Tokens))
	// Cancel.
	s = must[*pagoda.TokenStream](t)(g.Stream(ctx, long))
	s.Cancel()
	<-s.Done()
	response, err = s.Response()
	cancelled(t, response, err, nil)
	// A call, and an asynchronous one.
	c, cancel = context.WithTimeout(ctx, 5*time.Millisecond)
	defer cancel()
	response, err = g.Generate(c, long)
	cancelled(t, response, err, context.DeadlineExceeded)
	c, cancel = context.WithCancel(ctx)
	result := must[<-chan pagoda.GenerateResult](t)(g.GenerateAsync(c, long))
	cancel()
	later := <-result
	cancelled(t, later.Response, later.Err, context.Canceled)
	for _, start := range []func() error{
		func() error { _, err := g.Generate(c, long); return err },
		func() error { _, err := g.Stream(c, long); return err },
		func() error { _, err := g.GenerateAsync(c, long); return err },
		func() error { _, err := g.Forget(c, "a"); return err },
	} {
		if err := start(); !errors.Is(err, context.Canceled) || !errors.Is(err, pagoda.ErrCancelled) {
			t.Errorf("with a context that is done: %v", err)
		}
	}
	eventually(t, "five have ended early", func() bool { return must[pagoda.GeneratorStats](t)(g.Stats()).EndedEarly == 5 })
	equal(t, "failed", must[pagoda.GeneratorStats](t)(g.Stats()).Failed, 0)
	// Close ends what runs and what waits.
	one := must[*pagoda.Generator](t)(pagoda.OpenGenerator(t.Context(), llama, &pagoda.GeneratorOptions{
		MaxBatch: 1, Model: cpu(), KVSize: pagoda.KVPages(64),
	}))
	var streams []*pagoda.TokenStream
	for range 4 {
		streams = append(streams, must[*pagoda.TokenStream](t)(one.Stream(ctx, long)))
	}
	ok(t, one.Close())
	for _, s := range streams {
		<-s.Done()
	}
	response, err = streams[3].Response()
	cancelled(t, response, err, nil)
	if !strings.Contains(err.Error(), "closed") {
		t.Errorf("%v does not say that the generator was closed", err)
	}
}

func TestConcurrentRequestsGetTheirOwnAnswers(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{})
	var all sync.WaitGroup
	for i := range uint32(6) {
		request := likely(append([]uint32{20 + i}, first...), 12)
		alone := answer(t, g, request).Choices[0].Tokens
		all.Add(1)
		go func() {
			defer all.Done()
			for range 3 {
				r, err := g.Generate(t.Context(), request)
				if err != nil || !slices.Equal(r.Choices[0].Tokens, alone) {
					t.Errorf("%v %v, not %v", r, err, alone)
				}
				s, err := g.Stream(t.Context(), request)
				if err != nil {
					t.Error(err)
					return
				}
				tokens, _, _ := readStream(t, s, 1)
				same(t, "streamed", tokens[0], alone)
			}
		}()
	}
	all.Wait()
}

func TestSessionsGoOnAfterARestart(t *testing.T) {
	options := func() *pagoda.GeneratorOptions {
		return &pagoda.GeneratorOptions{StorePath: t.TempDir(), StoreOptions: &pagoda.StoreOptions{}}
	}
	stored := options()
	of := func(session string, tokens []uint32) *pagoda.GenerateRequest {
		return with(likely(tokens, 10), func(r *pagoda.GenerateRequest) { r.Session = session })
	}
	turn := slices.Repeat(first, 9)[:70]
	g := openGenerator(t, stored)
	one := answer(t, g, of("a", turn))
	equal(t, "cached", one.CachedTokens, 0)
	answer(t, g, of("b", turn[1:]))
	ok(t, g.Close())
	g = openGenerator(t, stored)
	next := append(append(slices.Clone(turn), one.Choices[0].Tokens...), 9, 8, 7)
	two := answer(t, g, of("a", next))
	equal(t, "cached", two.CachedTokens, 79)
	equal(t, "unloaded", must[int](t)(g.Unload(ctx, "a", "never")), 1)
	equal(t, "loading", must[int](t)(g.Prefetch("a", "b", "never")), 2)
	eventually(t, "the sessions are there", func() bool {
		return must[pagoda.KVStats](t)(g.KVStats()).ResidentOwners >= 2
	})
	equal(t, "forgotten", must[int](t)(g.Forget(t.Context(), "a", "never")), 1)
	equal(t, "forgotten", must[int](t)(g.Forget(ctx)), 0)
	equal(t, "cached", answer(t, g, of("c", next)).CachedTokens, 0)
	if cleared := must[int](t)(g.Clear(ctx, false)); cleared < 1 {
		t.Errorf("%d were cleared", cleared)
	}
	equal(t, "resident", must[pagoda.KVStats](t)(g.KVStats()).ResidentOwners, 0)
	if cached := answer(t, g, of("c", next)).CachedTokens; cached < 60 {
		t.Errorf("the store had %d tokens", cached)
	}
	must[int](t)(g.Clear(ctx, true))
	equal(t, "cached", answer(t, g, of("c", next)).CachedTokens, 0)
	_, err := g.Forget(ctx, "a\x00")
	fails(t, err, pagoda.ErrInvalidArgument, "sessions")
	shared := openGenerator(t, &pagoda.GeneratorOptions{})
	alone := openGenerator(t, &pagoda.GeneratorOptions{SharePrefixes: pagoda.Ptr(false)})
	for i, g := range []*pagoda.Generator{alone, shared} {
		answer(t, g, likely(turn, 2))
		equal(t, "shares", answer(t, g, likely(turn, 2)).CachedTokens > 0, i == 1)
	}
}

func TestPoliciesAndFormatsOfKeysAndValues(t *testing.T) {
	long := make([]uint32, 300)
	for i := range long {
		long[i] = uint32(5 + i*7%250)
	}
	g := openGenerator(t, &pagoda.GeneratorOptions{KVPolicy: &pagoda.KVPolicy{Name: "h2o", CacheLength: 64}})
	recent := &pagoda.KVPolicy{Name: "lastrec", Protect: pagoda.Ptr(3)}
	heavy := answer(t, g, likely(long, 12)).Choices[0].Tokens
	chosen := answer(t, g, with(likely(long, 12), func(r *pagoda.GenerateRequest) { r.KVPolicy = recent })).Choices[0].Tokens
	if slices.Equal(heavy, chosen) {
		t.Error("the policy of the request changes nothing")
	}
	for _, policy := range []pagoda.KVPolicy{
		{Name: "lastrec", CacheLength: 64, Protect: pagoda.Ptr(3)}, {Name: "lastrec", CacheLengths: []int32{64, 64}, Protect: pagoda.Ptr(3)},
	} {
		opened := openGenerator(t, &pagoda.GeneratorOptions{KVPolicy: &policy})
		same(t, "lastrec", answer(t, opened, likely(long, 12)).Choices[0].Tokens, chosen)
	}
	_, err := g.Generate(ctx, with(likely(long, 12), func(r *pagoda.GenerateRequest) {
		r.KVPolicy = &pagoda.KVPolicy{Name: "h2o", CacheLength: 32}
	}))
	fails(t, err, pagoda.ErrUnsupported, "request.kv_policy.cache_length")
	for argument, policy := range map[string]*pagoda.KVPolicy{
		"options.kv_policy.name":                  {Name: "best", CacheLength: 64},
		"options.kv_policy.protect":               {Name: "lastrec", CacheLength: 64, Protect: pagoda.Ptr(-1)},
		"options.kv_policy.keep_initial_fraction": {Name: "h2o", CacheLength: 64, KeepInitialFraction: pagoda.Ptr(-0.5)},
		"options.kv_policy.score_share":           {Name: "h2o", CacheLength: 64, ScoreShare: pagoda.Ptr(-0.5)},
	} {
		_, err := pagoda.OpenGenerator(ctx, llama, &pagoda.GeneratorOptions{KVPolicy: policy, Model: cpu()})
		fails(t, err, pagoda.ErrInvalidArgument, argument)
	}
	for _, format := range []pagoda.KVFormat{pagoda.KVFormatDefault, pagoda.KVFormatNative, pagoda.KVFormatInt8} {
		quantised := openGenerator(t, &pagoda.GeneratorOptions{KVFormat: format})
		equal(t, "tokens", len(answer(t, quantised, likely(long, 12)).Choices[0].Tokens), 12)
	}
}

func TestDraftsChangeNoToken(t *testing.T) {
	repeated := func(maxDraft *int) *pagoda.GenerateRequest {
		return with(likely(slices.Repeat(first, 6), 60), func(r *pagoda.GenerateRequest) { r.MaxDraft = maxDraft })
	}
	stats := func(g *pagoda.Generator) pagoda.GeneratorStats { return must[pagoda.GeneratorStats](t)(g.Stats()) }
	plain := openGenerator(t, &pagoda.GeneratorOptions{})
	want := answer(t, plain, repeated(nil)).Choices[0].Tokens
	equal(t, "drafts", stats(plain).Drafts, 0)
	same(t, "with drafts", answer(t, plain, repeated(pagoda.Ptr(8))).Choices[0].Tokens, want)
	if stats(plain).Drafts == 0 {
		t.Error("nothing was guessed")
	}
	for _, model := range []string{"", llama} {
		g := openGenerator(t, &pagoda.GeneratorOptions{MaxDraft: 4, DraftModel: model, DraftKVBytes: 1 << 20})
		same(t, "without drafts", answer(t, g, repeated(pagoda.Ptr(0))).Choices[0].Tokens, want)
		equal(t, "drafts", stats(g).Drafts, 0)
		same(t, "with the generator's", answer(t, g, repeated(nil)).Choices[0].Tokens, want)
		had := stats(g)
		if had.Drafts == 0 || had.DraftedTokens < had.Drafts || had.AcceptedTokens > had.DraftedTokens {
			t.Errorf("%+v", had)
		}
		ok(t, g.SetSpeculation(false, false))
		answer(t, g, repeated(nil))
		equal(t, "drafts while it is off", stats(g).Drafts, had.Drafts)
		ok(t, g.SetSpeculation(true, false))
		answer(t, g, repeated(nil))
		if stats(g).Drafts <= had.Drafts {
			t.Error("nothing was guessed after it was on again")
		}
		ok(t, g.SetSpeculation(false, true))
		same(t, "after clearing", answer(t, g, repeated(nil)).Choices[0].Tokens, want)
		if now := stats(g); now.Drafts != 0 || now.DraftedTokens != 0 || now.AcceptedTokens != 0 {
			t.Errorf("after clearing: %+v", now)
		}
	}
}

func TestBeamsAreTheBestAnswersWithTheirScores(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{})
	search := func(n int, beams *pagoda.BeamOptions) *pagoda.GenerateRequest {
		return with(likely(first, 12), func(r *pagoda.GenerateRequest) {
			r.N, r.Logprobs, r.Beams = n, pagoda.Ptr(0), beams
		})
	}
	plain := answer(t, g, likely(first, 12)).Choices[0]
	one := answer(t, g, search(1, &pagoda.BeamOptions{Width: 1, EarlyStop: pagoda.EarlyStopWhenFull})).Choices[0]
	same(t, "one beam", one.Tokens, plain.Tokens)
	if plain.Score != nil || one.Score == nil {
		t.Errorf("scores: %v without a search, and %v with one", plain.Score, one.Score)
	}
	for _, penalty := range []*float64{nil, pagoda.Ptr(-2.0)} {
		options := &pagoda.BeamOptions{LengthPenalty: penalty, EarlyStop: pagoda.EarlyStopNever}
		power, last := 1.0, float32(math.Inf(1))
		if penalty != nil {
			power = *penalty
		}
		found := answer(t, g, search(4, options)).Choices
		equal(t, "answers", len(found), 4)
		for _, choice := range found {
			sum := 0.0
			for _, token := range choice.Logprobs {
				sum += float64(token.Logprob)
			}
			score := sum / math.Pow(float64(len(choice.Tokens)), power)
			if choice.Score == nil || math.Abs(float64(*choice.Score)/score-1) > 1e-3 || *choice.Score > last {
				t.Fatalf("%v after %v, not %v", choice.Score, last, score)
			}
			last = *choice.Score
		}
	}
	_, err := g.Generate(ctx, search(1, &pagoda.BeamOptions{Width: 17}))
	fails(t, err, pagoda.ErrInvalidArgument, "request.beams.width")
	_, err = g.Generate(ctx, search(1, &pagoda.BeamOptions{EarlyStop: 3}))
	fails(t, err, pagoda.ErrInvalidArgument, "request.beams.early_stop")
}

func TestWhatIsKnownOfAGenerator(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{Driver: pagoda.DriverCaller})
	r := answer(t, g, likely(first, 12))
	_, err := g.Generate(ctx, likely([]uint32{}, 1))
	fails(t, err, pagoda.ErrInvalidArgument, "request.tokens")
	stats := must[pagoda.GeneratorStats](t)(g.Stats())
	want := pagoda.GeneratorStats{
		Answered: 1, Failed: 1, Steps: stats.Steps, ComputedTokens: r.ComputedTokens, GeneratedTokens: 12,
		StepUs: stats.StepUs, ModelUs: stats.ModelUs,
	}
	if stats != want || stats.Steps < 12 || stats.ModelUs == 0 || stats.ModelUs > stats.StepUs {
		t.Errorf("%+v, not %+v", stats, want)
	}
	equal(t, "pages", must[pagoda.KVStats](t)(g.KVStats()).Pages, 64)
	provider := must[pagoda.EngineProvider](t)(g.Provider())
	equal(t, "provider", provider, pagoda.EngineProvider{Provider: pagoda.ProviderCPU, DeviceID: -1})
	var info struct{ Kind, Version string }
	ok(t, json.Unmarshal([]byte(must[string](t)(g.Info())), &info))
	equal(t, "kind", info.Kind, "generate")
	equal(t, "version", info.Version, r.Version)
}

func TestGenerateRequestsThatCanNotBe(t *testing.T) {
	g := openGenerator(t, &pagoda.GeneratorOptions{MaxPromptTokens: 100, MaxNewTokens: 20, Queue: 2, KVSize: pagoda.KVPages(3)})
	type r = pagoda.GenerateRequest
	invalid := pagoda.ErrInvalidArgument
	for _, c := range []struct {
		change   func(*r)
		status   pagoda.Status
		argument string
	}{
		{func(r *r) { r.Tokens = nil }, invalid, "request.prompt"},
		{func(r *r) { r.Prompt = "a" }, invalid, "request.tokens"},
		{func(r *r) { r.Tokens, r.Prompt = nil, "a\x00" }, invalid, "request.prompt"},
		{func(r *r) { r.Tokens = []uint32{} }, invalid, "request.tokens"},
		{func(r *r) { r.Tokens = []uint32{5, 6, 300} }, invalid, "request.tokens[2]"},
		{func(r *r) { r.Tokens = slices.Repeat(first, 20) }, invalid, "request.tokens"},
		{func(r *r) { r.Tools = []any{} }, invalid, "request.tools"},
		{func(r *r) { r.Tokens, r.Messages = nil, "[{" }, invalid, "request.messages"},
		{func(r *r) { r.Tokens, r.Messages = nil, "" }, invalid, "request.messages"},
		{func(r *r) { r.Tokens, r.Messages = nil, make(chan int) }, invalid, "request.messages"},
		{func(r *r) { r.Tokens, r.Messages, r.Variables = nil, "[]", 3 }, invalid, "request.variables"},
		{func(r *r) { r.MaxNewTokens = pagoda.Ptr(21) }, invalid, "request.max_new_tokens"},
		{func(r *r) { r.MaxNewTokens = pagoda.Ptr(-1) }, invalid, "request.max_new_tokens"},
		{func(r *r) { r.MinNewTokens = pagoda.Ptr(-1) }, invalid, "request.min_new_tokens"},
		{func(r *r) { r.Temperature = pagoda.Ptr(-1.0) }, invalid, "request.temperature"},
		{func(r *r) { r.TopK = pagoda.Ptr(-1) }, invalid, "request.top_k"},
		{func(r *r) { r.TopP = pagoda.Ptr(1.5) }, invalid, "request.top_p"},
		{func(r *r) { r.MinP = pagoda.Ptr(-0.1) }, invalid, "request.min_p"},
		{func(r *r) { r.RepetitionPenalty = pagoda.Ptr(0.0) }, invalid, "request.repetition_penalty"},
		{func(r *r) { r.PresencePenalty = 3 }, invalid, "request.presence_penalty"},
		{func(r *r) { r.FrequencyPenalty = math.NaN() }, invalid, "request.frequency_penalty"},
		{func(r *r) { r.NoRepeatNgramSize = pagoda.Ptr(-1) }, invalid, "request.no_repeat_ngram_size"},
		{func(r *r) { r.ForcedEOS = pagoda.Ptr(300) }, invalid, "request.forced_eos"},
		{func(r *r) { r.LogitBias = map[uint32]float32{1: 2, 272: 1} }, invalid, "request.logit_bias[1]"},
		{func(r *r) { r.Stop = []string{"a", "b\x00"} }, invalid, "request.stop"},
		{func(r *r) { r.Stop = []string{""} }, invalid, "request.stop"},
		{func(r *r) { r.StopTokens = []uint32{272} }, invalid, "request.stop_tokens"},
		{func(r *r) { r.Logprobs = pagoda.Ptr(-1) }, invalid, "request.logprobs"},
		{func(r *r) { r.PromptLogprobs = pagoda.Ptr(-1) }, invalid, "request.prompt_logprobs"},
		{func(r *r) { r.N = -1 }, invalid, "request.n"},
		{func(r *r) { r.ContextEnd = 9 }, invalid, "request.context_end"},
		{func(r *r) { r.Timeout = -1 }, invalid, "request.timeout_us"},
		{func(r *r) { r.Session = "\x00" }, invalid, "request.session"},
		{func(r *r) { r.KVPolicy = &pagoda.KVPolicy{Name: "lastrec"} }, pagoda.ErrUnsupported, "request.kv_policy"},
		{func(r *r) { r.Grammar = map[string]any{"verse": "a"} }, invalid, "request.grammar.verse"},
		{func(r *r) { r.Tokens = slices.Repeat([]uint32{5}, 90) }, pagoda.ErrCapacity, "request.max_new_tokens"},
	} {
		bad := with(likely(first, 12), c.change)
		_, err := g.Generate(ctx, bad)
		fails(t, err, c.status, c.argument)
		_, err = g.Stream(t.Context(), bad)
		fails(t, err, c.status, c.argument)
		_, err = g.GenerateAsync(ctx, bad)
		fails(t, err, c.status, c.argument)
	}
	_, err := g.Generate(ctx, nil)
	fails(t, err, invalid, "request")
	_, err = g.Tokenize(nil)
	fails(t, err, invalid, "request")
	_, err = g.Stream(nil, likely(first, 1)) //nolint:staticcheck // that is what is tested
	fails(t, err, invalid, "ctx")
	_, err = g.Generate(ctx, with(likely(first, 1), func(r *r) { r.N = 3 }))
	if !errors.Is(err, pagoda.ErrCapacity) {
		t.Errorf("more answers than the queue has room for: %v", err)
	}
	equal(t, "after all that", len(answer(t, g, likely(first, 12)).Choices[0].Tokens), 12)

	for argument, options := range map[string]*pagoda.GeneratorOptions{
		"options.driver":            {Driver: 9},
		"options.max_batch":         {MaxBatch: -1},
		"options.max_batch_tokens":  {MaxBatchTokens: -1},
		"options.max_stretch":       {MaxStretch: 1.01},
		"options.max_prompt_tokens": {MaxPromptTokens: -1},
		"options.max_new_tokens":    {MaxNewTokens: -1},
		"options.queue":             {Queue: -1},
		"options.kv_format":         {KVFormat: 9},
		"options.kv_size_unit":      {KVSize: pagoda.KVSize{Unit: 9}},
		"options.model.provider":    {Model: &pagoda.ModelOptions{Provider: 9}},
		"options.store_path":        {StorePath: "a\x00b"},
	} {
		_, err := pagoda.OpenGenerator(ctx, llama, options)
		fails(t, err, invalid, argument)
	}
	_, err = pagoda.OpenGenerator(ctx, llama, &pagoda.GeneratorOptions{HostBytes: math.MaxUint64, Model: cpu()})
	fails(t, err, pagoda.ErrCapacity, "options.host_bytes")
	_, err = pagoda.OpenGenerator(ctx, "/nowhere/model", nil)
	fails(t, err, pagoda.ErrNotFound, "folder")
	_, err = pagoda.OpenGenerator(ctx, data+"/gather", nil)
	if !errors.Is(err, pagoda.ErrUnsupported) {
		t.Errorf("a folder of a ranking model: %v", err)
	}
	unlimited := openGenerator(t, &pagoda.GeneratorOptions{MaxStretch: pagoda.None})
	equal(t, "without a limit", len(answer(t, unlimited, likely(first, 3)).Choices[0].Tokens), 3)
}
