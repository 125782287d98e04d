package pagoda_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"os"
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
