package pagoda

import (
	"context"
	"testing"
)

// A swap at the worst moment: between the number of tasks and the request.
func TestASwapRightAfterTheNumberOfTasksWasRead(t *testing.T) {
	ctx, folders := context.Background(), "../../tests/data/engine/"
	engine, err := OpenEngine(ctx, folders+"gather", &EngineOptions{
		KVSize: KVPages(64), Model: &ModelOptions{Provider: ProviderCPU, IntraOpThreads: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	request := &RankRequest{
		Events:     Columns{"item": {3, 7}, "genre": {1, 0}, "rating": {4, 2}},
		EventTimes: []int64{1700000000, 1700001000},
		UserKeys:   map[string]int64{"age": 6, "town": 8},
		Candidates: Columns{"item": {5, 6, 39}, "genre": {5, 2, -1}},
	}
	for _, to := range []struct {
		folder string
		tasks  int
	}{{"three", 3}, {"gather", 2}, {"three", 3}, {"second", 2}} {
		read := 0
		response, err := engine.rank(ctx, request, func() (int, error) {
			tasks, err := engine.Tasks()
			if read++; read == 1 {
				if err := engine.Swap(ctx, folders+to.folder); err != nil {
					t.Fatal(err)
				}
			}
			return tasks, err
		})
		if err != nil || read != 2 || response.Tasks != to.tasks || len(response.Scores) != 3*to.tasks {
			t.Fatalf("%+v after %d reads: %v", response, read, err)
		}
	}
}
