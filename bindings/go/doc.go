// Package pagoda is Pagoda for Go: inference for models that remember.
//
// A [Model] is an ONNX model, run on [Tensor]s. An [Engine] serves a model folder: a user's history, or what is new of
// it, and candidates go in, a score for each candidate and task comes out. A [Generator] serves a folder of a language
// model: prompts in, text out. Under both lie a [KVCache] of keys and values, over a [Store] on disk, and [Embeddings]
// tables; each can be used by itself.
//
//	engine, err := pagoda.OpenEngine(ctx, "model", nil)
//	if err != nil {
//		return err
//	}
//	defer engine.Close()
//	ranking, err := engine.Rank(ctx, &pagoda.RankRequest{
//		User:       7,
//		Events:     pagoda.Columns{"movie": {17, 4}, "rating": {5, 3}},
//		Candidates: pagoda.Columns{"movie": {8, 15, 16}},
//	})
//
// Text comes whole, by [Generator.Generate], or token by token:
//
//	generator, err := pagoda.OpenGenerator(ctx, "model", nil)
//	if err != nil {
//		return err
//	}
//	defer generator.Close()
//	stream, err := generator.Stream(ctx, &pagoda.GenerateRequest{
//		Messages:    []pagoda.Message{{Role: "user", Content: "Hello"}},
//		Temperature: pagoda.Ptr(0.7),
//	})
//	if err != nil {
//		return err
//	}
//	for token, err := range stream.Tokens() {
//		if err != nil {
//			return err
//		}
//		fmt.Print(token.Text)
//	}
//
// # Errors
//
// What fails returns an [*Error]. errors.Is compares it with a [Status]:
//
//	if errors.Is(err, pagoda.ErrNotFound) { ... }
//
// Objects that were closed, nil, and zero values such as new(pagoda.Model) give [ErrInvalidHandle].
//
// # Contexts
//
// Calls that can take long take a context. When it is done, a run, a ranking or an answer is stopped, and the error is
// both [ErrCancelled] and the context's; beside it is what was generated of the answer. Other calls can not be stopped half-way (opening, waiting for the disk, lookups):
// they return at once and what they began goes on behind; what it would have returned is closed.
//
// Some calls can wait and take no context. [Store.Close], [KVCache.Close], [Engine.Close] and [Generator.Close] write what
// is not on disk yet; [Engine.Close] also answers the queued requests, and [Generator.Close] ends those that run. [KVLease.Abort], and closing a lease that has not ended, wait
// until every [KVLease.Wait] on it has returned. [EstimateEmbeddings] reads the headers of the tables, and
// [Embeddings.Retire] gives back what no other model has. To wait for the disk no longer than a context lasts, call
// Flush, or [KVCache.OffloadAll], before Close; or call them in a goroutine.
//
// # Options
//
// A nil *Options is all defaults, and so is the zero value of each field. Where 0 itself is a choice, [None] makes it; in a
// [GenerateRequest], where that is most fields, they are pointers, which [Ptr] makes.
//
// # Closing
//
// Every object has a Close, which may be called more than once, and while others use the object: their calls end well,
// or with [ErrInvalidHandle]. What is forgotten is closed when the garbage collector finds it. With a log at level
// [LogLevelDebug] (see [SetLog]) a line says so, and where the object was made.
//
// # Memory
//
// [NewTensor] copies nothing: a run reads and writes the slice itself, which is pinned until the tensor is closed and
// no run uses it. [Values] copies; [View] does not.
//
// Any number of goroutines may use any object at the same time. The caller orders reads and writes of the memory of a
// tensor.
package pagoda

// #cgo pkg-config: pagoda
import "C"
