package pagoda_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pagoda"
)

func TestAModelTellsWhatItIs(t *testing.T) {
	m := open(t, hello)
	provider, reason, err := m.Provider()
	ok(t, err)
	equal(t, "provider", provider, pagoda.ProviderCPU)
	equal(t, "reason", reason, "")
	inputs, outputs := must[[]pagoda.ValueInfo](t)(m.Inputs()), must[[]pagoda.ValueInfo](t)(m.Outputs())
	equal(t, "inputs", fmt.Sprintf("%+v", inputs), "[{Name:x Type:f32 Dims:[-1 4] Symbols:[n ]}]")
	equal(t, "outputs", fmt.Sprintf("%+v", outputs), "[{Name:y Type:f32 Dims:[-1 3] Symbols:[n ]}]")
}

func TestRun(t *testing.T) {
	m := open(t, hello)
	x := tensor(t, []int64{2, 4}, []float32{1, 2, 3, 4, 0, 0, 0, 0})
	outputs := must[[]*pagoda.Tensor](t)(m.Run(ctx, pagoda.Tensors{"x": x}, "y"))
	y := must[[]float32](t)(pagoda.Values[float32](outputs[0]))
	if len(y) != 6 || math.Abs(float64(y[0]+y[1]+y[2]-1)) > 1e-6 || math.Abs(float64(y[3]-1.0/3)) > 1e-6 {
		t.Errorf("%v", y)
	}
	if viewed := must[[]float32](t)(pagoda.View[float32](outputs[0])); !slices.Equal(viewed, y) {
		t.Errorf("%v, not %v", viewed, y)
	}
	ok(t, outputs[0].Close())

	bound := make([]float32, 6)
	into := tensor(t, []int64{2, 3}, bound)
	none := must[[]*pagoda.Tensor](t)(m.RunInto(ctx, pagoda.Tensors{"x": x}, pagoda.Tensors{"y": into}))
	equal(t, "new outputs", len(none), 0)
	if !slices.Equal(bound, y) {
		t.Errorf("in place %v, not %v", bound, y)
	}

	nothing := tensor(t, []int64{0, 4}, []float32{})
	outputs = must[[]*pagoda.Tensor](t)(m.Run(ctx, pagoda.Tensors{"x": nothing}, "y"))
	equal(t, "dims", fmt.Sprint(must[[]int64](t)(outputs[0].Dims())), "[0 3]")
	equal(t, "bytes", len(must[[]byte](t)(outputs[0].Bytes())), 0)
	ok(t, outputs[0].Close())

	bytes := must[[]byte](t)(os.ReadFile(hello))
	for _, c := range []context.Context{ctx, t.Context()} {
		again := must[*pagoda.Model](t)(pagoda.OpenModelMemory(c, bytes, cpu()))
		outputs = must[[]*pagoda.Tensor](t)(again.Run(c, pagoda.Tensors{"x": x}, "y"))
		if got := must[[]float32](t)(pagoda.Values[float32](outputs[0])); !slices.Equal(got, y) {
			t.Errorf("%v, not %v", got, y)
		}
		ok(t, outputs[0].Close())
		ok(t, again.Close())
	}
}

// y = x, of strings [n].
const identity = "\x08\x08\x12\x00:9\n\x10\n\x01x\x12\x01y\"\x08Identity\x12\x01g" +
	"Z\x10\n\x01x\x12\x0b\n\t\x08\x08\x12\x05\n\x03\x12\x01n" +
	"b\x10\n\x01y\x12\x0b\n\t\x08\x08\x12\x05\n\x03\x12\x01nB\x04\n\x00\x10\x11"

func TestRunOfStrings(t *testing.T) {
	m := must[*pagoda.Model](t)(pagoda.OpenModelMemory(ctx, []byte(identity), cpu()))
	defer m.Close()
	texts := []string{"", "pagoda", "塔", "b\x00c"}
	outputs := must[[]*pagoda.Tensor](t)(m.Run(ctx, pagoda.Tensors{"x": tensor(t, []int64{4}, texts)}, "y"))
	defer outputs[0].Close()
	if got := must[[]string](t)(pagoda.Values[string](outputs[0])); !slices.Equal(got, texts) {
		t.Errorf("%q", got)
	}
}

func TestRunsThatCanNotBe(t *testing.T) {
	m := open(t, hello)
	x, wide := tensor(t, []int64{1, 4}, make([]float32, 4)), tensor(t, []int64{1, 5}, make([]float32, 5))
	run := func(name string, x *pagoda.Tensor, output string) error {
		_, err := m.Run(ctx, pagoda.Tensors{name: x}, output)
		_, later := m.RunAsync(ctx, pagoda.Tensors{name: x}, nil, output)
		if err == nil || later == nil || err.Error() != later.Error() {
			t.Errorf("Run says %v, RunAsync %v", err, later)
		}
		return err
	}
	fails(t, run("x", wide, "y"), pagoda.ErrInvalidArgument, `inputs["x"]`)
	fails(t, run("x", tensor(t, []int64{1, 4}, make([]float64, 4)), "y"), pagoda.ErrInvalidArgument, `inputs["x"]`)
	fails(t, run("z", x, "y"), pagoda.ErrNotFound, `inputs["z"]`)
	fails(t, run("x", x, "z"), pagoda.ErrNotFound, `outputs["z"]`)
	fails(t, run("x", nil, "y"), pagoda.ErrInvalidHandle, `inputs["x"]`)
	fails(t, run("x", new(pagoda.Tensor), "y"), pagoda.ErrInvalidHandle, `inputs["x"]`)
	fails(t, run("x\x00", x, "y"), pagoda.ErrInvalidArgument, "inputs")
	many := pagoda.Tensors{"x": x}
	for i := range 40 {
		many[fmt.Sprint("extra", i)] = x
	}
	_, err := m.Run(ctx, many, "y")
	if !errors.Is(err, pagoda.ErrNotFound) || !strings.Contains(err.Error(), `inputs["extra`) {
		t.Errorf("%v", err)
	}
	if err := run("x", wide, "y"); !strings.Contains(err.Error(), `inputs["x"]`) {
		t.Errorf("%v", err)
	}
	_, err = m.Run(ctx, nil, "y")
	fails(t, err, pagoda.ErrInvalidArgument, "input_names")
	_, err = m.Run(ctx, pagoda.Tensors{"x": x})
	fails(t, err, pagoda.ErrInvalidArgument, "output_names")
	_, err = m.RunInto(ctx, pagoda.Tensors{"x": x}, pagoda.Tensors{"y": wide})
	fails(t, err, pagoda.ErrInvalidArgument, `outputs["y"]`)
	_, err = m.RunInto(ctx, pagoda.Tensors{"x": x}, pagoda.Tensors{"y": nil})
	fails(t, err, pagoda.ErrInvalidHandle, `outputs["y"]`)
	_, err = m.Run(nil, pagoda.Tensors{"x": x}, "y") //nolint:staticcheck // that is what is tested
	fails(t, err, pagoda.ErrInvalidArgument, "ctx")

	_, err = pagoda.OpenModel(ctx, "no such file.onnx", nil)
	fails(t, err, pagoda.ErrNotFound, "path")
	_, err = pagoda.OpenModel(ctx, "", nil)
	fails(t, err, pagoda.ErrInvalidArgument, "path")
	_, err = pagoda.OpenModel(ctx, "a\x00b", nil)
	fails(t, err, pagoda.ErrInvalidArgument, "path")
	_, err = pagoda.OpenModelMemory(ctx, make([]byte, 64), cpu())
	fails(t, err, pagoda.ErrModel, "bytes")
	_, err = pagoda.OpenModelMemory(ctx, nil, cpu())
	fails(t, err, pagoda.ErrInvalidArgument, "bytes")
	options := cpu()
	options.DeviceID = -1
	_, err = pagoda.OpenModel(ctx, hello, options)
	fails(t, err, pagoda.ErrInvalidArgument, "options.device_id")
	options = cpu()
	options.ProfilePath = "a\x00b"
	_, err = pagoda.OpenModel(ctx, hello, options)
	fails(t, err, pagoda.ErrInvalidArgument, "options.profile_path")
	options = cpu()
	options.Tables = new(pagoda.Embeddings)
	_, err = pagoda.OpenModel(ctx, hello, options)
	fails(t, err, pagoda.ErrInvalidHandle, "options.tables")
}

// history is the inputs of samples/make_model.py's model for one user with so many events and a candidate, and the
// pools, which are outputs too.
func history(t *testing.T, rows int64) (inputs, pools pagoda.Tensors) {
	t.Helper()
	pages := (rows + 7) / 8
	ids := make([]int32, pages)
	for i := range ids {
		ids[i] = int32(i)
	}
	items := make([]int64, rows)
	for i := range items {
		items[i] = int64(i) * 7919 % 1000
	}
	pool := func() *pagoda.Tensor {
		it := must[*pagoda.Tensor](t)(pagoda.Zeros(pagoda.F32, pages, 2, 8, 2, 32))
		t.Cleanup(func() { it.Close() })
		return it
	}
	first, second := pool(), pool()
	return pagoda.Tensors{
		"item_ids":       tensor(t, []int64{rows}, items),
		"row_offsets":    tensor(t, []int64{2}, []int32{0, int32(rows)}),
		"num_candidates": tensor(t, []int64{1}, []int32{1}),
		"cached_len":     tensor(t, []int64{1}, []int32{0}),
		"page_indptr":    tensor(t, []int64{2}, []int32{0, int32(pages)}),
		"page_ids":       tensor(t, []int64{pages}, ids),
		"kv_pool_0":      first,
		"kv_pool_1":      second,
	}, pagoda.Tensors{"kv_pool_0_out": first, "kv_pool_1_out": second}
}

// isDone checks that a call ended because of its context.
func isDone(t *testing.T, err, cause error) {
	t.Helper()
	if !errors.Is(err, pagoda.ErrCancelled) || !errors.Is(err, cause) {
		t.Errorf("%v, where %v is due", err, cause)
	}
}

func TestAContextStopsRuns(t *testing.T) {
	x := pagoda.Tensors{"x": tensor(t, []int64{1, 4}, make([]float32, 4))}
	small := open(t, hello)
	gone, cancel := context.WithCancel(ctx)
	outputs := must[[]*pagoda.Tensor](t)(small.Run(gone, x, "y"))
	ok(t, outputs[0].Close())
	cancel()
	_, err := small.Run(gone, x, "y")
	isDone(t, err, context.Canceled)
	_, err = small.RunAsync(gone, x, nil, "y")
	isDone(t, err, context.Canceled)

	// Runs that are under way: this one takes a hundred milliseconds or more to its end.
	m := open(t, model)
	inputs, pools := history(t, 6000)
	begin := time.Now()
	outputs = must[[]*pagoda.Tensor](t)(m.RunInto(ctx, inputs, pools, "scores"))
	whole := time.Since(begin)
	ok(t, outputs[0].Close())
	soon, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
	defer cancel()
	begin = time.Now()
	_, err = m.RunInto(soon, inputs, pools, "scores")
	isDone(t, err, context.DeadlineExceeded)
	t.Logf("a run of %v was stopped after %v", whole, time.Since(begin))

	soon, cancel = context.WithCancel(ctx)
	result := must[<-chan pagoda.RunResult](t)(m.RunAsync(soon, inputs, pools, "scores"))
	eventually(t, "a thread has taken the run", func() bool {
		return strings.Contains(must[string](t)(pagoda.Metrics()), "\npagoda_async_queue 0\n")
	})
	cancel()
	isDone(t, (<-result).Err, context.Canceled)
}

// Runs whose contexts end at any moment, between others whose do not.
func TestAContextStopsNoOtherRuns(t *testing.T) {
	m := open(t, hello)
	x := pagoda.Tensors{"x": tensor(t, []int64{1, 4}, make([]float32, 4))}
	var group sync.WaitGroup
	for range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			for i := range 500 {
				c, cancel := context.WithCancel(ctx)
				if i%2 == 0 {
					go cancel()
				}
				outputs, err := m.Run(c, x, "y")
				if err == nil {
					err = outputs[0].Close()
				} else if i%2 == 0 && errors.Is(err, context.Canceled) {
					err = nil
				}
				if err != nil {
					t.Error(err)
				}
				cancel()
			}
		}()
	}
	group.Wait()
}

func TestAsyncRuns(t *testing.T) {
	before := settled(0)
	m := must[*pagoda.Model](t)(pagoda.OpenModel(ctx, hello, cpu()))
	bound := make([]float32, 3)
	into := must[*pagoda.Tensor](t)(pagoda.NewTensor([]int64{1, 3}, bound))
	x := must[*pagoda.Tensor](t)(pagoda.NewTensor([]int64{1, 4}, make([]float32, 4)))
	result := must[<-chan pagoda.RunResult](t)(m.RunAsync(t.Context(), pagoda.Tensors{"x": x}, pagoda.Tensors{"y": into}))
	// The objects may go while the run is under way; one result is never read.
	must[<-chan pagoda.RunResult](t)(m.RunAsync(ctx, pagoda.Tensors{"x": x}, nil, "y"))
	ok(t, m.Close())
	ok(t, x.Close())
	ok(t, into.Close())
	r := <-result
	ok(t, r.Err)
	equal(t, "outputs", len(r.Outputs), 0)
	if math.Abs(float64(bound[2])-1.0/3) > 1e-6 {
		t.Errorf("%v", bound)
	}
	if _, more := <-result; more {
		t.Error("there are two results")
	}
	equal(t, "objects held", settled(before), before)

	// Right by names, types and shapes, wrong by its numbers: the run itself fails.
	ranker := open(t, model)
	inputs, pools := history(t, 3)
	inputs["page_ids"] = tensor(t, []int64{1}, []int32{9})
	_, err := ranker.RunInto(ctx, inputs, pools, "scores")
	fails(t, err, pagoda.ErrInvalidArgument, "")
	r = <-must[<-chan pagoda.RunResult](t)(ranker.RunAsync(ctx, inputs, pools, "scores"))
	fails(t, r.Err, pagoda.ErrInvalidArgument, "")
}

func TestManyGoroutinesRunOneModel(t *testing.T) {
	m := open(t, hello)
	var group sync.WaitGroup
	for i := range 8 {
		group.Add(1)
		go func() {
			defer group.Done()
			c, cancel := context.WithCancel(ctx)
			defer cancel()
			x := tensor(t, []int64{1, 4}, []float32{float32(i), 0, 0, 0})
			var before []float32
			for range 200 {
				outputs, err := m.Run(c, pagoda.Tensors{"x": x}, "y")
				if err != nil {
					t.Error(err)
					return
				}
				y, err := pagoda.Values[float32](outputs[0])
				if err != nil || before != nil && !slices.Equal(before, y) {
					t.Errorf("%v, then %v (%v)", before, y, err)
				}
				before = y
				outputs[0].Close()
			}
		}()
	}
	group.Wait()
}
