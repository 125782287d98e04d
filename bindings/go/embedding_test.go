package pagoda_test

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"pagoda"
)

func TestEmbeddings(t *testing.T) {
	path, rest := table(t)
	estimate, err := pagoda.EstimateEmbeddings(path)
	if err != nil || estimate.Memory == 0 {
		t.Errorf("%+v, %v", estimate, err)
	}
	tables := must[*pagoda.Embeddings](t)(pagoda.OpenEmbeddings(ctx, path))
	defer tables.Close()
	equal(t, "dim", must[int](t)(tables.Dim("m/t")), 2)

	keys := []int64{2, 9, 2, 4}
	for _, c := range []context.Context{ctx, t.Context()} {
		for _, options := range []*pagoda.LookupOptions{
			nil, {Miss: pagoda.MissWait}, {Miss: pagoda.MissWithin, Limit: time.Minute},
		} {
			rows := must[*pagoda.EmbeddingRows](t)(tables.Lookup(c, "t", keys, options))
			equal(t, "rows", fmt.Sprint(*rows), "{2 [2 -2 7 8 2 -2 4 -4] [true false true true]}")
			equal(t, "row", fmt.Sprint(rows.Row(1)), "[7 8]")
		}
		rows := must[*pagoda.EmbeddingRows](t)(tables.Lookup(c, "t", keys, &pagoda.LookupOptions{Miss: pagoda.MissDefault}))
		equal(t, "rows", len(rows.Numbers), 8)
		pooled := must[*pagoda.EmbeddingRows](t)(tables.Pool(c, "t", keys, []int64{0, 1, 1, 4}, pagoda.CombinerSum, nil))
		equal(t, "pooled", fmt.Sprint(*pooled), "{2 [2 -2 0 0 13 2] [true false true true]}")
	}
	none := must[*pagoda.EmbeddingRows](t)(tables.Lookup(ctx, "t", nil, nil))
	equal(t, "no keys", len(none.Numbers), 0)

	ok(t, tables.Upsert(t.Context(), "t", 1, keys[:1], []float32{5, 6}, pagoda.ReachAtOnce))
	equal(t, "changed", fmt.Sprint(must[*pagoda.EmbeddingRows](t)(tables.Lookup(ctx, "t", keys[:1], nil)).Numbers), "[5 6]")
	ok(t, tables.Delete(ctx, "t", 2, keys[:1], pagoda.ReachAtOnce))
	equal(t, "deleted", must[*pagoda.EmbeddingRows](t)(tables.Lookup(ctx, "t", keys[:1], nil)).Found[0], false)

	ok(t, tables.Add(ctx, `{"model": "n", `+rest, filepath.Dir(path)))
	if queued := must[int](t)(tables.Prefetch("n/t", keys)); queued > 3 {
		t.Errorf("%d were queued", queued)
	}
	ok(t, tables.Wait(t.Context()))
	ok(t, tables.Refresh(t.Context(), "n/t"))
	stats := must[pagoda.TableStats](t)(tables.Stats("t"))
	if stats.Lookups < 10 || stats.CacheRows < stats.CachedRows || stats.Memory == 0 || stats.Defaults == 0 {
		t.Errorf("%+v", stats)
	}
	ok(t, tables.Retire("n"))

	_, err = tables.Dim("n/t")
	fails(t, err, pagoda.ErrNotFound, "table")
	_, err = tables.Lookup(ctx, "n/t", keys, nil)
	fails(t, err, pagoda.ErrNotFound, "table")
	_, err = tables.Lookup(ctx, "t", keys, &pagoda.LookupOptions{Limit: -1})
	fails(t, err, pagoda.ErrInvalidArgument, "options.limit_us")
	_, err = tables.Pool(ctx, "t", keys, keys, pagoda.CombinerMean, nil)
	fails(t, err, pagoda.ErrInvalidArgument, "offsets")
	_, err = tables.Pool(ctx, "t", keys, nil, pagoda.CombinerMean, nil)
	fails(t, err, pagoda.ErrInvalidArgument, "offsets")
	_, err = tables.Pool(ctx, "t", keys, []int64{0, 4}, 9, nil)
	fails(t, err, pagoda.ErrInvalidArgument, "combiner")
	fails(t, tables.Upsert(ctx, "t", 1, keys, []float32{1}, pagoda.ReachAtOnce), pagoda.ErrInvalidArgument, "number_count")
	fails(t, tables.Add(ctx, "{", ""), pagoda.ErrInvalidArgument, "model")
	fails(t, tables.Retire("n"), pagoda.ErrNotFound, "model")
	fails(t, tables.Retire("n\x00"), pagoda.ErrInvalidArgument, "model")
	_, err = pagoda.OpenEmbeddings(ctx, "/nowhere/ps.json")
	fails(t, err, pagoda.ErrNotFound, "path")
	_, err = pagoda.EstimateEmbeddings("/nowhere/ps.json")
	fails(t, err, pagoda.ErrNotFound, "path")

	// A model keeps tables that it is given.
	options := cpu()
	options.Tables = tables
	m := must[*pagoda.Model](t)(pagoda.OpenModel(t.Context(), hello, options))
	ok(t, m.Close())
}
