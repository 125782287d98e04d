package pagoda_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"math"
	"time"

	"pagoda"
)

func Example() {
	ctx := context.Background()
	model, err := pagoda.OpenModel(ctx, "../../target/demo/hello.onnx", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	x, err := pagoda.NewTensor([]int64{2, 4}, []float32{1, 2, 3, 4, 0, 0, 0, 0})
	if err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	outputs, err := model.Run(ctx, pagoda.Tensors{"x": x}, "y")
	if err != nil {
		log.Fatal(err)
	}
	defer outputs[0].Close()
	y, err := pagoda.Values[float32](outputs[0])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.4f\n", y[3:])
	// Output: [0.3333 0.3333 0.3333]
}

func ExampleEngine_Rank() {
	ctx := context.Background()
	engine, err := pagoda.OpenEngine(ctx, "../../tests/data/engine/gather", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	// The whole history at first, then only what is new.
	for _, request := range []pagoda.RankRequest{
		{
			User:       7,
			UserKeys:   map[string]int64{"age": 6, "town": 8},
			Events:     pagoda.Columns{"item": {3, 7}, "genre": {1, 0}, "rating": {4, 2}},
			EventTimes: []int64{1700000000, 1700001000},
		},
		{
			User:       7,
			Start:      2,
			Events:     pagoda.Columns{"item": {9}, "genre": {1}, "rating": {0}},
			EventTimes: []int64{1700001500},
		},
	} {
		request.Candidates = pagoda.Columns{"item": {5, 6, 39}, "genre": {5, 2, -1}}
		response, err := engine.Rank(ctx, &request)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(len(response.Scores), "scores,", response.CachedRows, "rows remembered,", response.ComputedRows, "computed")
	}
	// Output:
	// 6 scores, 0 rows remembered, 6 computed
	// 6 scores, 6 rows remembered, 2 computed
}

func ExampleGenerator_Stream() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // ends the answer, too
	defer cancel()
	generator, err := pagoda.OpenGenerator(ctx, "../../tests/data/generate/llama", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer generator.Close()
	stream, err := generator.Stream(ctx, &pagoda.GenerateRequest{
		Messages:     []pagoda.Message{{Role: "user", Content: "What is the answer?"}},
		MaxNewTokens: pagoda.Ptr(16),
		Temperature:  pagoda.Ptr(0.7),
		Seed:         pagoda.Ptr[uint64](7),
		Grammar:      map[string]any{"choice": []string{"It is 42."}},
	})
	if err != nil {
		log.Fatal(err)
	}
	for token, err := range stream.Tokens() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(token.Text)
	}
	response, err := stream.Response()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(" The end is a", response.Choices[0].FinishReason)
	// Output: It is 42. The end is a stop
}

func ExampleGenerator_Generate() {
	ctx := context.Background()
	generator, err := pagoda.OpenGenerator(ctx, "../../tests/data/generate/llama", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer generator.Close()
	response, err := generator.Generate(ctx, &pagoda.GenerateRequest{
		Prompt: "The answer is ", MaxNewTokens: pagoda.Ptr(3), Temperature: pagoda.Ptr(0.0), IgnoreEOS: true, N: 2,
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, choice := range response.Choices {
		fmt.Println(len(choice.Tokens), choice.FinishReason)
	}
	// Output:
	// 3 length
	// 3 length
}

func ExampleModel_RunAsync() {
	ctx := context.Background()
	model, err := pagoda.OpenModel(ctx, "../../target/demo/hello.onnx", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	x, err := pagoda.NewTensor([]int64{1, 4}, make([]float32, 4))
	if err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	result, err := model.RunAsync(ctx, pagoda.Tensors{"x": x}, nil, "y")
	if err != nil {
		log.Fatal(err)
	}
	r := <-result
	if r.Err != nil {
		log.Fatal(r.Err)
	}
	defer r.Outputs[0].Close()
	fmt.Println(r.Outputs[0].Dims())
	// Output: [1 3] <nil>
}

func ExampleKVCache() {
	ctx := context.Background()
	cache, err := pagoda.OpenKVCache(ctx, &pagoda.KVOptions{Layers: 2, Heads: 2, HeadSize: 32, Size: pagoda.KVPages(16)})
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Close()
	lease, err := cache.Prepare(ctx, pagoda.KVRequest{Owner: 7, Tokens: 500, Candidates: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer lease.Close()
	// Here the model runs on lease.Tensor(...) and cache.Pool(...).
	if err := lease.Commit(ctx, false); err != nil {
		log.Fatal(err)
	}
	users, err := cache.Lookup(7, 8)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(users[0].Length, users[1].Length)
	// Output: 500 0
}

func ExampleError() {
	_, err := pagoda.OpenModel(context.Background(), "nowhere.onnx", nil)
	var e *pagoda.Error
	if errors.Is(err, pagoda.ErrNotFound) && errors.As(err, &e) {
		fmt.Println(e.Argument, "is at fault")
	}
	// Output: path is at fault
}

func ExampleSetLog() {
	levels := map[pagoda.LogLevel]slog.Level{
		pagoda.LogLevelError: slog.LevelError, pagoda.LogLevelWarn: slog.LevelWarn, pagoda.LogLevelInfo: slog.LevelInfo,
	}
	err := pagoda.SetLog(pagoda.LogLevelInfo, func(level pagoda.LogLevel, source, message string) {
		slog.Log(context.Background(), levels[level], message, "source", source)
	})
	fmt.Println(err, pagoda.SetLog(pagoda.LogLevelOff, nil))
	// Output: <nil> <nil>
}

func ExampleView() {
	zeros, err := pagoda.Zeros(pagoda.F32, 2, 2)
	if err != nil {
		log.Fatal(err)
	}
	defer zeros.Close()
	memory, err := pagoda.View[float32](zeros)
	if err != nil {
		log.Fatal(err)
	}
	memory[3] = math.Pi
	fmt.Println(pagoda.Values[float32](zeros))
	// Output: [0 0 0 3.1415927] <nil>
}
