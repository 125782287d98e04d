package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"runtime"
	"slices"
	"unsafe"
)

// Driver is what runs the steps of a generator.
type Driver int32

// What runs the steps.
const (
	DriverThread Driver = C.PAGODA_DRIVER_THREAD // A thread of the generator.
	DriverCaller Driver = C.PAGODA_DRIVER_CALLER // The caller, by [Generator.Step] and [Generator.Generate].
)

// KVPolicy is a fixed number of slots for the keys and values of each sequence, however long it is.
type KVPolicy struct {
	// Name is which tokens stay: "dense" (all of them, and a sequence of more than CacheLength is rejected), "lastrec",
	// "smart-lastrec", "h2o", "h2o-orig", "h2o-vlen" and, for quantised pages, "qh2o" and "qh2o-vlen".
	Name string
	// CacheLength is the slots of a sequence in each layer. With "dense" 0 is no limit.
	CacheLength int32
	// CacheLengths is the slots of each layer, instead of CacheLength; nil: all have as many.
	CacheLengths []int32
	// ChunkSize is the maximum number of tokens of a prompt that one step reads once the slots are full; 0: 64.
	ChunkSize int32
	// Protect is, with lastrec and smart-lastrec, the tokens at the beginning that always stay; nil: for lastrec an eighth
	// of the slots, from 1 to 16; for smart-lastrec half of them.
	Protect *int
	// GracePeriod is, with h2o, how many of the newest tokens stay whatever their weights.
	GracePeriod int32
	// KeepInitialFraction is, with h2o, the part of the slots that the first eviction leaves alone at the beginning; nil:
	// 0.05.
	KeepInitialFraction *float64
	// Normalise is, with h2o, whether the weights that a token got are divided by the time that it has been there.
	Normalise bool
	// ScoreShare is, with qh2o, how much a token's weights count against what quantisation took from it, from 0 to 1; nil:
	// 0.5.
	ScoreShare *float64
	// ProtectFirstMessage is, with lastrec and smart-lastrec, whether the tokens of a chat's first message always stay, as
	// the model's template writes it; mostly it is the system prompt. Protect holds for other prompts.
	ProtectFirstMessage bool
}

// GeneratorOptions is how to open a generator.
type GeneratorOptions struct {
	// Driver is what runs the steps.
	Driver Driver
	// SharePrefixes is whether sequences share the pages of equal prefixes; nil: they do.
	SharePrefixes *bool
	// MaxBatch is the maximum number of sequences that run at the same time; 0: 64.
	MaxBatch int32
	// MaxBatchTokens is the maximum number of rows of a step: one for each sequence that decodes, and the chunks of prompts;
	// 0: 512.
	MaxBatchTokens int32
	// MaxStretch is how much longer a step may take than one without prompts, while sequences decode; 0: 1.5. The chunks of
	// prompts are cut to keep it. At least 1.1; [None]: no limit but MaxBatchTokens.
	MaxStretch float32
	// MaxPromptTokens is the maximum number of tokens of a prompt; 0: what the model's context has.
	MaxPromptTokens int32
	// MaxNewTokens is the maximum number of new tokens that a request may ask for; 0: what the model's context has.
	MaxNewTokens int32
	// Queue is the maximum number of answers that wait for their turn; 0: 4096. A request beyond it is rejected with
	// [ErrCapacity].
	Queue int32
	// KVSize is the size of the pool of keys and values; zero: 1 GiB. A sequence that does not fit into it is rejected.
	KVSize KVSize
	// KVFormat is how pages hold keys and values, on the GPU, in host memory and on disk.
	KVFormat KVFormat
	// KVPolicy is a fixed number of slots for the keys and values of each sequence; nil: all tokens stay. With a policy
	// nothing is shared between sequences, and a session goes on only behind what was computed of it.
	KVPolicy *KVPolicy
	// HostBytes is bytes of host memory for keys and values that were evicted from the pool; 0: none. The memory is pinned
	// if the model can run on a GPU.
	HostBytes uint64
	// Model is where the model runs, and on how many threads. Its Tables must be nil.
	Model *ModelOptions
	// StorePath is the folder of a store for keys and values; "": none. Sessions survive a restart in it. One process at a
	// time has it open.
	StorePath string
	// StoreOptions is how the store is opened.
	StoreOptions *StoreOptions
	// MaxDraft is the MaxDraft of requests that do not say, 0 to 64; 0: nothing is guessed.
	MaxDraft int32
	// DraftModel is the folder of a smaller model with the same tokenizer, which guesses tokens; "": they are looked up in
	// the prompt and the answer.
	DraftModel string
	// DraftKVBytes is the bytes of that model's pool of keys and values; 0: 256 MiB. What does not fit is not guessed.
	DraftKVBytes uint64
}

func (p *KVPolicy) toC(f *fields, argument string) *C.pagoda_kv_policy {
	c := C.pagoda_kv_policy_init()
	f.text(&c.name, p.Name, argument+".name")
	c.cache_length = C.int32_t(p.CacheLength)
	if p.CacheLengths != nil {
		c.cache_lengths, c.cache_length_count = (*C.int32_t)(list(f, p.CacheLengths)), number(len(p.CacheLengths))
	}
	orDefault(&c.chunk_size, p.ChunkSize)
	f.count(&c.protect, p.Protect, argument+".protect")
	c.grace_period = C.int32_t(p.GracePeriod)
	f.number(&c.keep_initial_fraction, p.KeepInitialFraction, argument+".keep_initial_fraction")
	c.normalise = flag(p.Normalise)
	f.number(&c.score_share, p.ScoreShare, argument+".score_share")
	c.protect_first_message = flag(p.ProtectFirstMessage)
	f.lent.Pin(&c)
	return &c
}

func (o *GeneratorOptions) toC(l *lent) (*C.pagoda_generator_options, error) {
	c, f := C.pagoda_generator_options_init(), &fields{lent: l}
	c.driver = C.pagoda_driver(o.Driver)
	f.flag(&c.share_prefixes, o.SharePrefixes)
	orDefault(&c.max_batch, o.MaxBatch)
	orDefault(&c.max_batch_tokens, o.MaxBatchTokens)
	orNone(&c.max_stretch, o.MaxStretch)
	c.max_prompt_tokens, c.max_new_tokens = C.int32_t(o.MaxPromptTokens), C.int32_t(o.MaxNewTokens)
	orDefault(&c.queue, o.Queue)
	c.kv_size_unit, c.kv_size = C.pagoda_kv_size_unit(o.KVSize.Unit), C.uint64_t(o.KVSize.Value)
	c.kv_format = C.pagoda_kv_format(o.KVFormat)
	if o.KVPolicy != nil {
		c.kv_policy = o.KVPolicy.toC(f, "options.kv_policy")
	}
	c.host_bytes = C.uint64_t(o.HostBytes)
	f.model(&c.model, o.Model)
	f.text(&c.store_path, o.StorePath, "options.store_path")
	f.store(&c.store_options, o.StoreOptions)
	c.max_draft = C.int32_t(o.MaxDraft)
	f.text(&c.draft_model, o.DraftModel, "options.draft_model")
	orDefault(&c.draft_kv_bytes, o.DraftKVBytes)
	return &c, f.err
}

// GeneratorStats is the state of a generator, and counters since it was opened.
type GeneratorStats struct {
	Answered        uint64 // Answers that ended with a stop or at their length.
	EndedEarly      uint64 // Answers that were cancelled or exceeded their time limit.
	Failed          uint64 // Answers that failed, and requests that were rejected.
	Steps           uint64 // Steps.
	ComputedTokens  uint64 // Rows that were computed.
	CachedTokens    uint64 // Tokens of prompts whose keys and values were cached.
	GeneratedTokens uint64 // Tokens of answers.
	Preemptions     uint64 // Sequences that were preempted because pages ran out.
	Waiting         uint64 // Sequences that wait.
	Running         uint64 // Sequences that run.
	StepUs          uint64 // Microseconds that the steps took in all.
	ModelUs         uint64 // Microseconds of them that the model took.
	DraftedTokens   uint64 // Tokens that were guessed and computed.
	AcceptedTokens  uint64 // Those of them that were right.
	Drafts          uint64 // Steps of a sequence with such tokens.
}

// Generator is an open model folder of a language model, with the keys and values of its sequences. Requests of concurrent
// callers run together by continuous batching.
type Generator struct{ object *object }

var generatorKind = &kind{"generator", func(token uintptr) C.pagoda_status {
	return C.pagoda_generator_free(generatorHandle(token))
}}

func generatorHandle(token uintptr) *C.pagoda_generator {
	return *(**C.pagoda_generator)(unsafe.Pointer(&token))
}

// OpenGenerator opens a model folder of a language model, and checks all its files.
func OpenGenerator(ctx context.Context, folder string, options *GeneratorOptions) (*Generator, error) {
	if err := loaded(); err != nil {
		return nil, err
	}
	cFolder, err := text(folder, "folder")
	if err != nil {
		return nil, err
	}
	options, made := copied(options), callers()
	options.Model, options.StoreOptions = copiedIfAny(options.Model), copiedIfAny(options.StoreOptions)
	if options.KVPolicy != nil {
		options.KVPolicy = copied(options.KVPolicy)
		options.KVPolicy.CacheLengths = slices.Clone(options.KVPolicy.CacheLengths)
	}
	return await(ctx, func() (*Generator, error) {
		var l lent
		defer l.Unpin()
		cOptions, err := options.toC(&l)
		if err != nil {
			return nil, err
		}
		var handle *C.pagoda_generator
		var failure *C.pagoda_error
		err = check(C.pagoda_generator_open(cFolder, cOptions, &handle, &failure), &failure)
		runtime.KeepAlive(options)
		if err != nil {
			return nil, err
		}
		g := new(Generator)
		g.object = own(g, generatorKind, *(*uintptr)(unsafe.Pointer(&handle)), made)
		return g, nil
	}, func(g *Generator) { g.Close() })
}

// Step runs one step of a generator with [DriverCaller]: the model once, for all sequences that run. It returns whether
// there is more to do. A request that waits for the store is more to do. A failure of the model is an error of the requests.
func (g *Generator) Step() (more bool, err error) {
	handle, err := g.handle()
	if err != nil {
		return false, err
	}
	defer runtime.KeepAlive(g)
	var left C.int32_t
	var failure *C.pagoda_error
	err = check(C.pagoda_generator_step(handle, &left, &failure), &failure)
	return left == 1, err
}

// Tokenize is the tokens of the prompt of a request, as a request with it would have them. The other fields of the request
// are checked, and not used.
func (g *Generator) Tokenize(request *GenerateRequest) ([]uint32, error) {
	handle, err := g.handle()
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(g)
	var l lent
	defer l.Unpin()
	c, err := request.toC(&l)
	if err != nil {
		return nil, err
	}
	var count C.size_t
	var failure *C.pagoda_error
	if err := check(C.pagoda_generator_tokenize(handle, c, nil, 0, &count, &failure), &failure); err != nil {
		return nil, err
	}
	tokens := make([]uint32, count)
	err = check(C.pagoda_generator_tokenize(handle, c, cTokens(tokens), count, &count, &failure), &failure)
	runtime.KeepAlive(request)
	return tokens, err
}

// Detokenize is the text of tokens; with skipSpecial without special tokens. Bytes that are not UTF-8 become U+FFFD, and a
// NUL becomes a backslash and a 0. A token that the vocabulary does not have has no text.
func (g *Generator) Detokenize(tokens []uint32, skipSpecial bool) (string, error) {
	handle, err := g.handle()
	if err != nil {
		return "", err
	}
	defer runtime.KeepAlive(g)
	return grown(func(buffer *C.char, capacity C.size_t, length *C.size_t, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_generator_detokenize(handle, cTokens(tokens), C.size_t(len(tokens)), flag(skipSpecial), buffer,
			capacity, length, failure)
	})
}

func cTokens(tokens []uint32) *C.uint32_t { return (*C.uint32_t)(first(tokens)) }

// Forget removes all data of sessions: their keys and values, in the pool, in host memory and in the store. Pages that they
// share with others stay. It returns how many sessions were known.
func (g *Generator) Forget(ctx context.Context, sessions ...string) (int, error) {
	return g.count(ctx, sessions, func(handle *C.pagoda_generator, sessions **C.char, count C.size_t, done *C.size_t,
		failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_generator_forget(handle, sessions, count, done, failure)
	})
}

// Unload evicts the keys and values of sessions from the pool to host memory and the store. Without either they are lost,
// and must be computed again. It returns how many sessions had any in the pool.
func (g *Generator) Unload(ctx context.Context, sessions ...string) (int, error) {
	return g.count(ctx, sessions, func(handle *C.pagoda_generator, sessions **C.char, count C.size_t, done *C.size_t,
		failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_generator_unload(handle, sessions, count, done, failure)
	})
}

// Prefetch starts to load the keys and values of sessions from host memory and the store into the pool, and returns at once
// with how many sessions are being loaded: their next request need not wait. It stops when the pool is full.
func (g *Generator) Prefetch(sessions ...string) (int, error) {
	return g.count(context.Background(), sessions, func(handle *C.pagoda_generator, sessions **C.char, count C.size_t,
		done *C.size_t, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_generator_prefetch(handle, sessions, count, done, failure)
	})
}

// Clear drops all sessions, and all prefixes that no request uses now, from the pool; with stored from host memory and the
// store, too. It returns how many histories there were.
func (g *Generator) Clear(ctx context.Context, stored bool) (int, error) {
	return g.count(ctx, nil, func(handle *C.pagoda_generator, _ **C.char, _ C.size_t, done *C.size_t,
		failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_generator_clear(handle, flag(stored), done, failure)
	})
}

func (g *Generator) count(ctx context.Context, sessions []string, call func(*C.pagoda_generator, **C.char, C.size_t,
	*C.size_t, **C.pagoda_error) C.pagoda_status) (int, error) {
	sessions = lasting(ctx, sessions)
	return await(ctx, func() (int, error) {
		handle, err := g.handle()
		if err != nil {
			return 0, err
		}
		defer runtime.KeepAlive(g)
		var l lent
		defer l.Unpin()
		texts, err := l.texts(sessions, "sessions")
		if err != nil {
			return 0, err
		}
		var done C.size_t
		var failure *C.pagoda_error
		err = check(call(handle, first(texts), C.size_t(len(texts)), &done, &failure), &failure)
		return int(done), err
	}, nil)
}

// SetSpeculation sets whether tokens are guessed where requests allow it (MaxDraft), from the next step on. They are when the
// generator was opened. With clear that step also forgets how good guesses were and what they cost, and counts them from 0
// again.
func (g *Generator) SetSpeculation(on, clear bool) error {
	handle, err := g.handle()
	if err != nil {
		return err
	}
	defer runtime.KeepAlive(g)
	var failure *C.pagoda_error
	return check(C.pagoda_generator_set_speculation(handle, flag(on), flag(clear), &failure), &failure)
}

// Provider is where the model runs.
func (g *Generator) Provider() (EngineProvider, error) {
	handle, err := g.handle()
	if err != nil {
		return EngineProvider{}, err
	}
	defer runtime.KeepAlive(g)
	var provider C.pagoda_provider
	var device C.int32_t
	reason, err := grown(func(buffer *C.char, capacity C.size_t, length *C.size_t,
		failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_generator_provider(handle, &provider, &device, buffer, capacity, length, failure)
	})
	return EngineProvider{Provider(provider), int32(device), reason}, err
}

// Info is the pagoda.json of the model: its special tokens, defaults of generation, limits and version.
func (g *Generator) Info() (string, error) {
	handle, err := g.handle()
	if err != nil {
		return "", err
	}
	defer runtime.KeepAlive(g)
	return grown(func(buffer *C.char, capacity C.size_t, length *C.size_t, failure **C.pagoda_error) C.pagoda_status {
		return C.pagoda_generator_info(handle, buffer, capacity, length, failure)
	})
}

// KVStats is the statistics of the cache of keys and values. Owners are sequences and sessions.
func (g *Generator) KVStats() (KVStats, error) {
	handle, err := g.handle()
	if err != nil {
		return KVStats{}, err
	}
	defer runtime.KeepAlive(g)
	c := C.pagoda_kv_stats_init()
	var failure *C.pagoda_error
	err = check(C.pagoda_generator_get_kv_stats(handle, &c, &failure), &failure)
	return newKVStats(&c), err
}

// Stats is the state and the counters of the generator.
func (g *Generator) Stats() (GeneratorStats, error) {
	handle, err := g.handle()
	if err != nil {
		return GeneratorStats{}, err
	}
	defer runtime.KeepAlive(g)
	c := C.pagoda_generator_stats_init()
	var failure *C.pagoda_error
	if err := check(C.pagoda_generator_get_stats(handle, &c, &failure), &failure); err != nil {
		return GeneratorStats{}, err
	}
	return GeneratorStats{
		Answered:        uint64(c.answered),
		EndedEarly:      uint64(c.ended_early),
		Failed:          uint64(c.failed),
		Steps:           uint64(c.steps),
		ComputedTokens:  uint64(c.computed_tokens),
		CachedTokens:    uint64(c.cached_tokens),
		GeneratedTokens: uint64(c.generated_tokens),
		Preemptions:     uint64(c.preemptions),
		Waiting:         uint64(c.waiting),
		Running:         uint64(c.running),
		StepUs:          uint64(c.step_us),
		ModelUs:         uint64(c.model_us),
		DraftedTokens:   uint64(c.drafted_tokens),
		AcceptedTokens:  uint64(c.accepted_tokens),
		Drafts:          uint64(c.drafts),
	}, nil
}

// Close closes the generator. Streams and asynchronous requests that wait or run are ended, with what they have, and the
// pool is written to the store if there is one; this waits for both. If another goroutine is in a call, that call goes on to
// its end and does the waiting instead.
func (g *Generator) Close() error { return g.it().close() }

func (g *Generator) it() *object {
	if g == nil {
		return nil
	}
	return g.object
}

func (g *Generator) handle() (*C.pagoda_generator, error) {
	token, err := g.it().get("generator")
	return generatorHandle(token), err
}
