//go:build !race

package pagoda_test

import (
	"context"
	"os"
	"testing"
	"time"

	"pagoda"
	"pagoda/internal/plain"
)

// A call costs at most a microsecond more than the same call by plain cgo, be it short or a run; and a context that can
// be done costs a run no more than another.
func TestACallCostsLittleMoreThanPlainCgo(t *testing.T) {
	prepare(t)
	m, x := open(t, hello), tensor(t, []int64{1, 4}, make([]float32, 4))
	inputs, into := pagoda.Tensors{"x": x}, pagoda.Tensors{"y": tensor(t, []int64{1, 3}, make([]float32, 3))}
	stoppable, cancel := context.WithCancel(ctx)
	defer cancel()
	littleMore(t, "a call", func() { x.Type() }, "by plain cgo", func() { plain.Type() })
	run := func(c context.Context) func() {
		return func() {
			if _, err := m.RunInto(c, inputs, into); err != nil {
				t.Fatal(err)
			}
		}
	}
	littleMore(t, "a run", run(ctx), "by plain cgo", func() { plain.Run() })
	littleMore(t, "a run that can be stopped", run(stoppable), "one that can not", run(ctx))
}

// A token of a stream costs at most two microseconds more than one that its caller reads in C, of an answer alone, whose reader is
// woken for each token, and of many answers at once, whose tokens share the steps of the model and the wake-ups. Only `make bench`
// runs it: a machine that is busy with other tests would decide the outcome.
func TestATokenCostsLittleMoreThanInPlainC(t *testing.T) {
	if os.Getenv("PAGODA_BENCH") != "1" {
		t.Skip("measured by make bench")
	}
	ok(t, plain.OpenGenerator(llama))
	defer plain.CloseGenerator()
	g := openGenerator(t, &pagoda.GeneratorOptions{MaxBatch: 64, KVSize: pagoda.KVPages(256)})
	tokenCostsLittleMore(t, g, 1, 400)
	tokenCostsLittleMore(t, g, 32, 50)
}

func tokenCostsLittleMore(t *testing.T, g *pagoda.Generator, answers, length int) {
	t.Helper()
	const goal = 2 * time.Microsecond
	count := answers * length
	request := with(likely(first, length), func(r *pagoda.GenerateRequest) { r.N = answers })
	ours := func() {
		read := 0
		for _, err := range must[*pagoda.TokenStream](t)(g.Stream(ctx, request)).Tokens() {
			ok(t, err)
			read++
		}
		equal(t, "tokens", read, count)
	}
	theirs := func() { equal(t, "tokens in C", plain.Stream(answers, length), count) }
	our, their := time.Hour, time.Hour
	for range 100 {
		for range 5 {
			our = min(our, timed(ours)/time.Duration(count))
			their = min(their, timed(theirs)/time.Duration(count))
		}
		if our-their <= goal {
			break
		}
	}
	t.Logf("of %d answers, a token %v, in plain C %v", answers, our, their)
	if our-their > goal {
		t.Errorf("of %d answers, a token takes %v, in plain C %v: that is more than %v less", answers, our, their, goal)
	}
}

// littleMore compares the best of many tries, taken in turns, for other programs may have the processor during any one.
// If they had it during all of them, there are more.
func littleMore(t *testing.T, what string, ours func(), other string, theirs func()) {
	t.Helper()
	our, their := time.Hour, time.Hour
	for range 20 {
		for range 50 {
			our, their = min(our, took(ours)), min(their, took(theirs))
		}
		if our-their <= time.Microsecond {
			break
		}
	}
	t.Logf("%s %v, %s %v", what, our, other, their)
	if our-their > time.Microsecond {
		t.Errorf("%s takes %v, %s %v: that is more than a microsecond less", what, our, other, their)
	}
}

// took is how long one of a hundred calls took.
func took(call func()) time.Duration {
	return timed(func() {
		for range 100 {
			call()
		}
	}) / 100
}

func timed(call func()) time.Duration {
	begin := time.Now()
	call()
	return time.Since(begin)
}
