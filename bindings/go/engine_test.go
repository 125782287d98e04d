package pagoda_test

import (
	"context"
	"encoding/json"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pagoda"
)

func openEngine(t testing.TB, options *pagoda.EngineOptions) *pagoda.Engine {
	t.Helper()
	options.Model = cpu()
	if options.KVSize == (pagoda.KVSize{}) {
		options.KVSize = pagoda.KVBytes(1 << 20)
	}
	it := must[*pagoda.Engine](t)(pagoda.OpenEngine(ctx, data+"/gather", options))
	t.Cleanup(func() { ok(t, it.Close()) })
	return it
}

func request() *pagoda.RankRequest {
	return &pagoda.RankRequest{
		User:       7,
		Events:     pagoda.Columns{"item": {3, 7}, "genre": {1, 0}, "rating": {4, 2}},
		EventTimes: []int64{1700000000, 1700001000},
		UserKeys:   map[string]int64{"age": 6, "town": 8},
		Candidates: pagoda.Columns{"item": {5, 6, 39}, "genre": {5, 2, -1}},
		Time:       time.Unix(1700002000, 0),
	}
}

func near(t *testing.T, got, want []float32) {
	t.Helper()
	for i := range want {
		if len(got) != len(want) || math.Abs(float64(got[i]-want[i])) > 1e-4 {
			t.Fatalf("%v, not %v", got, want)
		}
	}
}

func TestEngine(t *testing.T) {
	engine := openEngine(t, &pagoda.EngineOptions{StorePath: t.TempDir(), StoreOptions: &pagoda.StoreOptions{
		Durability: pagoda.DurabilityNone,
	}})
	equal(t, "tasks", must[int](t)(engine.Tasks()), 2)
	var info struct {
		Format  int
		Version string
	}
	ok(t, json.Unmarshal([]byte(must[string](t)(engine.Info())), &info))
	equal(t, "format", info.Format, 1)

	cold := must[*pagoda.RankResponse](t)(engine.Rank(ctx, request()))
	equal(t, "tasks", cold.Tasks, 2)
	equal(t, "version", cold.Version, info.Version)
	equal(t, "length of the version", len(cold.Version), 64)
	equal(t, "scores", len(cold.Scores), 6)
	equal(t, "cached", cold.CachedRows, 0)
	equal(t, "computed", cold.ComputedRows, 6)
	if click := cold.Candidate(2)[1]; click <= 0 || click >= 1 || cold.RunTime <= 0 {
		t.Errorf("%+v", cold)
	}
	for _, c := range []context.Context{ctx, t.Context()} {
		warm := must[*pagoda.RankResponse](t)(engine.Rank(c, request()))
		equal(t, "cached", warm.CachedRows, 6)
		near(t, warm.Scores, cold.Scores)
		later := <-must[<-chan pagoda.RankResult](t)(engine.RankAsync(c, request()))
		ok(t, later.Err)
		equal(t, "cached", later.Response.CachedRows, 6)
		equal(t, "tasks", later.Response.Tasks, 2)
		near(t, later.Response.Scores, cold.Scores)
	}

	more := request()
	more.Start, more.UserKeys, more.EventTimes = 2, nil, []int64{1700001500}
	more.Events = pagoda.Columns{"item": {9}, "genre": {1}, "rating": {0}}
	equal(t, "cached", must[*pagoda.RankResponse](t)(engine.Rank(ctx, more)).CachedRows, 6)
	none := request()
	none.Start, none.UserKeys, none.EventTimes, none.Events = 3, nil, nil, nil
	equal(t, "cached", must[*pagoda.RankResponse](t)(engine.Rank(ctx, none)).CachedRows, 8)

	ok(t, engine.Swap(ctx, data+"/second"))
	swapped := must[*pagoda.RankResponse](t)(engine.Rank(ctx, request()))
	if swapped.CachedRows != 0 || slices.Equal(swapped.Scores, cold.Scores) {
		t.Errorf("%+v", swapped)
	}
	fails(t, engine.Swap(t.Context(), "/nowhere"), pagoda.ErrNotFound, "folder")
	equal(t, "forgotten", must[int](t)(engine.Forget(ctx, 7, 8)), 1)
	equal(t, "forgotten", must[int](t)(engine.Forget(t.Context())), 0)
	stats := must[pagoda.EngineStats](t)(engine.Stats())
	if stats.Answered != 8 || stats.Failed != 0 || stats.RememberedUsers != 0 {
		t.Errorf("%+v", stats)
	}
}

// The scores of tests/data/engine/make.py, of histories that grow.
func TestScoresAreThoseOfTheReference(t *testing.T) {
	var users []struct {
		Keys       map[string]int64
		Events     pagoda.Columns
		Times      []int64
		Candidates pagoda.Columns
		Now        int64
		Steps      []struct {
			Events int64
			Scores []float32
		}
	}
	ok(t, json.Unmarshal([]byte(read(t, data+"/gather.json")), &users))
	engine := openEngine(t, &pagoda.EngineOptions{})
	for number, user := range users {
		start := int64(0)
		for _, step := range user.Steps {
			r := &pagoda.RankRequest{User: uint64(number), Start: start, Events: pagoda.Columns{}, Candidates: user.Candidates}
			for name, keys := range user.Events {
				r.Events[name] = keys[start:step.Events]
			}
			r.EventTimes, r.Time = user.Times[start:step.Events], time.Unix(user.Now, 0)
			if start == 0 {
				r.UserKeys = user.Keys
			}
			near(t, must[*pagoda.RankResponse](t)(engine.Rank(ctx, r)).Scores, step.Scores)
			start = step.Events
		}
	}
	if len(users) < 2 || len(users[0].Steps) < 3 {
		t.Errorf("there are %d users", len(users))
	}
}

func TestQuantisedPagesOfSoManyBytesAreMore(t *testing.T) {
	// Of 2 layers of a head of 8 f32: 32 bytes, then 12 as int8 and 10 as fp8.
	heads := map[pagoda.KVFormat]uint64{pagoda.KVFormatDefault: 32, pagoda.KVFormatInt8: 12, pagoda.KVFormatFP8: 10}
	for format, head := range heads {
		engine := openEngine(t, &pagoda.EngineOptions{KVSize: pagoda.KVBytes(1 << 20), KVFormat: format})
		equal(t, "pages", must[pagoda.KVStats](t)(engine.KVStats()).Pages, (1<<20)/(2*2*8*head))
	}
}

func TestRequestsThatCanNotBe(t *testing.T) {
	engine := openEngine(t, &pagoda.EngineOptions{KVSize: pagoda.KVPages(64)})
	type r = pagoda.RankRequest
	for _, c := range []struct {
		change   func(*r)
		status   pagoda.Status
		argument string
	}{
		{func(r *r) { r.Candidates = nil }, pagoda.ErrInvalidArgument, "request.candidate_keys"},
		{func(r *r) { r.Candidates["x\x00"] = []int64{1, 2, 3} }, pagoda.ErrInvalidArgument, "request.candidate_keys"},
		{func(r *r) { r.Events["genre"] = nil }, pagoda.ErrInvalidArgument, "request.event_keys"},
		{func(r *r) { r.EventTimes = r.EventTimes[:1] }, pagoda.ErrInvalidArgument, "request.event_times"},
		{func(r *r) { r.Timeout = -time.Second }, pagoda.ErrInvalidArgument, "request.timeout_us"},
		{func(r *r) { r.Start = -2 }, pagoda.ErrInvalidArgument, "request.start"},
		{func(r *r) { r.UserKeys["shoe"] = 1 }, pagoda.ErrNotFound, "request.user_keys"},
	} {
		bad := request()
		c.change(bad)
		_, err := engine.Rank(ctx, bad)
		fails(t, err, c.status, c.argument)
		_, err = engine.RankAsync(t.Context(), bad)
		fails(t, err, c.status, c.argument)
	}
	gap := request()
	gap.Start = 9
	_, err := engine.Rank(ctx, gap)
	fails(t, err, pagoda.ErrNotFound, "request.start")
	fails(t, (<-must[<-chan pagoda.RankResult](t)(engine.RankAsync(ctx, gap))).Err, pagoda.ErrNotFound, "request.start")
	_, err = engine.Rank(ctx, nil)
	fails(t, err, pagoda.ErrInvalidArgument, "request")
	_, err = engine.Rank(nil, request()) //nolint:staticcheck // that is what is tested
	fails(t, err, pagoda.ErrInvalidArgument, "ctx")

	for argument, options := range map[string]*pagoda.EngineOptions{
		"options.instances":      {Instances: -1},
		"options.remember_bytes": {RememberBytes: -2},
		"options.max_delay_us":   {MaxDelay: -1},
		"options.model.provider": {Model: &pagoda.ModelOptions{Provider: 9}},
		"options.store_path":     {StorePath: "a\x00b"},
		"options.cuda_graphs[1]": {CUDAGraphs: []pagoda.GraphShape{{Users: 1, Rows: 1}, {Users: 1}}},
		"options.kv_size_unit":   {KVSize: pagoda.KVSize{Unit: 9}},
		"options.kv_format":      {KVFormat: 9},
	} {
		_, err := pagoda.OpenEngine(ctx, data+"/gather", options)
		fails(t, err, pagoda.ErrInvalidArgument, argument)
	}
	for _, size := range []pagoda.KVSize{
		{Value: 1}, pagoda.KVPages(1 << 31), pagoda.KVPercent(0), pagoda.KVPercent(50), pagoda.KVPercent(101),
	} {
		_, err = pagoda.OpenEngine(ctx, data+"/gather", &pagoda.EngineOptions{KVSize: size, Model: cpu()})
		fails(t, err, pagoda.ErrInvalidArgument, "options.kv_size")
	}
	_, err = pagoda.OpenEngine(ctx, data+"/bag", &pagoda.EngineOptions{TableTiersPath: "/nowhere/ps.json"})
	fails(t, err, pagoda.ErrNotFound, "options.table_tiers_path")
	_, err = pagoda.OpenEngine(ctx, data+"/gather", &pagoda.EngineOptions{HostBytes: math.MaxUint64, Model: cpu()})
	fails(t, err, pagoda.ErrCapacity, "options.host_bytes")
	_, err = pagoda.OpenEngine(ctx, "/nowhere/model", nil)
	fails(t, err, pagoda.ErrNotFound, "folder")
}

func TestAnEngineWithoutMemory(t *testing.T) {
	engine := must[*pagoda.Engine](t)(pagoda.OpenEngine(t.Context(), data+"/gather",
		&pagoda.EngineOptions{KVSize: pagoda.KVNone(), RememberBytes: pagoda.None, Model: cpu()}))
	defer engine.Close()
	must[*pagoda.RankResponse](t)(engine.Rank(ctx, request()))
	equal(t, "cached", must[*pagoda.RankResponse](t)(engine.Rank(ctx, request())).CachedRows, 0)
	equal(t, "remembered", must[pagoda.EngineStats](t)(engine.Stats()).RememberedBytes, 0)
}

// A pool with room for two of them: by the time that one comes back, the others have had its pages.
func TestWhatLeftThePoolComesBackFromHostMemory(t *testing.T) {
	long := request()
	long.Events, long.EventTimes = pagoda.Columns{}, nil
	for i := range int64(20) {
		for name, key := range map[string]int64{"item": i, "genre": i % 6, "rating": i % 5} {
			long.Events[name] = append(long.Events[name], key)
		}
		long.EventTimes = append(long.EventTimes, 1700000000+i)
	}
	for _, hostBytes := range []uint64{1 << 20, 0} {
		engine := openEngine(t, &pagoda.EngineOptions{
			KVSize: pagoda.KVPages(14), HostBytes: hostBytes, RememberBytes: pagoda.None,
			CUDAGraphs: []pagoda.GraphShape{{Users: 1, Rows: 384}, {Users: 8, Rows: 3072, Candidates: 2048}},
		})
		var scores []float32
		for _, came := range []bool{false, true} {
			for long.User = 1; long.User <= 6; long.User++ {
				ranking := must[*pagoda.RankResponse](t)(engine.Rank(ctx, long))
				equal(t, "cached", ranking.CachedRows > 0, came && hostBytes > 0)
				if scores == nil {
					scores = ranking.Scores
				}
				near(t, ranking.Scores, scores)
			}
		}
	}
}

// Requests that wait for others to run with, which do not come.
func TestAContextEndsRankings(t *testing.T) {
	engine := openEngine(t, &pagoda.EngineOptions{MaxDelay: time.Minute})
	begin := time.Now()
	soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	_, err := engine.Rank(soon, request())
	isDone(t, err, context.DeadlineExceeded)

	soon, cancel = context.WithCancel(ctx)
	quiet := openEngine(t, &pagoda.EngineOptions{MaxDelay: time.Minute})
	result := must[<-chan pagoda.RankResult](t)(quiet.RankAsync(soon, request()))
	eventually(t, "the request waits", func() bool {
		return must[pagoda.EngineStats](t)(quiet.Stats()).Waiting == 1
	})
	cancel()
	isDone(t, (<-result).Err, context.Canceled)

	limited := request()
	for _, limited.Timeout = range []time.Duration{20 * time.Millisecond, time.Nanosecond} {
		_, err = engine.Rank(ctx, limited)
		fails(t, err, pagoda.ErrCancelled, "request.timeout_us")
	}
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("it took %v", took)
	}
}

// Swaps between a model of two tasks and one of three while goroutines rank: every answer is a whole one of either.
func TestASwapThatChangesTheTasksFailsNoRequest(t *testing.T) {
	engine := openEngine(t, &pagoda.EngineOptions{Instances: 2})
	var stop atomic.Bool
	var answered [4]atomic.Int64
	var group sync.WaitGroup
	for user := range uint64(3) {
		group.Add(1)
		go func() {
			defer group.Done()
			mine := request()
			mine.User = user
			for round := 0; !stop.Load(); round++ {
				var response *pagoda.RankResponse
				var err error
				switch round % 3 {
				case 0:
					response, err = engine.Rank(ctx, mine)
				case 1:
					response, err = engine.Rank(t.Context(), mine)
				default:
					result := <-must[<-chan pagoda.RankResult](t)(engine.RankAsync(ctx, mine))
					response, err = result.Response, result.Err
				}
				if err != nil || len(response.Scores) != 3*response.Tasks || response.Tasks < 2 || response.Tasks > 3 {
					t.Errorf("%+v: %v", response, err)
					return
				}
				answered[response.Tasks].Add(1)
			}
		}()
	}
	until := func(tasks int) {
		deadline := time.Now().Add(time.Minute)
		for before := answered[tasks].Load(); answered[tasks].Load() < before+5 && !t.Failed(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("no answers with %d tasks", tasks)
			}
		}
	}
	for range 10 {
		until(2)
		ok(t, engine.Swap(ctx, data+"/three"))
		until(3)
		ok(t, engine.Swap(ctx, data+"/gather"))
	}
	stop.Store(true)
	group.Wait()
}

func TestWhatAnEngineRunsOnAndHas(t *testing.T) {
	engine := openEngine(t, &pagoda.EngineOptions{HostBytes: 1 << 20})
	provider := must[pagoda.EngineProvider](t)(engine.Provider())
	equal(t, "provider", provider, pagoda.EngineProvider{Provider: pagoda.ProviderCPU, DeviceID: -1})
	must[*pagoda.RankResponse](t)(engine.Rank(ctx, request()))
	if stats := must[pagoda.KVStats](t)(engine.KVStats()); stats.ResidentOwners != 1 || stats.FreePages >= stats.Pages {
		t.Errorf("%+v", stats)
	}
	equal(t, "unloaded", must[int](t)(engine.Unload(ctx, 7, 8)), 1)
	equal(t, "resident", must[pagoda.KVStats](t)(engine.KVStats()).ResidentOwners, 0)
	equal(t, "prefetched", must[int](t)(engine.Prefetch(7, 8)), 1)
	equal(t, "cached", must[*pagoda.RankResponse](t)(engine.Rank(ctx, request())).CachedRows, 6)
	equal(t, "tables", len(must[[]string](t)(engine.Tables())), 0)

	ok(t, engine.Swap(ctx, data+"/bag"))
	tables := must[[]string](t)(engine.Tables())
	if len(tables) != 5 || !slices.Contains(tables, "items") {
		t.Errorf("%q", tables)
	}
	equal(t, "rows", must[pagoda.TableStats](t)(engine.TableStats("items")).CachedRows, 40)
	_, err := engine.TableStats("nothing")
	fails(t, err, pagoda.ErrNotFound, "table")
}

func TestManyGoroutinesRank(t *testing.T) {
	engine := openEngine(t, &pagoda.EngineOptions{Instances: 2})
	want := must[*pagoda.RankResponse](t)(engine.Rank(ctx, request())).Scores
	var group sync.WaitGroup
	for user := range uint64(8) {
		group.Add(1)
		go func() {
			defer group.Done()
			mine := request()
			mine.User = user
			for range 50 {
				c, cancel := context.WithTimeout(ctx, time.Minute)
				ranking, err := engine.Rank(c, mine)
				cancel()
				if err != nil {
					t.Error(err)
					return
				}
				for i, score := range ranking.Scores {
					if math.Abs(float64(score-want[i])) > 1e-4 {
						t.Errorf("%v, not %v", ranking.Scores, want)
						return
					}
				}
			}
		}()
	}
	group.Wait()
}
