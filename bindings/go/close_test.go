package pagoda_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pagoda"
)

// uses calls every method of every type on what is handed to it, and checks what they say.
func uses(t *testing.T, m *pagoda.Model, x *pagoda.Tensor, s *pagoda.Store, c *pagoda.KVCache, l *pagoda.KVLease,
	e *pagoda.Embeddings, g *pagoda.Engine, w *pagoda.Generator) map[string]error {
	t.Helper()
	of := func(_ any, err error) error { return err }
	_, _, provider := m.Provider()
	good := tensor(t, []int64{1}, []float32{1})
	return map[string]error{
		"Model.Provider":       provider,
		"Model.Inputs":         of(m.Inputs()),
		"Model.Outputs":        of(m.Outputs()),
		"Model.Run":            of(m.Run(ctx, pagoda.Tensors{"x": good}, "y")),
		"Model.RunInto":        of(m.RunInto(ctx, pagoda.Tensors{"x": good}, pagoda.Tensors{"y": good})),
		"Model.RunAsync":       of(m.RunAsync(ctx, pagoda.Tensors{"x": good}, nil, "y")),
		"Tensor.Type":          of(x.Type()),
		"Tensor.Dims":          of(x.Dims()),
		"Tensor.Bytes":         of(x.Bytes()),
		"Values":               of(pagoda.Values[float32](x)),
		"Values of strings":    of(pagoda.Values[string](x)),
		"View":                 of(pagoda.View[float32](x)),
		"Store.Flush":          s.Flush(ctx),
		"Store.Compact":        s.Compact(ctx),
		"Store.Stats":          of(s.Stats()),
		"KVCache.Pool":         of(c.Pool(0)),
		"KVCache.Lookup":       of(c.Lookup(1)),
		"KVCache.Offload":      of(c.Offload(ctx, 1)),
		"KVCache.OffloadAll":   of(c.OffloadAll(ctx)),
		"KVCache.Evict":        of(c.Evict(ctx, pagoda.TiersAll, 1)),
		"KVCache.EvictAll":     of(c.EvictAll(ctx, pagoda.TiersAll)),
		"KVCache.Prefetch":     of(c.Prefetch(1)),
		"KVCache.Fork":         of(c.Fork(ctx, 1, 2, 8)),
		"KVCache.Flush":        c.Flush(ctx),
		"KVCache.Stats":        of(c.Stats()),
		"KVCache.Prepare":      of(c.Prepare(ctx, pagoda.KVRequest{Tokens: 1})),
		"KVLease.Tensor":       of(l.Tensor(0)),
		"KVLease.Owner":        of(l.Owner(0)),
		"KVLease.Ready":        of(l.Ready(0)),
		"KVLease.Wait":         l.Wait(ctx, 0),
		"KVLease.Commit":       l.Commit(ctx, false),
		"KVLease.Abort":        l.Abort(),
		"Embeddings.Add":       e.Add(ctx, "{}", ""),
		"Embeddings.Retire":    e.Retire("m"),
		"Embeddings.Dim":       of(e.Dim("t")),
		"Embeddings.Lookup":    of(e.Lookup(ctx, "t", []int64{1}, nil)),
		"Embeddings.Pool":      of(e.Pool(ctx, "t", []int64{1}, []int64{0, 1}, 0, nil)),
		"Embeddings.Upsert":    e.Upsert(ctx, "t", 0, nil, nil, 0),
		"Embeddings.Delete":    e.Delete(ctx, "t", 0, nil, 0),
		"Embeddings.Prefetch":  of(e.Prefetch("t", nil)),
		"Embeddings.Refresh":   e.Refresh(ctx, "t"),
		"Embeddings.Wait":      e.Wait(ctx),
		"Embeddings.Stats":     of(e.Stats("t")),
		"Engine.Rank":          of(g.Rank(ctx, request())),
		"Engine.RankAsync":     of(g.RankAsync(ctx, request())),
		"Engine.Swap":          g.Swap(ctx, data+"/second"),
		"Engine.Forget":        of(g.Forget(ctx, 1)),
		"Engine.Tasks":         of(g.Tasks()),
		"Engine.Info":          of(g.Info()),
		"Engine.Stats":         of(g.Stats()),
		"Generator.Generate":   of(w.Generate(ctx, likely(first, 1))),
		"Generator.Async":      of(w.GenerateAsync(ctx, likely(first, 1))),
		"Generator.Stream":     of(w.Stream(ctx, likely(first, 1))),
		"Generator.Step":       of(w.Step()),
		"Generator.Tokenize":   of(w.Tokenize(likely(first, 1))),
		"Generator.Detokenize": of(w.Detokenize(first, true)),
		"Generator.Forget":     of(w.Forget(ctx, "a")),
		"Generator.Unload":     of(w.Unload(ctx, "a")),
		"Generator.Prefetch":   of(w.Prefetch("a")),
		"Generator.Clear":      of(w.Clear(ctx, true)),
		"Generator.Provider":   of(w.Provider()),
		"Generator.Info":       of(w.Info()),
		"Generator.KVStats":    of(w.KVStats()),
		"Generator.Stats":      of(w.Stats()),
		"OpenKVCache (store)":  of(pagoda.OpenKVCache(ctx, &pagoda.KVOptions{Store: or(s, new(pagoda.Store))})),
		"OpenModel (tables)":   of(pagoda.OpenModel(ctx, hello, &pagoda.ModelOptions{Tables: or(e, new(pagoda.Embeddings))})),
		"Model.Run (tensor)":   of(open(t, hello).Run(ctx, pagoda.Tensors{"x": x}, "y")),
		"Model.Run (in place)": of(open(t, hello).RunInto(ctx, pagoda.Tensors{"x": good}, pagoda.Tensors{"y": x})),
	}
}

func or[T any](pointer, other *T) *T {
	if pointer == nil {
		return other
	}
	return pointer
}

func TestWhatIsNotOpenIsAnError(t *testing.T) {
	check := func(what string, results map[string]error) {
		for name, err := range results {
			if !errors.Is(err, pagoda.ErrInvalidHandle) {
				t.Errorf("%s of %s says: %v", name, what, err)
			}
		}
	}
	check("nil", uses(t, nil, nil, nil, nil, nil, nil, nil, nil))
	check("what was made by hand", uses(t, new(pagoda.Model), new(pagoda.Tensor), new(pagoda.Store), new(pagoda.KVCache),
		new(pagoda.KVLease), new(pagoda.Embeddings), new(pagoda.Engine), new(pagoda.Generator)))

	path, _ := table(t)
	m, x := open(t, hello), tensor(t, []int64{1}, []float32{1})
	s, c := openStore(t, t.TempDir(), nil), openCache(t, shape())
	l := must[*pagoda.KVLease](t)(c.Prepare(ctx, pagoda.KVRequest{Tokens: 1}))
	e, g := must[*pagoda.Embeddings](t)(pagoda.OpenEmbeddings(ctx, path)), openEngine(t, &pagoda.EngineOptions{})
	w := openGenerator(t, &pagoda.GeneratorOptions{})
	for _, it := range []interface{ Close() error }{m, x, s, c, l, e, g, w} {
		ok(t, it.Close())
		ok(t, it.Close()) // again is fine
	}
	check("what was closed", uses(t, m, x, s, c, l, e, g, w))

	ok(t, (*pagoda.Model)(nil).Close())
	ok(t, (*pagoda.Tensor)(nil).Close())
	ok(t, (*pagoda.Store)(nil).Close())
	ok(t, (*pagoda.KVCache)(nil).Close())
	ok(t, (*pagoda.KVLease)(nil).Close())
	ok(t, (*pagoda.Embeddings)(nil).Close())
	ok(t, (*pagoda.Engine)(nil).Close())
	ok(t, (*pagoda.Generator)(nil).Close())
	ok(t, new(pagoda.Model).Close())
}

// endsWell is how calls may end on what others close meanwhile.
func endsWell(err error) bool {
	return err == nil || errors.Is(err, pagoda.ErrInvalidHandle) ||
		errors.Is(err, pagoda.ErrCancelled) && strings.Contains(err.Error(), "the generator was closed")
}

func TestClosingWhileOthersUseIt(t *testing.T) {
	for range 20 {
		m := must[*pagoda.Model](t)(pagoda.OpenModel(ctx, hello, cpu()))
		x := must[*pagoda.Tensor](t)(pagoda.NewTensor([]int64{1, 4}, make([]float32, 4)))
		y := must[*pagoda.Tensor](t)(pagoda.Zeros(pagoda.F32, 1, 3))
		g := must[*pagoda.Engine](t)(pagoda.OpenEngine(ctx, data+"/gather", &pagoda.EngineOptions{
			KVSize: pagoda.KVBytes(1 << 20), Model: cpu(),
		}))
		w := must[*pagoda.Generator](t)(pagoda.OpenGenerator(ctx, llama, &pagoda.GeneratorOptions{
			KVSize: pagoda.KVPages(64), Model: cpu(),
		}))
		var users, closers, used sync.WaitGroup
		var closed atomic.Bool
		use := func(call func() error) {
			users.Add(1)
			used.Add(1)
			go func() {
				defer users.Done()
				ended := sync.OnceFunc(used.Done)
				defer ended()
				for !closed.Load() {
					if err := call(); !endsWell(err) {
						t.Error(err)
						return
					}
					ended()
				}
			}()
		}
		use(func() error {
			_, err := m.RunInto(t.Context(), pagoda.Tensors{"x": x}, pagoda.Tensors{"y": y})
			return err
		})
		use(func() error {
			result, err := m.RunAsync(ctx, pagoda.Tensors{"x": x}, nil, "y")
			if err == nil {
				r := <-result
				if err = r.Err; err == nil {
					err = r.Outputs[0].Close()
				}
			}
			return err
		})
		use(func() error { _, err := x.Dims(); return err })
		use(func() error { _, err := pagoda.Values[float32](x); return err })
		use(func() error { _, err := m.Inputs(); return err })
		use(func() error { _, err := g.Rank(t.Context(), request()); return err })
		use(func() error {
			result, err := g.RankAsync(ctx, request())
			if err == nil {
				err = (<-result).Err
			}
			return err
		})
		use(func() error { _, err := w.Generate(t.Context(), likely(first, 3)); return err })
		use(func() error {
			stream, err := w.Stream(t.Context(), likely(first, 3))
			if err != nil {
				return err
			}
			for _, err = range stream.Tokens() {
			}
			return err
		})
		// Each has made a call, and makes more of them while everything is closed.
		used.Wait()
		for _, it := range []interface{ Close() error }{m, x, y, g, w} {
			closers.Add(1)
			go func() { defer closers.Done(); ok(t, it.Close()) }()
		}
		closers.Wait()
		closed.Store(true)
		users.Wait()
	}
}

func TestWhatIsForgottenIsClosed(t *testing.T) {
	before := settled(0)
	var mu sync.Mutex
	var lines []string
	ok(t, pagoda.SetLog(pagoda.LogLevelDebug, func(level pagoda.LogLevel, source, message string) {
		mu.Lock()
		defer mu.Unlock()
		if source == "go" && strings.Contains(message, "close_test.go:") {
			lines = append(lines, fmt.Sprintf("%v %s", level, message))
		}
	}))
	defer pagoda.SetLog(pagoda.LogLevelOff, nil)
	path, _ := table(t)
	forget := func() {
		must[*pagoda.Model](t)(pagoda.OpenModel(ctx, hello, cpu()))
		must[*pagoda.Tensor](t)(pagoda.NewTensor([]int64{1}, []float32{1}))
		must[*pagoda.Store](t)(pagoda.OpenStore(t.Context(), t.TempDir(), nil))
		c := must[*pagoda.KVCache](t)(pagoda.OpenKVCache(ctx, shape()))
		must[*pagoda.KVLease](t)(c.Prepare(t.Context(), pagoda.KVRequest{Tokens: 1}))
		must[*pagoda.Embeddings](t)(pagoda.OpenEmbeddings(t.Context(), path))
		must[*pagoda.Engine](t)(pagoda.OpenEngine(ctx, data+"/gather", &pagoda.EngineOptions{KVSize: pagoda.KVBytes(1 << 20), Model: cpu()}))
		w := must[*pagoda.Generator](t)(pagoda.OpenGenerator(ctx, llama, &pagoda.GeneratorOptions{KVSize: pagoda.KVPages(64), Model: cpu()}))
		must[*pagoda.TokenStream](t)(w.Stream(ctx, likely(first, 400)))
		closed := must[*pagoda.Tensor](t)(pagoda.NewTensor([]int64{1}, []float32{1}))
		ok(t, closed.Close())
	}
	forget()
	if live := pagoda.LiveObjects(); live < before+1 {
		t.Errorf("%d objects are held, where there were %d and 8 were made", live, before)
	}
	equal(t, "objects held", settled(before), before)
	for range 100 {
		mu.Lock()
		enough := len(lines) >= 8
		mu.Unlock()
		if enough {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	mu.Lock()
	defer mu.Unlock()
	equal(t, "lines", len(lines), 8)
	for _, name := range []string{"model", "tensor", "store", "cache", "lease", "table set", "engine", "generator"} {
		found := 0
		for _, line := range lines {
			if strings.HasPrefix(line, "debug a "+name+" was not closed; it was made at ") {
				found++
			}
		}
		if found != 1 {
			t.Errorf("%s: %d lines of %q", name, found, lines)
		}
	}
}

// A handle whose place was used for the 0xc0th time looks like an address in Go's heap, which begins at 0xc000000000,
// at least under the race detector: the garbage collector must not take it for one. It ends the program where there is
// no object at such an address; the handles here are many and far apart, so that this is so for some.
func TestHandlesAreNotAddresses(t *testing.T) {
	held := make([]*pagoda.Tensor, 40000)
	for i := range held {
		held[i] = must[*pagoda.Tensor](t)(pagoda.Zeros(pagoda.F32))
	}
	for range 0xbf {
		for i := 0; i < len(held); i += 50 {
			ok(t, held[i].Close())
		}
		for i := 0; i < len(held); i += 50 {
			held[i] = must[*pagoda.Tensor](t)(pagoda.Zeros(pagoda.F32))
		}
	}
	runtime.GC()
	for _, it := range held {
		must[pagoda.ElementType](t)(it.Type())
		ok(t, it.Close())
	}
}

func TestOpeningCanBeLeft(t *testing.T) {
	before := settled(0)
	for _, wait := range []time.Duration{0, time.Millisecond, 3 * time.Millisecond} {
		soon, cancel := context.WithTimeout(ctx, wait)
		engine, err := pagoda.OpenEngine(soon, data+"/gather", &pagoda.EngineOptions{KVSize: pagoda.KVBytes(1 << 20), Model: cpu()})
		cancel()
		if err == nil {
			ok(t, engine.Close())
		} else {
			isDone(t, err, context.DeadlineExceeded)
		}
	}
	equal(t, "objects held", settled(before), before)
}
