// Ranks movies for a returning user: rank FOLDER, which has a model and visits.txt (samples/movielens/prepare.py).
//
// Each visit sends only what the user did since the last one. What the model made of everything before that is in the
// engine's cache, so a visit costs what is new, however long the history is.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"pagoda"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintf(os.Stderr, "usage: %s FOLDER\n", os.Args[0])
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "rank:", err)
		os.Exit(1)
	}
}

func run(folder string) error {
	user, visits, movies, titles, err := readVisits(filepath.Join(folder, "visits.txt"))
	if err != nil {
		return err
	}
	ctx := context.Background()
	engine, err := pagoda.OpenEngine(ctx, filepath.Join(folder, "model"), nil)
	if err != nil {
		return err
	}
	defer engine.Close()

	fmt.Println("User", user)
	request := pagoda.RankRequest{User: user, Candidates: pagoda.Columns{"movie": movies}}
	var response *pagoda.RankResponse
	for i, events := range visits {
		request.Events = events
		if response, err = engine.Rank(ctx, &request); err != nil {
			return err
		}
		fmt.Printf("  visit %d: %d new events, %d rows remembered, %d computed\n", i+1, len(events["movie"]),
			response.CachedRows, response.ComputedRows)
		request.Start += int64(len(events["movie"]))
	}
	// A candidate has a score for each task; this is the first task's.
	score := func(candidate int) float32 { return response.Candidate(candidate)[0] }
	order := make([]int, len(movies))
	for i := range order {
		order[i] = i
	}
	sort.SliceStable(order, func(a, b int) bool { return score(order[a]) > score(order[b]) })
	fmt.Printf("Top ten of %d movies:\n", len(movies))
	for i, candidate := range order[:min(10, len(order))] {
		fmt.Printf("  %2d. %.6f  %s\n", i+1, score(candidate), titles[candidate])
	}
	return nil
}

// readVisits reads the user, the events of each visit, and the candidates with their titles.
func readVisits(path string) (user uint64, visits []pagoda.Columns, movies []int64, titles []string, err error) {
	file, err := os.Open(path)
	if err != nil {
		return 0, nil, nil, nil, fmt.Errorf("%w; samples/movielens/prepare.py makes it", err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	next := func(format string, values ...any) {
		if lines.Scan(); err == nil {
			if _, problem := fmt.Sscanf(lines.Text(), format, values...); problem != nil {
				err = fmt.Errorf("%s: %q is not what prepare.py writes; make it anew", path, lines.Text())
			}
		}
	}
	var what string
	var count, movie, rating int64
	next("user %d", &user)
	for next("%s %d", &what, &count); what == "visit" && err == nil; next("%s %d", &what, &count) {
		events := pagoda.Columns{"movie": {}, "rating": {}}
		for ; err == nil && count > 0; count-- {
			next("%d %d", &movie, &rating)
			events["movie"], events["rating"] = append(events["movie"], movie), append(events["rating"], rating)
		}
		visits = append(visits, events)
	}
	for ; err == nil && count > 0; count-- {
		next("%d", &movie)
		_, title, _ := strings.Cut(lines.Text(), " ")
		movies, titles = append(movies, movie), append(titles, title)
	}
	if err == nil && len(visits) == 0 {
		err = fmt.Errorf("%s: there are no visits; make it anew", path)
	}
	return user, visits, movies, titles, err
}
