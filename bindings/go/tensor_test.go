package pagoda_test

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"pagoda"
)

func roundTrip[T pagoda.Element](t *testing.T, want pagoda.ElementType, name string, values ...T) {
	t.Run(name, func(t *testing.T) {
		it := tensor(t, []int64{int64(len(values))}, values)
		equal(t, "type", must[pagoda.ElementType](t)(it.Type()), want)
		equal(t, "name", want.String(), name)
		if copied := must[[]T](t)(pagoda.Values[T](it)); !slices.Equal(copied, values) {
			t.Errorf("%v, not %v", copied, values)
		}
	})
}

func TestEveryTypeOfElement(t *testing.T) {
	roundTrip[float32](t, pagoda.F32, "f32", 1.5, -2)
	roundTrip[float64](t, pagoda.F64, "f64", 1.5, -2)
	roundTrip[int8](t, pagoda.I8, "i8", 1, -2)
	roundTrip[int16](t, pagoda.I16, "i16", 1, -2)
	roundTrip[int32](t, pagoda.I32, "i32", 1, -2)
	roundTrip[int64](t, pagoda.I64, "i64", 1, math.MinInt64)
	roundTrip[uint8](t, pagoda.U8, "u8", 1, 255)
	roundTrip[uint16](t, pagoda.U16, "u16", 1, 65535)
	roundTrip[uint32](t, pagoda.U32, "u32", 1, math.MaxUint32)
	roundTrip[uint64](t, pagoda.U64, "u64", 1, math.MaxUint64)
	roundTrip(t, pagoda.Bool, "bool", true, false)
	roundTrip(t, pagoda.String, "string", "", "pagoda", "塔", "b\x00c")
	roundTrip[complex64](t, pagoda.Complex64, "complex64", 1+2i)
	roundTrip[complex128](t, pagoda.Complex128, "complex128", 1+2i, 3)
	roundTrip[pagoda.Float16](t, pagoda.F16, "f16", 0x3c00, 0xc000)
	roundTrip[pagoda.BFloat16](t, pagoda.BF16, "bf16", 0x3f80, 0xc000)
	for _, kind := range []pagoda.ElementType{
		pagoda.F8E4M3FN, pagoda.F8E4M3FNUZ, pagoda.F8E5M2, pagoda.F8E5M2FNUZ, pagoda.F8E8M0,
	} {
		it := must[*pagoda.Tensor](t)(pagoda.NewTensorOf(kind, []int64{3}, []byte{1, 2, 3}))
		equal(t, kind.String(), string(must[[]byte](t)(it.Bytes())), "\x01\x02\x03")
		ok(t, it.Close())
	}
	for kind, perByte := range map[pagoda.ElementType]int64{
		pagoda.U4: 2, pagoda.I4: 2, pagoda.F4E2M1: 2, pagoda.U2: 4, pagoda.I2: 4,
	} {
		it := must[*pagoda.Tensor](t)(pagoda.NewTensorOf(kind, []int64{2 * perByte}, []byte{0x21, 0x43}))
		equal(t, kind.String(), string(must[[]byte](t)(it.Bytes())), "\x21\x43")
		ok(t, it.Close())
	}
	equal(t, "name", pagoda.ElementType(99).String(), "undefined")
}

func TestDims(t *testing.T) {
	for _, dims := range [][]int64{{}, {2, 3}, {0, 3}, {1, 1, 1, 2}} {
		it := must[*pagoda.Tensor](t)(pagoda.Zeros(pagoda.F32, dims...))
		equal(t, "dims", fmt.Sprint(must[[]int64](t)(it.Dims())), fmt.Sprint(dims))
		for _, value := range must[[]float32](t)(pagoda.Values[float32](it)) {
			equal(t, "value", value, 0)
		}
		ok(t, it.Close())
	}
	empty := tensor(t, []int64{0}, []float64{})
	equal(t, "values", len(must[[]float64](t)(pagoda.Values[float64](empty))), 0)
	raw := must[*pagoda.Tensor](t)(pagoda.NewTensorOf(pagoda.F32, []int64{2, 0}, nil))
	equal(t, "bytes", len(must[[]byte](t)(raw.Bytes())), 0)
	equal(t, "view", len(must[[]float32](t)(pagoda.View[float32](raw))), 0)
	ok(t, raw.Close())
	equal(t, "strings", len(must[[]string](t)(pagoda.Values[string](tensor(t, []int64{0, 2}, []string{})))), 0)
}

func TestATensorIsOverTheSlice(t *testing.T) {
	values := []float32{1, 2, 3}
	it := tensor(t, []int64{3}, values)
	viewed := must[[]float32](t)(pagoda.View[float32](it))
	if unsafe.SliceData(viewed) != unsafe.SliceData(values) {
		t.Error("the view is not the slice")
	}
	values[0] = 9
	equal(t, "value", must[[]float32](t)(pagoda.Values[float32](it))[0], 9)

	zeros := must[*pagoda.Tensor](t)(pagoda.Zeros(pagoda.I32, 2))
	defer zeros.Close()
	must[[]int32](t)(pagoda.View[int32](zeros))[1] = 7
	equal(t, "value", must[[]int32](t)(pagoda.Values[int32](zeros))[1], 7)
	equal(t, "alignment", uintptr(unsafe.Pointer(unsafe.SliceData(must[[]int32](t)(pagoda.View[int32](zeros)))))%64, 0)
}

// The memory of a tensor that no Go value refers to any more stays while C has it.
func TestPinnedMemoryStays(t *testing.T) {
	m := open(t, hello)
	var results []<-chan pagoda.RunResult
	for range 50 {
		x := must[*pagoda.Tensor](t)(pagoda.NewTensor([]int64{1, 4}, []float32{0, 0, 0, 0}))
		results = append(results, must[<-chan pagoda.RunResult](t)(m.RunAsync(ctx, pagoda.Tensors{"x": x}, nil, "y")))
		ok(t, x.Close())
		if len(results)%10 == 0 {
			runtime.GC()
		}
	}
	for _, result := range results {
		r := <-result
		ok(t, r.Err)
		y := must[[]float32](t)(pagoda.Values[float32](r.Outputs[0]))
		if math.Abs(float64(y[1])-1.0/3) > 1e-6 {
			t.Errorf("%v", y)
		}
		ok(t, r.Outputs[0].Close())
	}
}

func TestTensorsThatCanNotBe(t *testing.T) {
	_, err := pagoda.NewTensor([]int64{3}, []float32{1, 2})
	fails(t, err, pagoda.ErrInvalidArgument, "values")
	_, err = pagoda.NewTensor([]int64{1}, []float32{1, 2})
	fails(t, err, pagoda.ErrInvalidArgument, "values")
	_, err = pagoda.NewTensor([]int64{-1}, []float32{1})
	fails(t, err, pagoda.ErrInvalidArgument, "dims[0]")
	_, err = pagoda.NewTensor([]int64{math.MaxInt64, math.MaxInt64}, []float32{1})
	fails(t, err, pagoda.ErrInvalidArgument, "dims")
	_, err = pagoda.NewTensor(make([]int64, 65), []float32{})
	fails(t, err, pagoda.ErrInvalidArgument, "rank")
	_, err = pagoda.NewTensor([]int64{2}, []string{"a"})
	fails(t, err, pagoda.ErrInvalidArgument, "count")
	_, err = pagoda.NewTensor([]int64{1}, []string{"\xff"})
	fails(t, err, pagoda.ErrInvalidArgument, "values[0]")
	_, err = pagoda.NewTensorOf(pagoda.F32, []int64{2}, make([]byte, 4))
	fails(t, err, pagoda.ErrInvalidArgument, "bytes")
	for _, empty := range [][]byte{nil, {}} {
		_, err = pagoda.NewTensorOf(pagoda.F32, []int64{2, 3}, empty)
		fails(t, err, pagoda.ErrInvalidArgument, "bytes")
		_, err = pagoda.NewTensorOf(pagoda.F32, nil, empty)
		fails(t, err, pagoda.ErrInvalidArgument, "bytes")
		_, err = pagoda.NewTensorOf(pagoda.String, []int64{2}, empty)
		fails(t, err, pagoda.ErrInvalidArgument, "type")
	}
	_, err = pagoda.NewTensorOf(pagoda.F32, []int64{1}, make([]byte, 8)[1:5])
	fails(t, err, pagoda.ErrInvalidArgument, "data")
	_, err = pagoda.NewTensorOf(pagoda.String, []int64{1}, make([]byte, 8))
	fails(t, err, pagoda.ErrInvalidArgument, "type")
	_, err = pagoda.Zeros(99, 1)
	fails(t, err, pagoda.ErrInvalidArgument, "type")

	it := tensor(t, []int64{2}, []float32{1, 2})
	_, err = pagoda.Values[float64](it)
	fails(t, err, pagoda.ErrInvalidArgument, "T")
	_, err = pagoda.View[int32](it)
	fails(t, err, pagoda.ErrInvalidArgument, "T")
	_, err = pagoda.Values[string](it)
	fails(t, err, pagoda.ErrInvalidArgument, "T")
	texts := tensor(t, []int64{1}, []string{"a"})
	_, err = pagoda.View[string](texts)
	fails(t, err, pagoda.ErrUnsupported, "tensor")
	_, err = texts.Bytes()
	fails(t, err, pagoda.ErrUnsupported, "tensor")
}

// Memory may be part of an object that has pointers to others: C is handed that part alone.
func TestMemoryBesidePointers(t *testing.T) {
	type record struct {
		next    *record
		text    string
		numbers [4]float32
		dims    [2]int64
		bytes   [4096]byte
		keys    [2]int64
		users   [2]uint64
	}
	r := &record{next: &record{text: "another"}, dims: [2]int64{1, 4}, keys: [2]int64{3, 7}, users: [2]uint64{7, 8}}
	x := tensor(t, r.dims[:], r.numbers[:])
	r.numbers[2] = 5
	equal(t, "number", must[[]float32](t)(pagoda.Values[float32](x))[2], 5)
	raw := must[*pagoda.Tensor](t)(pagoda.NewTensorOf(pagoda.U8, []int64{4096}, r.bytes[:]))
	defer raw.Close()

	model := r.bytes[:copy(r.bytes[:], read(t, hello))]
	for _, c := range []context.Context{ctx, t.Context()} {
		m := must[*pagoda.Model](t)(pagoda.OpenModelMemory(c, model, cpu()))
		outputs := must[[]*pagoda.Tensor](t)(m.Run(c, pagoda.Tensors{"x": x}, "y"))
		ok(t, outputs[0].Close())
		ok(t, m.Close())
	}

	path, _ := table(t)
	tables := must[*pagoda.Embeddings](t)(pagoda.OpenEmbeddings(ctx, path))
	defer tables.Close()
	ok(t, tables.Upsert(ctx, "t", 1, r.keys[:], r.numbers[:], pagoda.ReachAtOnce))
	equal(t, "rows", fmt.Sprint(must[*pagoda.EmbeddingRows](t)(tables.Lookup(ctx, "t", r.keys[:], nil)).Numbers), "[0 0 5 0]")
	r.dims = [2]int64{0, 2}
	pooled := must[*pagoda.EmbeddingRows](t)(tables.Pool(ctx, "t", r.keys[:], r.dims[:], pagoda.CombinerSum, nil))
	equal(t, "pooled", fmt.Sprint(pooled.Numbers), "[5 0]")
	must[int](t)(tables.Prefetch("t", r.keys[:]))
	ok(t, tables.Delete(ctx, "t", 2, r.keys[:], pagoda.ReachAtOnce))

	engine := openEngine(t, &pagoda.EngineOptions{})
	asked := request()
	asked.Events["item"], asked.EventTimes = r.keys[:], r.keys[:]
	must[*pagoda.RankResponse](t)(engine.Rank(ctx, asked))
	ok(t, (<-must[<-chan pagoda.RankResult](t)(engine.RankAsync(t.Context(), asked))).Err)
	equal(t, "forgotten", must[int](t)(engine.Forget(ctx, r.users[:]...)), 1)

	options := shape()
	options.Edited = pagoda.EditedRefuse
	cache := openCache(t, options)
	ok(t, must[*pagoda.KVLease](t)(cache.Prepare(ctx, pagoda.KVRequest{Owner: 7, Tokens: 2, Items: r.users[:]})).Close())
	equal(t, "cached", len(must[[]pagoda.CachedOwner](t)(cache.Lookup(r.users[:]...))), 2)
	must[int](t)(cache.Evict(ctx, pagoda.TiersResident, r.users[:]...))
}
