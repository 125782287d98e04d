package pagoda_test

import (
	"encoding/json"
	"errors"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"pagoda"
)

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
