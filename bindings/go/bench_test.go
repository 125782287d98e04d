package pagoda_test

import (
	"context"
	"testing"

	"pagoda"
	"pagoda/internal/plain"
)

func prepare(b testing.TB) {
	b.Helper()
	ok(b, plain.Prepare(hello))
	b.Cleanup(plain.Done)
}

// What cgo itself costs.
func BenchmarkPlainNothing(b *testing.B) {
	for b.Loop() {
		plain.Nothing()
	}
}

func BenchmarkPlainType(b *testing.B) {
	prepare(b)
	for b.Loop() {
		plain.Type()
	}
}

func BenchmarkType(b *testing.B) {
	x := tensor(b, []int64{1, 4}, make([]float32, 4))
	for b.Loop() {
		if _, err := x.Type(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPlainRun(b *testing.B) {
	prepare(b)
	for b.Loop() {
		if plain.Run() != 0 {
			b.Fatal("it failed")
		}
	}
}

func BenchmarkRun(b *testing.B) {
	m := open(b, hello)
	inputs := pagoda.Tensors{"x": tensor(b, []int64{1, 4}, make([]float32, 4))}
	into := pagoda.Tensors{"y": tensor(b, []int64{1, 3}, make([]float32, 3))}
	stoppable, cancel := context.WithCancel(ctx)
	defer cancel()
	b.Run("in place", func(b *testing.B) {
		for b.Loop() {
			if _, err := m.RunInto(ctx, inputs, into); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("stoppable", func(b *testing.B) {
		for b.Loop() {
			if _, err := m.RunInto(stoppable, inputs, into); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("new output", func(b *testing.B) {
		for b.Loop() {
			outputs, err := m.Run(ctx, inputs, "y")
			if err != nil {
				b.Fatal(err)
			}
			outputs[0].Close()
		}
	})
}

func BenchmarkNewTensor(b *testing.B) {
	dims, values := []int64{1, 4}, make([]float32, 4)
	for b.Loop() {
		it, err := pagoda.NewTensor(dims, values)
		if err != nil {
			b.Fatal(err)
		}
		it.Close()
	}
}

func BenchmarkRank(b *testing.B) {
	engine := openEngine(b, &pagoda.EngineOptions{})
	stoppable, cancel := context.WithCancel(ctx)
	defer cancel()
	for name, c := range map[string]context.Context{"plain": ctx, "stoppable": stoppable} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := engine.Rank(c, request()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// Each is a stream of a hundred tokens.
func BenchmarkPlainStream(b *testing.B) {
	ok(b, plain.OpenGenerator(llama))
	defer plain.CloseGenerator()
	for b.Loop() {
		plain.Stream(1, 100)
	}
}

func BenchmarkStream(b *testing.B) {
	g := openGenerator(b, &pagoda.GeneratorOptions{})
	for b.Loop() {
		for _, err := range must[*pagoda.TokenStream](b)(g.Stream(ctx, likely(first, 100))).Tokens() {
			ok(b, err)
		}
	}
}
